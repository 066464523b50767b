"""Absorbed queries and the new cache rows of an MLA step, in one kernel.

    q bf16 [N, H (nope + rope)]; kv_a bf16 [N, ..], whose last columns are latent | rope; kv_b bf16
    [L, H (nope + V), latent]; norm bf16 [L, latent]; cache [L, P, page, latent + rope], a Ref;
    place i32 [N]: page * rows of a page + row, -1 where nothing is written
    -> queries [B, C, latent + rope] as `mla_attend` reads them; the cache in place

A query row is round(W_UK^T q_nope), then q_rope as it is; nothing is rotated. With an FP8 cache it
is f16 and 2^-6 of that (`Q_SHIFT`). A cache row is round(norm * c * rsqrt(mean(c^2) +
eps)), then kv_a's rope columns as they are, each rounded once: bf16, or divided by the scale and
cut off at 448 for e4m3.

Most CTAs have 64 of the latent's columns for one head and all rows: W_UK, transposed, is the wide
operand of the tensor core. One more per head copies the rope columns; the others, four rows each,
make cache rows. Queries of N rows depend on those rows only; NaN stays where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common
from pallas_kernels.mla_attend import arrange, query_dtype
from pallas_kernels.mla_attend_cta import Q_SHIFT
from pallas_kernels.narrow_product import product

TILE = 64  # columns of a query row per CTA
GROUP = 4  # cache rows per CTA: enough numbers of the rope part for every thread
FP8_MAX = 448.0  # largest finite e4m3 number


def limits(
    q: jax.Array,
    kv_a: jax.Array,
    kv_b: jax.Array,
    norm: jax.Array,
    cache: Any,
    place: jax.Array,
    *,
    heads: int,
    tokens: int,
    columns: int,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    ranks = q.ndim, kv_a.ndim, kv_b.ndim, norm.ndim, len(cache.shape), place.ndim
    wanted = (2, 2, 3, 2, 4, 1)
    name = "ranks of q, kv_a, kv_b, norm, cache, place"
    common.expect(out, name, ranks, wanted, ranks == wanted)
    if out:
        return out
    n, latent, row = q.shape[0], norm.shape[1], cache.shape[3]
    rope = row - latent
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "rows", n, f"a multiple of {tokens}", n % tokens == 0)
    nope = q.shape[1] // heads - rope
    ok = q.shape[1] % heads == 0 and nope > 0 and nope % 64 == 0
    common.expect(out, "columns of q", q.shape[1], f"{heads} (a multiple of 64 + {rope})", ok)
    common.expect(out, "rope width", rope, TILE, rope == TILE)
    common.expect(out, "latent width", latent, "a multiple of 128", latent % 128 == 0)
    common.expect(out, "rows of kv_a", kv_a.shape[0], n, kv_a.shape[0] == n)
    ok = kv_a.shape[1] >= row
    common.expect(out, "columns of kv_a", kv_a.shape[1], f"at least {row}", ok)
    common.expect(out, "columns of kv_b", kv_b.shape[2], latent, kv_b.shape[2] == latent)
    ok = kv_b.shape[1] % heads == 0 and kv_b.shape[1] // heads > nope
    common.expect(out, "rows of kv_b", kv_b.shape[1], f"{heads} ({nope} + values)", ok)
    common.expect(out, "shape of place", place.shape, (n,), place.shape == (n,))
    ok = columns % 8 == 0
    common.expect(out, "columns of a group", columns, "a multiple of 8", ok)
    for name, x in (("q", q), ("kv_a", kv_a), ("kv_b", kv_b), ("norm", norm)):
        common.expect(out, f"dtype of {name}", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    ok = cache.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    common.expect(out, "dtype of cache", cache.dtype, "bfloat16 or float8_e4m3fn", ok)
    return out


def reference(
    q: jax.Array,
    kv_a: jax.Array,
    kv_b: jax.Array,
    layer: int | jax.Array,
    norm: jax.Array,
    cache: jax.Array,
    cache_layer: int | jax.Array,
    place: jax.Array,
    kv_scale: jax.Array | None = None,
    *,
    eps: float,
    heads: int,
    tokens: int,
    columns: int,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp; the cache is an array and returned."""
    f32, n, latent = jnp.float32, q.shape[0], norm.shape[1]
    rope = cache.shape[3] - latent
    x = q.reshape(n, heads, -1)
    w = kv_b[layer].reshape(heads, -1, latent)[:, : x.shape[2] - rope].astype(f32)
    nope = x[..., :-rope].astype(f32)
    absorbed = jnp.einsum("nhi,hir->nhr", nope, w, precision=lax.Precision.HIGHEST)
    absorbed = lax.reduce_precision(absorbed, 8, 7).astype(jnp.bfloat16)
    absorbed = jnp.concatenate([absorbed, x[..., -rope:]], axis=-1)
    c = kv_a[:, -cache.shape[3] :].astype(f32)
    scale = lax.rsqrt(jnp.mean(c[:, :latent] ** 2, -1, keepdims=True) + eps)
    made = lax.reduce_precision(norm[layer].astype(f32) * (c[:, :latent] * scale), 8, 7)
    rows = jnp.concatenate([made, c[:, latent:]], axis=-1)
    if kv_scale is not None:
        rows = jnp.clip(rows / kv_scale, -FP8_MAX, FP8_MAX)
    page = cache.shape[2]
    at = jnp.where(place >= 0, place, cache.shape[1] * page)
    rows = rows.astype(cache.dtype)
    cache = cache.at[cache_layer, at // page, at % page].set(rows, mode="drop")
    return arrange(absorbed, tokens, columns, cache.dtype), cache


def query(
    q: jax.Array,
    kv_a: jax.Array,
    kv_b: jax.Array,
    layer: int | jax.Array,
    norm: jax.Array,
    cache: Any,
    cache_layer: int | jax.Array,
    place: jax.Array,
    kv_scale: jax.Array | None = None,
    *,
    eps: float,
    heads: int,
    tokens: int,
    columns: int,
    interpret: bool = False,
) -> jax.Array:
    """The queries; `cache` is a Ref (`jax.new_ref`) and written.

    `layer` counts matrices of kv_b, `cache_layer` layers of the cache; `columns` is that of
    `mla_attend.Tuning`. Pad rows of the queries are not written.

    Raises:
        ValueError: `limits` are not met.
    """
    reasons = limits(q, kv_a, kv_b, norm, cache, place, heads=heads, tokens=tokens, columns=columns)
    common.require(reasons, "mla_query")
    n, latent, row = q.shape[0], norm.shape[1], cache.shape[3]
    width = common.bucket(n)
    if interpret:  # no copies clipped at an array's edge there
        q, kv_a = (
            jnp.pad(x, ((0, common.round_up(width, GROUP) - n), (0, 0)), constant_values=jnp.nan)
            for x in (q, kv_a)
        )
    elif n > 8:  # the copy engine takes rows by eights
        q = jnp.pad(q, ((0, -n % 8), (0, 0)))
    s = _Sizes(
        n,
        tokens,
        heads,
        common.round_up(tokens * heads, columns),
        q.shape[1] // heads + latent - row,
        latent,
        row,
        kv_b.shape[1] // heads,
        kv_a.shape[1] - row,
        cache.shape[2],
        cache.dtype == jnp.float8_e4m3fn,
        eps,
    )
    factor = jnp.ones((1,), jnp.float32) if kv_scale is None else kv_scale.reshape(1)
    # an operand each: putting them together would be a launch of its own
    layers = common.layer_operand(layer), common.layer_operand(cache_layer)
    call = _build(s, width, query_dtype(cache.dtype), interpret)
    return call(q, kv_a, kv_b, norm, cache, *layers, place, factor).reshape(n // tokens, -1, row)


@dataclass(frozen=True)
class _Sizes:
    n: int
    tokens: int
    heads: int
    columns: int  # query rows of a sequence, pad rows included
    nope: int
    latent: int
    row: int
    per_head: int  # rows of kv_b
    skip: int  # columns of kv_a before the latent
    page: int
    fp8: bool
    eps: float

    @property
    def tiles(self) -> int:
        """CTAs per head."""
        return self.row // TILE


def _build(s: _Sizes, width: int, dtype: Any, interpret: bool) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bf16 = jnp.bfloat16
    stored = jnp.float8_e4m3fn if s.fp8 else bf16
    # one row of the result per token where a token's query rows, or a sequence's, are apart evenly
    even = s.tokens == 1 or s.columns == s.tokens * s.heads
    wide = s.columns if s.tokens == 1 else s.heads
    shape = (s.n, wide * s.row) if even else (s.n // s.tokens, s.columns, s.row)
    return common.kernel(
        _body(s, width, dtype, even),
        "k3_mla_query",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(s.heads * s.tiles + -(-s.n // GROUP),),
        grid_names=("cta",),
        scratch_types=dict(
            ws=plgpu.SMEM((s.nope, TILE), bf16, transforms=common.tiled(bf16, TILE)),
            xs=plgpu.SMEM((width, s.nope), bf16, transforms=common.tiled(bf16, s.nope)),
            ropes=plgpu.SMEM((width, TILE), bf16),
            ys=plgpu.SMEM((width, TILE), dtype),
            tails=plgpu.SMEM((GROUP, TILE), bf16),
            new_tails=plgpu.SMEM((GROUP, TILE), stored),
            pair=plgpu.Barrier(num_barriers=1, num_arrivals=2),
            one=plgpu.Barrier(num_barriers=1),
        ),
    )


def _body(s: _Sizes, width: int, dtype: Any, even: bool) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    f32 = jnp.float32

    def query_value(x: jax.Array) -> jax.Array:
        if not s.fp8:
            return x
        return (x.astype(f32) * Q_SHIFT).astype(dtype)

    def body(
        q,  # bf16 [N, H (nope + rope)]
        kv_a,  # bf16 [N, skip + latent + rope]
        kv_b,  # bf16 [L, H (nope + V), latent]
        norm,  # bf16 [L, latent]
        cache,  # bf16 or e4m3 [L, P, page, row]
        layer,  # i32 [1], of kv_b
        cache_layer,  # i32 [1], of the cache
        place,  # i32 [N]
        factor,  # f32 [1]
        y,  # bf16 or f16 [N, .. row] or [B, columns, row]
        ws,  # bf16 [nope, 64]
        xs,  # bf16 [width, nope]
        ropes,  # bf16 [width, 64]
        ys,  # [width, 64]
        tails,  # bf16 [4, 64]
        new_tails,  # as stored [4, 64]
        pair,
        one,
    ):
        cta = lax.axis_index("cta")
        head, tile = cta // s.tiles, lax.rem(cta, s.tiles)
        rows = pl.ds(cta * 0, width)  # a start known at run time lets the box reach beyond N

        def absorb():
            at = head * (s.nope + TILE)
            block = kv_b.at[layer[0], pl.ds(head * s.per_head, s.nope), pl.ds(tile * TILE, TILE)]
            plgpu.copy_gmem_to_smem(block, ws, pair.at[0])
            plgpu.copy_gmem_to_smem(q.at[rows, pl.ds(at, s.nope)], xs, pair.at[0])
            plgpu.barrier_wait(pair.at[0])

            z = product(
                lambda start, size: common.tref(ws.at[pl.ds(start, size)]),
                lambda start, size: common.tref(xs.at[:, pl.ds(start, size)]),
                *(TILE, width, s.nope),
            )
            common.store(common.tref(ys), query_value(z.astype(jnp.bfloat16)))
            store()

        def rope():
            at = head * (s.nope + TILE) + s.nope
            plgpu.copy_gmem_to_smem(q.at[rows, pl.ds(at, TILE)], ropes, one.at[0])
            plgpu.barrier_wait(one.at[0])
            ys[...] = query_value(laid(ropes))
            store()

        def store():
            plgpu.commit_smem()
            if even:
                target = y.at[:, pl.ds(head * s.row + tile * TILE, TILE)]
                plgpu.copy_smem_to_gmem(ys.at[pl.ds(0, s.n)], target)
            else:
                for i in range(s.n):
                    sequence, token = divmod(i, s.tokens)
                    target = y.at[sequence, token * s.heads + head, pl.ds(tile * TILE, TILE)]
                    plgpu.copy_smem_to_gmem(ys.at[i], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def cache_rows():  # one warpgroup only: `jnp.sum` has one scratch place
            first = (cta - s.heads * s.tiles) * GROUP
            source = kv_a.at[pl.ds(first, GROUP), pl.ds(s.skip + s.latent, TILE)]
            plgpu.copy_gmem_to_smem(source, tails, one.at[0])
            row = [jnp.minimum(first + i, s.n - 1) for i in range(min(GROUP, s.n))]
            # named layouts: inferred ones are searched for over all rows together
            latents = [laid(kv_a.at[r, pl.ds(s.skip, s.latent)]).astype(f32) for r in row]
            weight = laid(norm.at[layer[0]]).astype(f32)
            plgpu.barrier_wait(one.at[0])
            new_tails[...] = as_stored(laid(tails))
            plgpu.commit_smem()
            for i, x in enumerate(latents):
                mean = jnp.sum(x * x) * (1 / s.latent)
                scale = lax.broadcast_in_dim(lax.rsqrt(mean + s.eps), (s.latent,), ())
                new = as_stored((weight * (x * scale)).astype(jnp.bfloat16))
                where = place[row[i]]

                @pl.when((first + i < s.n) & (where >= 0))
                def _(i=i, where=where, new=new):
                    at = cache_layer[0], where // s.page, lax.rem(where, s.page)
                    cache[*at, pl.ds(0, s.latent)] = new
                    tail = cache.at[*at, pl.ds(s.latent, TILE)]
                    plgpu.copy_smem_to_gmem(new_tails.at[i], tail)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def laid(ref: Any) -> jax.Array:
            layout = plgpu.Layout.WG_STRIDED(
                ref.shape, vec_size=min(4, math.prod(ref.shape) // 128)
            )
            return plgpu.load(ref, layout=layout, optimized=False)

        def as_stored(x: jax.Array) -> jax.Array:
            if not s.fp8:
                return x
            x = x.astype(f32) / lax.broadcast_in_dim(factor[0], x.shape, ())
            return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)

        queries = head < s.heads
        pl.when(queries & (tile < s.tiles - 1))(absorb)
        pl.when(queries & (tile == s.tiles - 1))(rope)
        pl.when(jnp.logical_not(queries))(cache_rows)

    return body

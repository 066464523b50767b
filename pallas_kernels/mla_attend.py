"""Paged latent attention of a decode step, split over the context (flash-decoding).

    q [B, C, row]: absorbed queries, see `arrange`; cache [L, P, page, row] bf16 or e4m3 with one
    f32 scale; table i32 [B, W]; ends i32 [B, T]: how many of the sequence's cache rows each token
    sees, 0 for pad rows -> Parts

All heads share the cached rows, so the T H query rows of a sequence are the narrow operand of the
tensor core and 64 cache rows the wide one: s = K q^T [64, columns], p = exp(scale s - top), value
sums K[:, :latent]^T p [latent, columns], all sums f32. A sequence's tiles of 64 rows are cut evenly
over `splits` CTAs; where there are fewer tiles than CTAs only so many CTAs work. Each writes the
mean of the latents it saw and the log-sum-exp of their scores; `mla_value` merges them.

Rounding: p, at most 1, to 16 bits: bf16, or f16 with an FP8 cache, because f16 holds e4m3 exactly;
the sum that divides is of the rounded values. The cache's scale multiplies scores and result in
f32, so that stored rows are never rounded: the same as in the standard path where the scale is a
power of two, one rounding less elsewhere.

Rows beyond a sequence's end are replaced by zeros in shared memory before they are multiplied;
pages that lie wholly beyond it are not read. A page's id is read by the warpgroup that issues the
copies, which does nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common
from pallas_kernels.mla_attend_cta import Q_SHIFT, TILE, Sizes, Tuning, build


class Parts(NamedTuple):
    """Attention over parts of the context.

    Attributes:
        latent: f32 [B, G, S, C, latent], mean of the latents that split S saw; column c of group g
            is query row g C + c of the sequence. Splits that did not work hold anything.
        lse: f32 [B, G, S, C], natural log of the sum of exp(score); -inf where nothing was seen.
    """

    latent: jax.Array
    lse: jax.Array


def default_tuning(batch: int, rows: int, fp8: bool, cores: int = 132) -> Tuning:
    """A guess: one CTA per multiprocessor; wide operands leave room for fewer stages.

    48 columns fit, and 32 with an FP8 cache or on Blackwell, but spill some registers.
    """
    columns = min(24 if fp8 or common.blackwell() else 32, common.round_up(rows, 8))
    groups = -(-rows // columns)
    columns = common.round_up(-(-rows // groups), 8)
    warpgroups = 2 if columns > 16 else 1
    stages = 3 if fp8 else 2
    while stages > 1 and shared_bytes(Tuning(1, columns, warpgroups, stages), 576, fp8) > (
        common.SHARED_MEMORY
    ):
        stages -= 1
    return Tuning(max(1, cores // (batch * groups)), columns, warpgroups, stages)


def shared_bytes(t: Tuning, row: int, fp8: bool) -> int:
    """Shared memory of one CTA."""
    ring = t.stages * TILE * row * (1 if fp8 else 2) + (TILE * row * 2 if fp8 else 0)
    own = t.columns * TILE * 2 + 32 * t.columns * 4
    return ring + t.columns * row * 2 + t.warpgroups * own + 2048


def limits(
    q: jax.Array,
    cache: Any,
    table: jax.Array,
    ends: jax.Array,
    *,
    heads: int,
    latent: int,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    ranks = q.ndim, len(cache.shape), table.ndim, ends.ndim
    common.expect(out, "ranks of q, cache, table, ends", ranks, (3, 4, 2, 2), ranks == (3, 4, 2, 2))
    if out:
        return out
    (batch, tokens), (page, row) = ends.shape, cache.shape[2:]
    fp8 = cache.dtype == jnp.float8_e4m3fn
    t = tuning or default_tuning(batch, tokens * heads, fp8)
    n = batch * tokens
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    wanted = batch, -(-tokens * heads // t.columns) * t.columns, row
    common.expect(out, "shape of q", q.shape, wanted, q.shape == wanted)
    common.expect(out, "sequences of table", table.shape[0], batch, table.shape[0] == batch)
    wanted = query_dtype(cache.dtype)
    common.expect(out, "dtype of q", q.dtype, wanted, q.dtype == wanted)
    ok = fp8 or cache.dtype == jnp.bfloat16
    common.expect(out, "dtype of cache", cache.dtype, "bfloat16 or float8_e4m3fn", ok)
    common.expect(out, "cache row", row, "a multiple of 64", row % 64 == 0)
    found = t.warpgroups  # more would not have the registers that `_body` asks for
    common.expect(out, "warpgroups", found, "1 or 2", found in (1, 2))
    cut = 64 * t.warpgroups
    ok = latent % cut == 0 and latent <= row
    common.expect(out, "latent width", latent, f"a multiple of {cut}, at most {row}", ok)
    ok = page % 8 == 0 and (TILE % page == 0 or page % TILE == 0)
    common.expect(out, "page", page, "8, 16, 32 or a multiple of 64 rows", ok)
    ok = t.columns % 8 == 0 and 8 <= t.columns <= 256
    common.expect(out, "columns", t.columns, "a multiple of 8 up to 256", ok)
    used, limit = shared_bytes(t, row, fp8), common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def reference(
    q: jax.Array,
    cache: jax.Array,
    layer: int | jax.Array,
    table: jax.Array,
    ends: jax.Array,
    kv_scale: jax.Array | None = None,
    *,
    heads: int,
    latent: int,
    scale: float,
    tuning: Tuning | None = None,
) -> Parts:
    """The same in plain jnp, part by part; f32 shares."""
    batch, tokens = ends.shape
    fp8 = cache.dtype == jnp.float8_e4m3fn
    t = tuning or default_tuning(batch, tokens * heads, fp8)
    factor = 1.0 if kv_scale is None else kv_scale
    kv = cache[layer, jnp.clip(table, 0, cache.shape[1] - 1)].astype(jnp.float32)
    kv = kv.reshape(batch, -1, cache.shape[3])
    key = jnp.arange(kv.shape[1])
    kv = jnp.where((key < jnp.max(ends, 1)[:, None])[..., None], kv * factor, 0.0)
    rows = tokens * heads
    groups = -(-rows // t.columns)
    pad = groups * t.columns - rows
    x = q.astype(jnp.float32) * (1 / Q_SHIFT if fp8 else 1.0)
    x = x.reshape(batch, groups, t.columns, -1)
    limit = jnp.pad(jnp.repeat(ends, heads, axis=1), ((0, 0), (0, pad)))
    limit = limit.reshape(batch, groups, 1, t.columns, 1)
    high = lax.Precision.HIGHEST
    score = scale * jnp.einsum("bgcr,bkr->bgck", x, kv, precision=high)[:, :, None]
    tiles, active = work(ends, t.splits)
    split = jnp.arange(t.splits)
    used = jnp.maximum(active, 1)[:, None]
    first, last = (jnp.minimum(split + i, used) * tiles[:, None] // used for i in (0, 1))
    mine = (key >= first[..., None] * TILE) & (key < last[..., None] * TILE)
    seen = mine[:, None, :, None] & (key < limit)
    top = jnp.max(jnp.where(seen, score, -jnp.inf), -1, keepdims=True)
    weight = jnp.where(seen, jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(weight, -1, keepdims=True)
    share = weight / jnp.where(total == 0.0, 1.0, total)
    mean = jnp.einsum("bgsck,bkr->bgscr", share, kv[..., :latent], precision=high)
    return Parts(mean, (top + jnp.log(total))[..., 0])


def query_dtype(stored: Any) -> Any:
    """Dtype of q for a cache of dtype `stored`."""
    return jnp.dtype(jnp.float16 if stored == jnp.float8_e4m3fn else jnp.bfloat16)


def arrange(q: jax.Array, tokens: int, columns: int, stored: Any) -> jax.Array:
    """Absorbed queries bf16 [N, H, row] as `attend` reads them, [B, C, row]; in plain jnp.

    C is T H rounded up to whole groups of `columns`; pad rows may hold anything. For an FP8 cache
    q is f16 and 2^-6 of itself. `mla_query` writes this form.
    """
    n, heads, row = q.shape
    q = q.reshape(n // tokens, tokens * heads, row)
    q = jnp.pad(q, ((0, 0), (0, -q.shape[1] % columns), (0, 0)))
    return (
        (q.astype(jnp.float32) * Q_SHIFT).astype(jnp.float16)
        if (query_dtype(stored) == jnp.float16)
        else q
    )


def work(ends: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of each sequence and how many of its splits work on them, i32 [B]."""
    tiles = -(-jnp.max(ends, axis=1) // TILE)
    return tiles, jnp.minimum(tiles, splits)


def merge(parts: Parts, ends: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """One mean latent f32 [N, H, latent] and its log-sum-exp [N, H]; zeros and -inf if nothing.

    What ranks exchange that hold parts of the context. In plain jnp.
    """
    (batch, tokens), splits = ends.shape, parts.lse.shape[2]
    works = jnp.arange(splits) < work(ends, splits)[1][:, None]
    lse = jnp.where(works[:, None, :, None], parts.lse, -jnp.inf)
    top = jnp.max(lse, axis=2, keepdims=True)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weight, axis=2, keepdims=True)
    share = weight / jnp.where(total == 0.0, 1.0, total)
    latent = jnp.where(share[..., None] > 0.0, parts.latent, 0.0)
    latent = jnp.sum(share[..., None] * latent, axis=2)
    whole = (top + jnp.log(total))[:, :, 0]
    rows = tokens * heads

    def by_row(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, -1, *x.shape[3:])[:, :rows]
        return x.reshape(batch * tokens, heads, *x.shape[2:])

    return by_row(latent), by_row(whole)


def attend(
    q: jax.Array,
    cache: Any,
    layer: int | jax.Array,
    table: jax.Array,
    ends: jax.Array,
    kv_scale: jax.Array | None = None,
    *,
    heads: int,
    latent: int,
    scale: float,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Parts:
    """Attention of every part of the context, see the module's docstring.

    `cache` is an array or a Ref of the whole stack. Entries of `table` that cover the first
    max(ends) rows of a sequence are pages; others are not looked at.

    Raises:
        ValueError: `limits` are not met.
    """
    reasons = limits(q, cache, table, ends, heads=heads, latent=latent, tuning=tuning)
    common.require(reasons, "mla_attend")
    batch, tokens = ends.shape
    fp8 = cache.dtype == jnp.float8_e4m3fn
    t = tuning or default_tuning(batch, tokens * heads, fp8)
    s = Sizes(batch, tokens, heads, latent, cache.shape[3], cache.shape[2], fp8, scale)
    factor = jnp.ones((1,), jnp.float32) if kv_scale is None else kv_scale.reshape(1)
    call = build(s, t, interpret)
    return Parts(*call(q, cache, common.layer_operand(layer), table, ends, factor))

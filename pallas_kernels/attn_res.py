"""Attention residual: add the pending delta, mix over depth, norm; the snapshot on the way.

    prefix, delta [N, D] (delta bf16, or f32 and rounded once here); snapshots bf16 [N, J, D] of
    which `count` are valid -> x bf16 [N, D], new prefix bf16 [N, D] (and the snapshots, written in
    place at index `count` when `snapshot`)

With sources s_1 .. s_count and the new prefix p = round(prefix + delta) (`reset`: round(delta)),
and c = res_norm * res_proj in f32: score_i = rsqrt(mean(s_i^2) + eps) * sum(s_i c), shares =
softmax of the scores, mixture = sum of share * source in f32, x = round(norm * mixture *
rsqrt(mean(mixture^2) + eps)). Everything between the two roundings is f32, as in profile V. Rows
of the bank from `count` on may hold anything; they are masked, never multiplied.

One CTA per row, its warpgroups side by side along D; a source is read once and kept in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        warpgroups: per row; each takes an equal part of D.
    """

    warpgroups: int = 7


def limits(
    prefix: jax.Array, snapshots: jax.Array, delta: jax.Array, *, tuning: Tuning | None = None
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    t = tuning or Tuning()
    n, d = prefix.shape
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    cut = 128 * t.warpgroups
    common.expect(out, "width", d, f"a multiple of {cut}", d % cut == 0)
    ok = snapshots.ndim == 3 and snapshots.shape[0] == n and snapshots.shape[2] == d
    common.expect(out, "shape of snapshots", snapshots.shape, (n, "J", d), ok)
    common.expect(out, "shape of delta", delta.shape, (n, d), delta.shape == (n, d))
    bf16, f32 = jnp.bfloat16, jnp.float32
    common.expect(out, "dtype of prefix", prefix.dtype, "bfloat16", prefix.dtype == bf16)
    common.expect(out, "dtype of snapshots", snapshots.dtype, "bfloat16", snapshots.dtype == bf16)
    common.expect(
        out, "dtype of delta", delta.dtype, "bfloat16 or float32", delta.dtype in (bf16, f32)
    )
    return out


def _rounded(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def reference(
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    res_norm: jax.Array,
    res_proj: jax.Array,
    norm: jax.Array,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same in plain jnp."""
    f32 = jnp.float32
    new = _rounded(delta)
    new = new if reset else _rounded(prefix.astype(f32) + new)
    valid = jnp.append(jnp.arange(snapshots.shape[1]) < count, True)
    sources = jnp.concatenate([snapshots.astype(f32), new[:, None]], axis=1)
    sources = jnp.where(valid[:, None], sources, 0.0)
    c = res_norm.astype(f32) * res_proj.reshape(-1).astype(f32)
    scores = lax.rsqrt(jnp.mean(sources * sources, -1) + eps) * jnp.sum(sources * c, -1)
    share = jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    mixed = jnp.sum(share[..., None] * sources, axis=1)
    x = norm.astype(f32) * mixed * lax.rsqrt(jnp.mean(mixed * mixed, -1, keepdims=True) + eps)
    new = new.astype(jnp.bfloat16)
    if snapshot:
        snapshots = snapshots.at[:, count].set(new)
    return _rounded(x).astype(jnp.bfloat16), new, snapshots


def attn_res(
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    res_norm: jax.Array,
    res_proj: jax.Array,
    norm: jax.Array,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, the new prefix and the snapshots; see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(prefix, snapshots, delta, tuning=tuning), "attn_res")
    t = tuning or Tuning()
    n, d = prefix.shape
    bank = snapshots.shape[1]
    rows = jax.ShapeDtypeStruct((n, d), jnp.bfloat16)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    call = common.kernel(
        _body(d, bank, eps, reset, snapshot, t, interpret),
        "k3_attn_res",
        interpret=interpret,
        out_type=[rows, rows],
        grid=(n,),
        grid_names=("row",),
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=dict(
            parts=plgpu.SMEM((2 * bank + 3, 4 * t.warpgroups), jnp.float32),
            totals=plgpu.SMEM((2 * bank + 3,), jnp.float32),
            ready=plgpu.Barrier(num_barriers=4, num_arrivals=t.warpgroups),
        ),
    )
    weights = res_norm.reshape(-1), res_proj.reshape(-1), norm.reshape(-1)
    valid = common.layer_operand(count)
    if not snapshot:
        return (*call(prefix, snapshots, valid, delta, *weights), snapshots)
    held = jax.new_ref(snapshots)
    x, new = call(prefix, held, valid, delta, *weights)
    return x, new, jax.freeze(held)


def _body(
    d: int, bank: int, eps: float, reset: bool, snapshot: bool, t: Tuning, interpret: bool
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    span = d // t.warpgroups
    f32, bf16 = jnp.float32, jnp.bfloat16

    def body(
        prefix,  # bf16 [N, D]
        snapshots,  # bf16 [N, J, D]
        count,  # i32 [1]
        delta,  # [N, D]
        res_norm,  # bf16 [D]
        res_proj,  # bf16 [D]
        norm,  # bf16 [D]
        x,  # bf16 [N, D]
        new,  # bf16 [N, D]
        parts,  # f32 [2 (J + 1) + 1, warps]: sums of every warp
        totals,  # f32 [2 (J + 1) + 1]
        ready,
    ):
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        mine = pl.ds(wg * span, span)
        valid = count[0]

        def wide(scalar):
            return lax.broadcast_in_dim(scalar, (span,), ())

        def meet(i):
            plgpu.barrier_arrive(ready.at[i])
            plgpu.barrier_wait(ready.at[i])

        def put(i, value):
            common.store_partial_sums(value, parts.at[i, pl.ds(wg * 4, 4)], interpret)

        def add_up(first, last, barrier):
            meet(barrier)
            for i in range(first, last):  # the warpgroups take turns
                pl.when(wg == i % t.warpgroups)(
                    lambda i=i: common.store_total(parts.at[i], totals.at[pl.ds(i, 1)], interpret)
                )
            meet(barrier + 1)

        last = jnp.maximum(valid - 1, 0)
        # rows beyond `count` are not read: another valid one is, and is then masked
        sources = [snapshots[row, jnp.minimum(j, last), mine] for j in range(bank)]
        p = delta[row, mine].astype(bf16)
        if not reset:
            p = (prefix[row, mine].astype(f32) + p.astype(f32)).astype(bf16)
        new[row, mine] = p
        if snapshot:
            snapshots[row, valid, mine] = p
        c = res_norm[mine].astype(f32) * res_proj[mine].astype(f32)
        for j, source in enumerate([*sources, p]):
            s = source.astype(f32)
            put(2 * j, s * s)
            put(2 * j + 1, s * c)
        add_up(0, 2 * bank + 2, 0)
        scores = []
        for j in range(bank + 1):
            score = lax.rsqrt(totals[2 * j] * (1 / d) + eps) * totals[2 * j + 1]
            scores.append(score if j == bank else jnp.where(j < valid, score, -jnp.inf))
        top = scores[0]
        for score in scores[1:]:
            top = jnp.maximum(top, score)
        shares = [jnp.exp(score - top) for score in scores]
        whole = sum(shares[1:], shares[0])
        mixed = p.astype(f32) * wide(shares[-1] / whole)
        for j, source in enumerate(sources):
            part = source.astype(f32) * wide(shares[j] / whole)
            # a select, not a product: what is masked may be NaN
            mixed = mixed + jnp.where(wide(j < valid), part, jnp.zeros_like(part))
        put(2 * bank + 2, mixed * mixed)
        add_up(2 * bank + 2, 2 * bank + 3, 2)
        scale = lax.rsqrt(totals[2 * bank + 2] * (1 / d) + eps)
        x[row, mine] = (norm[mine].astype(f32) * mixed * wide(scale)).astype(bf16)

    return body

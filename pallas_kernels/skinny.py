"""y = x W^T for few rows: BF16 weights streamed once, FP32 accumulation.

    x [M, K] bf16, M = 1..64;  w [L, N, K] bf16, the whole stack;  layer: which matrix of it
    y [M, N] f32 (not rounded) or bf16 (one rounding), or with `splits` S > 1 partial sums
    [S, M, N] f32 for the consumer to add.

With `situ=(beta, linear_beta)` the rows of w are gate rows, then up rows, and y [M, N/2] bf16 is
SiTU(gate, up). Rounding there: the products once to bf16, SiTU in f32 on the rounded values, one
rounding of the result; as in the standard path.

The weights are the 64-row operand of the tensor core and the rows of x the narrow one, padded to
8, 16, 32 or 64 columns by TMA, which reads zeros beyond the array. A column never enters another
column's sum, so a row that holds NaN cannot reach other rows.

Each CTA owns 64 rows of w. Its warpgroups take the steps along K in turn, each through a TMA ring
of its own, and add their sums through shared memory at the end, always in the same order: results
do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common

TILE = 64  # rows of w per CTA: the row count of a wgmma instruction


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        step: columns of w per pipeline step.
        stages: steps in flight per warpgroup.
        warpgroups: warpgroups per CTA, sharing the steps along K.
        splits: CTAs along K; more than one gives partial sums.
    """

    step: int = 128
    stages: int = 3
    warpgroups: int = 2
    splits: int = 1


def default_tuning(m: int, n: int, k: int) -> Tuning:
    """What measured best on an H200: few CTAs need more warpgroups each to draw the bandwidth."""
    step = 128 if k % 128 == 0 else 64
    width = common.bucket(m)
    if n <= TILE * 132 and width <= 16:
        return Tuning(step=step, stages=3, warpgroups=4)
    return Tuning(step=step, stages=3 if width <= 32 else 2, warpgroups=2)


def limits(
    x: jax.Array,
    w: jax.Array,
    *,
    out_dtype: Any = jnp.float32,
    situ: tuple[float, float] | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "x rank", x.ndim, 2, x.ndim == 2)
    common.expect(out, "w rank", w.ndim, "3 (layers, rows, columns)", w.ndim == 3)
    if out:
        return out
    m, k = x.shape
    n = w.shape[1]
    t = tuning or default_tuning(min(m, common.MAX_ROWS), n, k)
    common.expect(out, "rows of x", m, f"1..{common.MAX_ROWS}", 1 <= m <= common.MAX_ROWS)
    common.expect(out, "columns of w", w.shape[2], k, w.shape[2] == k)
    common.expect(out, "columns", k, "a multiple of 64", k % 64 == 0)
    common.expect(out, "rows of w", n, "a multiple of 8 (pad the stack when packing)", n % 8 == 0)
    common.expect(out, "dtype of x", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    common.expect(out, "dtype of w", w.dtype, "bfloat16", w.dtype == jnp.bfloat16)
    allowed = (jnp.float32, jnp.bfloat16)
    common.expect(out, "out_dtype", jnp.dtype(out_dtype), "float32 or bfloat16", out_dtype in allowed)
    cut = t.step * t.splits
    common.expect(out, "columns", k, f"a multiple of {cut}", k % cut == 0)
    if t.splits > 1:
        common.expect(out, "out_dtype", jnp.dtype(out_dtype), "float32", out_dtype == jnp.float32)
        common.expect(out, "situ", situ, "None with splits", situ is None)
    if situ is not None:
        common.expect(out, "rows of w", n, "a multiple of 64 with situ", n % TILE == 0)
    used = shared_bytes(common.bucket(min(m, common.MAX_ROWS)), t)
    limit = common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def shared_bytes(width: int, t: Tuning) -> int:
    """Shared memory of one CTA."""
    ring = t.warpgroups * t.stages * (TILE + width) * t.step * 2
    return ring + (t.warpgroups + 1) * TILE * width * 4 + 1024


def reference(
    x: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    out_dtype: Any = jnp.float32,
    situ: tuple[float, float] | None = None,
) -> jax.Array:
    """The same in plain jnp."""
    y = jnp.einsum(
        "mk,nk->mn",
        x.astype(jnp.float32),
        w[layer].astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    if situ is None:
        return _rounded(y).astype(out_dtype) if out_dtype == jnp.bfloat16 else y
    gate, up = jnp.split(_rounded(y), 2, axis=-1)
    return _rounded(situ_f32(gate, up, *situ)).astype(jnp.bfloat16)


def situ_f32(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """b tanh(g/b) sigmoid(g) * c tanh(u/c) in f32, not rounded."""
    soft_gate = beta * jnp.tanh(gate * (1 / beta)) / (1 + jnp.exp(-gate))
    return soft_gate * (linear_beta * jnp.tanh(up * (1 / linear_beta)))


def _rounded(y: jax.Array) -> jax.Array:
    return lax.reduce_precision(y, 8, 7)


def skinny(
    x: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    out_dtype: Any = jnp.float32,
    situ: tuple[float, float] | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y = x W^T, see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(x, w, out_dtype=out_dtype, situ=situ, tuning=tuning), "skinny")
    m, k = x.shape
    n = w.shape[1]
    t = tuning or default_tuning(m, n, k)
    cols = n if situ is None else n // 2
    out_type = jnp.bfloat16 if situ is not None else out_dtype
    width = common.bucket(m)
    # rows of y must start at multiples of 16 bytes; the interpreter has no clipping at the edge
    per_tile = TILE if situ is None else TILE // 2
    padded = common.round_up(cols, per_tile if interpret else 16 // jnp.dtype(out_type).itemsize)
    rows = width if interpret else m
    if interpret:
        x = jnp.pad(x, ((0, width - m), (0, 0)), constant_values=jnp.nan)
        w = jnp.pad(w, ((0, 0), (0, -n % TILE), (0, 0)))
    shape = (rows, padded) if t.splits == 1 else (t.splits, rows, padded)
    call = _build(k, n, width, t, jax.ShapeDtypeStruct(shape, out_type), situ, interpret)
    y = call(x, w, common.layer_operand(layer))
    return y[..., :m, :cols] if (rows, padded) != (m, cols) else y


def _build(
    k: int,
    n: int,
    width: int,
    t: Tuning,
    out: jax.ShapeDtypeStruct,
    situ: tuple[float, float] | None,
    interpret: bool,
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bf16, f32 = jnp.bfloat16, jnp.float32
    ring = t.warpgroups * t.stages
    out_cols = TILE if situ is None else TILE // 2
    return common.kernel(
        _body(k, n, width, t, situ),
        "k3_skinny",
        interpret=interpret,
        out_type=out,
        grid=(-(-n // TILE), t.splits),
        grid_names=("tile", "split"),
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=dict(
            ws=plgpu.SMEM((ring, TILE, t.step), bf16, transforms=common.tiled(bf16, t.step)),
            xs=plgpu.SMEM((ring, width, t.step), bf16, transforms=common.tiled(bf16, t.step)),
            sums=plgpu.SMEM((t.warpgroups, TILE, width), f32),
            ys=plgpu.SMEM((width, out_cols), out.dtype),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=2 if situ is None else 3),
            done=plgpu.Barrier(num_barriers=1, num_arrivals=t.warpgroups),
        ),
    )


def _body(k: int, n: int, width: int, t: Tuning, situ: tuple[float, float] | None) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    steps = k // t.step // t.splits  # of this CTA; warpgroup g takes g, g + warpgroups, ...

    def body(
        x,  # bf16 [M, K]
        w,  # bf16 [L, N, K]
        layer,  # i32 [1]
        y,  # [M, N], or [S, M, N]
        ws,  # bf16 [ring, 64, step]
        xs,  # bf16 [ring, width, step]
        sums,  # f32 [warpgroups, 64, width]
        ys,  # [width, 64], or [width, 32] with SiTU
        full,
        done,
    ):
        tile, split, wg = (lax.axis_index(name) for name in ("tile", "split", "wg"))
        mine = (steps - wg + t.warpgroups - 1) // t.warpgroups
        which = layer[0]

        def issue(j, slot):
            cols = pl.ds((split * steps + wg + j * t.warpgroups) * t.step, t.step)
            bar = full.at[slot]
            if situ is None:
                rows = w.at[which, pl.ds(tile * TILE, TILE), cols]
                plgpu.copy_gmem_to_smem(rows, ws.at[slot], bar)
            else:
                for part in range(2):  # 32 gate rows, and the 32 up rows that belong to them
                    rows = w.at[which, pl.ds(part * (n // 2) + tile * (TILE // 2), TILE // 2), cols]
                    into = ws.at[slot, pl.ds(part * (TILE // 2), TILE // 2)]
                    plgpu.copy_gmem_to_smem(rows, into, bar)
            # a start that is only known at run time lets the box reach beyond the last row of x
            plgpu.copy_gmem_to_smem(x.at[pl.ds(tile * 0, width), cols], xs.at[slot], bar)

        for s in range(t.stages):
            pl.when(s < mine)(lambda s=s: issue(s, wg * t.stages + s))

        def accumulate(acc):
            def step(j, _):
                slot = wg * t.stages + lax.rem(j, t.stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, ws.at[slot], common.tref(xs.at[slot]))
                plgpu.wgmma_wait(0)
                pl.when(j + t.stages < mine)(lambda: issue(j + t.stages, slot))

            lax.fori_loop(0, mine, step, None)
            return acc[...]

        sums[wg] = pl.run_scoped(accumulate, plgpu.ACC((TILE, width), jnp.float32))
        plgpu.barrier_arrive(done.at[0])

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(done.at[0])
            ys[...] = _result(sums, width, t, situ).astype(ys.dtype)
            plgpu.commit_smem()
            target = y if t.splits == 1 else y.at[split]
            cols = ys.shape[1]
            start = pl.ds(tile * 0, width)
            plgpu.copy_smem_to_gmem(ys, target.at[start, pl.ds(tile * cols, cols)])
            plgpu.wait_smem_to_gmem(0)

    return body


def _result(sums: Any, width: int, t: Tuning, situ: tuple[float, float] | None) -> jax.Array:
    """Add the warpgroups' sums; rows of y as rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def total(first: int, count: int) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED((width, count), vec_size=1)
        parts = [
            plgpu.load(
                common.tref(sums.at[g, pl.ds(first, count)]), layout=layout, optimized=False
            )
            for g in range(t.warpgroups)
        ]
        return sum(parts[1:], parts[0])

    if situ is None:
        return total(0, TILE)
    rounded = [
        total(part * (TILE // 2), TILE // 2).astype(jnp.bfloat16).astype(jnp.float32)
        for part in range(2)
    ]
    return situ_f32(*rounded, *situ)

"""Rows of x on their way to the routed experts: lifted, and in the tensor core's order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common, mxfp4
from pallas_kernels.units import COLUMNS


def stage_gathered(
    x: Any, table: Any, unit: jax.Array, k: int, xs: Any, wg: jax.Array, per: int, interpret: bool
) -> None:
    """`stage` of the rows that chose a unit."""
    rows = [table[unit, 2 + c] // (COLUMNS * k) for c in range(COLUMNS)]
    stage(x, xs, wg, per, rows, interpret, table[unit, 1])


def stage(
    x: Any,
    xs: Any,
    wg: jax.Array,
    per: int,
    rows: Any,
    interpret: bool,
    count: jax.Array | None = None,
) -> None:
    """This warpgroup's part of K of some rows of x to `xs`, lifted, in the tensor core's order."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def one(c: int, row: Any) -> None:
        source = x.at[row, pl.ds(wg * per, per)]
        target = xs.at[pl.ds(wg * (per // 32), per // 32)]
        if interpret:
            lifted = source[...] * jnp.bfloat16(mxfp4.LIFT)
            target[:, c] = mxfp4.operand_order(lifted[None])[:, 0]
            return
        call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        call(lambda _, a, b: _stage_registers(a, b, c, per))(source, target)

    if not interpret:
        # what was multiplied with the old rows is done in every warp
        plgpu.inline_mgpu()(lambda _: common.Registers().barrier())()
    for c, row in enumerate(rows):
        if count is None:
            one(c, row)
        else:
            pl.when(c < count)(lambda c=c, row=row: one(c, row))
    if not interpret:
        plgpu.inline_mgpu()(lambda _: common.Registers().barrier())()


# 8 neighbours of x (their order is e, p) become four pairs, 16 bytes, of the place [column, q].
_STAGE = """
{
.reg .pred in;
.reg .b32 r0, r1, r2, r3, p0, p1, p2, p3, at, t;
.reg .b64 from;
setp.lt.u32 in, $0, COUNT;
mul.wide.u32 from, $0, 16;
add.u64 from, from, $1;
@in ld.global.v4.b32 {r0, r1, r2, r3}, [from];
prmt.b32 p0, r0, r2, 0x5410;
prmt.b32 p1, r0, r2, 0x7632;
prmt.b32 p2, r1, r3, 0x5410;
prmt.b32 p3, r1, r3, 0x7632;
mov.b32 t, LIFT;
mul.rn.bf16x2 p0, p0, t;
mul.rn.bf16x2 p1, p1, t;
mul.rn.bf16x2 p2, p2, t;
mul.rn.bf16x2 p3, p3, t;
shr.u32 at, $0, 2;
shl.b32 at, at, 9;
and.b32 t, $0, 3;
shl.b32 t, t, 4;
add.u32 at, at, t;
add.u32 at, at, $2;
@in st.shared.v4.b32 [at+COLUMN], {p0, p1, p2, p3};
}
"""


def _stage_registers(source: Any, target: Any, column: int, per: int) -> None:
    reg = common.Registers()
    thread = reg.thread()
    base, address = reg.shared_address(target), reg.global_address(source)
    lift = f"0x{(int(np.float32(mxfp4.LIFT).view(np.uint32)) >> 16) * 0x10001:08X}"
    text = _STAGE.replace("COUNT", str(per // 8)).replace("COLUMN", str(64 * column))
    text = text.replace("LIFT", lift)
    for first in range(0, per // 8, 128):  # 8 numbers: v / 4 of the 32 each, q = v % 4
        reg.ptx(text, reg.add(thread, first), address, base, volatile=True)

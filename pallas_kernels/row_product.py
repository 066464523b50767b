"""W x for one row x: a tile of W by one warpgroup, from global memory to registers.

    w bf16 [64, K], x bf16 [K], y f32 [64], global; K a multiple of 32, at most 1024

What a warpgroup without other work can do beside one: it needs no shared memory, and all of its
loads are on their way before the first product. Products are exact, sums f32 in a fixed order.

The products are `mma.sync` m16n8k16, whose narrow operand has eight columns for one row. Of x cut
into groups of 32, column c holds the groups c, c + 8, ... (zeros where another group is at turn),
so that each lane keeps a few numbers of x and no more; the eight sums are added at the end.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels import common

ROWS = 64  # of a tile
GROUP = 32  # of K: 16 bytes per lane and row
COLUMNS = 8
MOST = 1024  # columns: what lanes keep of x has to fit into registers
AHEAD = 8  # groups of W on their way, 8 registers each

# $0 row g, $1 column (of eight), $2 place in a group of the thread $3: its row in the tile is
# 16 warp + g, the other one 8 further
_PLACE = """
{
.reg .b32 lane, warp, row, at;
shr.u32 warp, $3, 5;
and.b32 lane, $3, 31;
shr.u32 row, lane, 2;
and.b32 at, lane, 3;
mov.b32 lane, row;
mad.lo.u32 row, warp, 16, row;
mov.b32 $0, row;
mov.b32 $1, lane;
mov.b32 $2, at;
}
"""
_LOAD = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4+OFFSET];"
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3},"
# $0..$3 sums, of rows g and g + 8, from $17..$20; $4..$7 and $8..$11 these rows of W; $12..$15 x;
# $16 column. Which of the 32 a lane holds does not matter, as it is the same for W and x.
_MULTIPLY = f"""
{{
.reg .pred mine;
.reg .b32 x0, x1, x2, x3;
.reg .f32 d0, d1, d2, d3;
setp.eq.u32 mine, $16, TURN;
selp.b32 x0, $12, 0, mine;
selp.b32 x1, $13, 0, mine;
selp.b32 x2, $14, 0, mine;
selp.b32 x3, $15, 0, mine;
{_MMA} {{$4, $8, $5, $9}}, {{x0, x1}}, {{$17, $18, $19, $20}};
{_MMA} {{$6, $10, $7, $11}}, {{x2, x3}}, {{d0, d1, d2, d3}};
mov.f32 $0, d0;
mov.f32 $1, d1;
mov.f32 $2, d2;
mov.f32 $3, d3;
}}
"""
# $0..$3 sums, $4 row, $5 place in a group, $6 y
_STORE = """
{
.reg .pred one;
.reg .f32 low, high, other;
.reg .b64 at;
add.f32 low, $0, $1;
add.f32 high, $2, $3;
STEPS
setp.eq.u32 one, $5, 0;
mul.wide.u32 at, $4, 4;
add.u64 at, at, $6;
@one st.global.f32 [at], low;
@one st.global.f32 [at+32], high;
}
"""
_STORE_STEP = """
shfl.sync.bfly.b32 other, SUM, DISTANCE, 31, 0xFFFFFFFF;
add.f32 SUM, SUM, other;
"""


def product(w: Any, x: Any, y: Any) -> None:
    """Y = W x of one tile, see the module's docstring; called by a warpgroup."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(lambda _, *refs: _registers(*refs))(w, x, y)


def _registers(w: Any, x: Any, y: Any) -> None:
    reg = common.Registers()
    k = x.type.shape[0]
    groups = k // GROUP
    row, column, place = reg.ptx(_PLACE, reg.thread(), results=3)
    low = reg.wide_add(reg.global_address(w), reg.add(reg.mul(row, 2 * k), reg.mul(place, 16)))
    high = reg.wide_add(low, reg.constant(8 * 2 * k))

    def load(i: int) -> list[Any]:
        text = _LOAD.replace("OFFSET", str(2 * GROUP * i))
        return [word for at in (low, high) for word in reg.ptx(text, at, results=4, volatile=True)]

    mine = reg.add(reg.mul(column, 2 * GROUP), reg.mul(place, 16))
    from_x, held = reg.wide_add(reg.global_address(x), mine), []
    for first in range(0, groups, COLUMNS):
        left, at = groups - first, 2 * GROUP * first
        held.append(reg.load_or_zeros("ld.global.nc.v4.b32", from_x, column, left, at))
    waiting = [load(i) for i in range(min(AHEAD, groups))]
    zero = reg.arith.constant(reg.f32, reg.ir.FloatAttr.get(reg.f32, 0.0))
    sums = [zero] * 4
    for i in range(groups):
        text = _MULTIPLY.replace("TURN", str(i % COLUMNS))
        words = waiting.pop(0)
        if i + AHEAD < groups:
            waiting.append(load(i + AHEAD))
        args = *words, *held[i // COLUMNS], column, *sums
        sums = reg.ptx(text, *args, results=4, kind=reg.f32)
    steps = "".join(
        _STORE_STEP.replace("SUM", name).replace("DISTANCE", str(distance))
        for distance in (1, 2)
        for name in ("low", "high")
    )
    text = _STORE.replace("STEPS", steps)
    reg.ptx(text, *sums, row, place, reg.global_address(y), volatile=True)

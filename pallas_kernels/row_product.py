"""W x for one row x by CTAs without other work: part of `experts_row`.

    w bf16 [D, M], x bf16 [M], y f32 [D], global; M a multiple of 32, at most 1024

A unit is 16 rows of W and belongs to a warp; each warp of the CTAs has at most one. A unit comes to
shared memory by the copy engine, in one piece: by ordinary loads, 64 bytes of a row at once, a
multiprocessor gets 12 KB per us, by the copy engine 60. Products are exact, sums f32 in a fixed
order.

The products are `mma.sync` m16n8k16, whose narrow operand has eight columns for one row. Of x cut
into groups of 32, column c holds the groups c, c + 8, ... (zeros where another group is at turn),
so that each lane keeps a few numbers of x and no more; the eight sums are added at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import common

ROWS = 16  # of a unit
WARPS = 4  # of a warpgroup
GROUP = 32  # of M: 16 bytes per lane and row
COLUMNS = 8
MOST = 1024  # columns: what lanes keep of x has to fit into registers
LINE = 128  # numbers of a line of W as it is copied


@dataclass(frozen=True)
class RowUnits:
    """The units of D rows of M numbers, in turn over so many CTAs."""

    d: int
    m: int
    ctas: int

    @property
    def per(self) -> int:
        """Of a CTA at most, i of CTA s having number s + ctas i."""
        return -(-self.d // ROWS // self.ctas)

    @property
    def lines(self) -> int:
        """Of a unit."""
        return ROWS * self.m // LINE

    def limits(self, warpgroups: int) -> list[str]:
        """Unmet conditions, each with what was found and expected."""
        out: list[str] = []
        common.expect(out, "rows of shared", self.d, f"a multiple of {ROWS}", self.d % ROWS == 0)
        wanted = f"a multiple of {GROUP}, at most {MOST}"
        ok = self.m % GROUP == 0 and self.m <= MOST
        common.expect(out, "columns of shared", self.m, wanted, ok)
        most = WARPS * warpgroups
        ok = self.per <= most
        common.expect(out, "units of shared per CTA", self.per, f"at most {most}, one per warp", ok)
        return out

    def lined(self, w: jax.Array) -> jax.Array:
        """[L, D, M] as `request` takes it: the same bytes in lines."""
        return w.reshape(w.shape[0], -1, LINE)

    def place(self) -> Any:
        """Shared memory of a CTA's units."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.SMEM((self.per, self.lines, LINE), jnp.bfloat16)

    def request(self, w: Any, cta: Any, wg: Any, place: Any, came: Any) -> None:
        """By a warpgroup: ask for its units; `w` of one layer, [lines, LINE]."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def ask(i: Any) -> None:
            lines = pl.ds((cta + i * self.ctas) * self.lines, self.lines)
            plgpu.copy_gmem_to_smem(w.at[lines], place.at[i], came.at[i])

        self._each(cta, wg, ask)

    def multiply(self, cta: Any, wg: Any, place: Any, came: Any, x: Any, y: Any) -> None:
        """By the same one: y [D] of its units, once they are there."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self._each(cta, wg, lambda i: plgpu.barrier_wait(came.at[i]))
        call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        call(self._code)(place, x, y, y.at[pl.ds(cta * ROWS, ROWS)])

    def _each(self, cta: Any, wg: Any, work: Any) -> None:
        """`work(i)` for the units that this warpgroup's warps have."""
        from jax.experimental import pallas as pl

        for warp in range(WARPS):
            i = wg * WARPS + warp
            pl.when(cta + i * self.ctas < self.d // ROWS)(lambda i=i: work(i))

    def _code(self, _: Any, place: Any, x: Any, y: Any, first: Any) -> None:
        reg = common.Registers()
        thread, groups = reg.utils.thread_idx(), self.m // GROUP
        row, column, quarter = reg.ptx(_PLACE, thread, results=3)
        mine = reg.add(reg.mul(column, 2 * GROUP), reg.mul(quarter, 16))
        from_x, held = reg.wide_add(reg.global_address(x), mine), []
        for start in range(0, groups, COLUMNS):
            left, at = groups - start, 2 * GROUP * start
            held.append(reg.load_or_zeros("ld.global.nc.v4.b32", from_x, column, left, at))
        # a warp without a unit reads that of another one, and writes nothing
        unit = reg.ptx(f"shr.u32 $0, $1, 5; min.u32 $0, $0, {self.per - 1};", thread, results=1)[0]
        low = reg.add(reg.shared_address(place), reg.mul(unit, 2 * ROWS * self.m))
        low = reg.add(reg.add(low, reg.mul(row, 2 * self.m)), reg.mul(quarter, 16))
        sums = [reg.as_f32(reg.constant(0))] * 4
        for i in range(groups):
            places = [2 * GROUP * i, 2 * GROUP * i + ROWS * self.m]
            words = [
                word
                for at in places
                for word in reg.ptx(_LOAD.replace("OFFSET", str(at)), low, results=4, volatile=True)
            ]
            text = _MULTIPLY.replace("TURN", str(i % COLUMNS))
            args = *words, *held[i // COLUMNS], column, *sums
            sums = reg.ptx(text, *args, results=4, kind=reg.f32)
        steps = "".join(
            _STORE_STEP.replace("SUM", name).replace("DISTANCE", str(distance))
            for distance in (1, 2)
            for name in ("low", "high")
        )
        text = _STORE.replace("STEPS", steps).replace("APART", str(4 * ROWS * self.ctas))
        text = text.replace("END", str(4 * self.d))
        to = reg.global_address(first), reg.global_address(y)
        reg.ptx(text, *sums, row, quarter, thread, *to, volatile=True)


# $0 row g of the unit, the other one is 8 further, $1 column (of eight), $2 place in a group of the
# thread $3
_PLACE = """
{
.reg .b32 lane, row;
and.b32 lane, $3, 31;
shr.u32 row, lane, 2;
mov.b32 $0, row;
mov.b32 $1, row;
and.b32 $2, lane, 3;
}
"""
_LOAD = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4+OFFSET];"
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
# $0..$3 sums, $4 row, $5 place in a group, $6 thread, $7 rows of the CTA's first unit, $8 y, of
# END bytes, behind which there are no units
_STORE = """
{
.reg .pred one;
.reg .f32 low, high, other;
.reg .b32 warp;
.reg .b64 at, more, end;
add.f32 low, $0, $1;
add.f32 high, $2, $3;
STEPS
shr.u32 warp, $6, 5;
mul.wide.u32 at, warp, APART;
add.u64 at, at, $7;
mul.wide.u32 more, $4, 4;
add.u64 at, at, more;
add.u64 end, $8, END;
setp.eq.u32 one, $5, 0;
setp.lt.and.u64 one, at, end, one;
@one st.global.f32 [at], low;
@one st.global.f32 [at+32], high;
}
"""
_STORE_STEP = """
shfl.sync.bfly.b32 other, SUM, DISTANCE, 31, 0xFFFFFFFF;
add.f32 SUM, SUM, other;
"""

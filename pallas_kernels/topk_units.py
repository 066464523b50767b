"""Register code of `topk`: units of what the warpgroups of a cluster have chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels import common, units
from pallas_kernels.topk_registers import filled, places_of


class Sizes(NamedTuple):
    """What `plan` needs to know."""

    rows: int
    experts: int
    chosen: int  # per row
    rounds: int  # rows of a warpgroup
    at_once: int  # rows of all warpgroups at a time
    ctas: int
    warpgroups: int


def clear(bits: Any, warpgroups: int) -> None:
    """Empty the CTA's sets of rows, shared i32 [2 E], for `plan`, which comes later."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        (thread,) = reg.ptx("mov.u32 $0, %tid.x;", results=1)
        experts = ref.type.shape[0] // 2
        units.clear(reg, reg.shared_address(ref), experts, thread, 128 * warpgroups)
        reg.ptx("barrier.cluster.arrive.release.aligned;", volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(bits)


# $0 number of a chosen one, $1 its pair or -1; $2 thread, $3 first row, $4 scratch, $5 bits: set
# the row's bit in all CTAs
_SET = """
{
.reg .pred in, high;
.reg .b32 turn, row, number, pair, bit, at, far;
div.u32 turn, $2, K;
mad.lo.u32 row, turn, AT_ONCE, $3;
setp.lt.u32 in, $2, TAKEN;
setp.lt.and.u32 in, row, ROWS, in;
mov.b32 number, 0;
mad.lo.u32 at, $2, 4, $4;
@in ld.shared.b32 number, [at+CHOSEN];
mul.lo.u32 pair, turn, K;
sub.u32 pair, $2, pair;
mad.lo.u32 pair, row, K, pair;
selp.b32 pair, pair, -1, in;
setp.ge.u32 high, row, 32;
and.b32 row, row, 31;
shl.b32 bit, 1, row;
mad.lo.u32 at, number, 4, $5;
@high add.u32 at, at, HIGH;
SETS
mov.b32 $0, number;
mov.b32 $1, pair;
}
"""
_SET_IN = """
mapa.shared::cluster.u32 far, at, CTA;
@in red.shared::cluster.or.b32 [far], bit;
"""
# one row: $0 thread, $1 scratch, $2 count, $3 table
_ONLY_ROW = """
{
.reg .pred in, one;
.reg .b32 at, number;
.reg .b64 to;
setp.lt.u32 in, $0, K;
setp.eq.u32 one, $0, 0;
@one st.global.b32 [$2], K;
@one st.global.b32 [$2+4], 0;
mad.lo.u32 at, $0, 4, $1;
@in ld.shared.b32 number, [at+CHOSEN];
mul.wide.u32 to, $0, 40;
add.u64 to, to, $3;
@in st.global.b32 [to], number;
@in st.global.b32 [to+4], 1;
mul.lo.u32 at, $0, 8;
@in st.global.b32 [to+8], at;
}
"""


def plan(words: Any, bits: Any, count: Any, table: Any, sizes: Sizes) -> None:
    """Units of what all warpgroups of the cluster have chosen, into global count and table."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s = sizes
    places = places_of(s.experts, s.chosen, s.rounds)
    only = filled(_ONLY_ROW, CHOSEN=places.chosen, K=s.chosen)
    sets = "".join(_SET_IN.replace("CTA", str(cta)) for cta in range(s.ctas))
    names = dict(CHOSEN=places.chosen, AT_ONCE=s.at_once, TAKEN=s.rounds * s.chosen)
    names |= dict(ROWS=s.rows, HIGH=4 * s.experts, K=s.chosen)
    setting = filled(_SET, SETS=sets, **names)

    def code(_: Any, words: Any, bits: Any, count: Any, table: Any) -> None:
        reg = common.Registers()
        thread, base = reg.thread(), reg.shared_address(words)
        total, to = reg.global_address(count), reg.global_address(table)
        if s.rows == 1:
            reg.ptx(only, thread, base, total, to, volatile=True)
            return
        here = reg.shared_address(bits)
        text = "{ .reg .b32 w; mov.u32 w, %tid.x; shr.u32 w, w, 7; mov.u32 $0, %cluster_ctarank;"
        text += f" mad.lo.u32 $0, $0, {s.warpgroups}, w; }}"
        (first,) = reg.ptx(text, results=1)
        reg.ptx("barrier.cluster.wait.acquire.aligned;", volatile=True)
        mine = reg.ptx(setting, thread, first, base, here, results=2, volatile=True)
        reg.cluster_barrier()
        firsts, sums = reg.add(base, places.scores), reg.add(base, places.counter)
        who = reg.add(reg.mul(first, 128), thread)
        units.first_units(reg, here, firsts, sums, total, who, s.experts)
        units.place(reg, mine[1], mine[0], here, firsts, to, (s.rows, s.chosen, s.experts))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)(code)(words, bits, count, table)

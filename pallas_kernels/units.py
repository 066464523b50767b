"""Units of work of the routed experts: each distinct expert with up to 8 of its rows.

    ids i32 [N, k], N = 1..64 -> count i32 [2], table i32 [N k, 10]

A table row is: expert, number of rows, then 8 slots; a slot is pair * 8 + column, with pair = n *
k + j for the j-th expert of row n. The column is that of the tensor core's narrow operand that
will hold row n: n itself for N <= 8, beyond that the slot's own number. Units ascend by expert,
and their slots by row (one row: units in the row's own order). Table rows from `count` on, and
slots beyond a unit's number of rows, hold nothing.

`plan` is one warpgroup. It collects each expert's rows as a set of bits (the order in which bits
are set does not matter, so the result is a function of ids alone), adds up units over the experts,
and then places every pair by counting bits. Its twin for the interpreter, and for one row, where
nothing can coincide, is `group_rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import common

COLUMNS = 8  # rows of a unit
FIELDS = 2 + COLUMNS


class Units(NamedTuple):
    """What the kernels work through."""

    count: jax.Array  # i32 [2]; the second, 0, counts who has met in `experts`
    table: jax.Array  # i32 [U, 10]


def group_rows(ids: jax.Array) -> Units:
    """`plan` in plain jnp; what the kernel leaves unset is zero."""
    n, k = ids.shape
    pairs = n * k
    flat = ids.reshape(-1)
    number = jnp.arange(pairs, dtype=jnp.int32)
    if n == 1:  # a row's experts are distinct
        slots = jnp.pad(number[:, None] * COLUMNS, ((0, 0), (0, COLUMNS - 1)))
        table = jnp.concatenate([flat[:, None], jnp.ones_like(flat)[:, None], slots], axis=1)
        return Units(jnp.array([pairs, 0], jnp.int32), table)
    same = flat[:, None] == flat[None, :]
    nth = jnp.sum(same & (number[None, :] < number[:, None]), axis=1, dtype=jnp.int32)
    slot = nth % COLUMNS
    leads = slot == 0
    column = number // k if n <= COLUMNS else slot
    before = (flat[None, :] < flat[:, None]) | (same & (nth[None, :] < nth[:, None]))
    unit = jnp.sum(leads[None, :] & before, axis=1, dtype=jnp.int32)
    mine = same & leads[None, :] & (nth[None, :] == (nth - slot)[:, None])
    of_pair = jnp.sum(jnp.where(mine, unit[None, :], 0), axis=1)
    total = jnp.sum(same, axis=1, dtype=jnp.int32)
    table = jnp.zeros((pairs, FIELDS), jnp.int32)
    lead_row = jnp.where(leads, unit, pairs)
    table = table.at[lead_row, 0].set(flat, mode="drop")
    table = table.at[lead_row, 1].set(jnp.minimum(total - nth, COLUMNS), mode="drop")
    table = table.at[of_pair, 2 + slot].set(number * COLUMNS + column)
    return Units(jnp.stack([jnp.sum(leads, dtype=jnp.int32), jnp.int32(0)]), table)


def limits(ids: jax.Array, experts: int) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    n = ids.shape[0]
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "dtype of ids", ids.dtype, "int32", ids.dtype == jnp.int32)
    used, limit = 4 * _words(experts), common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def plan(ids: jax.Array, experts: int, *, interpret: bool = False) -> Units:
    """The units of ids [N, k], each in 0..experts - 1 and distinct within a row.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(ids, experts), "plan")
    n, k = ids.shape
    if interpret or n == 1:
        return group_rows(ids)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    i32 = jnp.int32
    call = common.kernel(
        _body(n, k, experts),
        "k3_plan",
        out_type=[jax.ShapeDtypeStruct((2,), i32), jax.ShapeDtypeStruct((n * k, FIELDS), i32)],
        grid=(1,),
        grid_names=("one",),
        scratch_types=dict(words=plgpu.SMEM((_words(experts),), i32)),
    )
    return Units(*call(ids))


def _words(experts: int) -> int:
    return 3 * experts + 4


def _body(n: int, k: int, experts: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        ids,  # i32 [N, k]
        count,  # i32 [2]
        table,  # i32 [U, 10]
        words,  # i32: rows 0..31 of each expert as bits, rows 32..63, first unit; sums of the warps
    ):
        call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        call(lambda _, *refs: _registers(*refs, n, k, experts))(ids, count, table, words)

    return body


# results go to `out` first: $0 could be the register of an argument that is still to be read
_CLEAR = """
{
.reg .pred in;
.reg .b32 at;
setp.lt.u32 in, $0, COUNT;
mad.lo.u32 at, $0, 4, $1;
@in st.shared.b32 [at], 0;
}
"""
# $0 id; $1 pair, $2 ids, $3 bits
_COLLECT = """
{
.reg .b32 out;
.reg .pred in, high;
.reg .b32 row, at, bit;
.reg .b64 from;
setp.lt.u32 in, $1, PAIRS;
mul.wide.u32 from, $1, 4;
add.u64 from, from, $2;
mov.b32 out, 0;
@in ld.global.b32 out, [from];
div.u32 row, $1, CHOSEN;
setp.ge.u32 high, row, 32;
mad.lo.u32 at, out, 4, $3;
@high add.u32 at, at, HIGH;
and.b32 row, row, 31;
shl.b32 bit, 1, row;
@in red.shared.or.b32 [at], bit;
mov.b32 $0, out;
}
"""
# $0 units of expert $1; $2 bits
_COUNT = """
{
.reg .b32 out;
.reg .pred in;
.reg .b32 at, low, high;
setp.lt.u32 in, $1, EXPERTS;
mad.lo.u32 at, $1, 4, $2;
mov.b32 low, 0;
mov.b32 high, 0;
@in ld.shared.b32 low, [at];
@in ld.shared.b32 high, [at+HIGH];
popc.b32 low, low;
popc.b32 high, high;
add.u32 low, low, high;
add.u32 low, low, 7;
shr.u32 out, low, 3;
mov.b32 $0, out;
}
"""
# $0 sum over this warp's lanes up to this one; $1 own number, $2 thread, $3 where the warps' sums
# go
_SCAN = """
{
.reg .b32 out;
.reg .pred in, end;
.reg .b32 other, lane, at;
and.b32 lane, $2, 31;
mov.b32 out, $1;
STEPS
setp.eq.u32 end, lane, 31;
shr.u32 at, $2, 5;
mad.lo.u32 at, at, 4, $3;
@end st.shared.b32 [at], out;
mov.b32 $0, out;
}
"""
_SCAN_STEP = """
shfl.sync.up.b32 other, out, DISTANCE, 0, 0xFFFFFFFF;
setp.ge.u32 in, lane, DISTANCE;
@in add.u32 out, out, other;
"""
# $0 sum over all threads before this one; $1 sum up to this one in its warp, $2 own, $3 thread,
# $4 the warps' sums, $5 where the total goes, if $6 is 0
_OFFSET = """
{
.reg .b32 out;
.reg .pred in, one;
.reg .b32 warp, part, total;
shr.u32 warp, $3, 5;
sub.u32 out, $1, $2;
mov.b32 total, 0;
PARTS
setp.eq.u32 one, $6, 0;
@one st.global.b32 [$5], total;
@one st.global.b32 [$5+4], 0;
mov.b32 $0, out;
}
"""
_OFFSET_PART = """
ld.shared.b32 part, [$4+PLACE];
add.u32 total, total, part;
setp.gt.u32 in, warp, NUMBER;
@in add.u32 out, out, part;
"""
_FIRST = """
{
.reg .pred in;
.reg .b32 at;
setp.lt.u32 in, $0, EXPERTS;
mad.lo.u32 at, $0, 4, $1;
@in st.shared.b32 [at], $2;
}
"""
# $0 pair, $1 id, $2 bits, $3 table, $4 first units
_PLACE = """
{
.reg .pred in, high, lead;
.reg .b32 row, at, low, up, mask, nth, total, slot, unit, v;
.reg .b64 to, line;
setp.lt.u32 in, $0, PAIRS;
mad.lo.u32 at, $1, 4, $2;
ld.shared.b32 low, [at];
ld.shared.b32 up, [at+HIGH];
mad.lo.u32 at, $1, 4, $4;
ld.shared.b32 unit, [at];
div.u32 row, $0, CHOSEN;
setp.ge.u32 high, row, 32;
and.b32 v, row, 31;
shl.b32 mask, 1, v;
sub.u32 mask, mask, 1;
popc.b32 total, low;
selp.b32 v, up, low, high;
and.b32 v, v, mask;
popc.b32 nth, v;
@high add.u32 nth, nth, total;
popc.b32 v, up;
add.u32 total, total, v;
and.b32 slot, nth, 7;
shr.u32 v, nth, 3;
add.u32 unit, unit, v;
setp.eq.and.u32 lead, slot, 0, in;
mul.wide.u32 line, unit, 40;
add.u64 line, line, $3;
sub.u32 v, total, nth;
min.u32 v, v, 8;
@lead st.global.b32 [line], $1;
@lead st.global.b32 [line+4], v;
mad.lo.u32 v, $0, 8, COLUMN;
mul.wide.u32 to, slot, 4;
add.u64 to, to, line;
@in st.global.b32 [to+8], v;
}
"""


def _filled(text: str, n: int, k: int, experts: int) -> str:
    names = {"PAIRS": n * k, "CHOSEN": k, "EXPERTS": experts, "HIGH": 4 * experts}
    for name, value in names.items():
        text = text.replace(name, str(value))
    return text.replace("COLUMN", "row" if n <= COLUMNS else "slot")


def clear(reg: common.Registers, bits: Any, experts: int, thread: Any, threads: int) -> None:
    """Empty sets of rows at shared address `bits`, i32 [2 experts]; no barrier."""
    for first in range(0, 2 * experts, threads):
        text = _CLEAR.replace("COUNT", str(2 * experts))
        reg.ptx(text, reg.add(thread, first), bits, volatile=True)


def first_units(
    reg: common.Registers,
    bits: Any,
    firsts: Any,
    sums: Any,
    total: Any,
    who: Any,
    experts: int,
) -> None:
    """From the rows' bits each expert's first unit, i32 [experts] at shared address `firsts`.

    By one warpgroup, with a barrier at the end; `sums` are four shared words. The thread with `who`
    0 writes the number of units to global address `total`.
    """
    thread = reg.thread()
    count, place = _filled(_COUNT, 0, 0, experts), _filled(_FIRST, 0, 0, experts)
    each = -(-experts // 128)
    mine = [reg.add(reg.mul(thread, each), j) for j in range(each)]
    numbers = [reg.ptx(count, e, bits, results=1, volatile=True)[0] for e in mine]
    own = numbers[0]
    for number in numbers[1:]:
        own = reg.add(own, number)
    steps = "".join(_SCAN_STEP.replace("DISTANCE", str(1 << s)) for s in range(5))
    scan = _SCAN.replace("STEPS", steps)
    (upto,) = reg.ptx(scan, own, thread, sums, results=1, volatile=True)
    reg.barrier()
    parts = "".join(
        _OFFSET_PART.replace("PLACE", str(4 * w)).replace("NUMBER", str(w)) for w in range(4)
    )
    offset = _OFFSET.replace("PARTS", parts)
    (unit,) = reg.ptx(offset, upto, own, thread, sums, total, who, results=1, volatile=True)
    for e, number in zip(mine, numbers, strict=True):
        reg.ptx(place, e, firsts, unit, volatile=True)
        unit = reg.add(unit, number)
    reg.barrier()


def place(
    reg: common.Registers,
    pair: Any,
    expert: Any,
    bits: Any,
    firsts: Any,
    table: Any,
    sizes: tuple[int, int, int],
) -> None:
    """Write a pair into its unit in the table at a global address; none if it is beyond N k.

    `sizes` are N, k and the number of experts.
    """
    reg.ptx(_filled(_PLACE, *sizes), pair, expert, bits, table, firsts, volatile=True)


def _registers(ids: Any, count: Any, table: Any, words: Any, n: int, k: int, experts: int) -> None:
    reg = common.Registers()
    thread = reg.thread()
    bits = reg.shared_address(words)
    firsts, sums = reg.add(bits, 8 * experts), reg.add(bits, 12 * experts)
    clear(reg, bits, experts, thread, 128)
    reg.barrier()
    pairs = [reg.add(thread, first) for first in range(0, n * k, 128)]
    source, collect = reg.global_address(ids), _filled(_COLLECT, n, k, experts)
    chosen = [reg.ptx(collect, p, source, bits, results=1, volatile=True)[0] for p in pairs]
    reg.barrier()
    first_units(reg, bits, firsts, sums, reg.global_address(count), thread, experts)
    to = reg.global_address(table)
    for pair, expert in zip(pairs, chosen, strict=True):
        place(reg, pair, expert, bits, firsts, to, (n, k, experts))

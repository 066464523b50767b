"""Units of work of the routed experts: each distinct expert with up to 8 of its rows.

    ids i32 [N, k], N = 1..64 -> count i32 [1], table i32 [N k, 10]

A table row is: expert, number of rows, then 8 slots; a slot is pair * 8 + column, with pair = n * k + j
for the j-th expert of row n. The column is that of the tensor core's narrow operand that will hold row
n: n itself for N <= 8, beyond that the slot's own number. Units are in the order in which experts (and
their next 8 rows) first appear among the pairs; within a unit pairs ascend. Table rows from `count` on,
and slots beyond a unit's number of rows, hold nothing.

`plan` is one warp that walks over the pairs, 32 at a time, with its counters in shared memory; no
atomics, so the result is a function of ids alone. Its twin for the interpreter and for one row, where
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

    count: jax.Array  # i32 [1]
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
        return Units(jnp.full((1,), pairs, jnp.int32), table)
    same = flat[:, None] == flat[None, :]
    nth = jnp.sum(same & (number[None, :] < number[:, None]), axis=1, dtype=jnp.int32)
    slot = nth % COLUMNS
    leads = slot == 0
    column = number // k if n <= COLUMNS else slot
    unit = jnp.sum(leads[None, :] & (number[None, :] < number[:, None]), axis=1, dtype=jnp.int32)
    mine = same & leads[None, :] & (nth[None, :] == (nth - slot)[:, None])
    of_pair = jnp.sum(jnp.where(mine, unit[None, :], 0), axis=1)
    total = jnp.sum(same, axis=1, dtype=jnp.int32)
    table = jnp.zeros((pairs, FIELDS), jnp.int32)
    lead_row = jnp.where(leads, unit, pairs)
    table = table.at[lead_row, 0].set(flat, mode="drop")
    table = table.at[lead_row, 1].set(jnp.minimum(total - nth, COLUMNS), mode="drop")
    table = table.at[of_pair, 2 + slot].set(number * COLUMNS + column)
    return Units(jnp.sum(leads, dtype=jnp.int32).reshape(1), table)


def limits(ids: jax.Array, experts: int) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    n, k = ids.shape
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "dtype of ids", ids.dtype, "int32", ids.dtype == jnp.int32)
    common.expect(out, "experts per row", k, "at most 32", k <= 32)
    used, limit = 4 * _words(n, k, experts), common.SHARED_MEMORY
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
        out_type=[jax.ShapeDtypeStruct((1,), i32), jax.ShapeDtypeStruct((n * k, FIELDS), i32)],
        grid=(1,),
        grid_names=("one",),
        scratch_types=dict(words=plgpu.SMEM((_words(n, k, experts),), i32)),
    )
    return Units(*call(ids))


def _groups(n: int) -> int:
    return -(-n // COLUMNS)


def _words(n: int, k: int, experts: int) -> int:
    return common.round_up(n * k, 128) + experts * (1 + _groups(n))


def _body(n: int, k: int, experts: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        ids,  # i32 [N, k]
        count,  # i32 [1]
        table,  # i32 [U, 10]
        words,  # i32: ids, pairs counted so far by expert, unit by expert and eight of its rows
    ):
        call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        call(lambda _, *refs: _registers(*refs, n, k, experts))(ids, count, table, words)

    return body


_LOAD = """
{
.reg .pred in;
.reg .b32 v, at;
.reg .b64 from;
setp.lt.u32 in, $0, PAIRS;
mov.b32 v, 0xFFFFFFFF;
mul.wide.u32 from, $0, 4;
add.u64 from, from, $1;
@in ld.global.b32 v, [from];
mad.lo.u32 at, $0, 4, $2;
st.shared.b32 [at], v;
}
"""
_CLEAR = """
{
.reg .pred in;
.reg .b32 at;
setp.lt.u32 in, $0, EXPERTS;
mad.lo.u32 at, $0, 4, $1;
@in st.shared.b32 [at], 0;
}
"""
# $0 lane (of the first warp only), $1 ids, $2 counters, $3 unit numbers, $4 table, $5 count
_WALK = """
{
.reg .pred other, in, first, lead, last, full, more;
.reg .b32 i, id, at, same, lower, base, nth, rank, slot, group, ballot, units, unit, cur, v, row;
.reg .b64 to;
setp.ge.u32 other, $0, 32;
@other bra DONE;
mov.b32 units, 0;
mov.b32 i, $0;
mov.u32 lower, %lanemask_lt;
NEXT:
setp.lt.u32 in, i, PAIRS;
mad.lo.u32 at, i, 4, $1;
ld.shared.b32 id, [at];
match.any.sync.b32 same, id, 0xFFFFFFFF;
and.b32 v, same, lower;
popc.b32 rank, v;
setp.eq.and.u32 first, rank, 0, in;
mad.lo.u32 at, id, 4, $2;
mov.b32 base, 0;
@in ld.shared.b32 base, [at];
add.u32 nth, base, rank;
popc.b32 v, same;
add.u32 v, v, base;
bar.warp.sync 0xFFFFFFFF;
@first st.shared.b32 [at], v;
and.b32 slot, nth, 7;
shr.u32 group, nth, 3;
setp.eq.and.u32 lead, slot, 0, in;
vote.sync.ballot.b32 ballot, lead, 0xFFFFFFFF;
and.b32 v, ballot, lower;
popc.b32 v, v;
add.u32 unit, units, v;
popc.b32 v, ballot;
add.u32 units, units, v;
mad.lo.u32 cur, id, GROUPS, group;
mad.lo.u32 cur, cur, 4, $3;
@lead st.shared.b32 [cur], unit;
bar.warp.sync 0xFFFFFFFF;
@in ld.shared.b32 unit, [cur];
div.u32 row, i, CHOSEN;
mad.lo.u32 v, i, 8, COLUMN;
mul.wide.u32 to, unit, 40;
add.u64 to, to, $4;
@lead st.global.b32 [to], id;
shl.b32 base, 2, $0;
sub.u32 base, base, 1;
not.b32 base, base;
and.b32 base, base, same;
setp.eq.and.u32 last, base, 0, in;
setp.eq.and.u32 full, slot, 7, in;
or.pred last, last, full;
add.u32 base, slot, 1;
@last st.global.b32 [to+4], base;
mul.wide.u32 to, slot, 4;
.reg .b64 from;
mul.wide.u32 from, unit, 40;
add.u64 to, to, from;
add.u64 to, to, $4;
@in st.global.b32 [to+8], v;
bar.warp.sync 0xFFFFFFFF;
add.u32 i, i, 32;
sub.u32 v, i, $0;
setp.lt.u32 more, v, PAIRS;
@more bra NEXT;
setp.eq.u32 first, $0, 0;
@first st.global.b32 [$5], units;
DONE:
}
"""


def _registers(ids: Any, count: Any, table: Any, words: Any, n: int, k: int, experts: int) -> None:
    reg = common.Registers()
    thread = reg.thread()
    at_ids = reg.shared_address(words)
    at_counters = reg.add(at_ids, 4 * common.round_up(n * k, 128))
    at_units = reg.add(at_counters, 4 * experts)
    load, clear = _LOAD.replace("PAIRS", str(n * k)), _CLEAR.replace("EXPERTS", str(experts))
    for first in range(0, n * k, 128):
        reg.ptx(load, reg.add(thread, first), reg.global_address(ids), at_ids, volatile=True)
    for first in range(0, experts, 128):
        reg.ptx(clear, reg.add(thread, first), at_counters, volatile=True)
    reg.barrier()
    walk = _WALK.replace("PAIRS", str(n * k)).replace("GROUPS", str(_groups(n)))
    walk = walk.replace("CHOSEN", str(k)).replace("COLUMN", "row" if n <= COLUMNS else "slot")
    to = reg.global_address(table), reg.global_address(count)
    reg.ptx(walk, thread, at_ids, at_counters, at_units, *to, volatile=True)

"""Sums of several CTAs, brought into the shared memory of who needs them, added in a fixed order.

    `push_tile`, `pushed_total`: sums f32 [warpgroups, rows, width] in each CTA of a cluster
    -> f32 [width, columns], the total of `columns` of the rows, transposed

    `push`, `totals`: one number per thread and sum -> the sums over all CTAs in each of them

    `push_row`: a part of x -> tiles of x for the tensor core in each of the CTAs that need it

All of them write to another CTA's memory and leave word in a mailbox there (`mailbox`).

Register code (distributed shared memory has no place in Pallas); `local_total` is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common, mailbox, row_norm


def local_total(sums: Any, first: Any, columns: int) -> jax.Array:
    """Rows first.. of the sums of this CTA's warpgroups, f32 [width, columns]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroups, _, width = sums.shape
    layout = plgpu.Layout.WG_STRIDED((width, columns), vec_size=1)
    parts = [
        plgpu.load(common.tref(sums.at[g, pl.ds(first, columns)]), layout=layout, optimized=False)
        for g in range(warpgroups)
    ]
    return sum(parts[1:], parts[0])


# element $1 of [width, columns] -> byte offset of its sum, from $2 on
_PLACE = """
{
.reg .b32 m, r;
div.u32 m, $1, COLUMNS;
rem.u32 r, $1, COLUMNS;
mad.lo.u32 r, r, WIDTH, m;
shl.b32 r, r, 2;
add.u32 $0, r, $2;
}
"""
# row $1 -> byte offset of its squares, from $2 on
_SQUARES_PLACE = """
{
.reg .b32 m, r;
and.b32 r, $1, 7;
shr.u32 m, $1, 3;
mad.lo.u32 r, m, 16, r;
shl.b32 r, r, 2;
add.u32 $0, r, $2;
}
"""
# $0 number, $1 its place in this CTA; to the same place of another one, by threads $2 below COUNT;
# $3 mailbox
_PUSH_ONE = """
{
.reg .pred in;
.reg .b32 at, cta, box;
setp.lt.u32 in, $2, COUNT;
mov.u32 cta, %cluster_ctarank;
and.b32 cta, cta, FIRST;
add.u32 cta, cta, NUMBER;
mapa.shared::cluster.u32 at, $1, cta;
mapa.shared::cluster.u32 box, $3, cta;
@in SEND.b32 [at], $0, [box];
}
""".replace("SEND", mailbox.SEND)


# the same, where there is nobody else
_KEEP_ONE = """
{
.reg .pred in;
setp.lt.u32 in, $2, COUNT;
@in st.shared.b32 [$1], $0;
}
"""


def _added(reg: common.Registers, at: Any, offsets: Sequence[int]) -> Any:
    """The f32 numbers at these byte offsets of this CTA's shared memory, added in order."""
    value = None
    for offset in offsets:
        word = reg.ptx(f"ld.shared.b32 $0, [$1 + {offset}];", at, results=1, volatile=True)[0]
        part = reg.as_f32(word)
        value = part if value is None else reg.arith.addf(value, part)
    return value


def push_tile(
    sums: Any, squares: Any, into: Any, rows_into: Any, split: Any, starts: Any, columns: int,
    finishers: int, rows: int, mail: Any, number: int,
) -> None:  # fmt: skip
    """This CTA's part of a tile to those that finish it: CTA f of its `splits` gets its columns.

    A cluster is one or several times `splits` CTAs side by side, a power of two. A CTA without one
    has no mail: it cannot write to another's memory, nor to its own in that way.

    By one warpgroup, after all have stored their `sums` f32 [warpgroups, tile, width], and with a
    norm their `squares` (`row_norm.store_squares`). For each of `starts` the rows from
    start + f columns on go to `into` f32 [splits, starts x width x columns] of CTA f, the rows'
    squares to `rows_into` f32 [splits, width], `tile_bytes` in all, to its mailbox of that number.
    Of the columns of `sums` only the first `rows`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroups, tile, width = sums.shape
    size, per = width * columns, tile * width * 4
    sent = rows * columns  # the first elements of [width, columns]

    def tell(reg: common.Registers, value: Any, at: Any, cta: int, count: int, *box: Any) -> None:
        text = (_PUSH_ONE if box else _KEEP_ONE).replace("COUNT", str(count))
        text = text.replace("NUMBER", str(cta)).replace("FIRST", str(-into.shape[0]))
        reg.ptx(text, value, at, reg.thread(), *map(reg.shared_address, box), volatile=True)

    def numbers(_: Any, source: Any, target: Any, *box: Any) -> None:
        reg = common.Registers()
        text = _PLACE.replace("COLUMNS", str(columns)).replace("WIDTH", str(width))
        for cta in range(finishers):
            for block, start in enumerate(starts):
                first = reg.add(reg.shared_address(source), (start + cta * columns) * width * 4)
                for i in range(0, sent, 128):
                    element = reg.add(reg.thread(), i)
                    at = reg.ptx(text, element, first, results=1)[0]
                    value = _added(reg, at, [g * per for g in range(warpgroups)])
                    place = reg.add(reg.mul(element, 4), block * size * 4)
                    tell(
                        reg, value, reg.add(reg.shared_address(target), place), cta, sent - i, *box
                    )

    def row_squares(_: Any, source: Any, target: Any, *box: Any) -> None:
        reg = common.Registers()
        at = reg.ptx(_SQUARES_PLACE, reg.thread(), reg.shared_address(source), results=1)[0]
        offsets = [g * width * 8 + half for g in range(warpgroups) for half in (0, 32)]
        # threads from `width` on read what lies behind, and tell nobody
        seen = _added(reg, at, offsets)
        place = reg.add(reg.shared_address(target), reg.mul(reg.thread(), 4))
        for cta in range(finishers):
            tell(reg, seen, place, cta, width, *box)

    box = () if mail is None else (mailbox.box(mail, number),)
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (2 + len(box)))
    call(numbers)(sums, into.at[split], *box)
    if squares is not None:
        call(row_squares)(squares, rows_into.at[split], *box)


def tile_bytes(starts: Any, columns: int, rows: int, width: int, splits: int, norm: bool) -> int:
    """What a CTA that finishes a tile gets by `push_tile`."""
    return splits * (rows * len(starts) * columns + width * norm) * 4


def pushed_total(
    into: Any, rows_into: Any, block: int, width: int, columns: int, norm: tuple[int, float] | None
) -> jax.Array:
    """What `push_tile` brought for one of its starts, added: f32 [width, columns].

    With `norm` (count, eps) times the row's scale, from parts of its squares f32 [.., width].
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    splits, size = into.shape
    parts = splits if rows_into is None else rows_into.shape[0]
    layout = plgpu.Layout.WG_STRIDED((width, columns), vec_size=1)
    out = plgpu.ShapeDtypeStruct((width, columns), jnp.float32, layout=layout)

    def code(_: Any, ref: Any, squares: Any) -> Any:
        reg = common.Registers()
        frag = layout.to_mgpu()
        registers = np.empty(frag.registers_shape((width, columns)), dtype=object)
        for i in range(registers.size):
            element = reg.add(reg.thread(), 128 * i)
            first = reg.add(reg.mul(element, 4), block * width * columns * 4)
            at = reg.add(reg.shared_address(ref), first)
            value = _added(reg, at, [s * size * 4 for s in range(splits)])
            if norm is not None:
                row = reg.ptx(f"div.u32 $0, $1, {columns};", element, results=1)[0]
                at = reg.add(reg.shared_address(squares), reg.mul(row, 4))
                seen = _added(reg, at, [s * width * 4 for s in range(parts)])
                value = row_norm.scaled(reg, value, seen, *norm)
            word = reg.llvm.bitcast(reg.i32, value)
            registers.flat[i] = reg.as_type(word, frag.registers_element_type(reg.f32))
        return reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=out)
    return call(code)(into, into if rows_into is None else rows_into)


MAX_SUMS = 32  # that `push` takes: one per lane
WARPS = 4  # of the one warpgroup of a CTA

# $0 own + what the lane across has of the same sum; $1, $2 two sums, $3 thread
_TRADE = """
{
.reg .pred upper;
.reg .b32 keep, give, bit;
and.b32 bit, $3, MASK;
setp.ne.u32 upper, bit, 0;
selp.b32 keep, $2, $1, upper;
selp.b32 give, $1, $2, upper;
shfl.sync.bfly.b32 give, give, MASK, 31, 0xFFFFFFFF;
add.f32 $0, keep, give;
}
"""
_ACROSS = """
{
.reg .b32 other;
shfl.sync.bfly.b32 other, $1, MASK, 31, 0xFFFFFFFF;
add.f32 $0, other, $1;
}
"""
# $0 of the sums 2 $1 and 2 $1 + 1 the one that this lane ($2) kept; there were LAST + 1
_KEPT = """
{
.reg .pred upper;
.reg .b32 bit, at;
and.b32 bit, $2, MASK;
setp.ne.u32 upper, bit, 0;
selp.b32 bit, 1, 0, upper;
mad.lo.u32 at, $1, 2, bit;
min.u32 $0, at, LAST;
}
"""
# $0 sum, $1 its place in this CTA; into the same place of all CTAs
_PUSH_TO = """
mapa.shared::cluster.u32 at, $1, CTA;
mapa.shared::cluster.u32 box, $2, CTA;
@one SEND.b32 [at], $0, [box];
""".replace("SEND", mailbox.SEND)
# of the lanes with the same sum ($3) the first one sends it: a mailbox takes one word at a time
_ONE = """
{
.reg .pred one;
.reg .b32 at, box, same, below;
match.any.sync.b32 same, $3, 0xFFFFFFFF;
mov.u32 below, %lanemask_lt;
and.b32 same, same, below;
setp.eq.u32 one, same, 0;
STORES}
"""
# $0 thread, $1 column's place, $2 target; rows of COUNT numbers
_COLUMN = """
{
.reg .pred in;
.reg .b32 at, v, s0, s1, s2, s3;
setp.lt.u32 in, $0, COUNT;
mov.b32 s0, 0;
mov.b32 s1, 0;
mov.b32 s2, 0;
mov.b32 s3, 0;
mad.lo.u32 at, $0, 4, $1;
LOADS
add.f32 s0, s0, s1;
add.f32 s2, s2, s3;
add.f32 s0, s0, s2;
mad.lo.u32 at, $0, 4, $2;
@in st.shared.b32 [at], s0;
}
"""


def warp_totals(reg: common.Registers, values: Sequence[Any]) -> tuple[Any, Any]:
    """Each lane's one total over the warp of one of at most 32 numbers per thread, and which.

    Halves the list five times: two lanes trade, each keeps one of two sums. 20 numbers take 22
    exchanges in place of 100. Lanes that keep the same sum have the same bits.
    """
    thread, sizes = reg.thread(), []
    values = list(values)
    for step in range(5):
        mask = str(1 << step)
        sizes.append(len(values))
        pairs = zip(values[0:-1:2], values[1::2], strict=True)
        rest = values[-1:] if len(values) % 2 else []
        trade, across = _TRADE.replace("MASK", mask), _ACROSS.replace("MASK", mask)
        values = [reg.ptx(trade, a, b, thread, results=1, kind=reg.f32)[0] for a, b in pairs]
        values += [reg.ptx(across, v, results=1, kind=reg.f32)[0] for v in rest]
    index = reg.constant(0)
    for step in reversed(range(5)):
        kept = _KEPT.replace("MASK", str(1 << step)).replace("LAST", str(sizes[step] - 1))
        (index,) = reg.ptx(kept, index, thread, results=1)
    return values[0], index


def push(
    sums: Callable[..., Sequence[Any]],
    operands: Sequence[jax.Array],
    layout: Any,
    into: Any,
    part: Any,
    twin: Callable[..., Sequence[jax.Array]] | None,
    mail: Any,
    ctas: int | None = None,
) -> None:
    """Sums over this warpgroup, one per warp, to `into` [4 parts, sums] of a cluster's first CTAs.

    Each of them, by default one per part, gets `sums_bytes` in its mailbox `mail`.

    `sums(reg, *fragments)` gives a thread's own numbers (f32 registers) of operands of `layout`;
    `part` is this warpgroup's number among those that add up. The interpreter, where the parts are
    warpgroups of one CTA, stores what `twin(*operands)` gives; on a GPU there is none.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    mine = into.at[pl.ds(part * WARPS, WARPS)]
    ctas = ctas or into.shape[0] // WARPS
    if twin is not None:
        mine[...] = jnp.pad(jnp.stack(twin(*operands))[None], ((0, WARPS - 1), (0, 0)))
        return

    def code(_: Any, ref: Any, to: Any, *fragments: Any) -> None:
        reg = common.Registers()
        value, index = warp_totals(reg, sums(reg, *fragments))
        warp = reg.ptx("shr.u32 $0, $1, 5;", reg.thread(), results=1)[0]
        strides, _ = ref.type.get_strides_and_offset()
        at = reg.add(reg.mul(warp, strides[0]), index)
        at = reg.add(reg.shared_address(ref), reg.mul(at, 4))
        stores = "".join(_PUSH_TO.replace("CTA", str(cta)) for cta in range(ctas))
        text = _ONE.replace("STORES", stores)
        reg.ptx(text, value, at, reg.shared_address(to), index, volatile=True)

    types = (*(plgpu.RefType(),) * 2, *(layout for _ in operands))
    plgpu.inline_mgpu(arg_types=types)(code)(mine, mail, *operands)


def sums_bytes(parts: int, sums: int) -> int:
    """What a CTA gets by `push`."""
    return parts * WARPS * sums * 4


def totals(pushed: Any, into: Any, interpret: bool) -> list[jax.Array]:
    """The columns' sums of `pushed` f32 [4 parts, sums], as scalars; `into` f32 [sums] is scratch.

    For one warpgroup, behind `receive`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, count = pushed.shape
    if interpret:
        added = jnp.sum(pushed[...], axis=0)
        return [added[i] for i in range(count)]

    def code(_: Any, source: Any, target: Any) -> None:
        reg = common.Registers()
        loads = "".join(
            f"@in ld.shared.b32 v, [at+{4 * count * r}];\nadd.f32 s{r % 4}, s{r % 4}, v;\n"
            for r in range(rows)
        )
        text = _COLUMN.replace("LOADS", loads).replace("COUNT", str(count))
        at = reg.shared_address(source), reg.shared_address(target)
        reg.ptx(text, reg.thread(), *at, volatile=True)
        reg.barrier()

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(code)(pushed, into)
    return [into[i] for i in range(count)]


# $0 base of the tiles, $1 row, $2 thread, $3 mailbox, $4.. the thread's neighbouring bf16 numbers
_PUSH_ROW = """
{
.reg .b32 k, at, cta, t, far, box;
mov.u32 cta, %cluster_ctarank;
mul.lo.u32 k, cta, SPAN;
mad.lo.u32 k, $2, NEIGHBOURS, k;
div.u32 cta, k, COLUMNS;
mul.lo.u32 t, cta, COLUMNS;
sub.u32 k, k, t;
shr.u32 at, k, 6;
shl.b32 at, at, 10;
shr.u32 t, k, 3;
xor.b32 t, t, $1;
and.b32 t, t, 7;
shl.b32 t, t, 4;
add.u32 at, at, t;
and.b32 t, k, 7;
shl.b32 t, t, 1;
add.u32 at, at, t;
shl.b32 t, $1, 7;
add.u32 at, at, t;
add.u32 at, at, $0;
STORES
}
"""


def push_row(value: jax.Array, into: Any, splits: int, cluster: int, mail: Any) -> None:
    """A part of a row of x to where the tensor core reads it, in every CTA that needs it.

    By warpgroup r of a cluster's CTA p: value bf16 [span], columns p span.. of row r, to `into`
    bf16 [steps, 8, step], tiles as TMA would leave them. Split s of the CTAs, s, s + splits, ..,
    has columns s steps step... Rows without a warpgroup stay as they are. Each CTA gets 2 bytes per
    column and row in its mailbox `mail`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (span,), (steps, _, step) = value.shape, into.shape
    neighbours = span // 128

    def code(_: Any, target: Any, to: Any, fragment: Any) -> None:
        reg = common.Registers()
        words = reg.words(fragment.registers.flat[0])
        names = ", ".join(f"${i + 4}" for i in range(len(words)))
        send = f"{mailbox.SEND}.v{len(words)}.b32 [far], {{{names}}}, [box];"
        if len(words) == 1:
            send = mailbox.SEND + ".b32 [far], $4, [box];"
        maps = "mapa.shared::cluster.u32 far, at, cta;\nmapa.shared::cluster.u32 box, $3, cta;\n"
        more = f"\nadd.u32 cta, cta, {splits};\n"
        stores = more.join(maps + send for _ in range(cluster // splits))
        text = _PUSH_ROW.replace("STORES", stores).replace("SPAN", str(span))
        text = text.replace("NEIGHBOURS", str(neighbours)).replace("COLUMNS", str(steps * step))
        row = reg.arith.divui(reg.utils.thread_idx(), reg.constant(128))
        places = reg.shared_address(target), row, reg.thread(), reg.shared_address(to)
        reg.ptx(text, *places, *words, volatile=True)

    layout = plgpu.Layout.WG_STRIDED((span,), vec_size=neighbours)
    tiled = plgpu.RefType(common.tiled(jnp.bfloat16, step))
    call = plgpu.inline_mgpu(arg_types=(tiled, plgpu.RefType(), layout))
    call(code)(into, mail, value)

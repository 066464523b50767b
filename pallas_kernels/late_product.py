"""y = x W^T for an x that other CTAs of the same kernel make: W waits for it in registers.

    w bf16 [L, D, K], the whole stack;  x bf16 [N, K], N = 1..8, in global memory
    -> y f32 [N, D], not rounded

A CTA takes some rows of w. It asks for all of them, into registers in the order in which the tensor
core wants them, straight or by the copy engine through shared memory, and only then waits for x, so
that nothing is left to be read but x. Its warps have a part of the columns each; their sums meet in
shared memory and are added in one fixed order, so results do not depend on timing. Where D is no
multiple of the rows, the last CTA's overlap those of the one before: both write the same bits.

The kernel around it has the makers of x first in its grid. They wait for nobody and `arrive` at a
counter (`meeting`) when their x is written. All of it is register code, in which no layout is to be
inferred: the bodies of the makers could not be compiled together with a product of another kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, meeting
from pallas_kernels.skinny_cut import CORES

MAX_ROWS = 8  # of x: the narrow operand of the tensor core
BLOCK = 32  # columns of which four lanes read 16 bytes each: two products of 16
LINE = 64  # columns of a line of w in shared memory, 128 bytes
UNIT = 16  # rows of w of one product
MAX_PARTS = 8  # of the columns
FREE = 56  # registers of a thread that w does not take
ALL = 65536  # registers of a multiprocessor


@dataclass(frozen=True)
class Tuning:
    """How the product is cut.

    Attributes:
        rows: of w per CTA.
        pause: clock cycles before w is asked for; without any the makers' own loads stand behind
            all of it.
        drop: ask L2 to drop w before all else, which nobody reads again in this step; by the copy
            engine it is the kernel around it that says so.
        copied: by the copy engine, which brings a multiprocessor 60 KB per us; loads of 64 bytes
            per row bring 12.
    """

    rows: int = 64
    pause: int = 300
    drop: bool = True
    copied: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of a product: x [n, k], y [n, d], warpgroups of a CTA."""

    n: int
    d: int
    k: int
    warpgroups: int

    @property
    def parts(self) -> int:
        """Into which the columns are cut: a power of two that divides the number of warps."""
        return math.gcd(MAX_PARTS, 4 * self.warpgroups, self.k // BLOCK)

    @property
    def span(self) -> int:
        """Columns of a warp."""
        return self.k // self.parts

    @property
    def groups(self) -> int:
        """Into which a CTA's rows are cut."""
        return 4 * self.warpgroups // self.parts

    def tiles(self, t: Tuning) -> int:
        """CTAs that multiply."""
        return -(-self.d // t.rows)

    def shared_bytes(self, t: Tuning) -> int:
        """Shared memory of a CTA."""
        return self.parts * t.rows * MAX_ROWS * 4 + t.rows * self.k * 2 * t.copied


def default_tuning(s: Sizes, makers: int) -> Tuning:
    """As few rows as one CTA on each multiprocessor allows beside those that make x."""
    unit, free = UNIT * s.groups, max(1, CORES - makers)
    return Tuning(max(4 * UNIT, common.round_up(-(-s.d // free), unit)))


def limits(s: Sizes, makers: int, w: jax.Array, t: Tuning) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "rank of w", w.ndim, 3, w.ndim == 3)
    common.expect(out, "dtype of w", w.dtype, "bfloat16", w.dtype == jnp.bfloat16)
    common.expect(out, "rows of x", s.n, f"1..{MAX_ROWS}", 1 <= s.n <= MAX_ROWS)
    ok = w.shape[1:] == (s.d, s.k)
    common.expect(out, "shape of a layer's w", w.shape[1:], (s.d, s.k), ok)
    ok = s.k % BLOCK == 0
    common.expect(out, "columns of w", s.k, f"a multiple of {BLOCK}", ok)
    ok = not t.copied or s.k % LINE == 0
    common.expect(out, "columns of w that is copied", s.k, f"a multiple of {LINE}", ok)
    unit = UNIT * s.groups
    ok = t.rows % unit == 0 and unit <= t.rows <= s.d
    common.expect(out, "rows of a CTA", t.rows, f"a multiple of {unit} up to {s.d}", ok)
    threads = 128 * s.warpgroups
    held, most = t.rows * s.k // 2 // threads, min(255, ALL // threads) - FREE
    common.expect(out, "registers that hold w", held, f"at most {most}", held <= most)
    ctas = makers + s.tiles(t)
    common.expect(out, "CTAs", ctas, f"at most {CORES}, one per multiprocessor", ctas <= CORES)
    return out


def outputs(s: Sizes) -> list[jax.ShapeDtypeStruct]:
    """Of the kernel around it, behind what makes x: y, and counters for a kernel that follows."""
    return [jax.ShapeDtypeStruct((s.n, s.d), jnp.float32), meeting.COUNTERS]


def scratch(s: Sizes, t: Tuning) -> dict[str, Any]:
    """Scratch memory of a CTA that multiplies, as `multiply` takes it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    own: dict[str, Any] = dict(sums=plgpu.SMEM((s.parts, t.rows * MAX_ROWS), jnp.float32))
    if t.copied:
        bf16 = jnp.bfloat16
        own["tile"] = plgpu.SMEM((t.rows, s.k), bf16, transforms=common.tiled(bf16, s.k))
        own["came"] = plgpu.Barrier(num_barriers=1)
    return own


@dataclass(frozen=True)
class Memory:
    """Scratch memory of a kernel whose CTAs either make x or multiply: the two share theirs.

    Attributes:
        makers: by name what those need that make x.
        own: what those need that multiply, `scratch`.
    """

    makers: dict[str, Any]
    own: dict[str, Any]

    def types(self) -> dict[str, Any]:
        """As the kernel takes it."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        sides = [[a for a in side.values() if _in_memory(a)] for side in (self.makers, self.own)]
        both = self.makers | self.own
        barriers = {name: a for name, a in both.items() if not _in_memory(a)}
        return barriers | dict(memory=plgpu.RefUnion(*sides))

    def cut(self, memory: Any, **barriers: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """From what the body gets: refs of the makers by name, refs of the others."""
        out = []
        for side, refs in zip((self.makers, self.own), memory, strict=True):
            names = [name for name, a in side.items() if _in_memory(a)]
            rest = {name: ref for name, ref in barriers.items() if name in side}
            out.append(dict(zip(names, refs, strict=True)) | rest)
        return out[0], out[1]


def _in_memory(scratch: Any) -> bool:
    return hasattr(scratch, "memory_space")


@dataclass(frozen=True)
class Wait:
    """How many `arrive` at a counter, a global ref i32 [1], before x is there."""

    counter: Any
    arrivals: int


def multiply(
    s: Sizes, t: Tuning, number: Any, w: Any, x: Any, y: Any, held: dict[str, Any],
    wait: Wait | None, interpret: bool = False,
) -> None:  # fmt: skip
    """Called by all warpgroups of a CTA: columns of y for its tile of rows of w, of that `number`.

    w [D, K], x [N, K] and y [N, D] are global refs, `held` is `scratch`. Without `wait` x is there.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    first = jnp.minimum(number * t.rows, s.d - t.rows)
    rows = pl.ds(first, t.rows)
    if interpret:
        assert wait is None, "the interpreter cannot wait for other CTAs"
        pl.when(lax.axis_index("wg") == 0)(lambda: _twin(s, w.at[rows], x, y.at[:, rows]))
        return
    counter, arrivals = ((), 0) if wait is None else ((wait.counter,), wait.arrivals)
    source, kind = w.at[rows], plgpu.RefType()
    if t.copied:
        _pause(t)
        ask = partial(plgpu.copy_gmem_to_smem, source, held["tile"], held["came"].at[0])
        pl.when(lax.axis_index("wg") == 0)(ask)
        plgpu.barrier_wait(held["came"].at[0])
        source, kind = held["tile"], plgpu.RefType(common.tiled(jnp.bfloat16, s.k))

    def code(_: Any, *refs: Any) -> None:
        _multiply_registers(s, t, arrivals, *refs)

    others = x, y.at[:, rows], held["sums"], *counter
    types = kind, *(plgpu.RefType(),) * len(others)
    plgpu.inline_mgpu(arg_types=types)(code)(source, *others)


def _pause(t: Tuning) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    text = _PAUSE.replace("CYCLES", str(t.pause))
    if t.pause:
        plgpu.inline_mgpu()(lambda _: common.Registers().ptx(text, volatile=True))()


def _twin(s: Sizes, w: Any, x: Any, y: Any) -> None:
    total = None
    for part in range(s.parts):
        columns = slice(part * s.span, (part + 1) * s.span)
        a, b = (v[:, columns].astype(jnp.float32) for v in (x[...], w[...]))
        found = jnp.einsum("nk,dk->nd", a, b, precision=lax.Precision.HIGHEST)
        total = found if total is None else total + found
    y[...] = total


# a lane's places, in bytes: $0 in w, $1 in x, $2 in sums; $3 thread of the CTA
_PLACES = """
{
.reg .b32 part, group, lane, g, q, columns;
shr.u32 part, $3, 5;
shr.u32 group, part, SHIFT;
and.b32 part, part, MASK;
and.b32 lane, $3, 31;
shr.u32 g, lane, 2;
and.b32 q, lane, 3;
mul.lo.u32 q, q, 16;
mad.lo.u32 columns, part, SPAN, q;
mad.lo.u32 q, group, HEIGHT, g;
mad.lo.u32 $0, q, LINE, columns;
mad.lo.u32 $1, g, LINE, columns;
mul.lo.u32 q, lane, 16;
mad.lo.u32 q, part, SIZE, q;
mad.lo.u32 $2, group, GROUP, q;
}
"""
_PAUSE = """
{
.reg .pred on;
.reg .b32 first, now;
mov.u32 first, %clock;
again:
mov.u32 now, %clock;
sub.u32 now, now, first;
setp.lt.u32 on, now, CYCLES;
@on bra again;
}
"""
# Lanes of w in shared memory, lines of 128 bytes with piece i of row r, 16 bytes, at i ^ r (mod 8).
# Lane g of a product has row g / 2 or 4 + g / 2: eight lanes at once read two rows, which differ in
# bit 2, and so from all banks. $0 first line of the lane's row, with its piece, $1 the part's first
# block, $2 that bit; $3 tile, $4 thread
_SHARED_PLACES = """
{
.reg .b32 part, group, lane, row, q, bit;
shr.u32 part, $4, 5;
shr.u32 group, part, SHIFT;
and.b32 part, part, MASK;
and.b32 lane, $4, 31;
shr.u32 row, lane, 3;
shr.u32 bit, lane, 2;
and.b32 bit, bit, 1;
and.b32 q, lane, 3;
xor.b32 q, q, row;
mad.lo.u32 q, q, 16, $3;
mad.lo.u32 row, bit, 4, row;
mad.lo.u32 q, row, 128, q;
mad.lo.u32 $0, group, SIZE, q;
mul.lo.u32 $1, part, BLOCKS;
mov.b32 $2, bit;
}
"""
# $0 where block $2 + NUMBER of the row at $1 lies; $3 its bit
_BLOCK_PLACE = """
{
.reg .b32 block, half;
add.u32 block, $2, NUMBER;
and.b32 half, block, 1;
xor.b32 half, half, $3;
shr.u32 block, block, 1;
mad.lo.u32 block, block, 1024, $1;
mad.lo.u32 $0, half, 64, block;
}
"""
_LOAD_SHARED = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4+AT];"
_POLICY = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
_LOAD = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4+AT];"
_LOAD_DROP = "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4+AT], $5;"
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7},"
    " {$8, $9}, {$10, $11, $12, $13};"
)
_KEEP = "st.shared.v4.f32 [$0+AT], {$1, $2, $3, $4};"
# number $2 of y's [N, ROWS]: from sums $1 to y $0
_FINISH = """
{
.reg .pred in;
.reg .b32 n, r, at, some, high;
.reg .b64 to;
.reg .f32 s<8>;
setp.lt.u32 in, $2, COUNT;
mul.lo.u32 n, $2, INVERSE;
shr.u32 n, n, 24;
mul.lo.u32 r, n, ROWS;
sub.u32 r, $2, r;
mad.lo.u32 some, n, LINE, r;
mul.wide.u32 to, some, 4;
add.u64 to, to, $0;
shr.u32 some, r, 4;
mad.lo.u32 at, some, 512, $1;
LANE
mad.lo.u32 at, some, 64, at;
and.b32 some, r, 8;
add.u32 at, at, some;
shr.u32 some, n, 1;
mad.lo.u32 at, some, 16, at;
and.b32 some, n, 1;
mad.lo.u32 at, some, 4, at;
SUM@in st.global.f32 [to], s0;
}
"""


# which eighth of the lanes has row r of eight
_LANE = "and.b32 some, r, 7;"
_LANE_COPIED = """
and.b32 some, r, 3;
shl.b32 some, some, 1;
bfe.u32 high, r, 2, 1;
or.b32 some, some, high;
"""


def _filled(text: str, **numbers: Any) -> str:
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    return text


def _multiply_registers(
    s: Sizes, t: Tuning, arrivals: int, w: Any, x: Any, y: Any, sums: Any, counter: Any = None
) -> None:
    reg, line, size = common.Registers(), 2 * s.k, t.rows * MAX_ROWS * 4
    thread = reg.utils.thread_idx()
    text = _filled(
        _PLACES, SHIFT=s.parts.bit_length() - 1, MASK=s.parts - 1, SPAN=2 * s.span,
        HEIGHT=t.rows // s.groups, LINE=line, SIZE=size, GROUP=size // s.groups,
    )  # fmt: skip
    w_at, x_at, sums_at = reg.ptx(text, thread, results=3)
    units, blocks = t.rows // s.groups // UNIT, s.span // BLOCK
    if t.copied:
        held = _from_shared(reg, s, t, w, thread, units, blocks)
    else:
        if t.pause:
            reg.ptx(_PAUSE.replace("CYCLES", str(t.pause)), volatile=True)
        w_at = reg.wide_add(reg.global_address(w), w_at)
        held = [
            [_load(reg, t, w_at, unit * UNIT * line, line, j) for j in range(blocks)]
            for unit in range(units)
        ]
    if counter is not None:
        meeting.look(reg, counter, arrivals)
    at = reg.wide_add(reg.global_address(x), x_at)
    from_l2 = "ld.global.cg.v4.b32"  # where other CTAs wrote it
    columns = [
        reg.load_or_zeros(from_l2, at, x_at, s.n * line, 2 * BLOCK * j) for j in range(blocks)
    ]
    total = [[reg.as_f32(reg.constant(0))] * 4 for _ in range(units)]
    for j, b in enumerate(columns):
        for i in (0, 2):  # of the four words of a lane, two for each product
            for unit in range(units):
                low, high = held[unit][j]
                a = low[i], high[i], low[i + 1], high[i + 1]
                total[unit] = reg.ptx(
                    _MMA, *a, b[i], b[i + 1], *total[unit], results=4, kind=reg.f32
                )
    place = reg.add(reg.shared_address(sums), sums_at)
    for unit in range(units):
        reg.ptx(_KEEP.replace("AT", str(512 * unit)), place, *total[unit], volatile=True)
    reg.ptx("bar.sync 0;", volatile=True)  # all of the CTA
    _finish(reg, s, t, thread, y, sums)


def _finish(reg: common.Registers, s: Sizes, t: Tuning, thread: Any, y: Any, sums: Any) -> None:
    """The parts' sums in shared memory, added, to y."""
    count, inverse = s.n * t.rows, -(-(1 << 24) // t.rows)
    assert all(i * inverse >> 24 == i // t.rows for i in range(count)), "in place of a division"
    size, parts = t.rows * MAX_ROWS * 4, range(s.parts)
    load = "".join(f"@in ld.shared.f32 s{part}, [at+{part * size}];\n" for part in parts)
    clear = "".join(f"mov.f32 s{part}, 0f00000000;\n" for part in parts)
    add = "".join(f"add.f32 s0, s0, s{part};\n" for part in parts[1:])
    text = _filled(
        _FINISH,
        LANE=_LANE_COPIED if t.copied else _LANE,
        COUNT=count,
        INVERSE=inverse,
        ROWS=t.rows,
        LINE=s.d,
        SUM=clear + load + add,
    )
    for first in range(0, count, 128 * s.warpgroups):
        place = reg.global_address(y), reg.shared_address(sums), reg.add(thread, first)
        reg.ptx(text, *place, volatile=True)


def _load(reg: common.Registers, t: Tuning, at: Any, first: int, line: int, j: int) -> list[Any]:
    """Block j of a lane's two rows, the second 8 rows below, four registers each."""
    text, args = _LOAD, [at]
    if t.drop:
        i64 = reg.ir.IntegerType.get_signless(64)
        text, args = _LOAD_DROP, [at, *reg.ptx(_POLICY, results=1, kind=i64)]
    places = [first + row * line + 2 * BLOCK * j for row in (0, UNIT // 2)]
    return [
        reg.ptx(text.replace("AT", str(place)), *args, results=4, volatile=True) for place in places
    ]


def _from_shared(
    reg: common.Registers, s: Sizes, t: Tuning, w: Any, thread: Any, units: int, blocks: int
) -> list[list[list[Any]]]:
    """What `_load` gives for all units and blocks, from the tile in shared memory."""
    eight = 8 * 2 * s.k  # bytes of so many rows
    text = _filled(
        _SHARED_PLACES, SHIFT=s.parts.bit_length() - 1, MASK=s.parts - 1, BLOCKS=blocks,
        SIZE=t.rows // s.groups * 2 * s.k,
    )  # fmt: skip
    row, block, bit = reg.ptx(text, reg.shared_address(w), thread, results=3)
    places = [
        reg.ptx(_BLOCK_PLACE.replace("NUMBER", str(j)), row, block, bit, results=1)[0]
        for j in range(blocks)
    ]

    def load(place: Any, at: int) -> list[Any]:
        text = _LOAD_SHARED.replace("AT", str(at))
        return reg.ptx(text, place, results=4, volatile=True)

    return [
        [[load(place, (2 * unit + half) * eight) for half in (0, 1)] for place in places]
        for unit in range(units)
    ]


def alone(
    x: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    warpgroups: int,
    tuning: Tuning,
    interpret: bool = False,
) -> jax.Array:
    """The product as a kernel of its own, for an x that is there.

    Raises:
        ValueError: `limits` are not met.
    """
    s = Sizes(x.shape[0], w.shape[1], x.shape[1], warpgroups)
    common.require(limits(s, 0, w, tuning), "late_product")

    def body(x: Any, w: Any, layer: Any, y: Any, **held: Any) -> None:
        number = lax.axis_index("tile")
        multiply(s, tuning, number, w.at[layer[0]], x, y, held, None, interpret)

    call = common.kernel(
        body,
        "k3_late_product",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((s.n, s.d), jnp.float32),
        grid=(s.tiles(tuning),),
        grid_names=("tile",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch(s, tuning),
    )
    return call(x, w, common.layer_operand(layer))

"""y = x W^T for an x that other CTAs of the same kernel make: W waits for it in registers.

    w bf16 [L, D, K], the whole stack;  x bf16 [N, K], N = 1..8, in global memory
    -> y f32 [N, D], not rounded

A CTA takes some rows of w. It asks for all of them, straight into registers in the order in which
the tensor core wants them, and only then waits for x, so that nothing is left to be read but x. Its
warps have a part of the columns each; their sums meet in shared memory and are added in one fixed
order, so results do not depend on timing. Where D is no multiple of the rows, the last CTA's
overlap those of the one before: both write the same bits.

The kernel around it has the makers of x first in its grid. They wait for nobody and `arrive` at a
counter (`meeting`) when their x is written. All of it is register code, in which no layout is to be
inferred: the bodies of the makers could not be compiled together with a product of another kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, meeting
from pallas_kernels.skinny_cut import CORES

MAX_ROWS = 8  # of x: the narrow operand of the tensor core
BLOCK = 32  # columns of which four lanes read 16 bytes each: two products of 16
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
        drop: ask L2 to drop w before all else, which nobody reads again in this step.
    """

    rows: int = 64
    pause: int = 300
    drop: bool = True


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
        return self.parts * t.rows * MAX_ROWS * 4


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


def scratch(s: Sizes, t: Tuning) -> Any:
    """Shared memory of a CTA, in which the parts' sums meet."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM((s.parts, t.rows * MAX_ROWS), jnp.float32)


@dataclass(frozen=True)
class Wait:
    """How many `arrive` at a counter, a global ref i32 [1], before x is there."""

    counter: Any
    arrivals: int


def multiply(
    s: Sizes, t: Tuning, tile: Any, w: Any, x: Any, y: Any, sums: Any, wait: Wait | None,
    interpret: bool = False,
) -> None:  # fmt: skip
    """Called by all warpgroups of a CTA: columns of y for its `tile` of rows of w.

    w [D, K], x [N, K] and y [N, D] are global refs, `sums` is `scratch`. Without `wait` x is there.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    first = jnp.minimum(tile * t.rows, s.d - t.rows)
    rows = pl.ds(first, t.rows)
    if interpret:
        assert wait is None, "the interpreter cannot wait for other CTAs"
        pl.when(lax.axis_index("wg") == 0)(lambda: _twin(s, w.at[rows], x, y.at[:, rows]))
        return
    counter, arrivals = ((), 0) if wait is None else ((wait.counter,), wait.arrivals)

    def code(_: Any, *refs: Any) -> None:
        _multiply_registers(s, t, arrivals, *refs)

    refs = w.at[rows], x, y.at[:, rows], sums, *counter
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(code)(*refs)


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
.reg .b32 n, r, at, some;
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
and.b32 some, r, 7;
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
    w_at = reg.wide_add(reg.global_address(w), w_at)
    if t.pause:
        reg.ptx(_PAUSE.replace("CYCLES", str(t.pause)), volatile=True)
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
        _FINISH, COUNT=count, INVERSE=inverse, ROWS=t.rows, LINE=s.d, SUM=clear + load + add
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

    def body(x: Any, w: Any, layer: Any, y: Any, sums: Any) -> None:
        tile = lax.axis_index("tile")
        multiply(s, tuning, tile, w.at[layer[0]], x, y, sums, None, interpret)

    call = common.kernel(
        body,
        "k3_late_product",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((s.n, s.d), jnp.float32),
        grid=(s.tiles(tuning),),
        grid_names=("tile",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=dict(sums=scratch(s, tuning)),
    )
    return call(x, w, common.layer_operand(layer))

"""Merge the parts of an attention, raise the result to head values, gate it.

    parts of `mla_attend`, ends i32 [B, T], gate bf16 [N, H V], kv_b bf16 [L, H (nope + V), latent],
    layer -> heads bf16 [N, H V]; zeros in rows that see nothing, whatever their gate holds

A row's parts are weighted by exp(lse - largest) and added in f32, in the order of the splits.
Rounding: the merged latent once to bf16, W_UV times it (f32 sums) once to bf16, that times
sigmoid(gate) in f32 once to bf16; as in the standard path.

A CTA has up to 8 rows of one head, the narrow operand of the tensor core, and 64 rows of W_UV. Its
four warpgroups merge a quarter of the latent's columns each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common
from pallas_kernels.mla_attend import Parts, merge
from pallas_kernels.mla_attend_cta import TILE as CACHE_TILE
from pallas_kernels.narrow_product import product

TILE = 64  # rows of W_UV per CTA
NARROW = 8  # columns of the tensor core's narrow operand
SPAN = 128  # latent columns of a warpgroup


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        rows: of a CTA, 1..8.
        ahead: parts that are requested before the first of them is used.
    """

    rows: int = 1
    ahead: int = 8


def default_tuning(rows: int) -> Tuning:
    """A guess: eight groups of rows, so that some hundred CTAs share the reading of the parts."""
    return Tuning(-(-rows // 8))


def limits(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    *,
    heads: int,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    ranks = parts.latent.ndim, ends.ndim, gate.ndim, kv_b.ndim
    ok = ranks == (5, 2, 2, 3)
    common.expect(out, "ranks of latent, ends, gate, kv_b", ranks, (5, 2, 2, 3), ok)
    if out:
        return out
    n, width = ends.size, gate.shape[1]
    t = tuning or default_tuning(n)
    batch, groups, splits, columns, latent = parts.latent.shape
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "rows of a CTA", t.rows, f"1..{NARROW}", 1 <= t.rows <= NARROW)
    common.expect(out, "sequences of parts", batch, ends.shape[0], batch == ends.shape[0])
    rows = ends.shape[1] * heads
    ok = groups * columns >= rows
    common.expect(out, "columns of parts", groups * columns, f"at least {rows}", ok)
    found, wanted = parts.lse.shape, (batch, groups, splits, columns)
    common.expect(out, "shape of lse", found, wanted, found == wanted)
    common.expect(out, "rows of gate", gate.shape[0], n, gate.shape[0] == n)
    cut = heads * TILE
    common.expect(out, "columns of gate", width, f"a multiple of {cut}", width % cut == 0)
    common.expect(out, "columns of kv_b", kv_b.shape[2], latent, kv_b.shape[2] == latent)
    ok = kv_b.shape[1] % heads == 0 and kv_b.shape[1] >= width
    common.expect(out, "rows of kv_b", kv_b.shape[1], f"{heads} times (nope + values)", ok)
    ok = latent % SPAN == 0 and latent // SPAN <= 8
    common.expect(out, "latent width", latent, f"a multiple of {SPAN} up to {8 * SPAN}", ok)
    for name, x in (("gate", gate), ("kv_b", kv_b)):
        common.expect(out, f"dtype of {name}", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    return out


def reference(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    layer: int | jax.Array = 0,
    *,
    heads: int,
) -> jax.Array:
    """The same in plain jnp."""
    n, values = gate.shape[0], gate.shape[1] // heads
    latent = _rounded(merge(parts, ends, heads)[0])
    w = kv_b[layer].reshape(heads, -1, kv_b.shape[2])[:, -values:].astype(jnp.float32)
    y = jnp.einsum("nhr,hvr->nhv", latent, w, precision=lax.Precision.HIGHEST)
    y = _rounded(y).reshape(n, -1) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return _rounded(jnp.where(ends.reshape(-1, 1) > 0, y, 0.0)).astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, 8, 7)


def value(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    layer: int | jax.Array = 0,
    *,
    heads: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Gated head values [N, H V], see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(parts, ends, gate, kv_b, heads=heads, tuning=tuning), "mla_value")
    n = gate.shape[0]
    t = tuning or default_tuning(n)
    groups = -(-n // t.rows)
    out_rows = n
    if interpret:  # no copies clipped at an array's edge there
        out_rows = groups * t.rows
        gate = jnp.pad(gate, ((0, out_rows + NARROW - n), (0, 0)), constant_values=jnp.nan)
    s = sizes(parts, ends, gate, kv_b, heads)
    call = _build(s, t, groups, out_rows, interpret)
    return call(*parts, ends, gate, kv_b, common.layer_operand(layer))[:n]


def sizes(parts: Parts, ends: jax.Array, gate: jax.Array, kv_b: jax.Array, heads: int) -> Sizes:
    """Of the operands."""
    width, per_head = gate.shape[1] // heads, kv_b.shape[1] // heads
    return Sizes(ends.size, *ends.shape, heads, width, per_head, *parts.latent.shape)


@dataclass(frozen=True)
class Sizes:
    """What the kernel is built for."""

    n: int
    batch: int
    tokens: int
    heads: int
    values: int
    per_head: int  # rows of kv_b
    sequences: int
    groups: int
    splits: int
    columns: int
    latent: int

    @property
    def warpgroups(self) -> int:
        """Of a CTA."""
        return self.latent // SPAN

    @property
    def tiles(self) -> int:
        """CTAs of a head."""
        return self.values // TILE


def scratch(s: Sizes) -> dict[str, Any]:
    """Scratch memory of a CTA, by the names under which the body takes it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bf16 = jnp.bfloat16
    return dict(
        ws=plgpu.SMEM((TILE, s.latent), bf16, transforms=common.tiled(bf16, s.latent)),
        xs=plgpu.SMEM((NARROW, s.latent), bf16, transforms=common.tiled(bf16, s.latent)),
        merged=plgpu.SMEM((NARROW, s.latent), bf16),
        gs=plgpu.SMEM((NARROW, TILE), bf16),
        full=plgpu.Barrier(num_barriers=1, num_arrivals=2),
        done=plgpu.Barrier(num_barriers=1, num_arrivals=s.warpgroups),
    )


def shared_bytes(s: Sizes) -> int:
    """Shared memory of a CTA."""
    return 2 * s.latent * (TILE + 2 * NARROW) + 2 * NARROW * TILE + 2048


def _build(s: Sizes, t: Tuning, groups: int, out_rows: int, interpret: bool) -> Any:
    return common.kernel(
        body_of(s, t, interpret),
        "k3_mla_value",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((out_rows, s.heads * s.values), jnp.bfloat16),
        grid=(s.tiles, s.heads, groups),
        grid_names=("tile", "head", "group"),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=scratch(s),
    )


def body_of(s: Sizes, t: Tuning, interpret: bool) -> Any:
    """The kernel's body.

    In another kernel it takes `place`, that is (tile, head, group, warpgroup), and the first
    warpgroup calls `made` when this CTA's heads are written.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA

    def body(
        latent,  # f32 [B, G, S, columns, latent]
        lse,  # f32 [B, G, S, columns]
        ends,  # i32 [B, T]
        gate,  # bf16 [N, H V]
        kv_b,  # bf16 [L, H (nope + V), latent]
        layer,  # i32 [1]
        y,  # bf16 [N, H V]
        ws,
        xs,  # bf16 [8, latent], merged rows as the tensor core reads them
        merged,  # bf16 [8, latent], the same in plain order
        gs,
        full,
        done,
        place=None,
        made=None,
    ):
        names = "tile", "head", "group", "wg"
        tile, head, group, wg = place or (lax.axis_index(name) for name in names)
        first = group * t.rows
        columns = pl.ds(head * s.values + tile * TILE, TILE)

        @pl.when(wg == 0)
        def _():
            row = (head + 1) * s.per_head - s.values + tile * TILE
            plgpu.copy_gmem_to_smem(kv_b.at[layer[0], pl.ds(row, TILE)], ws, full.at[0])
            plgpu.copy_gmem_to_smem(gate.at[pl.ds(first, NARROW), columns], gs, full.at[0])

        mine = pl.ds(wg * SPAN, SPAN)

        def where(i):
            row = jnp.minimum(first + i, s.n - 1)
            return row // s.tokens, lax.rem(row, s.tokens)

        def merge_row(i, _):  # a loop: the layouts of an unrolled one take minutes to infer
            sequence, token = where(i)
            active = _active(ends, sequence, s)
            column = token * s.heads + head
            place = sequence, column // s.columns, lax.rem(column, s.columns)
            mean = _merge(latent, lse, place, active, mine, s, t)
            merged[i, mine] = mean.astype(jnp.bfloat16)

        lax.fori_loop(0, t.rows, merge_row, None)
        plgpu.commit_smem()
        x = plgpu.load(common.tref(merged.at[:, mine]), layout=layout, optimized=False)
        common.store(common.tref(xs.at[:, mine]), x)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done.at[0])

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(done.at[0])
            plgpu.barrier_wait(full.at[0])

            z = product(
                lambda start, size: ws.at[:, pl.ds(start, size)],
                lambda start, size: common.tref(xs.at[:, pl.ds(start, size)]),
                *(TILE, NARROW, s.latent),
            )
            z = z.astype(jnp.bfloat16).astype(jnp.float32)
            g = plgpu.load(common.tref(gs), layout=layout, optimized=False).astype(jnp.float32)
            z = z / (1 + jnp.exp(-g))
            number = plgpu.broadcasted_iota(jnp.int32, (TILE, NARROW), 1, layout=layout)
            alive = jnp.zeros_like(number)
            for i in range(t.rows):
                alive = jnp.where(number == i, ends[where(i)], alive)
            z = jnp.where(alive > 0, z, jnp.zeros_like(z))  # a select: a pad row's gate may be NaN
            _store(y, first, columns, z.astype(jnp.bfloat16), t.rows, interpret)
            if made is not None:
                made()

    return body


# two neighbouring numbers $0 of a row of [TILE, NARROW] to two rows of y; $1 y, $2 where the tile
# begins in it, $3 column, $4 row of the tile
_STORE = """
{
.reg .pred in, there;
.reg .b16 a, b;
.reg .b64 at, end;
mov.b32 {a, b}, $0;
add.u64 end, $1, WHOLE;
mad.wide.u32 at, $4, 2, $2;
mad.wide.u32 at, $3, STRIDE, at;
setp.lt.u32 in, $3, ROWS;
setp.lt.u64 there, at, end;
and.pred in, in, there;
@in st.global.b16 [at], a;
add.u64 at, at, STRIDE;
setp.lt.u32 in, $3, LAST;
setp.lt.u64 there, at, end;
and.pred in, in, there;
@in st.global.b16 [at], b;
}
"""


# $0 the first row of a lane, $1 thread: 16 rows per warp, four lanes a row
_ROW = """
{
.reg .b32 warp;
shr.u32 warp, $1, 5;
shr.u32 $0, $1, 2;
and.b32 $0, $0, 7;
mad.lo.u32 $0, warp, 16, $0;
}
"""


def _store(y: Any, first: Any, columns: Any, value: jax.Array, rows: int, interpret: bool) -> None:
    """Columns of value bf16 [TILE, NARROW] to `rows` rows of y from `first` on, those that it has.

    From registers: who waits for it (`mla_value_out`) does not wait for the copy engine as well.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        y[pl.ds(first, rows), columns] = value.T[:rows]
        return
    (n, width), text = y.shape, _STORE
    for name, number in (
        ("WHOLE", 2 * n * width), ("STRIDE", 2 * width), ("ROWS", rows), ("LAST", rows - 1)
    ):  # fmt: skip
        text = text.replace(name, str(number))

    def code(_: Any, whole: Any, begin: Any, fragment: Any) -> None:
        reg = common.Registers()
        column = reg.ptx("{ and.b32 $0, $1, 3; shl.b32 $0, $0, 1; }", reg.thread(), results=1)[0]
        row = reg.ptx(_ROW, reg.thread(), results=1)[0]
        for half, register in enumerate(fragment.registers.flat):
            place = reg.global_address(whole), reg.global_address(begin), column
            (both,) = reg.words(register)
            reg.ptx(text, both, *place, reg.add(row, 8 * half), volatile=True)

    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA))
    call(code)(y, y.at[pl.ds(first, 1), columns], value)


def _active(ends: Any, sequence: jax.Array, s: Sizes) -> jax.Array:
    """How many splits worked on a sequence, as `mla_attend.work` has it."""
    length = ends[sequence, 0]
    if s.tokens > 1:

        def longer(i: jax.Array, found: jax.Array) -> jax.Array:
            return jnp.maximum(found, ends[sequence, i])

        length = lax.fori_loop(1, s.tokens, longer, length)
    return jnp.minimum((length + CACHE_TILE - 1) // CACHE_TILE, s.splits)


def _merge(
    latent: Any, lse: Any, place: Any, active: jax.Array, mine: Any, s: Sizes, t: Tuning
) -> jax.Array:
    """Weighted mean of the active parts of one query row, f32 [128] of its columns."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    sequence, group, column = place
    low = jnp.float32(-jnp.inf)
    layout = plgpu.Layout.WG_STRIDED((SPAN,), vec_size=1)  # named: inference takes a minute

    def wide(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (SPAN,), ())

    def step(j: jax.Array, carry: Any) -> Any:
        top, mass, sums = carry
        numbers = [j * t.ahead + i for i in range(t.ahead)]
        at = [jnp.minimum(n, active - 1) for n in numbers]  # beyond: the last one, not weighted
        scores = [lse[sequence, group, k, column] for k in at]
        places = [latent.at[sequence, group, k, column, mine] for k in at]
        rows = [plgpu.load(place, layout=layout) for place in places]
        scores = [jnp.where(n < active, x, low) for n, x in zip(numbers, scores, strict=True)]
        new = top
        for x in scores:
            new = jnp.maximum(new, x)
        finite = jnp.where(new == low, 0.0, new)
        keep = jnp.exp(top - finite)
        mass, sums = mass * keep, sums * wide(keep)
        for x, row in zip(scores, rows, strict=True):
            weight = jnp.exp(x - finite)
            mass, sums = mass + weight, sums + wide(weight) * row
        return new, mass, sums

    zero = plgpu.layout_cast(jnp.zeros((SPAN,), jnp.float32), layout)
    start = low, jnp.float32(0.0), zero
    steps = (active + t.ahead - 1) // t.ahead
    _, mass, sums = lax.fori_loop(0, steps, step, start)
    return sums * wide(1 / jnp.where(mass == 0.0, 1.0, mass))

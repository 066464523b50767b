"""Logits of this rank's vocabulary rows with the best of each row: y = x W^T, max, argmax.

    x bf16 [N, K]; w bf16 [X, K] -> logits f32 [N, X], top f32 [N], best i32 [N]

The head: logits are the products rounded once to bf16 (as f32 numbers); NaN counts as the largest,
as in `jnp.max` and `jnp.argmax`. With `base` f32 [N, X], the drafter's Markov step: logits = base +
product, f32, not rounded; NaN counts as -inf. In both cases the lower column wins ties.

With `ids` i32 [N], x is a table [V, K], and its rows `ids`, clipped to the table, take its place.

The product is that of `skinny`, one CTA per 64 (or, with tcgen05, 128) rows of w. Each warp hands
on the best of 32 columns; XLA reduces these [N, X / 32] candidates in one fusion: two device
activities, and the second may take what follows (the exchange's packing) in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import cluster_sum, common, row_gather, skinny, skinny_cta, skinny_sm100
from pallas_kernels.skinny import Projection, Tuning

GROUP = 32  # columns of a candidate: a warp


def default_tuning(m: int, rows: int, k: int, blackwell: bool = False) -> Tuning:
    """That of `skinny` without clusters; not measured here."""
    return dataclasses.replace(skinny.default_tuning(m, [rows], k, blackwell), splits=1)


def _tuning(n: int, x: Any, w: Any) -> Tuning:
    rows = min(max(n, 1), common.MAX_ROWS)
    return default_tuning(rows, w.shape[0], x.shape[1], common.blackwell())


def limits(
    x: jax.Array,
    w: jax.Array,
    base: jax.Array | None = None,
    *,
    ids: jax.Array | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "rank of x", x.ndim, 2, x.ndim == 2)
    common.expect(out, "rank of w", w.ndim, "2 (rows, columns)", w.ndim == 2)
    if ids is not None:
        common.expect(out, "rank of ids", ids.ndim, 1, ids.ndim == 1)
    if out:
        return out
    n = x.shape[0] if ids is None else ids.shape[0]
    t = tuning or _tuning(n, x, w)
    one = Projection(jax.ShapeDtypeStruct((1, *w.shape), w.dtype))  # type: ignore[arg-type]
    rows = jax.ShapeDtypeStruct((n, x.shape[1]), x.dtype)
    out = skinny.limits(rows, [one], tuning=t)  # type: ignore[arg-type]
    common.expect(out, "splits", t.splits, 1, t.splits == 1)
    if ids is not None:
        common.expect(out, "dtype of ids", ids.dtype, "int32", ids.dtype == jnp.int32)
        step = row_gather.STEP
        common.expect(out, "step", t.step, f"{step} with ids", t.step == step)
    if base is not None:
        wanted = (n, w.shape[0])
        common.expect(out, "shape of base", base.shape, wanted, base.shape == wanted)
        common.expect(out, "dtype of base", base.dtype, "float32", base.dtype == jnp.float32)
    return out


def reference(
    x: jax.Array,
    w: jax.Array,
    base: jax.Array | None = None,
    *,
    ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same in plain jnp."""
    if ids is not None:
        x = x[jnp.clip(ids, 0, x.shape[0] - 1)]
    (y,) = skinny.reference(x, [Projection(w[None])])
    values = y = lax.reduce_precision(y, 8, 7) if base is None else base + y
    if base is not None:
        values = jnp.where(jnp.isnan(y), -jnp.inf, y)
    return y, _largest(values), jnp.argmax(values, -1).astype(jnp.int32)


def _largest(values: jax.Array) -> jax.Array:
    """`jnp.max` of the last axis, which on CPUs may skip NaN."""
    return jnp.where(jnp.any(jnp.isnan(values), -1), jnp.nan, jnp.max(values, -1))


def vocab(
    x: jax.Array,
    w: jax.Array,
    base: jax.Array | None = None,
    *,
    ids: jax.Array | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, their largest and its column; see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(x, w, base, ids=ids, tuning=tuning), "vocab")
    n, rows = x.shape[0] if ids is None else ids.shape[0], w.shape[0]
    t, width = tuning or _tuning(n, x, w), common.bucket(n)
    more = (-rows % t.tile) if interpret else 0
    if interpret:  # no clipped copies there: pads hold NaN
        w = jnp.pad(w, ((0, more), (0, 0)), constant_values=jnp.nan)
        if base is not None:
            base = jnp.pad(base, ((0, width - n), (0, more)), constant_values=jnp.nan)
    if ids is None:  # the copy engine takes rows of x by eights
        pads = width - n if interpret else (-n % 8 if n > 8 else 0)
        x = jnp.pad(x, ((0, pads), (0, 0)), constant_values=jnp.nan)
    form = _Form(n, rows, x.shape[1], width, ids is not None, t, interpret)
    optional = [a for a in (ids, base) if a is not None]
    call = _build(form)
    logits, tops, best = call(x, common.layer_operand(0), w[None], *optional)
    return (logits[:n, :rows], *_best(tops[:n, : form.groups], best[:n, : form.groups]))


def _best(tops: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest candidate of each row and its column, the lower one in ties; NaN is largest."""

    def better(a: Any, b: Any) -> Any:
        nan_a, nan_b = (jnp.isnan(v[0]) for v in (a, b))
        equal = (a[0] == b[0]) | (nan_a & nan_b)
        first = jnp.where(equal, a[1] < b[1], nan_a | ((a[0] > b[0]) & ~nan_b))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    nothing = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    return lax.reduce((tops, ids), nothing, better, (1,))


@dataclasses.dataclass(frozen=True)
class _Form:
    """One form of the kernel while it is traced."""

    n: int
    rows: int  # of w
    k: int
    width: int
    gathered: bool  # ids
    t: Tuning
    interpret: bool

    @property
    def kind(self) -> Any:
        """The product, as `skinny` describes it."""
        shape = jax.ShapeDtypeStruct((1, self.rows, self.k), jnp.bfloat16)
        return Projection(shape).kind(self.t.tile)  # type: ignore[arg-type]

    @property
    def groups(self) -> int:
        """Candidates of a row."""
        return -(-self.rows // GROUP)


def _build(form: _Form) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, width, tiles = form.t, form.width, form.kind.tiles
    bf16, f32, ring = jnp.bfloat16, jnp.float32, form.t.warpgroups * form.t.stages
    n, columns, groups = form.n, form.rows, form.groups
    if form.interpret:
        n, columns, groups = width, tiles * t.tile, tiles * t.tile // GROUP
    return common.kernel(
        _body(form),
        "k3_vocab",
        interpret=form.interpret,
        out_type=[
            jax.ShapeDtypeStruct((n, columns), f32),
            jax.ShapeDtypeStruct((n, groups), f32),
            jax.ShapeDtypeStruct((n, groups), jnp.int32),
        ],
        grid=(tiles,),
        grid_names=("tile",),
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=dict(
            ws=plgpu.SMEM((ring, t.tile, t.step), bf16, transforms=common.tiled(bf16, t.step)),
            xs=plgpu.SMEM((ring, width, t.step), bf16, transforms=common.tiled(bf16, t.step)),
            sums=plgpu.SMEM((t.warpgroups, t.tile, width), f32),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=1 if form.gathered else 2),
            done=plgpu.Barrier(num_barriers=1, num_arrivals=t.warpgroups),
            **({} if t.tile == skinny.TILE else skinny_sm100.scratch(width, t.stages)),
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Gathering(skinny_cta.Cta):
    """A CTA whose x is fetched row by row; `norm` holds the numbers of the rows."""

    def fetch(self, j: Any, slot: Any) -> None:
        """No copy of x."""

    def ready(self, j: Any, slot: Any, seen: Any) -> Any:
        """Fetch x for a slot, then wait for its w."""
        tile, columns = self.xs.at[slot], self.columns(j)
        row_gather.gather_tile(tile, self.x, columns, self.norm, self.interpret)
        return super().ready(j, slot, seen)


def _body(form: _Form) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        x,  # bf16 [N, K]
        layer,  # i32 [1], 0
        w,  # bf16 [1, X, K]
        *others,  # if there are such ids i32 [N], base f32 [N, X]; then logits f32 [N, X],
        # candidates f32 and i32 [N, X / 32]
        ws,  # scratch as in `skinny`
        xs,
        sums,
        full,
        done,
        acc=None,
        read=None,
        complete=None,
    ):
        tile, wg = lax.axis_index("tile"), lax.axis_index("wg")
        numbers, others = (others[0], others[1:]) if form.gathered else (None, others)
        c = (_Gathering if form.gathered else skinny_cta.Cta)(
            form.k, form.width, form.t, None, form.interpret, tile, 0, wg, x, layer, numbers,
            ws, xs, sums, full, None, acc, read, complete,
        )  # fmt: skip
        skinny.multiply(c, w, form.kind, 0)
        plgpu.barrier_arrive(done.at[0])

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(done.at[0])
            total = cluster_sum.local_total(sums, 0, form.t.tile)
            finish = _finish_plain if form.interpret else _finish
            finish(form, total, tile, *others)

    return body


def _finish_plain(form: _Form, total: jax.Array, tile: Any, *refs: Any) -> None:
    """Logits and candidates of a tile in plain jnp; total f32 [width, tile]."""
    from jax.experimental import pallas as pl

    *base, logits, tops, ids = refs
    size = form.t.tile
    columns = pl.ds(tile * size, size)
    y = total + base[0][:, columns] if base else lax.reduce_precision(total, 8, 7)
    logits[:, columns] = y
    values = jnp.where(jnp.isnan(y), -jnp.inf, y) if base else y
    number = tile * size + jnp.arange(size)
    values = jnp.where(number < form.rows, values, -jnp.inf).reshape(-1, size // GROUP, GROUP)
    groups = pl.ds(tile * (size // GROUP), size // GROUP)
    tops[:, groups] = _largest(values)
    first = tile * size + jnp.arange(size // GROUP) * GROUP
    ids[:, groups] = first + jnp.argmax(values, -1).astype(jnp.int32)


# one number of a thread: $0 value, $1 thread, $2 logits of the tile, $3 and $4 candidates, $5 base
_COLUMN = """
{
.reg .pred in, nan, best;
.reg .b16 none, half;
.reg .b32 v, key, mask, row, column, lane, at;
.reg .b64 far, to;
add.u32 at, $1, FIRST;
shr.u32 row, at, LOG;
and.b32 column, at, LAST;
mov.u32 lane, %ctaid.x;
mad.lo.u32 lane, lane, TILE, column;
setp.lt.u32 in, row, ROWS;
setp.lt.and.u32 in, lane, COLUMNS, in;
mad.wide.u32 to, row, STRIDE, 0;
mul.wide.u32 far, column, 4;
add.u64 to, to, far;
mov.b32 v, $0;
VALUE
add.u64 far, to, $2;
@in st.global.b32 [far], v;
setp.nan.f32 nan, v, v;
CLEAN
add.rn.f32 key, v, 0f00000000;
shr.s32 mask, key, 31;
or.b32 mask, mask, 0x80000000;
xor.b32 key, key, mask;
LARGEST
selp.b32 key, key, 0, in;
redux.sync.max.u32 mask, key, 0xFFFFFFFF;
setp.eq.u32 best, key, mask;
vote.sync.ballot.b32 mask, best, 0xFFFFFFFF;
neg.s32 key, mask;
and.b32 mask, mask, key;
bfind.u32 mask, mask;
and.b32 key, $1, 31;
setp.eq.and.u32 best, key, mask, in;
shr.u32 at, lane, 5;
mad.lo.u32 at, row, GROUPS, at;
mul.wide.u32 to, at, 4;
add.u64 far, to, $3;
@best st.global.b32 [far], v;
add.u64 far, to, $4;
@best st.global.b32 [far], lane;
}
"""
_ROUNDED = """
cvt.rn.bf16.f32 half, v;
mov.b16 none, 0;
mov.b32 v, {none, half};
"""
_ADDED = """
add.u64 far, to, $5;
mov.b32 key, 0;
@in ld.global.b32 key, [far];
add.rn.f32 v, v, key;
"""


def _finish(form: _Form, total: jax.Array, tile: Any, *refs: Any) -> None:
    """The same in registers, where 32 lanes hold 32 columns of one row."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *base, logits, tops, ids = refs
    size = form.t.tile
    columns = pl.ds(tile * size, size)
    names = dict(LOG=size.bit_length() - 1, LAST=size - 1, TILE=size, ROWS=form.n)
    names |= dict(COLUMNS=form.rows, STRIDE=4 * form.rows, GROUPS=form.groups)
    value = _ADDED if base else _ROUNDED
    clean = "selp.b32 v, 0xFF800000, v, nan;" if base else ""
    largest = "" if base else "selp.b32 key, 0xFFFFFFFF, key, nan;"
    text = _COLUMN.replace("VALUE", value).replace("CLEAN", clean).replace("LARGEST", largest)
    for name, number in names.items():
        text = text.replace(name, str(number))

    def code(_: Any, sums: Any, *places: Any) -> None:
        reg = common.Registers()
        thread, at = reg.thread(), [reg.global_address(place) for place in places]
        for i, register in enumerate(sums.registers.flat):
            (value,) = reg.elements(register)
            reg.ptx(text.replace("FIRST", str(128 * i)), value, thread, *at, volatile=True)

    layout = plgpu.Layout.WG_STRIDED((form.width, size), vec_size=1)
    places = [logits.at[:, columns], tops, ids, *(b.at[:, columns] for b in base)]
    call = plgpu.inline_mgpu(arg_types=(layout, *(plgpu.RefType() for _ in places)))
    call(code)(total, *places)

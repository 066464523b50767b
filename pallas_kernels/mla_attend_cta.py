"""One CTA of `mla_attend`: a tile of cache rows at a time, scores, softmax, sums."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import common
from pallas_kernels.narrow_product import largest_piece, product

TILE = 64  # cache rows per step
Q_SHIFT = 2.0**-6  # of q in f16: exact for bf16 from 0.004 to 4e6, below with an error of 2e-6
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        splits: CTAs along the context, per sequence and group of query rows.
        columns: query rows of a CTA, a multiple of 8; more rows make more groups.
        warpgroups: that share the latent's columns, 1 or 2; each computes all scores.
        stages: tiles of 64 cache rows in flight.
    """

    splits: int
    columns: int
    warpgroups: int = 1
    stages: int = 2


@dataclass(frozen=True)
class Sizes:
    """What the operands' shapes and dtypes say."""

    batch: int
    tokens: int
    heads: int
    latent: int
    row: int
    page: int
    fp8: bool
    scale: float

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.tokens * self.heads

    @property
    def dtype(self) -> Any:
        """Of the tensor core's operands."""
        return jnp.float16 if self.fp8 else jnp.bfloat16

    def groups(self, t: Tuning) -> int:
        """Groups of query rows."""
        return -(-self.rows // t.columns)


def build(s: Sizes, t: Tuning, interpret: bool) -> Any:
    """The kernel: q, cache, layer, table, ends, factor -> partial latents and log-sum-exps."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    f32, groups = jnp.float32, s.groups(t)
    stored = jnp.float8_e4m3fn if s.fp8 else jnp.bfloat16
    wgs, columns = t.warpgroups, t.columns

    def tile(dtype: Any, *lead: int) -> Any:
        shape = (*lead, TILE, s.row)
        return plgpu.SMEM(shape, dtype, transforms=common.tiled(dtype, s.row))

    parts = s.batch, groups, t.splits, columns
    wide = dict(wide=tile(s.dtype)) if s.fp8 else {}
    return common.kernel(
        _body(s, t, interpret),
        "k3_mla_attend",
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((*parts, s.latent), f32),
            jax.ShapeDtypeStruct(parts, f32),
        ],
        grid=(t.splits, groups, s.batch),
        grid_names=("split", "group", "sequence"),
        num_threads=wgs + 1,
        thread_name="wg",
        scratch_types=dict(
            qs=plgpu.SMEM((columns, s.row), s.dtype, transforms=common.tiled(s.dtype, s.row)),
            ks=tile(stored, t.stages),
            ps=plgpu.SMEM((wgs, columns, TILE), s.dtype, transforms=common.tiled(s.dtype, TILE)),
            scratch=plgpu.SMEM((wgs, 32 * columns), f32),
            full=plgpu.Barrier(num_barriers=t.stages, num_arrivals=max(1, TILE // s.page)),
            free=plgpu.Barrier(num_barriers=t.stages, num_arrivals=wgs),
            came=plgpu.Barrier(num_barriers=1),
            met=plgpu.Barrier(num_barriers=1, num_arrivals=wgs),
            **wide,
        ),
    )


@dataclass(frozen=True)
class _Cta:
    """One CTA while its kernel is traced: sizes, places, refs; see `_body`."""

    s: Sizes
    t: Tuning
    interpret: bool
    sequence: Any
    group: Any
    split: Any
    wg: Any
    first: Any  # tile
    count: Any  # tiles
    length: Any  # cache rows of the sequence
    ends: list[Any]
    refs: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """A ref by its name."""
        try:
            return self.refs[name]
        except KeyError:
            raise AttributeError(name) from None

    def meet(self) -> None:
        """Wait for the other computing warpgroups, and for all warps of this one."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.commit_smem()
        if self.t.warpgroups > 1:
            plgpu.barrier_arrive(self.met.at[0])
            plgpu.barrier_wait(self.met.at[0])


def _body(s: Sizes, t: Tuning, interpret: bool) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        q,  # bf16 or f16 [B, G columns, row]
        cache,  # bf16 or e4m3 [L, P, page, row]
        layer,  # i32 [1]
        table,  # i32 [B, W]
        ends,  # i32 [B, T]
        factor,  # f32 [1]
        part,  # f32 [B, G, S, columns, latent]
        lse,  # f32 [B, G, S, columns]
        **scratch,
    ):
        split, group, sequence, wg = (
            lax.axis_index(name) for name in ("split", "group", "sequence", "wg")
        )
        seen = [ends[sequence, i] for i in range(s.tokens)]
        length = seen[0]
        for end in seen[1:]:
            length = jnp.maximum(length, end)
        tiles = (length + TILE - 1) // TILE
        active = jnp.maximum(jnp.minimum(tiles, t.splits), 1)
        first = jnp.minimum(split, active) * tiles // active
        count = jnp.minimum(split + 1, active) * tiles // active - first
        refs = dict(q=q, cache=cache, layer=layer, table=table, factor=factor, part=part, lse=lse)
        c = _Cta(
            s,
            t,
            interpret,
            *(sequence, group, split, wg, first, count, length, seen),
            refs | scratch,
        )

        @pl.when(wg == t.warpgroups)
        def _():
            if t.warpgroups > 1:
                plgpu.set_max_registers(40, action="decrease")
            _load(c)

        @pl.when(wg < t.warpgroups)
        def _():
            if t.warpgroups > 1:  # 128 threads per warpgroup share 65536 registers
                plgpu.set_max_registers(232, action="increase")
            pl.when(count > 0)(lambda: _attend(c))

        @pl.when((wg == 0) & (count == 0))
        def _():
            nothing = jnp.full((t.columns,), -jnp.inf, jnp.float32)
            low = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA.reduce(0))
            common.store(lse.at[sequence, group, split], low)

    return body


def _load(c: _Cta) -> None:
    """Issue the copies of all tiles, page by page."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    page, stages = c.s.page, c.t.stages
    rows = min(page, TILE)
    layer = c.layer[0]

    @pl.when(c.count > 0)
    def _() -> None:
        mine = pl.ds(c.group * c.t.columns, c.t.columns)
        plgpu.copy_gmem_to_smem(c.q.at[c.sequence, mine], c.qs, c.came.at[0])

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, stages)
        starts = [(c.first + i) * TILE + j * rows for j in range(TILE // rows)]
        # a page beyond the end is replaced by the last one
        pages = [c.table[c.sequence, jnp.minimum(r, c.length - 1) // page] for r in starts]
        if len(pages) > 1:  # else each would be read behind the copy before its own
            none = jnp.minimum(functools.reduce(jnp.bitwise_or, pages), 0)  # 0, known with the last
            pages = [at + none for at in pages]
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(c.free.at[slot]))
        for j, (start, at) in enumerate(zip(starts, pages, strict=True)):
            source = c.cache.at[layer, at, pl.ds(lax.rem(start, page), rows)]
            target = c.ks.at[slot, pl.ds(j * rows, rows)]
            plgpu.copy_gmem_to_smem(source, target, c.full.at[slot])

    lax.fori_loop(0, c.count, step, None)
    for slot in range(stages):  # nobody leaves with an arrival unseen
        pl.when(c.count > slot)(lambda slot=slot: plgpu.barrier_wait(c.free.at[slot]))


def _attend(c: _Cta) -> None:
    """Scores, softmax and sums of this warpgroup's share of the latent's columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s, t, columns = c.s, c.t, c.t.columns
    share = s.latent // t.warpgroups
    rows = largest_piece(share, columns)  # of the latent per product
    layout = plgpu.Layout.WGMMA
    low = jnp.float32(-jnp.inf)
    plgpu.barrier_wait(c.came.at[0])
    limit = _limits_of_columns(c)
    to_log2 = s.scale * LOG2E * (1 / Q_SHIFT if s.fp8 else 1.0)
    factor = c.factor[0] if s.fp8 else jnp.float32(1.0)

    def across(column: jax.Array, height: int) -> jax.Array:
        return lax.broadcast_in_dim(column, (height, columns), (1,))

    def step(i: jax.Array, carry: Any) -> Any:
        sums, top, mass = carry
        slot = lax.rem(i, t.stages)
        base = (c.first + i) * TILE
        plgpu.barrier_wait(c.full.at[slot])
        tile = _prepare(c, slot, base)

        def cached(start: Any, size: int) -> Any:
            return tile.at[:, pl.ds(start, size)]

        def asked(start: Any, size: int) -> Any:
            return common.tref(c.qs.at[:, pl.ds(start, size)])

        score = product(cached, asked, TILE, columns, s.row)
        key = base + plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=layout)
        score = jnp.where(key < across(limit, TILE), score * (factor * to_log2), low)
        new = jnp.maximum(top, _reduce(c, score, "max"))
        finite = jnp.where(new == low, 0.0, new)
        p = jnp.exp2(score - across(finite, TILE)).astype(s.dtype)
        keep = jnp.exp2(top - finite)
        mass = mass * across(keep, TILE) + p.astype(jnp.float32)
        common.store(common.tref(c.ps.at[c.wg]), p)
        plgpu.commit_smem()
        after = []
        for j, old in enumerate(sums):

            def latents(_: Any, __: int, j: int = j) -> Any:
                return common.tref(tile.at[:, pl.ds(c.wg * share + j * rows, rows)])

            def shares(_: Any, __: int) -> Any:
                return common.tref(c.ps.at[c.wg])

            seen = product(latents, shares, rows, columns, TILE)
            after.append(old * across(keep, rows) + seen)
        plgpu.barrier_arrive(c.free.at[slot])
        return tuple(after), new, mass

    def start(height: int, value: float = 0.0) -> jax.Array:
        return plgpu.layout_cast(jnp.full((height, columns), value, jnp.float32), layout)

    top = plgpu.layout_cast(jnp.full((columns,), low), layout.reduce(0))
    carry = tuple(start(rows) for _ in range(share // rows)), top, start(TILE)
    sums, top, mass = lax.fori_loop(0, c.count, step, carry)
    total = _reduce(c, mass, "add")
    inverse = factor / jnp.where(total == 0.0, 1.0, total)
    for j, value in enumerate(sums):
        _store(c, value * across(inverse, rows), c.wg * share + j * rows)

    @pl.when(c.wg == 0)
    def _():
        found = (top + jnp.log2(jnp.where(total == 0.0, 1.0, total))) * (1 / LOG2E)
        common.store(c.lse.at[c.sequence, c.group, c.split], found)


def _limits_of_columns(c: _Cta) -> jax.Array:
    """How many cache rows each column sees, i32 [columns]; 0 for pad columns."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns = c.t.columns
    layout = plgpu.Layout.WGMMA.reduce(0)
    number = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=layout)
    number = number + c.group * columns
    limit = jnp.zeros_like(number)
    for i, end in enumerate(c.ends):
        here = (number >= i * c.s.heads) & (number < (i + 1) * c.s.heads)
        limit = jnp.where(here, end, limit)
    return limit


def _prepare(c: _Cta, slot: jax.Array, base: jax.Array) -> Any:
    """The tile as the tensor core reads it: 16 bits, zeros beyond the sequence's end."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s = c.s
    tile = c.ks.at[slot]
    layout = plgpu.Layout.WGMMA

    def rewrite(source: Any, target: Any) -> None:
        key = base + plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=layout)

        def columns(i: jax.Array, _: None) -> None:  # a loop: unrolled it would spill
            at = pl.ds((i * c.t.warpgroups + c.wg) * 64, 64)
            x = plgpu.layout_cast(source[:, at].astype(s.dtype), layout)
            target[:, at] = jnp.where(key < c.length, x, jnp.zeros_like(x))

        mine = (s.row // 64 - c.wg + c.t.warpgroups - 1) // c.t.warpgroups
        lax.fori_loop(0, mine, columns, None)
        c.meet()

    if s.fp8:
        c.meet()  # everyone is done with the last tile
        rewrite(tile, c.wide)
        return c.wide
    pl.when(base + TILE > c.length)(lambda: rewrite(tile, tile))
    return tile


def _reduce(c: _Cta, x: jax.Array, kind: str) -> jax.Array:
    """Sum or maximum over the rows of [64, columns].

    `jnp.sum` has one scratch place for all warpgroups of a CTA; here each has its own.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if c.interpret:
        return jnp.max(x, axis=0) if kind == "max" else jnp.sum(x, axis=0)
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((c.t.columns,), jnp.float32, layout=layout.reduce(0))
    call = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=out)
    return call(lambda _, value, scratch: value.reduce(kind, 0, scratch))(x, c.scratch.at[c.wg])


def _store(c: _Cta, value: jax.Array, first: Any) -> None:
    """Write [rows, columns] transposed to columns first.. of this CTA's partial result."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, columns = value.shape
    target = c.part.at[c.sequence, c.group, c.split, :, pl.ds(first, rows)]
    if c.interpret:
        target[...] = value.T
        return

    def code(_: Any, x: Any, ref: Any) -> None:
        reg = common.Registers()
        thread = reg.thread()
        # registers [rows / 64, columns / 8, .., 2]: row 64 i + 16 warp + 8 half + lane / 4, column
        # 8 j + 2 (lane % 4) + e; eight lanes fill one sector
        (place,) = reg.ptx(_PLACE.replace("STRIDE", str(4 * c.s.latent)), thread, results=1)
        wide = reg.arith.extui(reg.ir.IntegerType.get_signless(64), place)
        base = reg.arith.addi(reg.global_address(ref), wide)
        flat = x.registers.reshape(rows // 64, columns // 8, 2)
        for (i, j, half), register in np.ndenumerate(flat):
            for e, number in enumerate(reg.pair(register)):
                offset = 4 * ((8 * j + e) * c.s.latent + 64 * i + 8 * half)
                reg.ptx(f"st.global.f32 [$0 + {offset}], $1;", base, number, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))(code)(value, target)


# $0 bytes from the first number to that of thread $1: two columns of STRIDE bytes per lane % 4
_PLACE = """
{
.reg .b32 t, u;
and.b32 t, $1, 3;
mul.lo.u32 t, t, 2;
mul.lo.u32 t, t, STRIDE;
shr.u32 u, $1, 5;
shl.b32 u, u, 6;
add.u32 t, t, u;
shr.u32 u, $1, 2;
and.b32 u, u, 7;
shl.b32 u, u, 2;
add.u32 $0, t, u;
}
"""

"""Routed MXFP4 experts of one rank: gather by id, both products, SiTU between; FP32 sum.

    latent [N, Z] bf16, ids i32 [N, k], weights f32 [N, k], N = 1..64
    w13 u32 [L, E T, lines, 32], w2 u32 [L, E Z/64, lines, 32]   the layer stacks (`experts_pack`)
    result [N, Z] f32: sum over the row's experts of weight * expert(row), not rounded

Rounding, as in profile V: gate and up once to bf16 after the FP32-accumulated product, SiTU in f32
and once to bf16, the expert's output once to bf16, then weighting and summing in f32. Weights are
exact for scale bytes 0..254.

Two kernels. `gate_up` makes h = SiTU(W13 x) per *unit*, an expert with up to 8 rows; `down` makes
W2 h per unit and writes it per (row, expert) pair; the weighted sum over a row's pairs is plain
jnp. An expert that several rows chose is read once per 8 of its rows: for N <= 8 the eight columns
of the tensor core's narrow operand are the rows themselves, beyond that the rows of each expert are
gathered. Columns do not mix, so a row with NaN spoils its own pairs only, and columns that belong
to no row may hold anything.

`gate_up` runs a fixed number of CTAs; a work item is 64 rows of one unit's W13 (32 gate rows and
their 32 up rows), whose K the warpgroups share; one of them, in turn, adds the four sums in a fixed
order. In `down` an item is a few 64-row tiles of one unit's W2 and belongs to one warpgroup. Both
keep their TMA rings running across items. As one kernel (`Tuning.one_kernel`) the CTAs meet between
the two (`meeting`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, meeting, mxfp4
from pallas_kernels.experts_pack import HALF, w13_rows
from pallas_kernels.experts_stage import stage, stage_gathered
from pallas_kernels.skinny import situ_f32
from pallas_kernels.units import COLUMNS, Units, plan


def block_of(latent: int) -> int:
    """Of K per step of gate_up: 128, or all of a latent of 64."""
    return min(128, latent)


@dataclass(frozen=True)
class Tuning:
    """How the kernels are cut.

    Attributes:
        ctas: CTAs of both kernels; one per multiprocessor.
        warpgroups: per CTA of gate_up.
        finishers: warpgroups of gate_up that take turns in finishing items.
        down_warpgroups: per CTA of down.
        down_tiles: tiles of 64 rows per item of down.
        down_stages: items in flight per warpgroup of down.
        one_kernel: both products in one kernel, all CTAs of which meet between them; `warpgroups`
            serve both. All CTAs must be resident: at most one per multiprocessor.
        own_barriers: a warpgroup's warps meet where the bodies say so only (`common.kernel`).
    """

    ctas: int = 132
    warpgroups: int = 4
    finishers: int = 2
    down_warpgroups: int = 4
    down_tiles: int = 2
    down_stages: int = 2
    one_kernel: bool = False
    own_barriers: bool = True


def default_tuning(rows: int, width: int, latent: int) -> Tuning:
    """What measured best on an H200; one row has no more items of down than four per CTA.

    As one kernel up to 8 rows: with more `down` wants its six warpgroups. Narrow latents, of small
    models, have no work for four warpgroups of gate_up.
    """
    tiles = 2 if width <= 192 and latent % 128 == 0 else 1  # about 13 KB of W2 per item
    warpgroups = 4 if rows == 1 else 6
    while _down_bytes(width, Tuning(down_warpgroups=warpgroups, down_tiles=tiles)) > (
        common.SHARED_MEMORY
    ):
        warpgroups -= 1
    share = math.gcd(latent // block_of(latent), 4)
    together = rows <= COLUMNS and latent % 128 == 0
    together &= (common.cores() or Tuning.ctas) >= Tuning.ctas
    one = Tuning(warpgroups=share, down_tiles=tiles, one_kernel=True)
    together &= _down_bytes(width, one) <= common.SHARED_MEMORY
    return Tuning(
        warpgroups=share, finishers=min(2, share), down_warpgroups=warpgroups, down_tiles=tiles,
        one_kernel=together,
    )  # fmt: skip


def limits(
    latent: jax.Array,
    ids: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    *,
    width: int,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    n, z = latent.shape
    t = tuning or default_tuning(n, width, z)
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "dtype of latent", latent.dtype, "bfloat16", latent.dtype == jnp.bfloat16)
    cut = block_of(z) * t.warpgroups
    common.expect(out, "latent width", z, f"a multiple of {cut}", z % cut == 0)
    ok = 1 <= t.finishers <= t.warpgroups
    common.expect(out, "finishers", t.finishers, f"1..{t.warpgroups}", ok)
    span = mxfp4.ROWS * t.down_tiles
    common.expect(out, "latent width", z, f"a multiple of {span}", z % span == 0)
    common.expect(out, "expert width", width, "a multiple of 64", width % 64 == 0)
    common.expect(out, "rank of w13, w2", (w13.ndim, w2.ndim), 4, (w13.ndim, w2.ndim) == (4, 4))
    if out:
        return out
    tiles13, tiles2 = width // HALF, z // mxfp4.ROWS
    experts = w2.shape[1] // tiles2
    wanted = (experts * tiles13, mxfp4.tile_lines(z), mxfp4.LINE)
    common.expect(out, "shape of w13", w13.shape[1:], wanted, w13.shape[1:] == wanted)
    wanted = (experts * tiles2, mxfp4.tile_lines(width), mxfp4.LINE)
    common.expect(out, "shape of w2", w2.shape[1:], wanted, w2.shape[1:] == wanted)
    if t.one_kernel:  # or those CTAs that have a place would wait for ever
        cores = common.cores() or t.ctas
        common.expect(out, "CTAs that meet", t.ctas, f"at most {cores}", t.ctas <= cores)
    lines = t.down_tiles * mxfp4.tile_lines(width)
    common.expect(out, "lines per copy of w2", lines, "at most 256", lines <= 256)
    used = shared_bytes(z, width, t)
    limit = common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def shared_bytes(z: int, width: int, t: Tuning) -> int:
    """Shared memory of one CTA, of the larger product."""
    return max(_gate_up_bytes(z, t), _down_bytes(width, t))


def _gate_up_bytes(z: int, t: Tuning) -> int:
    ring = z // block_of(z) * mxfp4.tile_lines(block_of(z)) * 128
    return ring + COLUMNS * z * 2 + t.finishers * t.warpgroups * mxfp4.ROWS * COLUMNS * 4 + 1024


def _down_bytes(width: int, t: Tuning) -> int:
    wgs = t.warpgroups if t.one_kernel else t.down_warpgroups
    item = t.down_tiles * mxfp4.tile_lines(width) * 128 + COLUMNS * width * 2
    return wgs * (t.down_stages * item + COLUMNS * t.down_tiles * mxfp4.ROWS * 2) + 1024


def reference(
    latent: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    layer: int | jax.Array = 0,
    *,
    width: int,
    betas: tuple[float, float],
) -> jax.Array:
    """The same in plain jnp, pair by pair."""
    z = latent.shape[1]
    tiles13, tiles2 = width // HALF, z // mxfp4.ROWS
    inverse = jnp.argsort(w13_rows(width))

    def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, e = pair
        a = lax.dynamic_slice_in_dim(w13[layer], e * tiles13, tiles13)
        b = lax.dynamic_slice_in_dim(w2[layer], e * tiles2, tiles2)
        gate, up = jnp.split(_product(row, mxfp4.unpack(a, z))[inverse], 2)
        h = lax.reduce_precision(situ_f32(gate, up, *betas), 8, 7)
        return _product(h, mxfp4.unpack(b, width))

    rows = jnp.repeat(latent.astype(jnp.float32), ids.shape[1], axis=0)
    r = lax.map(one, (rows, ids.reshape(-1))).reshape(*ids.shape, z)
    return jnp.sum(r * weights[..., None], axis=1)


def _product(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    codes, scale = weight
    nibbles = jnp.stack([codes & 0xF, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    w = mxfp4.values(nibbles, jnp.repeat(scale, mxfp4.GROUP, axis=-1)).astype(jnp.float32)
    y = jnp.einsum("k,nk->n", x, w, precision=lax.Precision.HIGHEST)
    return lax.reduce_precision(y, 8, 7)


def experts(
    latent: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    layer: int | jax.Array = 0,
    *,
    width: int,
    betas: tuple[float, float],
    units: Units | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The routed sum [N, Z] f32, see the module's docstring. `width` is m of this rank.

    `units` are those of the ids, if they are known already.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(latent, ids, w13, w2, width=width, tuning=tuning), "experts")
    t = tuning or default_tuning(latent.shape[0], width, latent.shape[1])
    experts_here = w2.shape[1] // (latent.shape[1] // mxfp4.ROWS)
    units = units or plan(ids, experts_here, interpret=interpret)
    same: dict[str, Any] = dict(tuning=t, interpret=interpret)
    n, z = latent.shape
    if t.one_kernel and not interpret:
        r = _both(latent, units, ids.shape[1], w13, w2, layer, width, betas, t)
    else:
        h = gate_up(latent, units, w13, layer, k=ids.shape[1], width=width, betas=betas, **same)
        r = down(h, units, w2, layer, rows=n, latent=z, **same)
    return weighted_sum(r, weights)


def weighted_sum(r: jax.Array, weights: jax.Array) -> jax.Array:
    """F32 [N, Z] of r bf16 [N k, Z] and weights f32 [N, k]."""
    r = r.reshape(*weights.shape, -1).astype(jnp.float32)
    return jnp.sum(r * weights[..., None], axis=1)


def gate_up(
    latent: jax.Array,
    units: Units,
    w13: jax.Array,
    layer: int | jax.Array,
    *,
    k: int,
    width: int,
    betas: tuple[float, float],
    tuning: Tuning,
    interpret: bool = False,
) -> jax.Array:
    """H [U, m/32, 8, 32] bf16 = SiTU(W13 x) of every unit, as `mxfp4.multiply` reads it, lifted."""
    n, z = latent.shape
    t, bf16 = tuning, jnp.bfloat16
    call = common.kernel(
        _gate_up_body(n, z, k, width, betas, t, interpret),
        "k3_experts_gate_up",
        interpret=interpret,
        own_barriers=t.own_barriers,
        read_once=True,
        out_type=jax.ShapeDtypeStruct((units.table.shape[0], width // HALF, COLUMNS, HALF), bf16),
        grid=(t.ctas,),
        grid_names=("cta",),
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=_gate_up_memory(z, t) | _gate_up_barriers(z, t),
    )
    return call(latent, units.count, units.table, w13, common.layer_operand(layer))


def _gate_up_memory(z: int, t: Tuning) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    block = block_of(z)
    return dict(
        ws=plgpu.SMEM((z // block, mxfp4.tile_lines(block), mxfp4.LINE), jnp.uint32),
        xs=plgpu.SMEM((z // 32, COLUMNS, 32), jnp.bfloat16),
        sums=plgpu.SMEM((t.finishers, t.warpgroups, mxfp4.ROWS, COLUMNS), jnp.float32),
    )


def _gate_up_barriers(z: int, t: Tuning) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return dict(
        full=plgpu.Barrier(num_barriers=z // block_of(z)),
        done=plgpu.Barrier(num_barriers=t.finishers, num_arrivals=t.warpgroups),
        free=plgpu.Barrier(num_barriers=t.finishers),
    )


def _gate_up_body(
    n: int,
    z: int,
    k: int,
    width: int,
    betas: tuple[float, float],
    t: Tuning,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    wgs, tiles, block = t.warpgroups, width // HALF, block_of(z)
    lines = mxfp4.tile_lines(block)
    steps = z // block // wgs  # blocks of an item that one warpgroup takes
    dense = n <= COLUMNS

    def body(
        x,  # bf16 [N, Z]
        count,  # i32 [2]
        table,  # i32 [U, 10]
        w,  # u32 [L, E T, lines, 32]
        layer,  # i32 [1]
        h,  # bf16 [U, m/32, 8, 32]
        ws,  # u32 [Z / block, lines, 32]
        xs,  # bf16 [Z/32, 8, 32]; each warpgroup stages and reads its part of K
        sums,  # f32 [finisher, warpgroup, 64, 8]
        full,
        done,
        free,
    ):
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        items = (k if n == 1 else count[0]) * tiles
        start, end = cta * items // t.ctas, (cta + 1) * items // t.ctas
        mine = end - start
        which = layer[0]

        def tile_of(item):
            return table[item // tiles, 0] * tiles + lax.rem(item, tiles)

        def issue(tile, j):
            at = wg * steps + j  # of the item's blocks, each with its own place
            source = w.at[which, tile, pl.ds(at * lines, lines)]
            plgpu.copy_gmem_to_smem(source, ws.at[at], full.at[at])

        @pl.when(mine > 0)
        def _():
            tile = tile_of(start)
            for j in range(steps):
                issue(tile, j)

        if dense:
            pl.when(mine > 0)(lambda: stage(x, xs, wg, z // wgs, range(n), interpret))

        def item_step(i, previous):
            unit = (start + i) // tiles
            if not dense:
                pl.when(unit != previous)(
                    lambda: stage_gathered(x, table, unit, k, xs, wg, z // wgs, interpret)
                )
            finisher = lax.rem(i, t.finishers)
            y = product(i)
            pl.when(i >= t.finishers)(lambda: plgpu.barrier_wait(free.at[finisher]))
            sums[finisher, wg] = y
            # each thread arrives for itself behind its own stores, here and at `free` behind its
            # own reads: the warps need not meet before
            plgpu.barrier_arrive(done.at[finisher])

            @pl.when(wg == finisher)
            def _():
                plgpu.barrier_wait(done.at[finisher])
                tile = lax.rem(start + i, tiles)
                h[unit, tile] = situ_of_sums(sums.at[finisher], wgs, betas)
                plgpu.barrier_arrive(free.at[finisher])

            return unit

        def product(i):
            more = i + 1 < mine
            following = tile_of(jnp.minimum(start + i + 1, jnp.maximum(items - 1, 0)))

            def step(j, acc):
                at = wg * steps + j
                plgpu.barrier_wait(full.at[at])
                operand = xs.at[pl.ds(at * (block // 32), block // 32)]
                acc = mxfp4.multiply(acc, ws.at[at], operand, block, interpret=interpret)
                # `multiply` has had the warps meet behind their reads of the block
                pl.when(more)(lambda: issue(following, j))
                return acc

            return lax.fori_loop(0, steps, step, mxfp4.zeros())

        lax.fori_loop(0, mine, item_step, jnp.int32(-1))
        for f in range(t.finishers):  # nobody leaves with an arrival unseen
            pl.when(mine > f)(lambda f=f: plgpu.barrier_wait(free.at[f]))

    return body


def situ_of_sums(
    sums: Any, wgs: int, betas: tuple[float, float], columns: int = COLUMNS
) -> jax.Array:
    """SiTU of one tile, [columns, 32] bf16, from the warpgroups' sums f32 [warpgroups, 64, 8].

    Of the first columns, 4 or 8.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout, some = plgpu.Layout.WG_STRIDED((columns, HALF), vec_size=1), pl.ds(0, columns)

    def total(first: int) -> jax.Array:
        places = [sums.at[g, pl.ds(first, HALF), some] for g in range(wgs)]
        parts = [plgpu.load(common.tref(place), layout=layout, optimized=False) for place in places]
        return sum(parts[1:], parts[0]).astype(jnp.bfloat16).astype(jnp.float32)

    # a power of two: rounding before or after is the same
    return (situ_f32(total(0), total(HALF), *betas) * mxfp4.LIFT).astype(jnp.bfloat16)


def down(
    h: jax.Array,
    units: Units,
    w2: jax.Array,
    layer: int | jax.Array,
    *,
    rows: int,
    latent: int,
    tuning: Tuning,
    interpret: bool = False,
) -> jax.Array:
    """R [P, Z] bf16 = W2 h for every pair (each pair belongs to exactly one unit)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    pairs, width = h.shape[0], h.shape[1] * HALF
    t, wgs = tuning, tuning.down_warpgroups
    bf16 = jnp.bfloat16
    call = common.kernel(
        _down_body(rows, pairs, latent, width, t, wgs, interpret),
        "k3_experts_down",
        interpret=interpret,
        own_barriers=t.own_barriers,
        read_once=True,
        out_type=jax.ShapeDtypeStruct((pairs, latent), bf16),
        grid=(t.ctas,),
        grid_names=("cta",),
        num_threads=wgs,
        thread_name="wg",
        scratch_types=_down_memory(width, t, wgs)
        | dict(full=plgpu.Barrier(num_barriers=wgs * t.down_stages, num_arrivals=2)),
    )
    return call(h, units.count, units.table, w2, common.layer_operand(layer))


def _down_memory(width: int, t: Tuning, wgs: int) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    ring, span = wgs * t.down_stages, t.down_tiles * mxfp4.ROWS
    return dict(
        ws=plgpu.SMEM((ring, t.down_tiles, mxfp4.tile_lines(width), mxfp4.LINE), jnp.uint32),
        hs=plgpu.SMEM((ring, width // 32, COLUMNS, 32), jnp.bfloat16),
        rs=plgpu.SMEM((wgs, COLUMNS, span), jnp.bfloat16),
    )


def _down_body(n: int, pairs: int, z: int, width: int, t: Tuning, wgs: int, interpret: bool) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    depth = t.down_stages
    span = t.down_tiles * mxfp4.ROWS
    groups = z // span  # items per unit

    def body(
        h,  # bf16 [U, m/32, 8, 32]
        count,  # i32 [2]
        table,  # i32 [U, 10]
        w,  # u32 [L, E Z/64, lines, 32]
        layer,  # i32 [1]
        r,  # bf16 [P, Z]
        ws,  # u32 [warpgroups * stages, tiles, lines, 32]
        hs,  # bf16 [warpgroups * stages, m/32, 8, 32]
        rs,  # bf16 [warpgroups, 8, 64 tiles]
        full,
        meet=None,  # to wait for h
    ):
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        first = wg * t.ctas + cta  # items first, first + stride, ...: every CTA gets some early
        stride = wgs * t.ctas
        items = (pairs if n == 1 else count[0]) * groups
        mine = (items - first + stride - 1) // stride
        which = layer[0]

        def issue_w(i):
            item = first + i * stride
            unit, group = item // groups, lax.rem(item, groups)
            slot = wg * depth + lax.rem(i, depth)
            tile = table[unit, 0] * (z // mxfp4.ROWS) + group * t.down_tiles
            block = w.at[which, pl.ds(tile, t.down_tiles)]
            plgpu.copy_gmem_to_smem(block, ws.at[slot], full.at[slot])

        def issue_h(i):
            slot = wg * depth + lax.rem(i, depth)
            plgpu.copy_gmem_to_smem(
                h.at[(first + i * stride) // groups], hs.at[slot], full.at[slot]
            )

        def issue(i):
            issue_w(i)
            issue_h(i)

        for s in range(depth):
            pl.when(s < mine)(lambda s=s: issue_w(jnp.int32(s)))
        if meet is not None:
            meet()
        for s in range(depth):
            pl.when(s < mine)(lambda s=s: issue_h(jnp.int32(s)))

        def item_step(i, _):
            item = first + i * stride
            unit, group = item // groups, lax.rem(item, groups)
            slot = wg * depth + lax.rem(i, depth)
            plgpu.barrier_wait(full.at[slot])
            # rs is free again, for all warps: they meet behind it
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for tile in range(t.down_tiles):
                out = rs.at[wg, :, pl.ds(tile * mxfp4.ROWS, mxfp4.ROWS)]
                common.store(common.tref(out), product(slot, tile).astype(jnp.bfloat16))
            plgpu.commit_smem()  # and here: rs is written, the slot read
            pl.when(i + depth < mine)(lambda: issue(i + depth))

            def store(s, _):
                entry = table[unit, 2 + s]
                row = rs.at[wg, lax.rem(entry, COLUMNS)]
                plgpu.copy_smem_to_gmem(row, r.at[entry // COLUMNS, pl.ds(group * span, span)])

            lax.fori_loop(0, table[unit, 1], store, None)

        def product(slot, tile):
            acc = mxfp4.zeros()
            for k0 in range(0, width, 128):
                size = min(128, width - k0)
                lines = pl.ds(k0 // 64 * mxfp4.TAIL_LINES, size // 64 * mxfp4.TAIL_LINES)
                operand = hs.at[slot, pl.ds(k0 // 32, size // 32)]
                acc = mxfp4.multiply(
                    acc, ws.at[slot, tile, lines], operand, size, interpret=interpret
                )
            return acc

        lax.fori_loop(0, mine, item_step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return body


@dataclass(frozen=True)
class Both:
    """`gate_up` and `down` in one kernel, while it is traced.

    Their shared memory is the same, so a CTA asks for the first tiles of W2 when it is through with
    W13, and waits for the other CTAs' h meanwhile.
    """

    rows: int
    chosen: int  # per row
    latent: int
    width: int
    betas: tuple[float, float]
    t: Tuning

    @property
    def arrivals(self) -> int:
        """Of a meeting: all warpgroups of all CTAs."""
        return self.t.ctas * self.t.warpgroups

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of h and r, as the two kernels have them."""
        pairs = self.rows * self.chosen
        h = (pairs, self.width // HALF, COLUMNS, HALF)
        return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (h, (pairs, self.latent))]

    def grid(self) -> dict[str, Any]:
        """CTAs, warpgroups and scratch memory, as `run` takes it."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        z, width, t, wgs = self.latent, self.width, self.t, self.t.warpgroups
        memory = _gate_up_memory(z, t).values(), _down_memory(width, t, wgs).values()
        scratch = dict(
            memory=plgpu.RefUnion(*map(list, memory)),
            **_gate_up_barriers(z, t),
            left=plgpu.Barrier(num_barriers=1, num_arrivals=wgs),
            full_down=plgpu.Barrier(num_barriers=wgs * t.down_stages, num_arrivals=2),
        )
        cut = dict(grid=(t.ctas,), grid_names=("cta",), num_threads=wgs, thread_name="wg")
        return cut | dict(scratch_types=scratch)

    def run(
        self, x, count, table, a, b, layer, met, h, r, *,
        memory, full, done, free, left, full_down,
    ) -> None:  # fmt: skip
        """Both bodies; all CTAs meet once, at `met` i32 [1]."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        n, z, k, width, t = self.rows, self.latent, self.chosen, self.width, self.t
        (ws, xs, sums), (ws_down, hs, rs) = memory
        first = _gate_up_body(n, z, k, width, self.betas, t, False)
        first(x, count, table, a, layer, h, ws, xs, sums, full, done, free)
        plgpu.commit_smem()  # the CTA's shared memory gets another use
        plgpu.barrier_arrive(left.at[0])
        plgpu.barrier_wait(left.at[0])
        second = _down_body(n, n * k, z, width, t, t.warpgroups, False)
        meet = partial(meeting.meet, met, self.arrivals)
        second(h, count, table, b, layer, r, ws_down, hs, rs, full_down, meet)


def _both(
    latent: jax.Array, units: Units, k: int, w13: jax.Array, w2: jax.Array,
    layer: int | jax.Array, width: int, betas: tuple[float, float], t: Tuning,
) -> jax.Array:  # fmt: skip
    """Both products in one kernel: r [P, Z] bf16."""
    from jax.experimental import pallas as pl

    both = Both(latent.shape[0], k, latent.shape[1], width, betas, t)

    def body(x, table, a, b, layer, count, h, r, **scratch):
        met = count.at[pl.ds(1, 1)]
        both.run(x, count, table, a, b, layer, met, h, r, **scratch)

    call = common.kernel(
        body, "k3_experts", own_barriers=t.own_barriers, read_once=True,
        out_type=both.shapes(), **both.grid(),
    )  # fmt: skip
    count = jax.new_ref(units.count)
    return call(latent, units.table, w13, w2, common.layer_operand(layer), count)[-1]

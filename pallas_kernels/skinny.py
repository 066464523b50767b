"""y = x W^T for few rows: BF16 weights streamed once, FP32 accumulation; also several W of one x.

    x [M, >= K] bf16, M = 1..64, of which the first K columns are taken;  each w [L, N, K] bf16, the
    whole stack;  layer: which matrix of it
    y [M, N] f32 (not rounded) or bf16 (one rounding)

With `situ=(beta, linear_beta)` the rows of w are gate rows, then up rows, and y [M, N/2] bf16 is
SiTU(gate, up). Rounding there: the products once to bf16, SiTU in f32 on the rounded values, one
rounding of the result; as in the standard path.

The weights are the 64-row operand of the tensor core and the rows of x the narrow one, padded to
8, 16, 32 or 64 columns by TMA, which reads zeros beyond the array. A column never enters another
column's sum, so a row that holds NaN cannot reach other rows.

64 rows of a w belong to a cluster of `splits` CTAs, each with its part of K. A CTA's warpgroups
take the steps of that part in turn, each through a TMA ring of its own. All sums meet through
(distributed) shared memory and are added in one fixed order, so results do not depend on timing.

With `norm=(weight, eps)` the rows of x are normalised on the way: y = W rmsnorm(x), see `row_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import (
    cluster_sum,
    common,
    direct_store,
    mailbox,
    meeting,
    row_norm,
    skinny_sm100,
)
from pallas_kernels.skinny_cta import Cta, fill, ranges, w_copies
from pallas_kernels.skinny_cut import (
    TILE,
    Kind,
    Projection,
    Tuning,
    default_tuning,
    share_of,
    shared_bytes,
)


def limits(
    x: jax.Array,
    items: Sequence[Projection],
    *,
    norm: tuple[jax.Array, float] | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "x rank", x.ndim, 2, x.ndim == 2)
    for i, p in enumerate(items):
        common.expect(out, f"w[{i}] rank", p.w.ndim, "3 (layers, rows, columns)", p.w.ndim == 3)
    if out:
        return out
    m, k = x.shape[0], items[0].w.shape[2]
    rows = min(max(m, 1), common.MAX_ROWS)
    sizes = [p.rows for p in items]
    filled = k if norm is None else common.round_up(k, row_norm.STEP)
    t = tuning or default_tuning(rows, sizes, filled, common.blackwell(), norm is not None)
    wanted = skinny_sm100.TILE if common.blackwell() else TILE
    common.expect(out, "tile", t.tile, f"{wanted} on {common.architecture()}", t.tile == wanted)
    ok = t.tile == TILE or t.warpgroups == 1
    common.expect(out, "warpgroups", t.warpgroups, "1 with tcgen05", ok)
    common.expect(out, "rows of x", m, f"1..{common.MAX_ROWS}", 1 <= m <= common.MAX_ROWS)
    common.expect(out, "columns of x", x.shape[1], f"at least {k}", x.shape[1] >= k)
    common.expect(out, "columns", k, "a multiple of 64", filled % 64 == 0)
    cut = t.step * t.splits
    common.expect(out, "columns", k, f"a multiple of {cut}", filled % cut == 0)
    if norm is not None:
        ok = t.step == row_norm.STEP
        common.expect(out, "step", t.step, f"{row_norm.STEP} with norm", ok)
        found = norm[0].shape
        ok = found == (k,) or (norm[0].ndim == 2 and found[1] == k)
        common.expect(out, "shape of the norm's weight", found, f"({k},) or (layers, {k})", ok)
    common.expect(out, "splits", t.splits, "1, 2, 4 or 8", t.splits in (1, 2, 4, 8))
    common.expect(out, "dtype of x", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    for i, p in enumerate(items):
        name, n = f"w[{i}]", p.rows
        common.expect(out, f"columns of {name}", p.w.shape[2], k, p.w.shape[2] == k)
        common.expect(out, f"dtype of {name}", p.w.dtype, "bfloat16", p.w.dtype == jnp.bfloat16)
        unit = 8 if p.situ is None else t.tile
        common.expect(out, f"rows of {name}", n, f"a multiple of {unit} (pad them)", n % unit == 0)
        dtype = p.kind(t.tile).dtype
        allowed = (jnp.float32, jnp.bfloat16)
        common.expect(out, "out_dtype", dtype, "float32 or bfloat16", dtype in allowed)
    used = shared_bytes(common.bucket(rows), t, norm is not None)
    limit = common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def reference(
    x: jax.Array,
    items: Sequence[Projection],
    layer: int | jax.Array = 0,
    *,
    norm: tuple[jax.Array, float] | None = None,
    scale: jax.Array | None = None,
) -> list[jax.Array]:
    """The same in plain jnp; `scale` f32 [M, 1]: factors of the rows, applied to the f32 sums."""
    out = []
    x = x[:, : items[0].w.shape[2]]
    if norm is not None:
        f = x.astype(jnp.float32)
        f = f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + norm[1])
        x = lax.reduce_precision(f * _one(norm[0], layer).astype(jnp.float32), 8, 7)
    for p in items:
        y = jnp.einsum(
            "mk,nk->mn",
            x.astype(jnp.float32),
            p.w[layer].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        y = y if scale is None else y * scale
        out.append(jnp.tile(_finished(y, p.kind(TILE)), (1, p.copies)))
    return out


def _one(norm: jax.Array, layer: int | jax.Array) -> jax.Array:
    """The layer's row of a norm's weights [L, K]; weights [K] as they are."""
    return norm[layer] if norm.ndim == 2 else norm


def _finished(y: jax.Array, kind: Kind) -> jax.Array:
    """What is done to the complete f32 sums, in plain jnp."""
    if kind.situ is not None:
        gate, up = jnp.split(lax.reduce_precision(y, 8, 7), 2, axis=-1)
        y = situ_f32(gate, up, *kind.situ)
    return lax.reduce_precision(y, 8, 7).astype(kind.dtype) if kind.dtype == jnp.bfloat16 else y


def situ_f32(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """B tanh(g/b) sigmoid(g) * c tanh(u/c) in f32, not rounded."""
    soft_gate = beta * jnp.tanh(gate * (1 / beta)) / (1 + jnp.exp(-gate))
    return soft_gate * (linear_beta * jnp.tanh(up * (1 / linear_beta)))


def skinny(
    x: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    out_dtype: Any = jnp.float32,
    situ: tuple[float, float] | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """One product, see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    items = [Projection(w, out_dtype, situ)]
    return projections(x, items, layer, tuning=tuning, interpret=interpret)[0]


def projections(
    x: jax.Array,
    items: Sequence[Projection],
    layer: int | jax.Array = 0,
    *,
    norm: tuple[jax.Array, float] | None = None,
    zeros: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Several products of one x in one kernel, see the module's docstring.

    With `zeros` behind them the counters, at 0, of a kernel that comes after it (`meeting`).

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(x, items, norm=norm, tuning=tuning), "skinny")
    m, k = x.shape[0], items[0].w.shape[2]
    scale = None if norm is None else (k, norm[1])
    width = common.bucket(m)
    sizes = [p.rows for p in items]
    ws = [p.w for p in items]
    if norm is not None and k % row_norm.STEP:
        x, *ws, weight = (common.filled(a, row_norm.STEP) for a in (x[:, :k], *ws, norm[0]))
        k, norm = x.shape[1], (weight, norm[1])
    t = tuning or default_tuning(m, sizes, k, common.blackwell(), norm is not None)
    kinds = tuple(p.kind(t.tile) for p in items)
    if interpret:
        found = _interpreted(x[:, :k], ws, layer, kinds, norm, scale, t)
        return [*found, meeting.counters()] if zeros else found
    if m > 8:  # the copy engine takes rows of x by eights; the step's row buckets are such numbers
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    out = shapes(m, kinds)
    if zeros:
        out.append(meeting.COUNTERS)
    call = _build(k, width, kinds, t, out, scale, False)
    # without a norm its weight is any array, and not looked at
    rows = x if norm is None else norm[0].reshape(-1, k)
    ys = call(x, common.layer_operand(layer), rows, *ws)
    return cut(ys, kinds)


def shapes(m: int, kinds: Sequence[Kind]) -> list[jax.ShapeDtypeStruct]:
    """Of the outputs; rows of y start at multiples of 16 bytes."""
    wide = [common.round_up(q.columns * q.copies, 16 // q.dtype.itemsize) for q in kinds]
    return [jax.ShapeDtypeStruct((m, n), q.dtype) for n, q in zip(wide, kinds, strict=True)]


def cut(ys: Sequence[jax.Array], kinds: Sequence[Kind]) -> list[jax.Array]:
    """Outputs without what `shapes` filled up; what stands behind them as it is."""
    some = [y[:, : q.columns * q.copies] for y, q in zip(ys, kinds, strict=False)]
    return [*some, *ys[len(kinds) :]]


def _interpreted(
    x: jax.Array,
    ws: list[jax.Array],
    layer: int | jax.Array,
    kinds: tuple[Kind, ...],
    norm: tuple[jax.Array, float] | None,
    scale: tuple[int, float] | None,
    t: Tuning,
) -> list[jax.Array]:
    """The kernel in the interpreter, which has neither clusters of this kind nor clipped copies.

    Every CTA gives its partial sums, and their sum is finished here. So is a norm.
    """
    m, k = x.shape
    factor = jnp.ones((m, 1), jnp.float32)
    if norm is not None and scale is not None:
        f = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(f * f, -1, keepdims=True) / scale[0] + scale[1])
        x = x * _one(norm[0], layer)
    width = common.bucket(m)
    x = jnp.pad(x, ((0, width - m), (0, 0)), constant_values=jnp.nan)
    ws = [jnp.pad(w, ((0, 0), (0, -w.shape[1] % TILE), (0, 0))) for w in ws]
    padded = tuple(
        Kind(w.shape[1], w.shape[1], q.tile, q.tiles, q.dtype, q.situ)
        for w, q in zip(ws, kinds, strict=True)
    )
    shapes = [jax.ShapeDtypeStruct((t.splits, width, q.columns), jnp.float32) for q in padded]
    sums = _build(k, width, padded, t, shapes, None, True)(x, common.layer_operand(layer), x, *ws)
    out = []
    for y, kind in zip(sums, kinds, strict=True):
        y = jnp.sum(y, 0)
        if kind.situ is not None:  # columns are those of the tiles: 32 gate rows, their 32 up rows
            y = y.reshape(width, -1, 2, TILE // 2).swapaxes(1, 2).reshape(width, -1)
        finished = _finished(y[:m, : kind.rows] * factor, kind)
        out.append(jnp.tile(finished, (1, kind.copies)))
    return out


def _build(
    k: int,
    width: int,
    kinds: tuple[Kind, ...],
    t: Tuning,
    shapes: list[jax.ShapeDtypeStruct],
    scale: tuple[int, float] | None,
    interpret: bool,
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    f32 = jnp.float32
    tiles = sum(kind.tiles for kind in kinds)
    squares = dict(squares=plgpu.SMEM((t.warpgroups, width // 8, 16), f32))
    met = {} if interpret else parts(kinds, width, t, scale is not None)
    if interpret:
        grid = dict(grid=(tiles, t.splits), grid_names=("tile", "split"))
    else:
        grid = dict(grid=(tiles,), grid_names=("tile",))
        grid |= dict(cluster=(t.splits,), cluster_names=("split",))
    return common.kernel(
        _body(k, width, kinds, t, scale, interpret),
        "k3_skinny",
        interpret=interpret,
        own_barriers=True,
        read_once=True,
        out_type=shapes,
        **grid,
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=dict(
            **scratch(kinds, width, t),
            **({} if scale is None else squares),
            **met,
            **({} if t.tile == TILE else skinny_sm100.scratch(width, t.stages)),
            **staging(kinds, width, t, scale is not None, interpret),
        ),
    )


def scratch(kinds: Sequence[Kind], width: int, t: Tuning, held: int = 0) -> dict[str, Any]:
    """Scratch memory that `products` uses for products whose sums do not meet in a cluster.

    With `held` steps of x it has places for all of them and not for those of the rings.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    ring, bf16 = t.warpgroups * t.stages, jnp.bfloat16
    transforms = common.tiled(bf16, t.step)
    copies = w_copies(kinds) + (0 if held else 1)
    return dict(
        ws=plgpu.SMEM((ring, t.tile, t.step), bf16, transforms=transforms),
        xs=plgpu.SMEM((held or ring, width, t.step), bf16, transforms=transforms),
        sums=plgpu.SMEM((t.warpgroups, t.tile, width), jnp.float32),
        full=plgpu.Barrier(num_barriers=ring, num_arrivals=copies),
        done=plgpu.Barrier(num_barriers=1, num_arrivals=t.warpgroups),
    )


def parts(kinds: Sequence[Kind], width: int, t: Tuning, norm: bool) -> dict[str, Any]:
    """Scratch memory in which a cluster's sums meet, if they do; mailboxes if it is one."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not t.meets(norm):
        return {}
    most = max(len(_starts(q, t)) * width * share_of(q, width, t, False)[1] for q in kinds)
    out = dict(parts=plgpu.SMEM((t.splits, most), jnp.float32))
    if t.splits > 1:
        out["mail"] = mailbox.scratch(len(kinds))
    rows = dict(row_parts=plgpu.SMEM((t.splits, width), jnp.float32))
    return out | (rows if norm else {})


def expected(kinds: Sequence[Kind], rows: int, width: int, t: Tuning, norm: bool) -> list[int]:
    """Bytes in the mailboxes, one for tiles of each product."""
    cuts = [(_starts(q, t), share_of(q, width, t, False)[1]) for q in kinds]
    return [cluster_sum.tile_bytes(*one, rows, width, t.splits, norm) for one in cuts]


def staging(
    kinds: Sequence[Kind], width: int, t: Tuning, norm: bool, interpret: bool = False
) -> dict[str, Any]:
    """Scratch memory in which results leave for y where no cluster's sums meet."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not interpret and t.meets(norm):
        return {}
    return {
        f"y{i}": plgpu.SMEM(
            (width, share_of(kind, width, t, interpret)[1]),
            jnp.float32 if interpret else kind.dtype,
        )
        for i, kind in enumerate(kinds)
    }


def multiply(c: Cta, w: Any, kind: Kind, first: int, requested: bool = False) -> None:
    """This warpgroup's part of the product of a tile of w, into its place in `sums`.

    The first steps of w may be `requested` already.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, which = c.t, c.layer[0]

    def issue(j, slot):
        c.request(w, kind, c.tile - first, which, j, slot)
        c.fetch(j, slot)

    fill(c, c.fetch if requested else issue)
    start = None if c.scale is None else row_norm.no_squares(c.width)

    def accumulate(sum_ref):
        late = int(t.stages > 3)  # steps that a slot is asked for again after its product

        def again(j):
            common.barrier(c.interpret)  # all warps are through with the slot
            issue(j + t.stages, c.wg * t.stages + lax.rem(j, t.stages))

        def step(j, seen):
            slot = c.wg * t.stages + lax.rem(j, t.stages)
            seen = c.ready(j, slot, seen)
            plgpu.wgmma(sum_ref, c.ws.at[slot], common.tref(c.x_of(j, slot)))
            plgpu.wgmma_wait(late)
            more = (j >= late) & (j - late + t.stages < c.mine)
            pl.when(more)(lambda: again(j - late))
            return seen

        seen = lax.fori_loop(0, c.mine, step, start)
        plgpu.wgmma_wait(0)
        return (sum_ref[...],) if c.scale is None else (sum_ref[...], seen)

    if t.tile == TILE:
        result = pl.run_scoped(accumulate, plgpu.ACC((TILE, c.width), jnp.float32))
    else:
        result = skinny_sm100.accumulate(
            c.mine, t.stages, c.ready, issue, c.ws, c.xs, c.acc, c.read, c.complete, start
        )
    common.barrier(c.interpret)  # nobody reads what lay there before
    common.store(c.sums.at[c.wg], result[0])
    if c.scale is not None:
        row_norm.store_squares(result[1], c.squares.at[c.wg], c.width)


def _store(c: Cta, y: Any, kind: Kind, first: int, staged: Any) -> None:
    """Finish this CTA's columns of a tile and write them to y."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns = share_of(kind, c.width, c.t, c.interpret)[1]
    start = (c.tile - first) * kind.per_tile + c.split * columns
    if c.parts is not None or (kind.copies > 1 and not c.interpret):
        direct_store.store(y, start, _result(c, kind), kind.columns, kind.copies)
        return
    if c.interpret:
        staged[...] = cluster_sum.local_total(c.sums, 0, c.t.tile)
        target, start = y.at[c.split], (c.tile - first) * c.t.tile
    else:
        staged[...] = _result(c, kind)
        target = y
    plgpu.commit_smem()
    rows = pl.ds(c.tile * 0, c.width)
    plgpu.copy_smem_to_gmem(staged, target.at[rows, pl.ds(start, columns)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(
    k: int,
    width: int,
    kinds: tuple[Kind, ...],
    t: Tuning,
    scale: tuple[int, float] | None,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl

    count = len(kinds)

    def body(
        x,
        layer,
        norm,
        *refs,  # bf16 [L, N, K] each, outputs [M, N] each (interpreter: f32 [S, width, N]), zeros
        ws,
        xs,
        sums,
        full,
        done,
        squares=None,
        acc=None,
        read=None,
        complete=None,
        parts=None,
        row_parts=None,
        mail=None,
        **ys,  # y0, y1, ...: [width, columns of a finisher]
    ):
        tile, split, wg = (lax.axis_index(name) for name in ("tile", "split", "wg"))
        places = tile, split, wg
        held = ws, xs, sums, full, squares, acc, read, complete, parts, row_parts, mail
        c = Cta(k, width, t, scale, interpret, *places, x, layer, norm, *held, w_copies(kinds))
        if mail is not None:
            mailbox.open_mail(mail, expected(kinds, c.rows, width, t, scale is not None))
        products(c, kinds, refs[:count], refs[count:], list(ys.values()), done)
        if len(refs) > 2 * count:
            pl.when((tile == 0) & (split == 0) & (wg == 0))(lambda: meeting.clear(refs[-1]))

    return body


def products(
    c: Cta,
    kinds: Sequence[Kind],
    ws: Any,
    ys: Any,
    staged: Any,
    done: Any,
    requested: bool = False,
    entered: bool = False,
) -> None:
    """A CTA's tile of one of the products, whole; `requested` as in `multiply`.

    All threads `enter` the cluster, if they have not yet.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tiles = ranges(c, kinds)
    for i, kind, low, here in tiles:
        pl.when(here)(lambda i=i, kind=kind, low=low: multiply(c, ws[i], kind, low, requested))
    plgpu.barrier_arrive(done.at[0])
    if c.mail is not None and not entered:
        mailbox.enter()
    pl.when(c.wg == 0)(lambda: plgpu.barrier_wait(done.at[0]))
    if c.parts is not None:
        for i, kind, _, here in tiles:
            pl.when(here & (c.wg == 0))(lambda i=i, kind=kind: _push(c, kind, i))
    for i, kind, low, here in tiles:
        finishes = here & (c.wg == 0)
        if not c.interpret:
            finishes &= c.split < share_of(kind, c.width, c.t, c.interpret)[0]
        out = None if c.parts is not None else staged[i]

        def finish(i=i, y=ys[i], q=kind, at=low, out=out):
            if c.mail is not None:
                mailbox.receive(c.mail, i)
            elif c.parts is not None:  # this warpgroup's own
                common.barrier(c.interpret)
            _store(c, y, q, at, out)

        pl.when(finishes)(finish)


def _starts(kind: Kind, t: Tuning) -> tuple[int, ...]:
    """Rows of a tile at which gate and up begin, or all of it."""
    return (0,) if kind.situ is None else (0, t.tile // 2)


def _push(c: Cta, kind: Kind, number: int) -> None:
    finishers, columns = share_of(kind, c.width, c.t, False)
    held = c.sums, c.squares, c.parts, c.row_parts
    cut = c.split, _starts(kind, c.t), columns, finishers, c.rows
    cluster_sum.push_tile(*held, *cut, c.mail, number)


def _result(c: Cta, kind: Kind) -> jax.Array:
    """This CTA's columns [width, columns] of a tile: sums added, norm, SiTU, rounding."""
    columns = share_of(kind, c.width, c.t, False)[1]

    def total(block: int, start: int) -> jax.Array:
        if c.parts is None:
            return cluster_sum.local_total(c.sums, start, columns)
        held = c.parts, c.row_parts
        return cluster_sum.pushed_total(*held, block, c.width, columns, c.scale or c.late)

    found = [total(block, start) for block, start in enumerate(_starts(kind, c.t))]
    if kind.situ is None:
        return found[0].astype(kind.dtype)
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in found]
    return situ_f32(*rounded, *kind.situ).astype(kind.dtype)

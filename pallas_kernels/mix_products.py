"""AttnRes and the products that read what it gives, in one kernel, for few rows.

    operands of `attn_res`, several w [L, N, K] bf16 as in `skinny`, counters i32 [128] at 0
    -> x, new prefix and snapshots as `attn_res` gives them, the products of x as `skinny` does,
       the counters, of which the first is spent

A row's parts are made in as many CTAs of a cluster, and all ask for their first weights, as much as
shared memory holds, before x is there, so that the stream of weights begins with the kernel.
Rounding is that of the two kernels.

The first clusters of the grid make x, write it and wait for nobody. For one row every other cluster
makes x for itself, beside the weights' stream, and its CTAs write the parts into each other's
shared memory: before they are scaled by rsqrt(mean(mixture^2) + eps), which is done to the
products, in f32; x in them is then round(norm * mixture). For more rows all others wait for x,
through a counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attn_res, cluster_sum, common, mailbox, meeting, skinny, skinny_cta
from pallas_kernels.skinny import Projection
from pallas_kernels.skinny_cut import WIDTH

MAX_ROWS = 8  # beyond that the clusters that make x would crowd out the products
CLUSTER = 8  # CTAs
_ROW_BOXES = attn_res.MEETINGS * mailbox.BOX
BANK = 8  # snapshots that the released model has
MOST = 14  # clusters of large CTAs that an H200 surely holds: with 16 some came in a second wave


class Mix(NamedTuple):
    """What `attn_res` reads."""

    prefix: jax.Array  # bf16 [N, D]
    snapshots: jax.Array  # bf16 [N, J, D]
    count: int | jax.Array
    delta: jax.Array  # bf16 or f32 [N, D]
    res_norm: jax.Array  # stacks bf16 [L, D]
    res_proj: jax.Array
    norm: jax.Array
    layer: int | jax.Array  # of these stacks
    shared: jax.Array | None = None  # f32 [N, D]

    def by(self, attn_res: Callable[..., Any], **settings: Any) -> Any:
        """What `attn_res.attn_res` or its reference makes of it."""
        return attn_res(*self[:7], layer=self.layer, shared=self.shared, **settings)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        mix: parts of a row, each in a CTA of its own; all clusters are of `CLUSTER` CTAs.
        products: several times its splits are a cluster.
        each: every cluster makes the row for itself, and holds it in shared memory; for one row.
        pace: ns between two requests of weights before that row is there. What a multiprocessor has
            asked for at once stands before all that its neighbours send: 160 KB are 2.5 us.
            Measured best: 350 where a CTA has 28 steps, 150 for 14.
        rows: of one cluster, one per warpgroup; they share the instruction issue.
        looks: at the counter between two requests of weights, for the same reason.
    """

    mix: attn_res.Tuning
    products: skinny.Tuning
    each: bool = False
    pace: int = 350
    rows: int = 1
    looks: int = 4

    def held(self, d: int) -> int:
        """Steps of x in a CTA's shared memory; 0 if they come through the ring."""
        return d // self.products.step // self.products.splits if self.each else 0


def default_tuning(rows: int, d: int, sizes: Sequence[int]) -> Tuning:
    """As many CTAs as there is room for, so that shared memory takes in as much as possible."""
    tiles, splits = sum(-(-n // skinny.TILE) for n in sizes), 1
    each = rows == 1
    while splits < 4 and d % (256 * splits) == 0 and tiles * splits * 2 <= CLUSTER * (MOST - 1):
        splits *= 2
    makers = max(1, MOST - -(-tiles * splits // CLUSTER))
    step, wgs = 128, 2
    stages = min(6, max(1, d // step // splits // wgs))
    mix = attn_res.default_tuning(rows, d)
    products = skinny.Tuning(step, stages, wgs, splits)
    cut = Tuning(mix, products, each, 700 // splits, rows=min(wgs, -(-rows // makers)))
    while stages > 1 and _shared_bytes(cut, d, BANK) > common.SHARED_MEMORY:
        stages -= 1
        cut = replace(cut, products=replace(cut.products, stages=stages))
    return cut


def _shared_bytes(t: Tuning, d: int, bank: int) -> int:
    """Shared memory of a CTA: that of `skinny`, whose results are not staged here; x, if held."""
    shapes = attn_res.scratch_shapes(t.mix, bank).values()
    mixture = sum(common.round_up(t.rows * math.prod(shape) * 4, 1024) for shape in shapes)
    wgs = t.products.warpgroups
    tile = skinny.TILE * WIDTH * 4  # a mixture lies where sums do
    ring = wgs * t.products.stages * WIDTH * t.products.step * 2
    held = t.held(d) * WIDTH * t.products.step * 2
    more = max(0, mixture - wgs * tile) - tile + (held - ring + 1024 if held else 0)
    return skinny.shared_bytes(WIDTH, t.products) + max(0, more)


def _clusters(rows: int, tiles: int, t: Tuning) -> tuple[int, int]:
    """Those that write x, and all others."""
    makers = 1 if t.each else -(-rows // t.rows)
    return makers, -(-tiles * t.products.splits // CLUSTER)


def limits(m: Mix, items: Sequence[Projection], *, tuning: Tuning | None = None) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    n, d = m.prefix.shape
    t = tuning or default_tuning(n, d, [p.rows for p in items])
    out = attn_res.limits(m.prefix, m.snapshots, m.delta, shared=m.shared, tuning=t.mix)
    out += skinny.limits(m.prefix, items, tuning=t.products)
    most = 1 if t.each else MAX_ROWS
    common.expect(out, "rows", n, f"1..{most}", 1 <= n <= most)
    fill = attn_res.FILL
    common.expect(out, "width", d, f"a multiple of {fill}", d % fill == 0)
    found = {p.w.shape[2] for p in items}
    common.expect(out, "columns of w", found, {d}, found == {d})
    used, limit = _shared_bytes(t, d, m.snapshots.shape[1]), common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    free = t.products.warpgroups - t.each  # one asks for w meanwhile
    ok = 1 <= t.rows <= free
    common.expect(out, "rows of a cluster", t.rows, f"1..{free}", ok)
    if ok:
        clusters = sum(_clusters(n, sum(p.kind(skinny.TILE).tiles for p in items), t))
        common.expect(out, "clusters", clusters, f"at most {MOST}", clusters <= MOST)
    cut = t.products.splits
    common.expect(out, "splits", cut, "2, 4 or 8", cut in (2, 4, 8))
    name = common.architecture()
    common.expect(out, "architecture", name, "Hopper", not common.blackwell())
    return out


def reference(
    m: Mix,
    items: Sequence[Projection],
    layer: int | jax.Array = 0,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """The same in plain jnp."""
    t = tuning or default_tuning(*m.prefix.shape, [p.rows for p in items])
    found = m.by(attn_res.reference, eps=eps, reset=reset, snapshot=snapshot)
    x, scale = found[0], None
    if t.each:
        x, scale = m.by(attn_res.unscaled_reference, eps=eps, reset=reset)
    return *found, skinny.reference(x, items, layer, scale=scale)


def mix_products(
    m: Mix,
    items: Sequence[Projection],
    counters: jax.Array,
    layer: int | jax.Array = 0,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array], jax.Array]:
    """(x, new prefix, snapshots, products, counters); `layer` is that of the products' stacks.

    The first of the counters that come back is spent: a kernel behind this one may have another. In
    the interpreter, which cannot wait for other CTAs, the two kernels run one after the other.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(m, items, tuning=tuning), "mix_products")
    t = tuning or default_tuning(*m.prefix.shape, [p.rows for p in items])
    if interpret:
        same = dict(eps=eps, reset=reset, snapshot=snapshot)
        x, *rest = m.by(attn_res.attn_res, tuning=t.mix, interpret=True, **same)
        done = skinny.projections(x, items, layer, tuning=t.products, interpret=True)
        return x, *rest, done, counters
    (n, d), bank = m.prefix.shape, m.snapshots.shape[1]
    two = m.shared is not None
    form = attn_res.Form(n, d, d, eps, reset, snapshot, two, True, t.mix, False)
    kinds = tuple(p.kind(t.products.tile) for p in items)
    row = jax.ShapeDtypeStruct((n, d), jnp.bfloat16)
    call = _build(form, kinds, t, [row, row, *skinny.shapes(n, kinds)], bank)
    weights = [w.reshape(-1, d) for w in (m.res_norm, m.res_proj, m.norm)]
    deltas = (m.delta,) if m.shared is None else (m.delta, m.shared)
    held = jax.new_ref(m.snapshots) if snapshot else m.snapshots
    spent = jax.new_ref(counters)
    x, new, *ys = call(
        m.prefix, held, common.layer_operand(m.count), spent,
        common.layer_operand(layer), *(p.w for p in items),
        *weights, common.layer_operand(m.layer), *deltas,
    )  # fmt: skip
    snapshots = jax.freeze(held) if snapshot else m.snapshots
    return x, new, snapshots, skinny.cut(ys, kinds), jax.freeze(spent)


def _build(
    form: attn_res.Form,
    kinds: tuple[skinny.Kind, ...],
    t: Tuning,
    shapes: list[jax.ShapeDtypeStruct],
    bank: int,
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    cut = t.products
    memory = skinny.scratch(kinds, WIDTH, cut, t.held(form.width))
    shapes_of_row = attn_res.scratch_shapes(t.mix, bank).values()
    if t.each:
        squares = cluster_sum.WARPS * t.mix.parts, WIDTH
        memory["row_parts"] = plgpu.SMEM(squares, jnp.float32)
    mixing = [plgpu.SMEM((t.rows, *shape), jnp.float32) for shape in shapes_of_row]
    memory["sums"] = plgpu.RefUnion(mixing, [memory["sums"]])
    memory |= skinny.parts(kinds, WIDTH, cut, False)
    memory["mail"] = mailbox.scratch(len(_expected(form, kinds, t, bank)))
    clusters = sum(_clusters(form.rows, sum(kind.tiles for kind in kinds), t))
    return common.kernel(
        _body(form, kinds, t, bank),
        "k3_mix_products",
        own_barriers=True,
        read_once=True,
        out_type=shapes,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(CLUSTER,),
        cluster_names=("cta",),
        num_threads=cut.warpgroups,
        thread_name="wg",
        scratch_types=memory,
    )


def _expected(
    form: attn_res.Form, kinds: tuple[skinny.Kind, ...], t: Tuning, bank: int
) -> list[int]:
    """Bytes in the mailboxes: of the products, of the rows in this cluster, of x if it is held."""
    held = t.held(form.width) * t.products.step * 2 + cluster_sum.sums_bytes(t.mix.parts, 1)
    tiles = skinny.expected(kinds, form.rows, WIDTH, t.products, False)
    return [*tiles, *attn_res.expected(t.mix, bank) * t.rows, *([held] if t.each else [])]


def _body(form: attn_res.Form, kinds: tuple[skinny.Kind, ...], t: Tuning, bank: int) -> Any:
    from jax.experimental import pallas as pl

    cut, per_row, count = t.products, t.mix.parts, len(kinds)
    makers = _clusters(form.rows, 0, t)[0]
    boxes = _expected(form, kinds, t, bank)

    def body(
        prefix,  # bf16 [N, D]
        snapshots,  # bf16 [N, J, D]
        valid,  # i32 [1]
        counters,  # i32 [128]
        layer,  # i32 [1]
        *refs,  # w bf16 [L, N, K] each; the mixture's weights, layer and deltas; outputs
        ws,
        xs,
        sums,  # or what `attn_res` needs
        full,
        done,
        parts,
        mail,
        row_parts=None,
    ):
        mailbox.open_mail(mail, boxes)
        cluster, cta, wg = (lax.axis_index(name) for name in ("cluster", "cta", "wg"))
        w, rest = refs[:count], refs[count:]
        inputs = prefix, snapshots, valid, rest[4 : 5 + form.two], rest[:4]
        x, new, *outs = rest[5 + form.two :]
        mixing, (sums_,) = sums
        arrived = meeting.one(counters, 0)
        held = ws, xs, sums_, full, None, None, None, None, parts, row_parts, mail
        number = (cluster - makers) * CLUSTER + cta
        tile, split = number // cut.splits, lax.rem(number, cut.splits)
        places = tile, split, wg, x, layer, x
        c = skinny_cta.Cta(
            form.width, WIDTH, cut, None, False, *places, *held, skinny_cta.w_copies(kinds),
            held=t.each, late=(form.numbers, form.eps) if t.each else None,
        )  # fmt: skip

        def mix(row, use):
            mine = (cta < per_row) & (wg < t.rows) & (row < form.rows)
            at = jnp.minimum(wg, t.rows - 1)
            own = mail.at[pl.ds((count + at * attn_res.MEETINGS) * mailbox.BOX, _ROW_BOXES)]
            scratch = *(memory.at[at] for memory in mixing), own
            pl.when(mine)(lambda: use(form, row, cta, inputs, scratch))
            pl.when(jnp.logical_not(mine))(mailbox.enter)

        def keep(form, row, cta, inputs, scratch):
            attn_res.one_row(form, row, cta, inputs, (x, new), scratch)
            if not t.each:
                meeting.arrive(arrived)

        def hold(form, row, cta, inputs, scratch):
            score_parts, _, totals, own = scratch
            to = mailbox.box(mail, len(boxes) - 1)
            part = attn_res.unscaled_row(
                form, row, cta, inputs, (score_parts, totals, own),
                row_parts.at[:, pl.ds(row, 1)], to, CLUSTER,
            )  # fmt: skip
            cluster_sum.push_row(part, xs, cut.splits, CLUSTER, to)

        def by_itself():
            mix(wg, hold)  # by the first warpgroup; the last one asks for w, for all
            pause = partial(meeting.pause, t.pace)
            rings = range(cut.warpgroups)
            pl.when(wg == rings[-1])(lambda: skinny_cta.request(c, kinds, w, rings, pause))
            mailbox.receive(mail, len(boxes) - 1, engine=True)

        def from_others():
            mailbox.enter()
            all_ = partial(meeting.wait, arrived, form.rows * per_row)
            skinny_cta.request(c, kinds, w, [wg], partial(all_, t.looks))
            all_()

        def use():
            (by_itself if t.each else from_others)()
            skinny.products(c, kinds, w, outs, (), done, requested=True, entered=True)

        pl.when(cluster < makers)(lambda: mix(cluster * t.rows + wg, keep))
        pl.when(cluster >= makers)(use)

    return body

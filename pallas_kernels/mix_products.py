"""AttnRes and the products that read what it gives, in one kernel, for few rows.

    operands of `attn_res`, several w [L, N, K] bf16 as in `skinny`, counters i32 [128] at 0
    -> x, new prefix and snapshots as `attn_res` gives them, the products of x as `skinny` does

The first clusters of the grid make x, a row's parts in as many CTAs; all others are those of
`skinny`. They ask for their first weights, as much as shared memory holds, before they wait for x,
so that the stream of weights begins with the kernel and not behind it. Who makes x waits for
nobody. Rounding is that of the two kernels.
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

from pallas_kernels import attn_res, common, meeting, skinny
from pallas_kernels.skinny import Projection
from pallas_kernels.skinny_cut import WIDTH

MAX_ROWS = 8  # beyond that the clusters that make x would crowd out the products
CLUSTER = 8  # CTAs
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
        rows: of one cluster that makes x, one per warpgroup; they share the instruction issue.
        looks: at the counter between two requests of weights; without any x comes late, because
            its makers' own loads stand behind all weights that shared memory can hold.
    """

    mix: attn_res.Tuning
    products: skinny.Tuning
    rows: int = 1
    looks: int = 4


def default_tuning(rows: int, d: int, sizes: Sequence[int]) -> Tuning:
    """As many CTAs as there is room for, so that shared memory takes in as much as possible."""
    tiles, splits = sum(-(-n // skinny.TILE) for n in sizes), 1
    while splits < 4 and d % (256 * splits) == 0 and tiles * splits * 2 <= CLUSTER * (MOST - 1):
        splits *= 2
    makers = max(1, MOST - -(-tiles * splits // CLUSTER))
    step, wgs = 128, 2
    stages = min(6, max(1, d // step // splits // wgs))
    cut = skinny.Tuning(step, stages, wgs, splits)
    while stages > 1 and skinny.shared_bytes(WIDTH, cut) > common.SHARED_MEMORY:
        stages -= 1
        cut = replace(cut, stages=stages)
    return Tuning(attn_res.default_tuning(rows, d), cut, min(wgs, -(-rows // makers)))


def _clusters(rows: int, tiles: int, t: Tuning) -> tuple[int, int]:
    """Those that make x, and all others."""
    return -(-rows // t.rows), -(-tiles * t.products.splits // CLUSTER)


def limits(m: Mix, items: Sequence[Projection], *, tuning: Tuning | None = None) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    n, d = m.prefix.shape
    t = tuning or default_tuning(n, d, [p.rows for p in items])
    out = attn_res.limits(m.prefix, m.snapshots, m.delta, shared=m.shared, tuning=t.mix)
    out += skinny.limits(m.prefix, items, tuning=t.products)
    common.expect(out, "rows", n, f"1..{MAX_ROWS}", 1 <= n <= MAX_ROWS)
    span = attn_res.SPANS[-1]
    common.expect(out, "width", d, f"a multiple of {span}", d % span == 0)
    found = {p.w.shape[2] for p in items}
    common.expect(out, "columns of w", found, {d}, found == {d})
    shapes = attn_res.scratch_shapes(t.mix, m.snapshots.shape[1]).values()
    mixture = t.rows * sum(map(math.prod, shapes)) * 4
    tile = skinny.TILE * WIDTH * 4  # results are not staged; a mixture lies where sums do
    more = max(0, mixture - t.products.warpgroups * tile) - tile
    used, limit = skinny.shared_bytes(WIDTH, t.products) + more, common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    ok = 1 <= t.rows <= t.products.warpgroups
    common.expect(out, "rows of a cluster", t.rows, f"1..{t.products.warpgroups}", ok)
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
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """The same in plain jnp."""
    found = m.by(attn_res.reference, eps=eps, reset=reset, snapshot=snapshot)
    return *found, skinny.reference(found[0], items, layer)


def mix_products(
    m: Mix,
    items: Sequence[Projection],
    counters: jax.Array,
    layer: int | jax.Array = 0,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    zeros: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """(x, new prefix, snapshots, products); `layer` is that of the products' stacks.

    `counters` are spent: no other kernel may have them. With `zeros` others stand behind the
    products, at 0, for a kernel that comes after it. In the interpreter, which cannot wait for
    other CTAs, the two kernels run one after the other.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(m, items, tuning=tuning), "mix_products")
    t = tuning or default_tuning(*m.prefix.shape, [p.rows for p in items])
    if interpret:
        same = dict(eps=eps, reset=reset, snapshot=snapshot)
        x, *rest = m.by(attn_res.attn_res, tuning=t.mix, interpret=True, **same)
        cut = t.products
        ys = skinny.projections(x, items, layer, zeros=zeros, tuning=cut, interpret=True)
        return x, *rest, ys
    (n, d), bank = m.prefix.shape, m.snapshots.shape[1]
    two = m.shared is not None
    form = attn_res.Form(n, d, d, eps, reset, snapshot, two, True, t.mix, False, CLUSTER)
    kinds = tuple(p.kind(t.products.tile) for p in items)
    row = jax.ShapeDtypeStruct((n, d), jnp.bfloat16)
    out = [row, row, *skinny.shapes(n, kinds), *[meeting.COUNTERS] * zeros]
    call = _build(form, kinds, t, out, bank)
    weights = [w.reshape(-1, d) for w in (m.res_norm, m.res_proj, m.norm)]
    deltas = (m.delta,) if m.shared is None else (m.delta, m.shared)
    held = jax.new_ref(m.snapshots) if snapshot else m.snapshots
    x, new, *ys = call(
        m.prefix, held, common.layer_operand(m.count), jax.new_ref(counters),
        common.layer_operand(layer), *(p.w for p in items),
        *weights, common.layer_operand(m.layer), *deltas,
    )  # fmt: skip
    return x, new, jax.freeze(held) if snapshot else held, skinny.cut(ys, kinds)


def _build(
    form: attn_res.Form,
    kinds: tuple[skinny.Kind, ...],
    t: Tuning,
    shapes: list[jax.ShapeDtypeStruct],
    bank: int,
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    cut = t.products
    memory = skinny.scratch(WIDTH, cut)
    shapes_of_row = attn_res.scratch_shapes(t.mix, bank).values()
    mixing = [plgpu.SMEM((t.rows, *shape), jnp.float32) for shape in shapes_of_row]
    memory["sums"] = plgpu.RefUnion(mixing, [memory["sums"]])
    memory |= skinny.parts(kinds, WIDTH, cut, False)
    clusters = sum(_clusters(form.rows, sum(kind.tiles for kind in kinds), t))
    return common.kernel(
        _body(form, kinds, t),
        "k3_mix_products",
        out_type=shapes,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(CLUSTER,),
        cluster_names=("cta",),
        num_threads=cut.warpgroups,
        thread_name="wg",
        scratch_types=memory,
    )


def _body(form: attn_res.Form, kinds: tuple[skinny.Kind, ...], t: Tuning) -> Any:
    from jax.experimental import pallas as pl

    cut, per_row, count = t.products, t.mix.parts, len(kinds)
    makers = -(-form.rows // t.rows)  # clusters

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
    ):
        cluster, cta, wg = (lax.axis_index(name) for name in ("cluster", "cta", "wg"))
        w, rest = refs[:count], refs[count:]
        inputs = prefix, snapshots, valid, rest[4 : 5 + form.two], rest[:4]
        x, new, *outs = rest[5 + form.two :]
        (score_parts, norm_parts, totals), (sums_,) = sums
        arrived = counters.at[pl.ds(0, 1)]

        def make():
            row = cluster * t.rows + wg
            mine = (cta < per_row) & (wg < t.rows) & (row < form.rows)
            at = jnp.minimum(wg, t.rows - 1)
            scratch = score_parts.at[at], norm_parts.at[at], totals.at[at], None

            @pl.when(mine)
            def _():
                attn_res.one_row(form, row, cta, inputs, (x, new), scratch)
                meeting.arrive(arrived)

            @pl.when(jnp.logical_not(mine))
            def _():
                for i in range(attn_res.MEETINGS):
                    attn_res.meet(form, None, i)

        def use():
            held = ws, xs, sums_, full, None, None, None, None, parts
            number = (cluster - makers) * CLUSTER + cta
            tile, split = number // cut.splits, lax.rem(number, cut.splits)
            places = tile, split, wg, x, layer, x
            c = skinny.Cta(form.width, WIDTH, cut, None, False, *places, *held)
            all_ = partial(meeting.wait, arrived, form.rows * per_row)
            wait = skinny.Wait(all_, partial(all_, t.looks))
            skinny.products(c, kinds, w, outs, (), done, wait)
            if len(outs) > count:
                pl.when((number == 0) & (wg == 0))(lambda: meeting.clear(outs[-1]))

        pl.when(cluster < makers)(make)
        pl.when(cluster >= makers)(use)

    return body

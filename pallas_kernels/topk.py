"""The router's choice and the units of the routed experts in one kernel.

    logits f32 [N, E]; bias f32 [L, E], the whole stack; layer: which row of it
    ids i32 [N, k], weights f32 [N, k], units as `units.plan` gives them

score = 1 / (1 + exp(-logit)); the bias decides the choice only: ids are those of the k largest
score + bias, descending, the lower id in ties; NaN counts as -inf. weights = score / (sum + 1e-20)
* scaling, the sum taken in the order of the ids. All f32. exp is libdevice's (2 ulp at most), the
reciprocal and all else correctly rounded; XLA's sigmoid may differ in its last bits, and so the
choice between experts whose biased scores are that close.

A row belongs to a warpgroup. Groups of E / 32 experts each give their best; no expert below the
k-th best of these 32 can be chosen, which leaves about 22 of 896 (all the others, in the worst
case), and these are ranked by comparing each with each. For more than one row every chosen expert
sets its row's bit in the shared memory of all CTAs of the cluster; after one barrier each CTA
counts units over the same bits and places the pairs of its own rows.

With `shared=(hidden bf16 [N, M], w bf16 [L, D, M])` further clusters make hidden w^T, f32 [N, D],
the second product of the shared experts, which needs nothing of the choice but would wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, skinny, skinny_cta, topk_registers, topk_units, units
from pallas_kernels.skinny import Projection
from pallas_kernels.units import Units

TINY = 1e-20
LANES = 128  # the warpgroup takes so many experts at a time
MAX_CTAS = 8  # cluster size that every device takes


class Choice(NamedTuple):
    """What the routed experts need."""

    ids: jax.Array  # i32 [N, k]
    weights: jax.Array  # f32 [N, k]
    units: Units
    shared: jax.Array | None = None  # f32 [N, D]


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        ctas: one cluster of so many CTAs does it all.
        warpgroups: per CTA; each takes a row at a time.
    """

    ctas: int = 1
    warpgroups: int = 1


def default_tuning(rows: int) -> Tuning:
    """A CTA per row up to a cluster, then up to four rows at a time in each; not measured."""
    ctas = min(rows, MAX_CTAS)
    return Tuning(ctas, min(4, -(-rows // ctas)))


def _beside(rows: int, width: int, t: Tuning) -> skinny.Tuning:
    """How the product is cut: the longest rings of the widest steps that leave the choice room."""
    found = []
    for step in (128, 64):
        most = max(1, -(-width // step // t.warpgroups))
        found += [skinny.Tuning(step, n, t.warpgroups) for n in range(most, 0, -1)]
    room = common.SHARED_MEMORY * 3 // 4 if t.warpgroups > 1 else common.SHARED_MEMORY - 32768
    fits = [
        cut
        for cut in found
        if width % cut.step == 0 and skinny.shared_bytes(common.bucket(rows), cut) <= room
    ]
    return fits[0] if fits else found[-1]


def limits(
    logits: jax.Array,
    bias: jax.Array,
    *,
    k: int,
    shared: tuple[jax.Array, jax.Array] | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "rank of logits", logits.ndim, 2, logits.ndim == 2)
    common.expect(out, "rank of bias", bias.ndim, "2 (layers, experts)", bias.ndim == 2)
    if out:
        return out
    n, e = logits.shape
    t = tuning or default_tuning(min(max(n, 1), common.MAX_ROWS))
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "experts", e, "1..1024", 1 <= e <= 1024)
    common.expect(out, "experts of bias", bias.shape[1], e, bias.shape[1] == e)
    most = min(topk_registers.MAX_CHOSEN, e)
    common.expect(out, "k", k, f"1..{most}", 1 <= k <= most)
    for name, x in (("logits", logits), ("bias", bias)):
        common.expect(out, f"dtype of {name}", x.dtype, "float32", x.dtype == jnp.float32)
    common.expect(out, "ctas", t.ctas, f"1..{MAX_CTAS}", 1 <= t.ctas <= MAX_CTAS)
    common.expect(out, "warpgroups", t.warpgroups, "1..8", 1 <= t.warpgroups <= 8)
    chosen = -(-n // (t.ctas * t.warpgroups)) * k
    wanted = "at most 128 (more CTAs or warpgroups)"
    common.expect(out, "experts chosen by a warpgroup", chosen, wanted, chosen <= 128)
    if shared is None or out:
        return out
    hidden, w = shared
    common.expect(out, "rows of hidden", hidden.shape[0], n, hidden.shape[0] == n)
    if common.blackwell():  # a kernel of its own there
        return out + skinny.limits(hidden, [Projection(w)])
    cut = _beside(n, w.shape[-1], t)
    used = skinny.shared_bytes(common.bucket(n), cut) + _bytes(n, common.round_up(e, LANES), k, t)
    wanted = f"at most {common.SHARED_MEMORY} bytes"
    common.expect(out, "shared memory", used, wanted, used <= common.SHARED_MEMORY)
    return out + skinny.limits(hidden, [Projection(w)], tuning=cut)


def _bytes(n: int, e: int, k: int, t: Tuning) -> int:
    rounds = -(-n // (t.ctas * t.warpgroups))
    return 8 * e + 4 * t.warpgroups * topk_registers.scratch_words(e, k, rounds)


def reference(
    logits: jax.Array,
    bias: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
    shared: tuple[jax.Array, jax.Array] | None = None,
) -> Choice:
    """The same in plain jnp."""
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias[layer]
    _, ids = lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), k)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (jnp.sum(chosen, -1, keepdims=True) + TINY) * scaling
    beside = None
    if shared is not None:
        (beside,) = skinny.reference(shared[0], [Projection(shared[1])], layer)
    return Choice(ids, weights, units.group_rows(ids), beside)


def topk(
    logits: jax.Array,
    bias: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
    shared: tuple[jax.Array, jax.Array] | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Choice:
    """Ids, weights, units and the product, see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(logits, bias, k=k, shared=shared, tuning=tuning), "topk")
    missing = -logits.shape[1] % LANES
    if missing:  # small models: what nobody chooses before a real expert, whose number is smaller
        logits, bias = (
            jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf) for x in (logits, bias)
        )
    n, e = logits.shape
    t = tuning or default_tuning(n)
    i32, f32 = jnp.int32, jnp.float32
    out = [
        jax.ShapeDtypeStruct((n, k), i32),
        jax.ShapeDtypeStruct((n, k), f32),
        jax.ShapeDtypeStruct((2,), i32),
        jax.ShapeDtypeStruct((n * k, units.FIELDS), i32),
    ]
    if shared is not None and (interpret or common.blackwell()):  # a kernel of its own
        beside = skinny.skinny(*shared, layer, interpret=interpret)
        return topk(
            logits, bias, layer, k=k, scaling=scaling, tuning=t, interpret=interpret
        )._replace(shared=beside)
    product, operands, clusters = None, (), 1
    if shared is not None:
        hidden, w = shared
        product = _Product(w.shape[1], w.shape[2], common.bucket(n), _beside(n, w.shape[2], t))
        clusters += -(-product.kind.tiles // t.ctas)
        if n > 8:  # the copy engine takes rows by eights
            hidden = jnp.pad(hidden, ((0, -n % 8), (0, 0)))
        operands = hidden, w
        out.append(jax.ShapeDtypeStruct((n, w.shape[1]), f32))
    call = common.kernel(
        _body(n, e, k, scaling, t, product, interpret),
        "k3_topk",
        interpret=interpret,
        out_type=out,
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=_scratch(n, e, k, t, product),
        **_grid(clusters, t, interpret),
    )
    ids, weights, count, table, *rest = call(logits, bias, common.layer_operand(layer), *operands)
    if interpret:
        return Choice(ids, weights, units.group_rows(ids))
    return Choice(ids, weights, Units(count, table), *rest)


@dataclass(frozen=True)
class _Product:
    """The product beside the choice: rows and columns of w, operand's width, cut."""

    rows: int
    k: int
    width: int
    cut: skinny.Tuning

    @property
    def kind(self) -> skinny.Kind:
        """Its tiles, as `skinny` sees them."""
        tiles = -(-self.rows // skinny.TILE)
        f32 = jnp.dtype(jnp.float32)
        return skinny.Kind(self.rows, self.rows, skinny.TILE, tiles, f32, None)


def _grid(clusters: int, t: Tuning, interpret: bool) -> dict[str, Any]:
    if interpret:  # has no clusters
        return dict(grid=(clusters, t.ctas), grid_names=("cluster", "cta"))
    cut: dict[str, Any] = dict(grid=(clusters,), grid_names=("cluster",))
    return cut | dict(cluster=(t.ctas,), cluster_names=("cta",))


def _scratch(n: int, e: int, k: int, t: Tuning, product: _Product | None) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    words = topk_registers.scratch_words(e, k, -(-n // (t.ctas * t.warpgroups)))
    scratch: dict[str, Any] = dict(
        bits=plgpu.SMEM((2 * e,), jnp.int32), words=plgpu.SMEM((t.warpgroups, words), jnp.int32)
    )
    if product is not None:
        scratch |= skinny.scratch((product.kind,), product.width, product.cut)
        scratch["y"] = plgpu.SMEM((product.width, skinny.TILE), jnp.float32)
    return scratch


def _body(
    n: int, e: int, k: int, scaling: float, t: Tuning, product: _Product | None, interpret: bool
) -> Any:
    from jax.experimental import pallas as pl

    at_once = t.ctas * t.warpgroups
    rounds = -(-n // at_once)

    def body(
        logits,  # f32 [N, E]
        bias,  # f32 [L, E]
        layer,  # i32 [1]
        *others,  # of the product hidden bf16 [N, M], w bf16 [L, D, M]; then ids i32 [N, k],
        # weights f32 [N, k], count i32 [2], table i32 [N k, 10]; of the product f32 [N, D]
        bits,  # i32 [2 E]: rows 0..31 of each expert as bits, rows 32..63
        words,  # i32 [warpgroups, ..], see `topk_registers`
        **scratch,  # of the product, see `skinny.scratch`
    ):
        cluster, cta, wg = (lax.axis_index(name) for name in ("cluster", "cta", "wg"))
        operands = others[: 2 if product else 0]
        ids, weights, count, table, *beside = others[len(operands) :]
        first = cta * t.warpgroups + wg

        def choose(i):
            row = first + i * at_once
            if interpret:
                d = 1 + jnp.exp(-logits[row])
                ids[row], weights[row] = _twin(d, bias[layer[0]], k, scaling)
                return
            mine, turn = words.at[wg], dict(turn=i, rounds=rounds)
            own, selection = map(topk_registers.load, (logits.at[row], bias.at[layer[0]]))
            topk_registers.rank(1 + jnp.exp(-own), selection, mine, k, **turn)
            topk_registers.weigh(ids.at[row], weights.at[row], mine, e, scaling, **turn)

        def all_rows():
            if not interpret and n > 1:
                topk_units.clear(bits, t.warpgroups)
            for i in range(rounds):
                pl.when(first + i * at_once < n)(lambda i=i: choose(i))
            if not interpret:
                sizes = topk_units.Sizes(n, e, k, rounds, at_once, t.ctas, t.warpgroups)
                topk_units.plan(words.at[wg], bits, count, table, sizes)

        pl.when(cluster == 0)(all_rows)
        if product:
            tile = (cluster - 1) * t.ctas + cta
            pl.when((cluster > 0) & (tile < product.kind.tiles))(
                lambda: _multiply(product, tile, wg, layer, *operands, *beside, scratch)
            )

    return body


def _multiply(
    p: _Product, tile: Any, wg: Any, layer: Any, hidden: Any, w: Any, y: Any, scratch: dict
) -> None:
    """One tile of the product, by all warpgroups of a CTA."""
    held = {name: scratch[name] for name in ("ws", "xs", "sums", "full")}
    c = skinny_cta.Cta(p.k, p.width, p.cut, None, False, tile, 0, wg, hidden, layer, hidden, **held)
    skinny.products(c, (p.kind,), (w,), (y,), (scratch["y"],), scratch["done"])


def _twin(d: jax.Array, bias: jax.Array, k: int, scaling: float) -> tuple[jax.Array, jax.Array]:
    """A row's choice in plain jnp, from 1 + exp(-logits)."""
    scores = 1 / d
    biased = scores + bias
    _, ids = lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), k)
    chosen = scores[ids]
    return ids, chosen / (jnp.sum(chosen) + TINY) * scaling

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, topk_registers, topk_units, units
from pallas_kernels.units import Units

TINY = 1e-20
MAX_CTAS = 8  # cluster size that every device takes


class Choice(NamedTuple):
    """What the routed experts need."""

    ids: jax.Array  # i32 [N, k]
    weights: jax.Array  # f32 [N, k]
    units: Units


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        ctas: one cluster of so many CTAs does it all.
        warpgroups: per CTA; each takes a row at a time.
        prefetchers: clusters that only prefetch.
        prefetch_bytes: that they ask for at most.
    """

    ctas: int = 1
    warpgroups: int = 1
    prefetchers: int = 8
    prefetch_bytes: int = 16 << 20


def default_tuning(rows: int) -> Tuning:
    """A CTA per row up to a cluster, then up to four rows at a time in each; not measured."""
    ctas = min(rows, MAX_CTAS)
    return Tuning(ctas, min(4, -(-rows // ctas)), prefetchers=56 // ctas)


def limits(
    logits: jax.Array,
    bias: jax.Array,
    *,
    k: int,
    prefetch: Sequence[tuple[jax.Array, int | jax.Array]] = (),
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
    ok = e % 128 == 0 and 128 <= e <= 1024
    common.expect(out, "experts", e, "a multiple of 128 up to 1024", ok)
    common.expect(out, "experts of bias", bias.shape[1], e, bias.shape[1] == e)
    wanted = f"1..{topk_registers.MAX_CHOSEN}"
    common.expect(out, "k", k, wanted, 1 <= k <= topk_registers.MAX_CHOSEN)
    for name, x in (("logits", logits), ("bias", bias)):
        common.expect(out, f"dtype of {name}", x.dtype, "float32", x.dtype == jnp.float32)
    common.expect(out, "ctas", t.ctas, f"1..{MAX_CTAS}", 1 <= t.ctas <= MAX_CTAS)
    common.expect(out, "warpgroups", t.warpgroups, "1..8", 1 <= t.warpgroups <= 8)
    chosen = -(-n // (t.ctas * t.warpgroups)) * k
    wanted = "at most 128 (more CTAs or warpgroups)"
    common.expect(out, "experts chosen by a warpgroup", chosen, wanted, chosen <= 128)
    return out + common.prefetch_limits(prefetch)


def reference(
    logits: jax.Array,
    bias: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
) -> Choice:
    """The same in plain jnp."""
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias[layer]
    _, ids = lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), k)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (jnp.sum(chosen, -1, keepdims=True) + TINY) * scaling
    return Choice(ids, weights, units.group_rows(ids))


def topk(
    logits: jax.Array,
    bias: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
    prefetch: Sequence[tuple[jax.Array, int | jax.Array]] = (),
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Choice:
    """Ids, weights and units, see the module's docstring.

    `prefetch` holds stacks [L, ..] and the layer of each that later kernels read.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(logits, bias, k=k, prefetch=prefetch, tuning=tuning), "topk")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    n, e = logits.shape
    t = tuning or default_tuning(n)
    clusters = 1 + (t.prefetchers if prefetch else 0)
    i32, f32 = jnp.int32, jnp.float32
    if interpret:  # has no clusters
        cut = dict(grid=(clusters, t.ctas), grid_names=("cluster", "cta"))
    else:
        cut = dict(grid=(clusters,), grid_names=("cluster",))
        cut |= dict(cluster=(t.ctas,), cluster_names=("cta",))
    words = topk_registers.scratch_words(e, k, -(-n // (t.ctas * t.warpgroups)))
    call = common.kernel(
        _body(n, e, k, scaling, t, interpret),
        "k3_topk",
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((n, k), i32),
            jax.ShapeDtypeStruct((n, k), f32),
            jax.ShapeDtypeStruct((1,), i32),
            jax.ShapeDtypeStruct((n * k, units.FIELDS), i32),
        ],
        num_threads=t.warpgroups,
        thread_name="wg",
        scratch_types=dict(
            bits=plgpu.SMEM((2 * e,), i32), words=plgpu.SMEM((t.warpgroups, words), i32)
        ),
        **cut,
    )
    operands = common.prefetch_operands(prefetch)
    ids, weights, count, table = call(logits, bias, common.layer_operand(layer), *operands)
    if interpret:
        return Choice(ids, weights, units.group_rows(ids))
    return Choice(ids, weights, Units(count, table))


def _body(n: int, e: int, k: int, scaling: float, t: Tuning, interpret: bool) -> Any:
    from jax.experimental import pallas as pl

    at_once = t.ctas * t.warpgroups
    rounds = -(-n // at_once)

    def body(
        logits,  # f32 [N, E]
        bias,  # f32 [L, E]
        layer,  # i32 [1]
        *others,  # operands of the prefetch; ids i32 [N, k], weights f32 [N, k], count, table
        bits,  # i32 [2 E]: rows 0..31 of each expert as bits, rows 32..63
        words,  # i32 [warpgroups, ..], see `topk_registers`
    ):
        cluster, cta, wg = (lax.axis_index(name) for name in ("cluster", "cta", "wg"))
        prefetched, (ids, weights, count, table) = others[:-4], others[-4:]
        first = cta * t.warpgroups + wg

        def choose(i):
            row = first + i * at_once
            d = 1 + jnp.exp(-logits[row])
            if interpret:
                ids[row], weights[row] = _twin(d, bias[layer[0]], k, scaling)
                return
            out = ids.at[row], weights.at[row]
            topk_registers.choose(d, bias[layer[0]], *out, words.at[wg], i, rounds, scaling)

        def all_rows():
            if not interpret and n > 1:
                topk_units.clear(bits, t.warpgroups)
            for i in range(rounds):
                pl.when(first + i * at_once < n)(lambda i=i: choose(i))
            if not interpret:
                sizes = topk_units.Sizes(n, e, k, rounds, at_once, t.ctas, t.warpgroups)
                topk_units.plan(words.at[wg], bits, count, table, sizes)

        pl.when(cluster == 0)(all_rows)
        share, shares = (cluster - 1) * t.ctas + cta, t.prefetchers * t.ctas
        pl.when((cluster > 0) & (wg == 0))(
            lambda: common.prefetch_layers(prefetched, share, shares, t.prefetch_bytes, interpret)
        )

    return body


def _twin(d: jax.Array, bias: jax.Array, k: int, scaling: float) -> tuple[jax.Array, jax.Array]:
    """A row's choice in plain jnp, from 1 + exp(-logits)."""
    scores = 1 / d
    biased = scores + bias
    _, ids = lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), k)
    chosen = scores[ids]
    return ids, chosen / (jnp.sum(chosen) + TINY) * scaling

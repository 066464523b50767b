"""The routed experts of one row with their choice, and the shared experts' second product.

    latent bf16 [1, Z], w13 and w2 as in `experts`; logits f32 [1, E], bias f32 [L, E] as in `topk`
    hidden bf16 [1, M], shared bf16 [L, D, M]; counters i32 [128] of `meeting`, 0 but the first
    routed f32 [1, Z] as from `experts`; ids i32 [1, k], weights f32 [1, k] as from `topk`
    beside f32 [1, D] = hidden shared^T, exact products and f32 sums

One kernel, in place of `topk` and `experts`, with their rounding, but for the order of sums. One
row's choice is so little work that every CTA makes it for itself, by its last warpgroup, while the
others bring x into place; what it chose stays in shared memory. In `gate_up` one row has fewer
items than there are CTAs: those without one make the product beside (`row_product`). How the
products are cut and the weighted sum is made: `experts_pairs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, experts, meeting, topk, topk_registers
from pallas_kernels.experts import Tuning
from pallas_kernels.experts_pairs import Pairs
from pallas_kernels.experts_stage import stage
from pallas_kernels.units import COLUMNS


class Row(NamedTuple):
    """What belongs to the row, and the weights that only its choice and the product beside read."""

    latent: jax.Array  # bf16 [1, Z]
    logits: jax.Array  # f32 [1, E]
    bias: jax.Array  # f32 [L, E]
    hidden: jax.Array  # bf16 [1, M]
    shared: jax.Array  # bf16 [L, D, M]


class Found(NamedTuple):
    """What the kernel gives."""

    routed: jax.Array  # f32 or bf16 [1, Z]
    beside: jax.Array  # f32 [1, D]
    ids: jax.Array  # i32 [1, k]
    weights: jax.Array  # f32 [1, k]


def limits(
    row: Row, w13: jax.Array, w2: jax.Array, *, k: int, width: int, tuning: Tuning | None = None
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    (n, z), e, (_, d, m) = row.latent.shape, row.bias.shape[-1], row.shared.shape
    t = tuning or experts.default_tuning(1, width, z)
    ids = jax.ShapeDtypeStruct((n, k), jnp.int32)
    out = experts.limits(row.latent, ids, w13, w2, width=width, tuning=t)
    out += topk.limits(row.logits, row.bias, k=k)
    common.expect(out, "rows", n, "1", n == 1)
    common.expect(out, "one_kernel", t.one_kernel, "True", t.one_kernel)
    common.expect(out, "experts", e, f"a multiple of {topk.LANES}", e % topk.LANES == 0)
    common.expect(out, "shape of hidden", row.hidden.shape, (1, m), row.hidden.shape == (1, m))
    for name, x in (("hidden", row.hidden), ("shared", row.shared)):
        common.expect(out, f"dtype of {name}", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    words = topk_registers.scratch_words(e, k, 1)
    return out + Pairs(k, z, width, (0.0, 0.0), t, (d, m)).limits(words)


def reference(
    row: Row,
    w13: jax.Array,
    w2: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
    width: int,
    betas: tuple[float, float],
) -> Found:
    """The same in plain jnp."""
    beside = row.hidden, row.shared
    choice = topk.reference(row.logits, row.bias, layer, k=k, scaling=scaling, shared=beside)
    ids, weights, shared = choice.ids, choice.weights, choice.shared
    assert shared is not None
    same: dict[str, Any] = dict(width=width, betas=betas)
    routed = experts.reference(row.latent, ids, weights, w13, w2, layer, **same)
    return Found(routed, shared, ids, weights)


def experts_row(
    row: Row,
    w13: jax.Array,
    w2: jax.Array,
    counters: jax.Array,
    layer: int | jax.Array = 0,
    *,
    k: int,
    scaling: float,
    width: int,
    betas: tuple[float, float],
    out_dtype: Any = jnp.float32,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Found:
    """See the module's docstring; `width` is m of this rank, `layer` that of all stacks.

    With `out_dtype` bfloat16 the routed sum is rounded once, where no other rank adds to it.

    `counters` are spent, but for the first, which may have been before. In the interpreter, which
    cannot wait for other CTAs, the kernels run one after the other.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(row, w13, w2, k=k, width=width, tuning=tuning), "experts_row")
    t = tuning or experts.default_tuning(1, width, row.latent.shape[1])
    if interpret:
        beside = row.hidden, row.shared
        found = topk.topk(
            row.logits, row.bias, layer, k=k, scaling=scaling, shared=beside, interpret=True
        )
        routed = experts.experts(
            row.latent, found.ids, found.weights, w13, w2, layer, width=width, betas=betas,
            units=found.units, tuning=t, interpret=True,
        )  # fmt: skip
        assert found.shared is not None
        return Found(_rounded(routed, out_dtype), found.shared, found.ids, found.weights)
    hidden = row.shared.shape[1:]
    form = Pairs(k, row.latent.shape[1], width, betas, t, (hidden[0], hidden[1]), out_dtype)
    call = _build(form, row.bias.shape[1], scaling)
    lined = row._replace(shared=form.beside.lined(row.shared))
    held = jax.new_ref(counters)
    ids, weights, shared, _, routed = call(*lined, w13, w2, common.layer_operand(layer), held)
    return Found(routed, shared, ids, weights)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype == jnp.float32 else lax.reduce_precision(x, 8, 7).astype(dtype)


def _build(form: Pairs, e: int, scaling: float) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    cut, k = form.grid(), form.chosen
    words = topk_registers.scratch_words(e, k, 1)
    cut["scratch_types"] |= dict(
        words=plgpu.SMEM((words,), jnp.int32),
        ready=plgpu.Barrier(num_barriers=1, num_arrivals=form.t.warpgroups),
    )
    out = [
        jax.ShapeDtypeStruct((1, k), jnp.int32),
        jax.ShapeDtypeStruct((1, k), jnp.float32),
        jax.ShapeDtypeStruct((1, form.hidden[0]), jnp.float32),
        *form.shapes(),
    ]
    settings: dict[str, Any] = dict(own_barriers=form.t.own_barriers, read_once=True, out_type=out)
    return common.kernel(_body(form, e, scaling), "k3_experts_row", **settings, **cut)


@dataclass(frozen=True)
class _OnlyRow:
    """The table of `units` where there is one row: unit u is the u-th of the chosen experts."""

    words: Any  # shared i32 [..]
    first: int  # where the numbers of the chosen stand in it

    def __getitem__(self, place: Any) -> Any:
        unit, field = place
        if not isinstance(field, int):
            return unit * COLUMNS  # its only slot
        return self.words[self.first + unit] if field == 0 else jnp.int32(1)


def _body(form: Pairs, e: int, scaling: float) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    k, t, units = form.chosen, form.t, form.beside
    places = topk_registers.places_of(e, k, 1)

    def body(
        x,  # bf16 [1, Z]
        logits,  # f32 [1, E]
        bias,  # f32 [L, E]
        hidden,  # bf16 [1, M]
        shared,  # bf16 [L, D M / 128, 128]
        a,  # u32 [L, E T, lines, 32]
        b,  # u32 [L, E Z/64, lines, 32]
        layer,  # i32 [1]
        counters,  # i32 [128]
        ids,  # i32 [1, k]
        weights,  # f32 [1, k]
        beside,  # f32 [1, D]
        h,  # bf16 [k, m/32, 8, 32]
        total,  # f32 or bf16 [1, Z]
        *,
        words,  # i32 [..], see `topk_registers`
        ready,
        **scratch,
    ):
        cta, wg = form.cta(), lax.axis_index("wg")
        which = layer[0]

        def choose():
            own, selection = map(topk_registers.load, (logits.at[0], bias.at[which]))
            topk_registers.rank(1 + jnp.exp(-own), selection, words, k)

        def weigh():
            topk_registers.share(words, e, k, scaling)
            out = ids.at[0], weights.at[0], words
            pl.when(cta == 0)(lambda: topk_registers.weigh(*out, e, scaling))

        def prepare(xs, item, mine, held):
            # no CTA has two items, so of those before this one cta - item have none
            where = cta - item, wg, *held
            pl.when(mine == 0)(lambda: units.request(shared.at[which], *where))
            pl.when(wg == t.warpgroups - 1)(choose)
            pl.when(mine > 0)(partial(_stage, x, xs, wg, t.warpgroups))
            pl.when(mine == 0)(lambda: units.multiply(*where, hidden.at[0], beside.at[0]))
            plgpu.barrier_arrive(ready.at[0])
            plgpu.barrier_wait(ready.at[0])

        table, met = _OnlyRow(words, places.chosen // 4), meeting.one(counters, 1)
        shares = words.at[pl.ds(places.maxima // 4, k)]
        form.run(table, a, b, which, met, h, total, shares, **scratch, prepare=prepare, weigh=weigh)

    return body


def _stage(x: Any, xs: Any, wg: Any, warpgroups: int) -> None:
    """All of x, by the warpgroups that do not choose."""
    from jax.experimental import pallas as pl

    per, helpers = x.shape[1] // warpgroups, max(1, warpgroups - 1)
    for more in range(0, warpgroups, helpers):
        part = wg + more
        pl.when((wg < helpers) & (part < warpgroups))(
            lambda part=part: stage(x, xs, part, per, range(1), False)
        )

"""The routed experts of one row with their choice, and the shared experts' second product.

    latent bf16 [1, Z], w13 and w2 as in `experts`; logits f32 [1, E], bias f32 [L, E] as in `topk`
    hidden bf16 [1, M], shared bf16 [L, D, M]; counters i32 [128] of `meeting`, 0 but the first
    routed f32 [1, Z] as from `experts`; ids i32 [1, k], weights f32 [1, k] as from `topk`
    beside f32 [1, D] = hidden shared^T, exact products and f32 sums

One kernel, in place of `topk` and `experts`, with their rounding. One row's choice is so little
work that every CTA makes it for itself, by its last warpgroup, while the others bring x into place;
what it chose stays in shared memory. In `gate_up` one row has fewer items than there are CTAs:
those without one make the product beside, a tile per warpgroup, straight from global memory
(`row_product`). The weighted sum is in the kernel where CTAs go in pairs (`experts_pairs`), which
is the default where it fits; otherwise it is XLA's, behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, experts, meeting, row_product, topk, topk_registers
from pallas_kernels.experts import Both, Tuning
from pallas_kernels.experts_pack import HALF
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


def default_tuning(experts_: int, k: int, width: int, latent: int) -> Tuning:
    """That of `experts` for one row, with CTAs in pairs where that fits."""
    t = experts.default_tuning(1, width, latent)
    words = topk_registers.scratch_words(experts_, k, 1)
    fits = t.one_kernel and not Pairs(k, latent, width, (0.0, 0.0), t).limits(words)
    return replace(t, pairs=fits)


def limits(
    row: Row, w13: jax.Array, w2: jax.Array, *, k: int, width: int, tuning: Tuning | None = None
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    (n, z), e, (_, d, m) = row.latent.shape, row.bias.shape[-1], row.shared.shape
    t = tuning or default_tuning(e, k, width, z)
    ids = jax.ShapeDtypeStruct((n, k), jnp.int32)
    out = experts.limits(row.latent, ids, w13, w2, width=width, tuning=t)
    out += topk.limits(row.logits, row.bias, k=k)
    common.expect(out, "rows", n, "1", n == 1)
    common.expect(out, "one_kernel", t.one_kernel, "True", t.one_kernel)
    common.expect(out, "experts", e, f"a multiple of {topk.LANES}", e % topk.LANES == 0)
    items = k * (width // HALF)
    common.expect(out, "tiles of W13", items, f"fewer than {t.ctas} CTAs", items < t.ctas)
    common.expect(out, "shape of hidden", row.hidden.shape, (1, m), row.hidden.shape == (1, m))
    for name, x in (("hidden", row.hidden), ("shared", row.shared)):
        common.expect(out, f"dtype of {name}", x.dtype, "bfloat16", x.dtype == jnp.bfloat16)
    unit, group = row_product.ROWS, row_product.GROUP
    common.expect(out, "rows of shared", d, f"a multiple of {unit}", d % unit == 0)
    wanted = f"a multiple of {group}, at most {row_product.MOST}"
    ok = m % group == 0 and m <= row_product.MOST
    common.expect(out, "columns of shared", m, wanted, ok)
    words = topk_registers.scratch_words(e, k, 1)
    if t.pairs:
        return out + Pairs(k, z, width, (0.0, 0.0), t).limits(words)
    used, limit = experts.shared_bytes(z, width, t) + 4 * words, common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


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
    t = tuning or default_tuning(row.bias.shape[1], k, width, row.latent.shape[1])
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
    call = _build(row, k, scaling, width, betas, t, out_dtype)
    held = jax.new_ref(counters)
    ids, weights, shared, _, last = call(*row, w13, w2, common.layer_operand(layer), held)
    routed = last if t.pairs else _rounded(experts.weighted_sum(last, weights), out_dtype)
    return Found(routed, shared, ids, weights)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype == jnp.float32 else lax.reduce_precision(x, 8, 7).astype(dtype)


def _build(
    row: Row, k: int, scaling: float, width: int, betas: tuple[float, float], t: Tuning, dtype: Any
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    z, e, d = row.latent.shape[1], row.bias.shape[1], row.shared.shape[1]
    form = Pairs(k, z, width, betas, t, dtype) if t.pairs else Both(1, k, z, width, betas, t)
    cut = form.grid()
    words = topk_registers.scratch_words(e, k, 1)
    cut["scratch_types"] |= dict(
        words=plgpu.SMEM((words,), jnp.int32),
        ready=plgpu.Barrier(num_barriers=1, num_arrivals=t.warpgroups),
    )
    out = [
        jax.ShapeDtypeStruct((1, k), jnp.int32),
        jax.ShapeDtypeStruct((1, k), jnp.float32),
        jax.ShapeDtypeStruct((1, d), jnp.float32),
        *form.shapes(),
    ]
    settings: dict[str, Any] = dict(own_barriers=t.own_barriers, read_once=True, out_type=out)
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


def _body(form: Both | Pairs, e: int, scaling: float) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    k, t = form.chosen, form.t
    places = topk_registers.places_of(e, k, 1)
    spare = t.ctas - k * (form.width // HALF)  # CTAs without an item

    def body(
        x,  # bf16 [1, Z]
        logits,  # f32 [1, E]
        bias,  # f32 [L, E]
        hidden,  # bf16 [1, M]
        shared,  # bf16 [L, D, M]
        a,  # u32 [L, E T, lines, 32]
        b,  # u32 [L, E Z/64, lines, 32]
        layer,  # i32 [1]
        counters,  # i32 [128]
        ids,  # i32 [1, k]
        weights,  # f32 [1, k]
        beside,  # f32 [1, D]
        h,  # bf16 [k, m/32, 8, 32]
        last,  # bf16 [k, Z] of the experts, or their sum f32 [1, Z]
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
            if not isinstance(form, Pairs):
                weigh()

        def weigh():
            out = ids.at[0], weights.at[0], words
            pl.when(cta == 0)(lambda: topk_registers.weigh(*out, e, scaling))

        def share():
            topk_registers.share(words, e, k, scaling)
            weigh()

        def prepare(xs, start, mine):
            pl.when(wg == t.warpgroups - 1)(choose)
            pl.when(mine > 0)(partial(_stage, x, xs, wg, t.warpgroups))
            # no CTA has two items, so of those before this one cta - start have none; warpgroup
            # after warpgroup, so that the last, which chooses, gets the fewest tiles
            number = wg * spare + cta - start
            tiles = partial(_multiply, hidden, shared, which, beside, number, t.warpgroups * spare)
            pl.when(mine == 0)(tiles)
            plgpu.barrier_arrive(ready.at[0])
            plgpu.barrier_wait(ready.at[0])

        table, met = _OnlyRow(words, places.chosen // 4), meeting.one(counters, 1)
        if isinstance(form, Pairs):
            shares = words.at[pl.ds(places.maxima // 4, k)]
            form.run(
                table, a, b, which, met, h, last, shares, **scratch, prepare=prepare, weigh=share
            )
        else:
            form.run(x, None, table, a, b, layer, met, h, last, **scratch, prepare=prepare)

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


def _multiply(hidden: Any, shared: Any, which: Any, beside: Any, first: Any, stride: int) -> None:
    """A warpgroup's tiles of the product beside: first, first + stride, ..."""
    from jax.experimental import pallas as pl

    tiles = shared.shape[1] // row_product.ROWS

    def tile(i, _):
        rows = pl.ds((first + i * stride) * row_product.ROWS, row_product.ROWS)
        row_product.product(shared.at[which, rows], hidden.at[0], beside.at[0, rows])

    lax.fori_loop(0, (tiles - first + stride - 1) // stride, tile, None)

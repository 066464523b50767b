"""KDA of one layer and the output projection of its heads in one kernel, for few rows.

    operands of `kda`;  w bf16 [L, D, P], the stack of `o_proj`;  counters i32 [128], of which
    counter `COUNTER` is at 0 (`meeting`)
    -> what `kda` gives;  y = heads w^T, f32 [N, D];  counters at 0 for a kernel behind it

The first CTAs of the grid are those of `kda` and wait for nobody. All others hold rows of w and
wait for the heads, see `late_product`. Rounding is that of `kda` and `skinny`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from pallas_kernels import common, kda, late_product, meeting, skinny
from pallas_kernels.kda import Rows, Weights
from pallas_kernels.late_product import Sizes, Tuning
from pallas_kernels.skinny import Projection

COUNTER = 1  # 0 may be spent: by the mixture in front of this kernel (`mix_products`)


def _sizes(fused: jax.Array, state: jax.Array, w: jax.Array) -> Sizes:
    return Sizes(fused.shape[0], w.shape[1], state.shape[2] * kda.WIDTH, kda.GROUPS)


def default_tuning(fused: jax.Array, state: jax.Array, rows: Rows, w: jax.Array) -> Tuning:
    """For the CTAs that the heads leave."""
    return late_product.default_tuning(_sizes(fused, state, w), rows.slot.shape[0] * state.shape[2])


def limits(
    fused: jax.Array,
    state: jax.Array,
    window: jax.Array,
    weights: Weights,
    rows: Rows,
    w: jax.Array,
    *,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out = kda.limits(fused, state, window, weights, rows)
    common.expect(out, "rank of w", w.ndim, 3, w.ndim == 3)
    if out:
        return out
    batch, heads = rows.slot.shape[0], state.shape[2]
    s, t = _sizes(fused, state, w), tuning or default_tuning(fused, state, rows, w)
    out += late_product.limits(s, batch * heads, w, t)
    shape = kda.Shape(fused.shape[0] // batch, heads, weights.conv1d.shape[2], False)
    used, limit = kda.shared_bytes(shape) + s.shared_bytes(t), common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def reference(
    fused: jax.Array,
    state: jax.Array,
    window: jax.Array,
    weights: Weights,
    layer: int | jax.Array,
    rows: Rows,
    w: jax.Array,
    **settings: Any,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The same in plain jnp, but for the counters."""
    found = kda.reference(fused, state, window, weights, layer, rows, **settings)
    return found, skinny.reference(found[0], [Projection(w)], layer)[0]


def kda_out(
    fused: jax.Array,
    state: jax.Array,
    window: jax.Array,
    weights: Weights,
    layer: int | jax.Array,
    rows: Rows,
    w: jax.Array,
    counters: jax.Array,
    *,
    eps: float,
    lower_bound: float,
    commit: bool,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """What `kda` gives, y, and new counters; see the module.

    `counters` are spent: no other kernel may have them. In the interpreter, which cannot wait for
    other CTAs, the two halves run one after the other.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(fused, state, window, weights, rows, w, tuning=tuning), "kda_out")
    t = tuning or default_tuning(fused, state, rows, w)
    batch, heads = rows.slot.shape[0], state.shape[2]
    settings: dict[str, Any] = dict(eps=eps, lower_bound=lower_bound, commit=commit)
    if interpret:
        found = kda.kda(fused, state, window, weights, layer, rows, interpret=True, **settings)
        y = late_product.alone(found[0], w, layer, warpgroups=kda.GROUPS, tuning=t, interpret=True)
        return found, y, meeting.counters()
    shape = kda.Shape(fused.shape[0] // batch, heads, weights.conv1d.shape[2], commit)
    call = _build(shape, batch, _sizes(fused, state, w), t, eps, lower_bound)
    operands = *weights, common.layer_operand(layer), *rows, jax.new_ref(counters), w
    if not commit:
        *found, y, zeros = call(fused, state, window, *operands)
        return tuple(found), y, zeros
    held = jax.new_ref(state), jax.new_ref(window)
    made, y, zeros = call(fused, *held, *operands)
    return (made, jax.freeze(held[0]), jax.freeze(held[1])), y, zeros


def _build(
    shape: kda.Shape, batch: int, s: Sizes, t: Tuning, eps: float, lower_bound: float
) -> Any:
    makers = batch * shape.heads
    return common.kernel(
        _body(shape, makers, s, t, kda.body_of(shape, eps, lower_bound, False)),
        "k3_kda_out",
        own_barriers=True,
        read_once=True,
        out_type=[*kda.outputs(batch, shape), *late_product.outputs(s)],
        grid=(makers + s.tiles(t),),
        grid_names=("place",),
        num_threads=kda.GROUPS,
        thread_name="wg",
        scratch_types=dict(parts=late_product.scratch(s, t), **kda.scratch(shape)),
    )


def _body(shape: kda.Shape, makers: int, s: Sizes, t: Tuning, head: Any) -> Any:
    from jax.experimental import pallas as pl

    def body(*refs, parts, **held):
        inputs, (counters, w), (*found, y, zeros) = refs[:12], refs[12:14], refs[14:]
        layer, heads = inputs[8][0], found[0]
        place, wg = lax.axis_index("place"), lax.axis_index("wg")
        wait = late_product.Wait(meeting.one(counters, COUNTER), makers * kda.GROUPS)

        def make():
            where = place // shape.heads, lax.rem(place, shape.heads), wg
            made = partial(meeting.arrive, wait.counter, copied=False)
            head(*inputs, *found, **held, place=where, made=made)

        def use():
            pl.when((place == makers) & (wg == 0))(lambda: meeting.clear(zeros))
            late_product.multiply(s, t, place - makers, w.at[layer], heads, y, parts, wait)

        pl.when(place < makers)(make)
        pl.when(place >= makers)(use)

    return body

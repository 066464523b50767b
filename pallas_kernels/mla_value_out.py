"""`mla_value` and the output projection of the heads it makes in one kernel, for few rows.

    operands of `mla_value`;  w bf16 [L, D, H V], the stack of `o_proj`;  counters i32 [128], of
    which counter `COUNTER` is at 0 (`meeting`)
    -> heads bf16 [N, H V];  y = heads w^T, f32 [N, D];  counters at 0 for a kernel behind it

The first CTAs of the grid are those of `mla_value` and wait for nobody. All others hold rows of w
and wait for the heads, see `late_product`. Rounding is that of `mla_value` and `skinny`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from pallas_kernels import common, late_product, meeting, mla_value, skinny
from pallas_kernels.late_product import Sizes
from pallas_kernels.mla_attend import Parts
from pallas_kernels.skinny import Projection

COUNTER = 1
MAKERS = 48  # CTAs that make heads: more would leave the others more rows than registers hold


@dataclass(frozen=True)
class Tuning:
    """How both halves are cut."""

    value: mla_value.Tuning
    product: late_product.Tuning


def default_tuning(s: mla_value.Sizes, d: int) -> Tuning:
    """As few rows per CTA that makes heads as leaves room for the product's CTAs."""
    groups = max(1, MAKERS // (s.tiles * s.heads))
    value = mla_value.Tuning(max(1, -(-s.n // groups)))
    return Tuning(value, late_product.default_tuning(_product(s, d), _makers(s, value)))


def _product(s: mla_value.Sizes, d: int) -> Sizes:
    return Sizes(s.n, d, s.heads * s.values, s.warpgroups)


def _makers(s: mla_value.Sizes, t: mla_value.Tuning) -> int:
    return s.tiles * s.heads * -(-s.n // t.rows)


def limits(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    w: jax.Array,
    *,
    heads: int,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out = mla_value.limits(
        parts, ends, gate, kv_b, heads=heads, tuning=None if tuning is None else tuning.value
    )
    common.expect(out, "rank of w", w.ndim, 3, w.ndim == 3)
    if out:
        return out
    s = mla_value.sizes(parts, ends, gate, kv_b, heads)
    t, product = tuning or default_tuning(s, w.shape[1]), _product(s, w.shape[1])
    out += mla_value.limits(parts, ends, gate, kv_b, heads=heads, tuning=t.value)
    out += late_product.limits(product, _makers(s, t.value), w, t.product)
    used = mla_value.shared_bytes(s) + product.shared_bytes(t.product)
    limit = common.SHARED_MEMORY
    common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
    return out


def reference(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    heads: int,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp, but for the counters."""
    found = mla_value.reference(parts, ends, gate, kv_b, layer, heads=heads)
    return found, skinny.reference(found, [Projection(w)], layer)[0]


def value_out(
    parts: Parts,
    ends: jax.Array,
    gate: jax.Array,
    kv_b: jax.Array,
    w: jax.Array,
    counters: jax.Array,
    layer: int | jax.Array = 0,
    *,
    heads: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads, y, and new counters; see the module.

    `counters` are spent: no other kernel may have them. In the interpreter, which cannot wait for
    other CTAs, the two halves run one after the other.

    Raises:
        ValueError: `limits` are not met.
    """
    unmet = limits(parts, ends, gate, kv_b, w, heads=heads, tuning=tuning)
    common.require(unmet, "mla_value_out")
    s = mla_value.sizes(parts, ends, gate, kv_b, heads)
    t = tuning or default_tuning(s, w.shape[1])
    if interpret:
        found = mla_value.value(
            parts, ends, gate, kv_b, layer, heads=heads, tuning=t.value, interpret=True
        )
        y = late_product.alone(
            found, w, layer, warpgroups=s.warpgroups, tuning=t.product, interpret=True
        )
        return found, y, meeting.counters()
    product, makers = _product(s, w.shape[1]), _makers(s, t.value)
    call = common.kernel(
        _body(s, product, makers, t),
        "k3_mla_value_out",
        out_type=[jax.ShapeDtypeStruct(gate.shape, gate.dtype), *late_product.outputs(product)],
        grid=(makers + product.tiles(t.product),),
        grid_names=("place",),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=dict(sums=late_product.scratch(product, t.product), **mla_value.scratch(s)),
    )
    operands = *parts, ends, gate, kv_b, common.layer_operand(layer)
    found, y, zeros = call(*operands, jax.new_ref(counters), w)
    return found, y, zeros


def _body(s: mla_value.Sizes, product: Sizes, makers: int, t: Tuning) -> Any:
    from jax.experimental import pallas as pl

    one_tile = mla_value.body_of(s, t.value, False)

    def body(*refs, sums, **held):
        inputs, (counters, w, heads, y, zeros) = refs[:6], refs[6:]
        place, wg = lax.axis_index("place"), lax.axis_index("wg")
        wait = late_product.Wait(meeting.one(counters, COUNTER), makers)

        def make():
            head, group = lax.rem(place // s.tiles, s.heads), place // (s.tiles * s.heads)
            where = lax.rem(place, s.tiles), head, group, wg
            made = partial(meeting.arrive, wait.counter, copied=False)
            one_tile(*inputs, heads, **held, place=where, made=made)

        def use():
            pl.when((place == makers) & (wg == 0))(lambda: meeting.clear(zeros))
            tile, rows = place - makers, w.at[inputs[5][0]]
            late_product.multiply(product, t.product, tile, rows, heads, y, sums, wait)

        pl.when(place < makers)(make)
        pl.when(place >= makers)(use)

    return body

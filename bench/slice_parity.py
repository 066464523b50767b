"""Layers of the measured program against the standard path in float32, at the same weights.

One KDA and one MLA layer with experts, on random streams that both sides get bit by bit, so that
errors do not chain. The reference rounds nowhere and multiplies at full precision. Its heads attend
over the rows that the measured side wrote, for a row that falls to the other side of an FP8 step is
no error; the rows are compared apart. Its feed-forward part starts from the measured side's own y
and expert ids, for a near-tie of the router is no error; that the chosen experts are the best ones
is checked by score. Expert weights are the reference's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.collectives import all_max
from jax_impl.model import Stream, layer_weights, place, run_layer
from jax_impl.output import json_number
from jax_impl.params import Moe, Weights
from jax_impl.selftest_stages import (
    FP8_ROWS,
    chosen,
    exact,
    mla_over,
    rel_l2,
    written_rows,
)
from jax_impl.sharding import (
    ONE_DEVICE,
    P,
    Placement,
    cache_specs,
    input_specs,
    weight_specs,
)
from jax_impl.static import Static
from parity.tolerances import TOLERANCES


def checked_layers(static: Static) -> dict[str, int]:
    """First layer with experts of each attention kind."""
    c = static.config
    moe = [i for i in range(c.num_hidden_layers) if not c.is_dense(i)]
    first = {"kda": [i for i in moe if not c.is_mla(i)], "mla": [i for i in moe if c.is_mla(i)]}
    return {kind: layers[0] for kind, layers in first.items() if layers}


def layer_check(
    static: Static, backend: Backend, layer: int, placement: Placement = ONE_DEVICE
) -> Any:
    """Jitted: (weights, cache, inputs, prefix, bank, delta) -> distances by quantity, f32 scalars.

    prefix, delta [N, D] and bank [N, J, D] in the compute dtype, equal on all ranks. Over the ranks
    of a mesh the largest distance counts.
    """
    reference = exact(static)

    def run(
        weights: Weights, cache: Cache, inputs: StepInputs, *stream: jax.Array
    ) -> dict[str, jax.Array]:
        got, after = _run(static, backend, layer, weights, cache, inputs, *stream)
        wide = replace(cache, conv_window=cache.conv_window.astype(jnp.float32))
        raised = [x.astype(jnp.float32) for x in stream]
        standard = AUTO._replace(mla=mla_over(after.kv_latent))
        want, wanted = _run(reference, standard, layer, weights, wide, inputs, *raised)
        found = {name: rel_l2(got[name], want[name]) for name in ("heads", "prefix", "y")}
        found |= _feed_forward(reference, weights, layer, got)
        found |= _caches(static, layer, inputs, cache, after, wanted)
        return {name: all_max(value, static.ranks) for name, value in found.items()}

    if placement.mesh is None:
        return jax.jit(run)
    laid = (weight_specs(static.config, static.run), cache_specs(static.run), input_specs())
    # distances of values that are equal on all ranks are equal too: nothing for the check to see
    shared = jax.shard_map(
        run, mesh=placement.mesh, in_specs=(*laid, P(), P(), P()), out_specs=P(), check_vma=False
    )
    return jax.jit(shared)


def _run(static, backend, layer, weights, cache, inputs, prefix, bank, delta):
    record: dict[str, Any] = {}
    w = layer_weights(static, weights, layer, backend.whole_stacks)
    stream = Stream(prefix, bank, delta)
    _, cache, _ = run_layer(static, backend, w, place(static, layer), stream, cache, inputs, record)
    return record, cache


def _feed_forward(exact: Static, weights: Weights, layer: int, got: dict[str, Any]):
    """Distance of `delta`, and how far the chosen experts are from the best by score."""
    w = layer_weights(exact, weights, layer).mlp
    assert isinstance(w, Moe)  # `checked_layers` takes no other
    y, ids = got["y"].astype(jnp.float32), got["ids"]
    gap, share = chosen(exact, w, y, ids)
    routed = AUTO.route(exact, w, y)._replace(ids=ids, weights=share)
    shares = AUTO.experts(exact, w, routed)
    delta = AUTO.moe_out(exact, w, shares.routed, shares.shared)
    return {"router_gap": gap, "delta": rel_l2(got["delta"], delta)}


def _caches(static: Static, layer: int, inputs: StepInputs, before: Cache, got: Cache, want: Cache):
    """Distances of what the step wrote."""
    ordinal = static.config.attn_ordinal(layer)
    if not static.config.is_mla(layer):
        return {
            name: rel_l2(
                getattr(got, name)[ordinal][inputs.slot], getattr(want, name)[ordinal][inputs.slot]
            )
            for name in ("kda_state", "conv_window")
        }
    pages = (ordinal, inputs.page_table)
    a, b = written_rows(*(x.kv_latent[pages] for x in (before, got, want)))
    return {"kv_latent": rel_l2(a, b)}


def limits(static: Static) -> dict[str, float]:
    """Largest distance by quantity, from the parity suite's table."""
    limit = lambda name: TOLERANCES[name, static.run.compute].limit  # noqa: E731
    found = dict.fromkeys(("heads", "prefix", "y", "delta"), limit("sublayer"))
    found |= dict.fromkeys(("kda_state", "conv_window", "kv_latent"), limit("sublayer_cache"))
    gap = TOLERANCES["router_ids", "any"].limit
    if static.run.fp8:
        found["kv_latent"] = FP8_ROWS
    return found | {"router_gap": gap}


def verdict(static: Static, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The `parity` of a result from distances by case and layer; NaN never passes."""
    allowed = limits(static)
    comparisons = [
        {"what": f"{where}.{name}", "found": json_number(value), "limit": allowed[name],
         "passed": value <= allowed[name]}
        for where, distances in found.items()
        for name, value in distances.items()
    ]  # fmt: skip
    passed = bool(comparisons) and all(c["passed"] for c in comparisons)
    return {
        "verdict": "passed" if passed else "failed",
        "against": "standard path in float32 at the highest precision, one KDA and one MLA layer "
        "with experts on equal inputs",
        "comparisons": comparisons,
    }

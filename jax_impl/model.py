"""The one layer loop, parametrised by a `Backend`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_impl.backend import Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.params import Dense, Kda, Layer, LayerWeights, Moe, Weights
from jax_impl.stages.contract import Delta, whole
from jax_impl.static import Static

Record = dict[str, Any]  # stage outputs by name, filled while tracing


class Stream(NamedTuple):
    """What flows from layer to layer within one step."""

    prefix: jax.Array  # compute dtype [N, D], running sum of the block
    snapshots: jax.Array  # compute dtype [N, J, D]; rows not yet taken hold nothing meaningful
    delta: jax.Array | Delta  # compute dtype [N, D], feed-forward output not yet in the prefix
    entered: jax.Array | None = None  # [N, D], output of the layer before: prefix + delta


class Forward(NamedTuple):
    """What all layers together give."""

    hidden: jax.Array  # compute dtype [N, D], after the final norm
    cache: Cache
    pending: list[Any]  # without commit: what `kda_commit` needs, per KDA layer
    taps: jax.Array | None  # compute dtype [N, G D], the tapped streams side by side


class Place(NamedTuple):
    """Where a layer stands. `starts_block` is static, the rest may be data."""

    starts_block: bool
    snapshots: int | jax.Array  # snapshots taken before this layer
    attention: int | jax.Array  # ordinal among the layers of the same attention kind


def layer_weights(
    static: Static, weights: Weights, layer: int, whole_stacks: bool = False
) -> LayerWeights:
    """Weights of layer `layer` (0-based): slices of the stacks, or with `whole_stacks` places."""
    c = static.config
    attention = weights.mla if c.is_mla(layer) else weights.kda
    mlp = weights.dense if c.is_dense(layer) else weights.moe
    found = LayerWeights(
        Layer(weights.layer, layer),
        Layer(attention, c.attn_ordinal(layer)),
        Layer(mlp, c.mlp_ordinal(layer)),
    )
    return found if whole_stacks else LayerWeights(*(part.sliced() for part in found))


def _is(weights: Any, kind: type) -> bool:
    return isinstance(weights.stacks if isinstance(weights, Layer) else weights, kind)


def place(static: Static, layer: int) -> Place:
    """Where layer `layer` (0-based) stands."""
    c = static.config
    return Place(c.starts_block(layer), c.snapshots_before(layer), c.attn_ordinal(layer))


def run_layer(
    static: Static,
    backend: Backend,
    w: LayerWeights,
    where: Place,
    stream: Stream,
    cache: Cache,
    inputs: StepInputs,
    record: Record | None = None,
    *,
    commit: bool = True,
) -> tuple[Stream, Cache, Any]:
    """One layer.

    With `commit` the KDA state takes in all real tokens at once; without it the state stays as it
    was and what `kda_commit` needs is returned (None in MLA layers and with `commit`).
    """
    x, prefix, snapshots = backend.attn_in(
        static, w, stream.prefix, stream.snapshots, where.snapshots, stream.delta,
        starts_block=where.starts_block,
    )  # fmt: skip
    pending = None
    if not _is(w.attention, Kda):
        heads, kv = backend.mla(
            static, w.attention, where.attention, x, inputs, cache.kv_latent, cache.kv_scale
        )
        cache = cache.replace(kv_latent=kv)
    elif commit:
        heads, state, window = backend.kda_step(
            static, w.attention, where.attention, x, inputs, cache.kda_state, cache.conv_window
        )
        cache = cache.replace(kda_state=state, conv_window=window)
    else:
        heads, pending = backend.kda(
            static, w.attention, where.attention, x, inputs, cache.kda_state, cache.conv_window
        )
    y, after = backend.attn_out(
        static, w, heads, prefix, snapshots,
        where.snapshots + where.starts_block, starts_block=where.starts_block,
    )  # fmt: skip
    delta, chosen = feed_forward(static, backend, w.mlp, y)
    if record is not None:
        record |= {"x": x, "prefix_in": prefix, "heads": heads, "y": y, "prefix": after}
        record |= {"delta": whole(static.nx, delta)} | chosen
    return Stream(after, snapshots, delta, prefix), cache, pending


def feed_forward(
    static: Static, backend: Backend, w: Dense | Moe | Layer, y: jax.Array
) -> tuple[jax.Array | Delta, Record]:
    """Dense part or mixture of experts: y [N, D] -> delta [N, D], and what the stages returned."""
    if _is(w, Dense):
        return backend.dense(static, w, y), {}
    chosen = backend.route(static, w, y)
    routed = backend.experts(static, w, chosen)
    delta = backend.moe_out(static, w, routed, chosen.shared)
    outputs = {"latent": chosen.latent, "ids": chosen.ids, "weights": chosen.weights}
    return delta, outputs | {"routed": routed, "shared": chosen.shared}


def forward(
    static: Static,
    backend: Backend,
    weights: Weights,
    cache: Cache,
    inputs: StepInputs,
    record: dict[str, Any] | None = None,
    *,
    commit: bool = True,
    taps: tuple[int, ...] = (),
) -> Forward:
    """All layers: tokens [B, T] -> hidden [N, D], the cache, pending KDA commits and taps.

    Args:
        record: if given, filled with every stage output under `layerNN.<name>`, `embed`,
            `snapshots`, `hidden`.
        commit: False keeps the KDA state as it was; the pending commits come back per KDA layer.
        taps: layers (0-based, ascending) whose output, the un-normalised running sum, is wanted.
    """
    c = static.config
    embedded = backend.embed(static, weights.root, inputs)
    bank = jnp.zeros((embedded.shape[0], c.num_snapshots, c.hidden_size), embedded.dtype)
    stream = Stream(embedded, bank, jnp.zeros_like(embedded))
    pending, left = [], []
    for layer in range(c.num_hidden_layers):
        found: Record | None = None if record is None else {}
        with jax.named_scope(f"layer{layer:02d}"):
            stream, cache, waiting = run_layer(
                static, backend, layer_weights(static, weights, layer, backend.whole_stacks),
                place(static, layer), stream, cache, inputs, found, commit=commit,
            )  # fmt: skip
        if waiting is not None:
            pending.append(waiting)
        if layer - 1 in taps:
            left.append(stream.entered)
        if record is not None and found is not None:
            record |= {f"layer{layer:02d}.{name}": value for name, value in found.items()}
    hidden, last = backend.head_in(
        static, weights.root, stream.prefix, stream.snapshots, c.num_snapshots, stream.delta
    )
    if c.num_hidden_layers - 1 in taps:
        left.append(last)
    if record is not None:
        record |= {"embed": embedded, "snapshots": stream.snapshots, "hidden": hidden}
    return Forward(hidden, cache, pending, jnp.concatenate(left, axis=-1) if left else None)

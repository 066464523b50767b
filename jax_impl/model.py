"""The one layer loop, parametrised by a `Backend`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.backend import Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.config import ModelConfig
from jax_impl.params import Dense, Kda, Layer, LayerWeights, Moe, Weights
from jax_impl.stages.contract import Delta, plain, whole
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


class Repeat(NamedTuple):
    """From layer `first` on, `period` layers that come `turns` times in the same order of kinds."""

    first: int
    period: int
    turns: int


def repeated(config: ModelConfig) -> Repeat:
    """Runs of layers with experts, as many as an AttnRes block has, all like the first of them.

    They begin behind the first layer with experts, as a dense one may hand on a delta of another
    form, and not with a block: each has one start of a block in it, at the same place, and fewer
    layers are left over.
    """
    c, first, period = config, config.first_k_dense_replace + 1, config.attn_res_block_size

    def alike(turn: int) -> bool:
        begin = first + turn * period
        return begin + period <= c.num_hidden_layers and all(
            c.is_mla(first + i) == c.is_mla(begin + i) for i in range(period)
        )

    return Repeat(first, period, next(t for t in itertools.count() if not alike(t)))


def loop_of(config: ModelConfig, backend: Backend) -> Repeat | None:
    """The layers that run as one loop; None where all are unrolled.

    Only for stages that take whole stacks: a slice at a number known at run time is a copy.
    """
    again = repeated(config)
    return again if backend.whole_stacks and again.turns > 1 else None


def layer_weights(
    static: Static,
    weights: Weights,
    layer: int,
    whole_stacks: bool = False,
    turn: int | jax.Array = 0,
) -> LayerWeights:
    """Weights of layer `layer` (0-based): slices of the stacks, or with `whole_stacks` places.

    With `turn`, which may be data, those of the layer so many whole repeats further.
    """
    c = static.config
    attention = weights.mla if c.is_mla(layer) else weights.kda
    mlp = weights.dense if c.is_dense(layer) else weights.moe
    found = LayerWeights(
        Layer(weights.layer, _further(c, lambda i: i, layer, turn)),
        Layer(attention, _further(c, c.attn_ordinal, layer, turn)),
        Layer(mlp, _further(c, c.mlp_ordinal, layer, turn)),
    )
    return found if whole_stacks else LayerWeights(*(part.sliced() for part in found))


def _further(
    c: ModelConfig, number: Callable[[int], int], layer: int, turn: int | jax.Array
) -> int | jax.Array:
    """`number` of the layer `turn` repeats after `layer`; it grows by the same in each."""
    here = number(layer)
    if isinstance(turn, int) and turn == 0:
        return here
    return here + turn * (number(layer + c.attn_res_block_size) - here)


def _is(weights: Any, kind: type) -> bool:
    return isinstance(weights.stacks if isinstance(weights, Layer) else weights, kind)


def place(static: Static, layer: int, turn: int | jax.Array = 0) -> Place:
    """Where layer `layer` (0-based) stands, or the layer `turn` whole repeats further."""
    c = static.config
    return Place(
        c.starts_block(layer),
        _further(c, c.snapshots_before, layer, turn),
        _further(c, c.attn_ordinal, layer, turn),
    )


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
        record |= {"x": plain(x), "prefix_in": prefix, "heads": plain(heads), "y": plain(y)}
        record |= {"prefix": after, "delta": whole(static.nx, delta)} | chosen
    return Stream(after, snapshots, delta, prefix), cache, pending


def feed_forward(
    static: Static, backend: Backend, w: Dense | Moe | Layer, y: jax.Array
) -> tuple[jax.Array | Delta, Record]:
    """Dense part or mixture of experts: y [N, D] -> delta [N, D], and what the stages returned."""
    if _is(w, Dense):
        return backend.dense(static, w, y), {}
    chosen = backend.route(static, w, y)
    shares = backend.experts(static, w, chosen)
    delta = backend.moe_out(static, w, shares.routed, shares.shared)
    return delta, {"latent": chosen.latent} | shares._asdict()


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
    again = loop_of(c, backend) if record is None else None
    embedded = backend.embed(static, weights.root, inputs)
    bank = jnp.zeros((embedded.shape[0], c.num_snapshots, c.hidden_size), embedded.dtype)
    stream = Stream(embedded, bank, jnp.zeros_like(embedded))

    def layers(which: range, turn: int | jax.Array, stream: Stream, cache: Cache) -> Any:
        """These layers, or those `turn` repeats further; pending commits, and each one's input."""
        pending, entered = [], {}
        for layer in which:
            found: Record | None = None if record is None else {}
            with jax.named_scope(f"layer{layer:02d}"):
                stream, cache, waiting = run_layer(
                    static, backend,
                    layer_weights(static, weights, layer, backend.whole_stacks, turn),
                    place(static, layer, turn), stream, cache, inputs, found, commit=commit,
                )  # fmt: skip
            pending += [] if waiting is None else [waiting]
            entered[layer] = stream.entered
            if record is not None and found is not None:
                record.update({f"layer{layer:02d}.{name}": value for name, value in found.items()})
        return stream, cache, pending, entered

    if again is not None:
        stream, cache, pending, entered = _with_loop(again, c.num_hidden_layers, layers, taps)(
            stream, cache
        )
    else:
        stream, cache, pending, entered = layers(range(c.num_hidden_layers), 0, stream, cache)
    left = [entered[tap + 1] for tap in taps if tap + 1 in entered]
    hidden, last = backend.head_in(
        static, weights.root, stream.prefix, stream.snapshots, c.num_snapshots, stream.delta
    )
    if c.num_hidden_layers - 1 in taps:
        left.append(last)
    if record is not None:
        record |= {"embed": embedded, "snapshots": stream.snapshots, "hidden": hidden}
    return Forward(hidden, cache, pending, jnp.concatenate(left, axis=-1) if left else None)


def _with_loop(again: Repeat, total: int, layers: Callable, taps: tuple[int, ...]) -> Callable:
    """`layers` over all of the model, its repeated part a loop: a program of a quarter the size."""
    first, period, turns = again
    once = range(first, first + period)
    # inputs of layers that somebody wants; in the loop the same ones of every turn
    wanted = {(tap + 1 - first) % period for tap in taps if 0 <= tap + 1 - first < turns * period}

    def run(stream: Stream, cache: Cache) -> Any:
        def body(carry: tuple[Stream, Cache], turn: jax.Array) -> Any:
            stream, cache, pending, entered = layers(once, turn, *carry)
            return (stream, cache), (pending, {i: entered[first + i] for i in sorted(wanted)})

        stream, cache, pending, entered = layers(range(first), 0, stream, cache)
        (stream, cache), (kept, found) = lax.scan(body, (stream, cache), jnp.arange(turns))
        for turn in range(turns):
            pending += [jax.tree.map(lambda a, t=turn: a[t], one) for one in kept]
            entered |= {first + turn * period + i: found[i][turn] for i in found}
        stream, cache, more, last = layers(range(first + period * turns, total), 0, stream, cache)
        return stream, cache, pending + more, entered | last

    return run

"""Random weights made on the devices, layer by layer, in the layout that the loader gives.

Nothing passes through the host, so one rank's 98 GB at the released sizes take seconds. Every layer
has values of its own. Ranges are chosen so that activations keep their size from layer to layer and
the router spreads its rows over the experts:

    matrices        uniform, standard deviation 1 / sqrt(columns on this rank) times a gain
    norms           uniform in 0.75..1.25
    expert codes    all bytes alike; scale bytes of three neighbouring powers of two
    selection bias  within 1e-3: the scores decide, not the bias, and looped-back gathers of the
                    router's logits give every rank's share of the experts the same scores
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.binding import ROWS, is_bound
from jax_impl.config import GROUP, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, draft_from_arrays, draft_table
from jax_impl.params import Weights, from_arrays
from jax_impl.sharding import Placement, bind_spread, global_shape
from jax_impl.weights import AnyConfig, WeightArray, weight_table

Transform = Callable[[str, dict[str, jax.Array]], dict[str, jax.Array]]
# name -> half range and centre; what is not here is a matrix or a norm
RANGES: dict[str, tuple[float, float]] = {
    "embed_tokens": (1.5, 0.0),
    "A_log": (1.0, 0.0),
    "dt_bias": (2.0, -2.0),
    "conv1d": (0.9, 0.0),
    "e_score_correction_bias": (1e-3, 0.0),
    "markov_w1": (math.sqrt(3.0), 0.0),
    "markov_w2": (0.02, 0.0),
    "confidence_bias": (1.0, 0.0),
}
GAINS = {"routed_expert_up_proj": 0.3, "q_b_proj": 2.0}
MIX_GAIN = 2.0  # of the depth mixtures' projections: how unequal the mixtures are
CODE_RMS = 2.95  # of an E2M1 number with a uniform code


def random_weights(
    config: ModelConfig,
    placement: Placement,
    seed: int,
    run: RunConfig = RunConfig(),  # noqa: B008  (frozen)
) -> Weights:
    """All weights of the text model, bound where `run` wants it.

    The same seed gives the same values on one kind of device, bound or not.
    """
    bound = is_bound(run) and placement.mesh is None
    # bound layer by layer: one rank's experts cannot be there twice
    made = fill_all(config, weight_table(config), placement, seed, bind_layer if bound else None)
    weights = from_arrays(made)
    return weights if bound else bind_spread(weights, config, run, placement)


def random_draft(config: DraftConfig, placement: Placement, seed: int) -> DraftWeights:
    """All weights of a drafter."""
    table = draft_table(config, placement.ranks.size)
    return draft_from_arrays(fill_all(config, table, placement, seed + 1))


def bind_layer(kind: str, layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`jax_impl.binding.bind` of one layer's arrays."""
    if kind == "kda":
        missing = -layer["in_proj"].shape[0] % ROWS
        return layer | {"in_proj": jnp.pad(layer["in_proj"], ((0, missing), (0, 0)))}
    if kind != "moe":
        return layer
    from pallas_kernels.experts_pack import pack

    raw = ("w13_packed", "w13_scale", "w2_packed", "w2_scale")
    w13, w2 = pack(*(layer[name] for name in raw))
    rest = {name: array for name, array in layer.items() if name not in raw}
    return rest | {"w13_tiles": w13, "w2_tiles": w2}


def fill_all(
    config: AnyConfig,
    table: tuple[WeightArray, ...],
    placement: Placement,
    seed: int,
    transform: Transform | None = None,
) -> dict[tuple[str, str], jax.Array]:
    """The arrays of a table, by (kind, name); without a mesh each layer may be transformed."""
    arrays: dict[tuple[str, str], jax.Array] = {}
    for kind in dict.fromkeys(a.kind for a in table):
        mine = tuple(a for a in table if a.kind == kind)
        stacks = _fill_kind(config, mine, placement, seed, transform)
        arrays |= {(kind, name): stack for name, stack in stacks.items()}
    return arrays


def _fill_kind(
    config: AnyConfig,
    arrays: tuple[WeightArray, ...],
    placement: Placement,
    seed: int,
    transform: Transform | None,
) -> dict[str, jax.Array]:
    """The stacks of one kind: zeros first, then one layer after the other written in place."""
    kind, stacked = arrays[0].kind, arrays[0].kind != "root"
    cuts = {a.name: a.cut_axis(placement.experts) for a in arrays}
    laid: Any = {name: placement.sharding(cut) for name, cut in cuts.items()}
    if placement.mesh is None:
        laid = None
    ranks = placement.ranks.size if placement.mesh else 1
    local = {a.name: a.shape(config, placement.ranks.size, placement.experts) for a in arrays}
    shapes = {name: global_shape(s, cuts[name], ranks) for name, s in local.items()}
    # the fast generator; only the other one makes each device's share where it lies
    impl = "rbg" if placement.mesh is None else "threefry2x32"

    def values(keys: jax.Array) -> dict[str, jax.Array]:
        """One layer, or the root."""
        made = {}
        for array, data in zip(arrays, keys, strict=True):
            key = jax.random.wrap_key_data(data, impl=impl)
            shape, columns = shapes[array.name][stacked:], local[array.name][-1]
            made[array.name] = _values(array, shape, columns, key)
        return made if transform is None else transform(kind, made)

    if not stacked:
        return jax.jit(values, out_shardings=laid)(_keys(arrays, 0, seed, impl))

    @partial(jax.jit, donate_argnums=0, out_shardings=laid)
    def write(stacks: dict[str, jax.Array], layer: jax.Array, keys: jax.Array) -> Any:
        made = values(keys)
        put = jax.lax.dynamic_update_index_in_dim
        return {name: put(stack, made[name], layer, 0) for name, stack in stacks.items()}

    layers = shapes[arrays[0].name][0]
    one = jax.eval_shape(values, _keys(arrays, 0, seed, impl))

    def zeros() -> dict[str, jax.Array]:
        return {name: jnp.zeros((layers, *a.shape), a.dtype) for name, a in one.items()}

    stacks = jax.jit(zeros, out_shardings=laid)()
    for layer in range(layers):
        stacks = write(stacks, np.int32(layer), _keys(arrays, layer, seed, impl))
    return stacks


def _keys(arrays: tuple[WeightArray, ...], layer: int, seed: int, impl: str) -> np.ndarray:
    """Key data of one layer's arrays, from seed, name and layer; hashed here, not on the device."""
    names = [f"{seed}:{a.kind}.{a.name}:{layer}".encode() for a in arrays]
    words = [np.frombuffer(hashlib.sha256(name).digest()[:16], np.uint32) for name in names]
    return np.stack(words)[:, : 4 if impl == "rbg" else 2]


def _values(array: WeightArray, shape: tuple[int, ...], columns: int, key: Any) -> jax.Array:
    """One layer's values; `columns` is the length of a row on one rank."""
    if array.dtype == "uint8":
        if array.name.endswith("_scale"):
            centre = 126 + round(-math.log2(CODE_RMS * math.sqrt(columns * GROUP)))
            return centre + jax.random.randint(key, shape, 0, 3, jnp.uint8)
        return _random_bytes(key, shape)
    half, centre = RANGES.get(array.name, (None, 0.0))
    if half is None:
        if "norm" in array.name and "proj" not in array.name:
            half, centre = 0.25, 1.0
        else:
            gain = MIX_GAIN if array.name.endswith("res_proj") else GAINS.get(array.name, 1.0)
            half = gain * math.sqrt(3.0 / columns)
    drawn = jax.random.uniform(key, shape, jnp.float32, centre - half, centre + half)
    return drawn.astype(array.dtype)


def _random_bytes(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """U8 of any shape; four at a time where the last axis allows it."""
    if shape[-1] % 4:
        return jax.random.bits(key, shape, jnp.uint8)
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 4), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(shape)

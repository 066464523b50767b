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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.config import GROUP, ModelConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, draft_from_arrays, draft_table
from jax_impl.params import Weights, from_arrays
from jax_impl.sharding import Placement, global_shape
from jax_impl.weights import AnyConfig, WeightArray, weight_table

# (kind, name) or name -> half range and centre; what is not here is a matrix or a norm
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


def random_weights(config: ModelConfig, placement: Placement, seed: int) -> Weights:
    """All weights of the text model; the same seed gives the same values on one kind of device."""
    return from_arrays(fill_all(config, weight_table(config), placement, seed))


def random_draft(config: DraftConfig, placement: Placement, seed: int) -> DraftWeights:
    """All weights of a drafter."""
    table = draft_table(config, placement.ranks.size)
    return draft_from_arrays(fill_all(config, table, placement, seed + 1))


def fill_all(
    config: AnyConfig, table: tuple[WeightArray, ...], placement: Placement, seed: int
) -> dict[tuple[str, str], jax.Array]:
    """The arrays of a table, by (kind, name)."""
    arrays: dict[tuple[str, str], jax.Array] = {}
    for kind in dict.fromkeys(a.kind for a in table):
        mine = tuple(a for a in table if a.kind == kind)
        arrays |= {(kind, n): a for n, a in _fill_kind(config, mine, placement, seed).items()}
    return arrays


def _fill_kind(
    config: AnyConfig, arrays: tuple[WeightArray, ...], placement: Placement, seed: int
) -> dict[str, jax.Array]:
    """The stacks of one kind: zeros first, then one layer after the other written in place."""
    cuts = {a.name: a.cut_axis(placement.experts) for a in arrays}
    laid = {name: placement.sharding(cut) for name, cut in cuts.items()}
    ranks = placement.ranks.size if placement.mesh else 1
    local = {a.name: a.shape(config, placement.ranks.size, placement.experts) for a in arrays}
    shapes = {name: global_shape(s, cuts[name], ranks) for name, s in local.items()}
    stacked = arrays[0].kind != "root"
    # the fast generator; only the other one makes each device's share where it lies
    impl = "rbg" if placement.mesh is None else "threefry2x32"

    def values(keys: jax.Array) -> dict[str, jax.Array]:
        """One layer, or the root."""
        return {
            a.name: _values(
                a,
                shapes[a.name][stacked:],
                local[a.name][-1],
                jax.random.wrap_key_data(k, impl=impl),
            )
            for a, k in zip(arrays, keys, strict=True)
        }

    if not stacked:
        return jax.jit(values, out_shardings=laid)(_keys(arrays, 0, seed, impl))

    @partial(jax.jit, donate_argnums=0, out_shardings=laid)
    def write(stacks: dict[str, jax.Array], layer: jax.Array, keys: jax.Array) -> Any:
        made = values(keys)
        put = jax.lax.dynamic_update_index_in_dim
        return {name: put(stack, made[name], layer, 0) for name, stack in stacks.items()}

    def zeros() -> dict[str, jax.Array]:
        return {a.name: jnp.zeros(shapes[a.name], a.dtype) for a in arrays}

    stacks = jax.jit(zeros, out_shardings=laid)()
    for layer in range(shapes[arrays[0].name][0]):
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

"""Seeded inputs of kernels, with NaN wherever nothing may be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common, kda


def kda_inputs(
    tokens: int, heads: int, batch: int, slots: int, layers: int = 2, layer: int = 1, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, kda.Weights, kda.Rows]:
    """Projections, state, window, weights and rows of `kda.kda`.

    Sequence 0 has no history and its slot holds NaN; sequence 1 (if there is one) is a pad row;
    the last has one real token less than the others.
    """
    rng = np.random.default_rng(seed)
    width = kda.WIDTH
    p = heads * width

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    columns = common.round_up(4 * p + width + heads, 8)
    fused = normal(batch * tokens, columns)
    fused[:, 4 * p + width + heads :] = np.nan
    slot = rng.permutation(slots)[:batch].astype(np.int32)
    position = rng.integers(1, 1000, batch).astype(np.int32)
    count = np.full(batch, tokens, np.int32)
    state = np.full((layers, slots, heads, width, width), np.nan, np.float32)
    window = np.full((layers, slots, 3, 3 * p), np.nan, np.float32)
    state[layer, slot] = normal(batch, heads, width, width, scale=0.3)
    window[layer, slot] = normal(batch, 3, 3 * p)
    if batch > 1:
        position[0] = 0
        state[layer, slot[0]] = np.nan
        window[layer, slot[0]] = np.nan
        slot[1], count[1] = -1, 0
        fused.reshape(batch, tokens, columns)[1] = np.nan
        count[-1] = max(1, tokens - 1)
    bf16 = jnp.bfloat16
    weights = kda.Weights(
        jnp.asarray(normal(layers, p, width, scale=width**-0.5), bf16),
        jnp.asarray(normal(layers, 3 * p, 4, scale=0.5)),
        jnp.asarray(normal(layers, heads, scale=0.5)),
        jnp.asarray(normal(layers, p, scale=0.5)),
        jnp.asarray(1 + normal(layers, width, scale=0.1)),
    )
    rows = kda.Rows(*(jnp.asarray(a) for a in (slot, position, count)))
    return jnp.asarray(fused, bf16), jnp.asarray(state), jnp.asarray(window, bf16), weights, rows

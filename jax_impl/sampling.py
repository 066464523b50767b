"""Drawing tokens. Randomness is a function of (seed, position) alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def draw(
    logits: Float[Array, "B X"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, " B"],
    position: Int[Array, " B"],
) -> Int[Array, " B"]:
    """A token per row: the largest logit at temperature 0, else a draw from softmax(logits / t).

    `position` is that of the drawn token. Equal logits at temperature 0: the lower id.
    """

    def one(row, t, s, p):
        key = jax.random.fold_in(jax.random.key(s), p)
        return jax.random.categorical(key, row / jnp.where(t > 0, t, 1.0))

    greedy = jnp.argmax(logits, -1)
    drawn = jax.vmap(one)(logits, temperature, seed, position)
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)

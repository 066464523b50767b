"""Drawing tokens. Randomness is a function of (seed, position) alone.

Every purpose has a stream of its own: what a position draws for one is independent of what it draws
for another. A draft is salted with its number in the block, so that a position that is drafted
again in the next step does not see the same noise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

_ACCEPT, _DRAFT = 0, 1  # streams; a row number may be added within 0..255
_STREAMS = 1 << 31  # beyond every position
TINY = 2.0**-31  # acceptance uniforms are never 0


@struct.dataclass
class Filters:
    """Restrictions of the target's distribution; a neutral value switches one off for a row."""

    top_k: jax.Array  # i32 [B], 0 is off
    top_p: jax.Array  # f32 [B], 1 is off
    min_p: jax.Array  # f32 [B], 0 is off


def _keys(seed: jax.Array, position: jax.Array, stream: int | None) -> jax.Array:
    """A key per row. None is the stream of the tokens themselves."""

    def one(s, p):
        key = jax.random.key(s)
        if stream is not None:
            key = jax.random.fold_in(key, _STREAMS + stream)
        return jax.random.fold_in(key, p)

    return jax.vmap(one)(seed, position)


def _gumbel(keys: jax.Array, width: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (width,), jnp.float32))(keys)


def token_noise(
    seed: UInt32[Array, " B"], position: Int[Array, " B"], width: int
) -> Float[Array, "B X"]:
    """Gumbel noise for the token at `position`, the same with and without speculation."""
    return _gumbel(_keys(seed, position, None), width)


def draft_noise(
    seed: UInt32[Array, " B"], position: Int[Array, " B"], number: int, width: int
) -> Float[Array, "B X"]:
    """Gumbel noise for draft `number` (from 0); `position` is that of the token before it."""
    return _gumbel(_keys(seed, position, (_DRAFT << 8) + number), width)


def acceptance_uniforms(
    seed: UInt32[Array, " B"], position: Int[Array, " B"], drafts: int, *, salted: bool
) -> Float[Array, "B K"]:
    """Uniforms in (0, 1) that judge the drafts; `position` is the anchor's.

    A rule that looks beyond its first rejection judges the same position again in the next step;
    for it the draft's number salts the stream.
    """
    rows = [
        jax.vmap(jax.random.uniform)(_keys(seed, position + i, (_ACCEPT << 8) + (i + 1) * salted))
        for i in range(drafts)
    ]
    return jnp.maximum(jnp.stack(rows, axis=1), TINY)


def argmax(values: Float[Array, "*rows X"]) -> Int[Array, "*rows"]:
    """Index of the largest value; the lower one in ties, NaN never wins."""
    return jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values), -1).astype(jnp.int32)


def log_probabilities(
    logits: Float[Array, "B *rows X"],
    temperature: Float[Array, " B"],
    filters: Filters | None = None,
) -> Float[Array, "B *rows X"]:
    """Logarithm of the distribution that tokens are drawn from; temperature 0 counts as 1 here.

    In this order: temperature, min-p, top-k, top-p (of what is left). Equal logits at a cut stay
    together.
    """
    each = lambda a: a.reshape(-1, *(1 for _ in logits.shape[1:]))  # noqa: E731
    scaled = logits / each(jnp.where(temperature > 0, temperature, 1.0))
    if filters is not None:
        scaled = _filtered(
            scaled, *(each(a) for a in (filters.top_k, filters.top_p, filters.min_p))
        )
    return jax.nn.log_softmax(scaled, axis=-1)


def _filtered(scaled: jax.Array, top_k: Any, top_p: Any, min_p: Any) -> jax.Array:
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    width = scaled.shape[-1]
    floor = ordered[..., :1] + jnp.log(min_p)
    last = jnp.clip(jnp.where(top_k > 0, top_k, width) - 1, 0, width - 1)
    last = jnp.broadcast_to(last, (*scaled.shape[:-1], 1))
    floor = jnp.maximum(floor, jnp.take_along_axis(ordered, last, axis=-1))
    share = jax.nn.softmax(jnp.where(ordered >= floor, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    kept = (before < top_p) | (top_p >= 1)
    floor = jnp.maximum(floor, jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True))
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def pick(
    logits: Float[Array, "B X"],
    temperature: Float[Array, " B"],
    noise: Float[Array, "B X"] | None,
) -> Int[Array, " B"]:
    """A token per row from softmax(logits / t); the best one at temperature 0 or without noise."""
    if noise is None:
        return argmax(logits)
    drawn = argmax(log_probabilities(logits, temperature) + noise)
    return jnp.where(temperature > 0, drawn, argmax(logits))


def draw(
    logits: Float[Array, "B X"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, " B"],
    position: Int[Array, " B"],
    filters: Filters | None = None,
) -> Int[Array, " B"]:
    """A token per row: the largest logit at temperature 0, else a draw from softmax(logits / t).

    `position` is that of the drawn token. Equal logits at temperature 0: the lower id.
    """
    weights = log_probabilities(logits, temperature, filters)
    drawn = argmax(weights + token_noise(seed, position, logits.shape[-1]))
    return jnp.where(temperature > 0, drawn, argmax(logits))

"""Drawing tokens. Randomness is a function of (seed, position) alone.

Every purpose has a stream of its own: what a position draws for one is independent of what it draws
for another. A draft is salted with its number in the block, so that a position that is drafted
again in the next step does not see the same noise.

Logits may be this rank's shard of the vocabulary: then `ranks` says so, and every result is that of
the whole vocabulary, found without gathering it (restricted distributions excepted: top-k and top-p
need the order of all of it).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_impl.collectives import ONE_RANK, Ranks, all_gather, all_max, all_reduce, rank_index

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


def _gumbel(keys: jax.Array, width: int, ranks: Ranks) -> jax.Array:
    """Noise for the whole vocabulary, of which this rank keeps its part: the same on any number."""
    whole = jax.vmap(lambda key: jax.random.gumbel(key, (width * ranks.size,), jnp.float32))(keys)
    return shard(whole, ranks)


def shard(whole: Float[Array, "*rows V"], ranks: Ranks) -> Float[Array, "*rows X"]:
    """This rank's part of the last axis."""
    if ranks.size == 1:
        return whole
    width = whole.shape[-1] // ranks.size
    return jax.lax.dynamic_slice_in_dim(whole, rank_index(ranks) * width, width, axis=-1)


def token_noise(
    seed: UInt32[Array, " B"], position: Int[Array, " B"], width: int, ranks: Ranks = ONE_RANK
) -> Float[Array, "B X"]:
    """Gumbel noise for the token at `position`, the same with and without speculation.

    `width` is X, the vocabulary rows of this rank.
    """
    return _gumbel(_keys(seed, position, None), width, ranks)


def draft_noise(
    seed: UInt32[Array, " B"],
    position: Int[Array, " B"],
    number: int,
    width: int,
    ranks: Ranks = ONE_RANK,
) -> Float[Array, "B X"]:
    """Gumbel noise for draft `number` (from 0); `position` is that of the token before it."""
    return _gumbel(_keys(seed, position, (_DRAFT << 8) + number), width, ranks)


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


def first_id(values: Float[Array, "*rows X"], ranks: Ranks) -> jax.Array | int:
    """Vocabulary id of this rank's first column."""
    return rank_index(ranks) * values.shape[-1] if ranks.size > 1 else 0


def argmax(values: Float[Array, "*rows X"], ranks: Ranks = ONE_RANK) -> Int[Array, "*rows"]:
    """Index of the largest value; the lower one in ties, NaN never wins."""
    clean = jnp.where(jnp.isnan(values), -jnp.inf, values)
    best = jnp.argmax(clean, -1).astype(jnp.int32)
    if ranks.size == 1:
        return best
    return highest(jnp.max(clean, -1), best + first_id(values, ranks), ranks)[1]


def highest(
    top: Float[Array, "*rows"], ids: Int[Array, "*rows"], ranks: Ranks
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows"]]:
    """Largest of the ranks' values and its id; the lowest rank, thus the lowest id, in ties.

    A NaN counts as the largest value, as in `jnp.max`. One exchange.
    """
    if ranks.size == 1:
        return top, ids
    # ids are far below 2^24 and exact in f32
    pairs = all_gather(jnp.stack([top, ids.astype(jnp.float32)], axis=-1), ranks)
    pairs = pairs.reshape(*top.shape, ranks.size, 2)
    best = jnp.argmax(pairs[..., 0], axis=-1)[..., None]
    value, index = (jnp.take_along_axis(pairs[..., i], best, axis=-1)[..., 0] for i in (0, 1))
    return value, index.astype(jnp.int32)


def all_finite(values: Float[Array, "B *rows X"], ranks: Ranks) -> Bool[Array, " B"]:
    """Whether every value of each sequence is finite, on all ranks."""
    bad = ~jnp.all(jnp.isfinite(values), axis=tuple(range(1, values.ndim)))
    return ~bad if ranks.size == 1 else all_max(bad.astype(jnp.int32), ranks) == 0


def take(
    values: Float[Array, "*rows X"], ids: Int[Array, "*rows"], ranks: Ranks = ONE_RANK
) -> Float[Array, "*rows"]:
    """The value at a vocabulary id per row."""
    local = ids - first_id(values, ranks)
    inside = jnp.clip(local, 0, values.shape[-1] - 1)[..., None]
    found = jnp.take_along_axis(values, inside, axis=-1)[..., 0]
    if ranks.size == 1:
        return found
    here = (local >= 0) & (local < values.shape[-1])
    return all_reduce(jnp.where(here, found, 0.0), ranks)


def total(values: Float[Array, "*rows X"], ranks: Ranks = ONE_RANK) -> Float[Array, "*rows"]:
    """Sum over the vocabulary."""
    return all_reduce(jnp.sum(values, axis=-1), ranks)


def scaled(
    logits: Float[Array, "B *rows X"], temperature: Float[Array, " B"]
) -> Float[Array, "B *rows X"]:
    """Logits over the temperature; temperature 0 counts as 1 here."""
    return logits / _each(logits, jnp.where(temperature > 0, temperature, 1.0))


def _each(like: jax.Array, per_row: jax.Array) -> jax.Array:
    return per_row.reshape(-1, *(1 for _ in like.shape[1:]))


def log_probabilities(
    logits: Float[Array, "B *rows X"],
    temperature: Float[Array, " B"],
    filters: Filters | None = None,
    ranks: Ranks = ONE_RANK,
) -> Float[Array, "B *rows X"]:
    """Logarithm of the distribution that tokens are drawn from; temperature 0 counts as 1 here.

    In this order: temperature, min-p, top-k, top-p (of what is left). Equal logits at a cut stay
    together.
    """
    if filters is not None:
        whole = scaled(all_gather(logits, ranks), temperature)
        limits = (_each(whole, a) for a in (filters.top_k, filters.top_p, filters.min_p))
        return shard(jax.nn.log_softmax(_filtered(whole, *limits), axis=-1), ranks)
    values = scaled(logits, temperature)
    if ranks.size == 1:
        return jax.nn.log_softmax(values, axis=-1)
    top = all_max(jnp.max(values, axis=-1), ranks)[..., None]
    shifted = values - jnp.where(jnp.isfinite(top), top, 0.0)
    return shifted - jnp.log(total(jnp.exp(shifted), ranks))[..., None]


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
    floor = jnp.minimum(floor, ordered[..., :1])  # a top_p that f32 rounds to 0 keeps the best
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def pick(
    logits: Float[Array, "B X"],
    temperature: Float[Array, " B"],
    noise: Float[Array, "B X"] | None,
    ranks: Ranks = ONE_RANK,
) -> Int[Array, " B"]:
    """A token per row from softmax(logits / t); the best one at temperature 0 or without noise."""
    return argmax(logits if noise is None else contest(logits, temperature, noise), ranks)


def contest(
    logits: Float[Array, "B X"], temperature: Float[Array, " B"], noise: Float[Array, "B X"]
) -> Float[Array, "B X"]:
    """Values whose largest one is the drawn token: logits / t and noise, at temperature 0 logits.

    Logits in place of log-probabilities: a constant per row does not change which is largest.
    """
    return jnp.where(temperature[:, None] > 0, scaled(logits, temperature) + noise, logits)


def draw(
    logits: Float[Array, "B X"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, " B"],
    position: Int[Array, " B"],
    filters: Filters | None = None,
    ranks: Ranks = ONE_RANK,
) -> Int[Array, " B"]:
    """A token per row: the largest logit at temperature 0, else a draw from softmax(logits / t).

    `position` is that of the drawn token. Equal logits at temperature 0: the lower id.
    """
    noise = token_noise(seed, position, logits.shape[-1], ranks)
    if filters is None:
        return pick(logits, temperature, noise, ranks)
    weights = log_probabilities(logits, temperature, filters, ranks)
    return argmax(jnp.where(temperature[:, None] > 0, weights + noise, logits), ranks)

"""Exchanges between tensor-parallel ranks.

With `Ranks.axis` None the ranks are looped back: one device computes one rank's share at its real
shapes and every exchange returns something of the right shape. With size 1 that is exact; with a
larger size it is good for measuring compute only.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Ranks:
    """How many ranks share the model, and the mesh axis they lie on (None: looped back)."""

    size: int = 1
    axis: str | None = None


ONE_RANK = Ranks()


@dataclass(frozen=True)
class ContextSplit:
    """Which rank holds the cache row of which position (specification §6.4).

    With size 1 every rank holds all. Else position p lies on rank (p // interleave) % size, and a
    rank's rows keep the order of their positions.
    """

    size: int = 1
    interleave: int = 1
    ranks: Ranks = ONE_RANK

    def row_of(self, position: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
        """Row of `position` on the rank that holds it, and whether this rank does."""
        if self.size == 1:
            return position, True
        turn, within = position // self.interleave, position % self.interleave
        mine = turn % self.size == rank_index(self.ranks)
        return turn // self.size * self.interleave + within, mine

    def position_of(self, row: jax.Array) -> jax.Array:
        """Position whose row stands at `row` on this rank."""
        if self.size == 1:
            return row
        turn = row // self.interleave * self.size + rank_index(self.ranks)
        return turn * self.interleave + row % self.interleave


WHOLE_CONTEXT = ContextSplit()


def rank_index(ranks: Ranks) -> jax.Array | int:
    """Number of this rank; 0 when looped back."""
    return 0 if ranks.axis is None else lax.axis_index(ranks.axis)


def all_reduce(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Sum over the ranks."""
    return x if ranks.axis is None else lax.psum(x, ranks.axis)


def all_max(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Largest of the ranks' values, element by element."""
    return x if ranks.axis is None else lax.pmax(x, ranks.axis)


def all_gather(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Concatenation of the ranks' last axes, in rank order, equal on all ranks."""
    if ranks.size == 1:
        return x
    if ranks.axis is None:
        return jnp.concatenate([x] * ranks.size, axis=-1)
    return lax.all_gather(x, ranks.axis, axis=x.ndim - 1, tiled=True, to="invarying")


def all_gather_packed(parts: tuple[jax.Array, ...], ranks: Ranks) -> tuple[jax.Array, ...]:
    """`all_gather` of several arrays [N, w] of 2 or 4 bytes per element in one exchange."""
    if ranks.size == 1:
        return parts
    words = [_to_words(x) for x in parts]
    widths = [x.shape[-1] for x in words]
    gathered = all_gather(jnp.concatenate(words, axis=-1), ranks)
    by_rank = gathered.reshape(gathered.shape[0], ranks.size, -1)
    found, start = [], 0
    for part, width in zip(parts, widths, strict=True):
        mine = _from_words(by_rank[..., start : start + width], part)
        found.append(mine.reshape(part.shape[0], -1))
        start += width
    return tuple(found)


def all_reduce_packed(parts: tuple[jax.Array, ...], ranks: Ranks) -> tuple[jax.Array, ...]:
    """`all_reduce` of several f32 arrays [N, w] in one exchange."""
    if ranks.axis is None:
        return parts
    total = all_reduce(jnp.concatenate(parts, axis=-1), ranks)
    cuts = [sum(p.shape[-1] for p in parts[: i + 1]) for i in range(len(parts) - 1)]
    return tuple(jnp.split(total, cuts, axis=-1))


def all_to_all(x: jax.Array, ranks: Ranks) -> jax.Array:
    """X [R, ...]: entry i goes to rank i; the result's entry i came from rank i."""
    if ranks.axis is None:
        return x
    return lax.all_to_all(x, ranks.axis, split_axis=0, concat_axis=0, tiled=True)


def _to_words(x: jax.Array) -> jax.Array:
    """Bits of [N, w] as u32 words [N, ·]; an odd number of 2-byte elements is filled up."""
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    x = jnp.pad(x, ((0, 0), (0, x.shape[-1] % 2)))
    return lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `_to_words` on [N, R, ·]: [N, R, w]."""
    found = lax.bitcast_convert_type(words, like.dtype)
    if like.dtype.itemsize == 4:
        return found
    return found.reshape(*words.shape[:-1], -1)[..., : like.shape[-1]]

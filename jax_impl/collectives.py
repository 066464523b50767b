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


def rank_index(ranks: Ranks) -> jax.Array | int:
    """Number of this rank; 0 when looped back."""
    return 0 if ranks.axis is None else lax.axis_index(ranks.axis)


def all_reduce(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Sum over the ranks."""
    return x if ranks.axis is None else lax.psum(x, ranks.axis)


def all_gather(x: jax.Array, ranks: Ranks) -> jax.Array:
    """Concatenation of the ranks' last axes, in rank order, equal on all ranks."""
    if ranks.size == 1:
        return x
    if ranks.axis is None:
        return jnp.concatenate([x] * ranks.size, axis=-1)
    return lax.all_gather(x, ranks.axis, axis=x.ndim - 1, tiled=True, to="invarying")

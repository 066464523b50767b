"""The expert router (specification §3.6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TINY = 1e-20  # keeps 0/0 away when all chosen scores underflow; below f32 relevance otherwise


def choose_experts(
    logits: Float[Array, "N E"],
    bias: Float[Array, " E"],
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    scaling: float = 1.0,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Ids of the `top_k` largest biased scores, and the weights from the unbiased ones (f32).

    The bias decides the choice only. Equal scores: the lower id. Whatever a row holds (NaN and
    infinities included) its ids are distinct and in range; its weights may then be NaN, and no
    other row is touched.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias
    biased = jnp.where(jnp.isnan(biased), -jnp.inf, biased)
    if groups > 1:
        biased = _keep_best_groups(biased, groups, kept_groups)
    _, ids = lax.top_k(biased, top_k)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    return ids, chosen / (jnp.sum(chosen, -1, keepdims=True) + TINY) * scaling


def _keep_best_groups(biased: Float[Array, "N E"], groups: int, kept: int) -> Float[Array, "N E"]:
    # a group is worth the sum of its two best biased scores
    grouped = biased.reshape(biased.shape[0], groups, -1)
    worth = jnp.sum(lax.top_k(grouped, 2)[0], -1)
    _, best = lax.top_k(worth, kept)
    keep = jnp.any(best[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(biased.shape)

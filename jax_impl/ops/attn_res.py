"""Attention residuals: the softmax mixture over depth (specification §3.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_impl.numerics import Numerics, f32


def attn_res(
    nx: Numerics,
    prefix: Float[Array, "N D"],
    snapshots: Float[Array, "N J D"],
    count: int | jax.Array,
    norm_weight: Float[Array, " D"],
    proj_weight: Float[Array, "1 D"],
    eps: float,
) -> Float[Array, "N D"]:
    """Mixture of the first `count` snapshots and the prefix; f32, not yet rounded.

    Rows of the bank at or beyond `count` are never read (they may hold anything). With `count` 0
    the result is the prefix itself, bit for bit.
    """
    share, sources = _shares(nx, prefix, snapshots, count, norm_weight, proj_weight, eps)
    return jnp.sum(share[..., None] * sources, axis=1)


def mixture(
    nx: Numerics,
    prefix: Float[Array, "N D"],
    snapshots: Float[Array, "N J D"],
    count: int | jax.Array,
    norm_weight: Float[Array, " D"],
    proj_weight: Float[Array, "1 D"],
    eps: float,
) -> Float[Array, "N J+1"]:
    """The weights with which `attn_res` mixes, f32: snapshots (0 beyond `count`), then prefix."""
    return _shares(nx, prefix, snapshots, count, norm_weight, proj_weight, eps)[0]


def _shares(nx: Numerics, prefix, snapshots, count, norm_weight, proj_weight, eps):
    """Weights [N, J + 1] and sources [N, J + 1, D], both f32; zeros where a row is not valid."""
    bank = snapshots.shape[1]
    valid = jnp.append(jnp.arange(bank) < count, True)
    sources = jnp.concatenate([snapshots, prefix[:, None]], axis=1)
    sources = jnp.where(valid[:, None], f32(sources), 0.0)
    c = f32(norm_weight) * f32(proj_weight[0])
    r = lax.rsqrt(jnp.mean(sources * sources, -1) + eps)
    if nx.profile == "H":
        scores = jnp.sum((sources * r[..., None]) * c, -1)
    else:
        scores = r * jnp.sum(sources * c, -1)
    return jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1), sources

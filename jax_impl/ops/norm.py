"""Normalisations (specification §3.1, §3.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_impl.numerics import Numerics, f32

L2_EPS = 1e-6  # a constant of the published code, added to the sum (not the mean)


def rmsnorm(
    nx: Numerics, x: Float[Array, "*rows n"], weight: Float[Array, " n"], eps: float
) -> Float[Array, "*rows n"]:
    """RMSNorm. Profile H rounds the normalised value before the weight, V rounds once."""
    x, w = f32(x), f32(weight)
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    if nx.profile == "H":
        y = f32(nx.round(y))
    return nx.round(w * y)


def l2norm(x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """L2 norm: x / sqrt(sum x² + 1e-6), in f32."""
    x = f32(x)
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPS)


def gated_rmsnorm(
    nx: Numerics,
    o: Float[Array, "*rows v"],
    gate: Float[Array, "*rows v"],
    weight: Float[Array, " v"],
    eps: float,
) -> Float[Array, "*rows v"]:
    """KDA's output norm: RMSNorm per head, then a sigmoid gate, all f32, one rounding."""
    o = f32(o)
    y = o * lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + eps)
    return nx.round(y * f32(weight) * jax.nn.sigmoid(f32(gate)))

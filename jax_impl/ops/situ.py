"""SiTU, the gated activation of all three feed-forward parts (specification §3.8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_impl.numerics import Numerics, f32


def situ(
    nx: Numerics,
    gate: Float[Array, "*rows m"],
    up: Float[Array, "*rows m"],
    beta: float,
    linear_beta: float,
) -> Float[Array, "*rows m"]:
    """SiTU: b tanh(g/b) sigmoid(g) * c tanh(u/c) in f32, one rounding at the end."""
    g, u = f32(gate), f32(up)
    soft_gate = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)
    return nx.round(soft_gate * (linear_beta * jnp.tanh(u / linear_beta)))


def situ_mlp(
    nx: Numerics,
    x: Float[Array, "*rows i"],
    gate_up: Float[Array, "m2 i"],
    down: Float[Array, "o m"],
    beta: float,
    linear_beta: float,
) -> Float[Array, "*rows o"]:
    """Gated MLP: down · SiTU(gate x, up x); f32, not rounded (ranks' shares are summed first)."""
    return nx.project(situ_hidden(nx, x, gate_up, beta, linear_beta), down)


def situ_hidden(
    nx: Numerics,
    x: Float[Array, "*rows i"],
    gate_up: Float[Array, "m2 i"],
    beta: float,
    linear_beta: float,
) -> Float[Array, "*rows m"]:
    """The first half of a gated MLP: SiTU(gate x, up x)."""
    gate, up = jnp.split(nx.linear(x, gate_up), 2, axis=-1)
    return situ(nx, gate, up, beta, linear_beta)

"""The drafter's own formulas (draft specification §2.2, §2.6 to §2.8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_impl.numerics import Numerics, f32


def swiglu_mlp(
    nx: Numerics,
    x: Float[Array, "*rows i"],
    gate_up: Float[Array, "m2 i"],
    down: Float[Array, "o m"],
) -> Float[Array, "*rows o"]:
    """SwiGLU: down · (silu(gate x) * up x); f32 and not rounded, for the sum over ranks."""
    gate, up = jnp.split(nx.linear(x, gate_up), 2, axis=-1)
    return nx.project(nx.round(jax.nn.silu(f32(gate)) * f32(up)), down)


def markov_bias(
    nx: Numerics, previous: Float[Array, "B r"], w2: Float[Array, "X r"]
) -> Float[Array, "B X"]:
    """What the token before adds to the logits: W2 e, f32."""
    return nx.project(previous, w2)


def confidence(
    hidden: Float[Array, "*rows D"],
    previous: Float[Array, "*rows r"] | None,
    proj: Float[Array, "1 w"],
    bias: Float[Array, " 1"],
) -> Float[Array, "*rows"]:
    """Probability that a draft is accepted if all before it were; f32.

    `previous` is W1 of the token before it, None for heads without that input.
    """
    parts = [hidden] if previous is None else [hidden, previous]
    x = f32(jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=-1))
    return jax.nn.sigmoid(jnp.sum(x * f32(proj[0]), -1) + f32(bias[0]))

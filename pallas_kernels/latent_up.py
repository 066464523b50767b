"""Latent norm and up projection of the routed experts: y = W rmsnorm(x).

    x bf16 [N, Z], the complete latent sum, rounded once; norm bf16 [Z] or [L, Z]
    w bf16 [L, D/R, Z]
    y bf16 [N, D/R]

Rounding: x * norm once to bf16, everything else in f32 (the row's scale is applied to the sums, see
`row_norm`), y once to bf16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import skinny
from pallas_kernels.skinny import Projection, Tuning


def limits(
    x: jax.Array, norm: jax.Array, w: jax.Array, *, tuning: Tuning | None = None
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    items = [Projection(w, jnp.bfloat16)]
    return skinny.limits(x, items, norm=(norm, 0.0), tuning=tuning)


def reference(
    x: jax.Array, norm: jax.Array, w: jax.Array, layer: int | jax.Array = 0, *, eps: float
) -> jax.Array:
    """The same in plain jnp, with the standard path's rounding of the normalised row."""
    return skinny.reference(x, [Projection(w, jnp.bfloat16)], layer, norm=(norm, eps))[0]


def latent_up(
    x: jax.Array,
    norm: jax.Array,
    w: jax.Array,
    layer: int | jax.Array = 0,
    *,
    eps: float,
    copies: int = 1,
    zeros: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """This rank's rows of the up projection, [N, D/R] bf16, or `copies` of them side by side.

    A list of it alone, or with `zeros` of counters too, see `skinny.projections`.

    Raises:
        ValueError: `limits` are not met.
    """
    items = [Projection(w, jnp.bfloat16, copies=copies)]
    return skinny.projections(
        x, items, layer, norm=(norm, eps), zeros=zeros, tuning=tuning, interpret=interpret
    )

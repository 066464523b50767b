"""Router share and latent-down share in one kernel, and the shared experts' first product.

    x bf16 [N, D]; gate bf16 [L, E/R, D]; down bf16 [L, Z/R, D]; shared bf16 [L, 2M, D]
    logits f32 [N, E/R] (FP32 sums, not rounded), latent bf16 [N, Z/R] (one rounding),
    h bf16 [N, M] = SiTU(shared x), rounded as `skinny` says

All three read the same x, and none of them is large enough to occupy the device alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import skinny
from pallas_kernels.skinny import Projection, Tuning


def items(
    gate: jax.Array,
    down: jax.Array,
    shared: jax.Array | None,
    betas: tuple[float, float] | None,
    copies: int = 1,
) -> list[Projection]:
    """The products; `copies` of scores and latent stand side by side, see `skinny.Projection`."""
    out = [
        Projection(gate, jnp.float32, copies=copies),
        Projection(down, jnp.bfloat16, copies=copies),
    ]
    return out if shared is None else [*out, Projection(shared, jnp.bfloat16, betas)]


def limits(
    x: jax.Array,
    gate: jax.Array,
    down: jax.Array,
    shared: jax.Array | None = None,
    *,
    betas: tuple[float, float] | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out = skinny.limits(x, items(gate, down, shared, betas), tuning=tuning)
    if (shared is None) != (betas is None):
        out.append("shared, betas: found one of them, expected both or neither")
    return out


def reference(
    x: jax.Array,
    gate: jax.Array,
    down: jax.Array,
    shared: jax.Array | None = None,
    layer: int | jax.Array = 0,
    *,
    betas: tuple[float, float] | None = None,
) -> list[jax.Array]:
    """The same in plain jnp."""
    return skinny.reference(x, items(gate, down, shared, betas), layer)


def route(
    x: jax.Array,
    gate: jax.Array,
    down: jax.Array,
    shared: jax.Array | None = None,
    layer: int | jax.Array = 0,
    *,
    betas: tuple[float, float] | None = None,
    copies: int = 1,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """[logits, latent] or [logits, latent, h]; see the module's docstring.

    `copies` of scores and latent stand side by side, see `skinny.Projection`.

    Raises:
        ValueError: `limits` are not met.
    """
    from pallas_kernels import common

    common.require(limits(x, gate, down, shared, betas=betas, tuning=tuning), "route")
    found = items(gate, down, shared, betas, copies)
    return skinny.projections(x, found, layer, tuning=tuning, interpret=interpret)

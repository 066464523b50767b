"""What stages hand to each other where one array does not say it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_impl.numerics import Numerics, f32


class Routed(NamedTuple):
    """From `route` to `experts`."""

    latent: jax.Array  # compute dtype [N, Z], what the experts read
    ids: jax.Array  # i32 [N, k], the chosen experts
    weights: jax.Array  # f32 [N, k]
    shared: jax.Array  # f32 [N, D], this rank's share of the shared experts
    units: Any = None  # `pallas_kernels.units.Units` where the router's kernel has made them


class Delta(NamedTuple):
    """A feed-forward output in two parts, each still to be rounded; `attn_in` adds them."""

    up: jax.Array  # compute dtype [N, D], from the routed experts
    shared: jax.Array  # f32 [N, D], from the shared experts


def whole(nx: Numerics, delta: jax.Array | Delta) -> jax.Array:
    """The feed-forward output [N, D] as one array."""
    if isinstance(delta, Delta):
        return nx.round(f32(delta.up) + f32(nx.round(delta.shared)))
    return delta

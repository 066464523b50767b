"""What stages hand to each other where one array does not say it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_impl.numerics import Numerics, f32


class Ahead(NamedTuple):
    """What a stage hands on, and what it has already done for the next one.

    A stage that takes an array and gets this need not do the work again; `plain` is the array.
    """

    array: jax.Array
    done: Any  # the next stage's first products
    # i32 [128], see `pallas_kernels.meeting`; the first may be spent, the others are at 0
    counters: jax.Array | None = None


def plain(x: jax.Array | Ahead) -> jax.Array:
    """The array that a stage hands on."""
    return x.array if isinstance(x, Ahead) else x


class Routed(NamedTuple):
    """From `route` to `experts`, which hands on what it does not have yet where it is `pending`."""

    latent: jax.Array  # compute dtype [N, Z], what the experts read
    ids: jax.Array | None  # i32 [N, k], the chosen experts
    weights: jax.Array | None  # f32 [N, k]
    shared: jax.Array | None  # f32 [N, D], this rank's share of the shared experts
    units: Any = None  # `pallas_kernels.units.Units` where the router's kernel has made them
    pending: Pending | None = None  # in place of ids, weights and shared


class Pending(NamedTuple):
    """What the choice and the shared experts' second product are still to be made of."""

    logits: jax.Array  # f32 [N, E], of all experts
    hidden: jax.Array  # bf16 [N, M], the shared experts' on this rank
    counters: jax.Array  # i32 [128], as those of `Ahead`


class Shares(NamedTuple):
    """From `experts`: this rank's shares of two sums, and what was chosen."""

    routed: jax.Array  # f32 [N, Z]; the compute dtype where no other rank adds to it
    shared: jax.Array  # f32 [N, D]
    ids: jax.Array  # i32 [N, k]
    weights: jax.Array  # f32 [N, k]


class Delta(NamedTuple):
    """A feed-forward output in two parts, each still to be rounded; `attn_in` adds them."""

    up: jax.Array  # compute dtype [N, D], from the routed experts
    shared: jax.Array  # f32 [N, D], from the shared experts
    counters: jax.Array | None = None  # i32 [128] at 0, see `pallas_kernels.meeting`


def whole(nx: Numerics, delta: jax.Array | Delta) -> jax.Array:
    """The feed-forward output [N, D] as one array."""
    if isinstance(delta, Delta):
        return nx.round(f32(delta.up) + f32(nx.round(delta.shared)))
    return delta

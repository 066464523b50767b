"""Kimi Delta Attention (specification §3.4), all of it in f32 after the projections."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_impl.numerics import Numerics, f32


class Records(NamedTuple):
    """What each row did to the state; enough to replay any prefix of the rows (§3.10, form b)."""

    update: jax.Array  # f32 [B, T, H, V]   u = beta * e
    key: jax.Array  # f32 [B, T, H, K]   normalised key
    log_decay: jax.Array  # f32 [B, T, H, K]


class Snapshots(NamedTuple):
    """The state after each row (§3.10, form a)."""

    states: jax.Array  # f32 [B, T, H, V, K]


def log_decay(
    z: Float[Array, "*rows H K"],
    dt_bias: Float[Array, "H K"],
    a_log: Float[Array, " H"],
    lower_bound: float,
) -> Float[Array, "*rows H K"]:
    """Bounded gate: g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), in (lower_bound, 0)."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * (f32(z) + dt_bias))


def short_conv(
    nx: Numerics,
    raw: Float[Array, "B T C"],
    window: Float[Array, "B W C"],
    weight: Float[Array, "C taps"],
) -> Float[Array, "B T C"]:
    """Causal depthwise convolution over the window and the new raw projections, then SiLU.

    Tap `taps - 1` belongs to the current token. One rounding at the end, in both profiles.
    """
    tokens = raw.shape[1]
    history = f32(jnp.concatenate([window, raw], axis=1))
    acc = sum(
        weight[:, tap] * lax.slice_in_dim(history, tap, tap + tokens, axis=1)
        for tap in range(weight.shape[1])
    )
    return nx.round(jax.nn.silu(acc))


def next_window(
    raw: Float[Array, "B T C"], window: Float[Array, "B W C"], count: Int[Array, " B"]
) -> Float[Array, "B W C"]:
    """The last W raw projections after `count` of the T new rows are taken, oldest first."""
    history = jnp.concatenate([window, raw], axis=1)
    rows = count[:, None] + jnp.arange(window.shape[1])
    return jnp.take_along_axis(history, rows[..., None], axis=1)


def delta_step(
    state: Float[Array, "B H V K"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
) -> tuple[Float[Array, "B H V K"], Float[Array, "B H V"], Float[Array, "B H V"]]:
    """One token: decay, error against the decayed state, rank-one write, read of the new state.

    Returns the new state, the output and the update vector u.
    """
    state = state * jnp.exp(g)[..., None, :]
    error = v - jnp.sum(state * k[..., None, :], -1)
    update = beta[..., None] * error
    state = state + update[..., None] * k[..., None, :]
    return state, jnp.sum(state * q[..., None, :], -1), update


def recurrence(
    state: Float[Array, "B H V K"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    count: Int[Array, " B"],
    *,
    snapshots: bool = False,
) -> tuple[Float[Array, "B H V K"], Float[Array, "B T H V"], Records | Snapshots]:
    """`delta_step` over T tokens in order; rows at or beyond `count` leave the state alone.

    Returns the state, the outputs, and what `kept_state` makes any earlier state from.
    """
    tokens = q.shape[1]

    def step(carry, row):
        index, *arrays = row
        new, o, update = delta_step(carry, *arrays)
        live = (index < count)[:, None, None, None]
        new = jnp.where(live, new, carry)
        return new, (o, new if snapshots else update)

    rows = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, (o, kept) = lax.scan(step, state, (jnp.arange(tokens), *rows), unroll=min(tokens, 8))
    o, kept = jnp.moveaxis(o, 0, 1), jnp.moveaxis(kept, 0, 1)
    return state, o, Snapshots(kept) if snapshots else Records(kept, k, g)


def kept_state(
    state: Float[Array, "B H V K"], kept: Records | Snapshots, count: Int[Array, " B"]
) -> Float[Array, "B H V K"]:
    """State after the first `count` rows, `state` being that before them."""
    if isinstance(kept, Records):
        return replay(state, kept, count)
    index = jnp.maximum(count - 1, 0)[:, None, None, None, None]
    found = jnp.take_along_axis(kept.states, index, axis=1)[:, 0]
    return jnp.where((count > 0)[:, None, None, None], found, state)


def replay(
    state: Float[Array, "B H V K"], records: Records, count: Int[Array, " B"]
) -> Float[Array, "B H V K"]:
    """State after the first `count` recorded rows: S <- S * exp(g) + u kᵀ for each."""

    def step(carry, row):
        index, update, key, g = row
        new = carry * jnp.exp(g)[..., None, :] + update[..., None] * key[..., None, :]
        return jnp.where((index < count)[:, None, None, None], new, carry), None

    tokens = records.key.shape[1]
    rows = [jnp.moveaxis(x, 1, 0) for x in records]
    state, _ = lax.scan(step, state, (jnp.arange(tokens), *rows), unroll=min(tokens, 8))
    return state

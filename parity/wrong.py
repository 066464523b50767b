"""Wrong formulas: what `parity.mutants` puts in the place of functions of `jax_impl`.

Each takes the original as its first argument and has the original's signature behind it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.numerics import f32
from jax_impl.ops.norm import L2_EPS
from jax_impl.ops.router import TINY


# ---- KDA ----
def decay_per_channel(original, z, dt_bias, a_log, lower_bound):
    """A_log read per channel: the padded vector has one entry per channel of a head."""
    rate = jnp.exp(jnp.zeros(z.shape[-1]).at[: len(a_log)].set(a_log[: z.shape[-1]]))
    return lower_bound * jax.nn.sigmoid(rate * (f32(z) + dt_bias))


def decay_softplus(original, z, dt_bias, a_log, lower_bound):
    """The unbounded gate of the earlier model family."""
    return -jnp.exp(a_log)[:, None] * jax.nn.softplus(f32(z) + dt_bias)


def decay_clamped(original, z, dt_bias, a_log, lower_bound):
    """The unbounded gate, clamped at the bound."""
    return jnp.maximum(decay_softplus(None, z, dt_bias, a_log, lower_bound), lower_bound)


def no_output_scale(original, state, q, *rest, **options):
    """The query is not scaled by the root of the head width."""
    return original(state, q * q.shape[-1] ** 0.5, *rest, **options)


def decay_after_prediction(original, state, q, k, v, g, beta):
    """The error is taken against the state before its decay."""
    error = v - jnp.sum(state * k[..., None, :], -1)
    update = beta[..., None] * error
    state = state * jnp.exp(g)[..., None, :] + update[..., None] * k[..., None, :]
    return state, jnp.sum(state * q[..., None, :], -1), update


def read_before_write(original, state, q, k, v, g, beta):
    """The output comes from the state before the rank-one update."""
    after, _, update = original(state, q, k, v, g, beta)
    return after, jnp.sum(state * jnp.exp(g)[..., None, :] * q[..., None, :], -1), update


def state_key_first(original, *arguments, **options):
    """The state is handed on as [key, value]: equal extents hide it from every shape check."""
    state, o, records = original(*arguments, **options)
    return jnp.swapaxes(state, -1, -2), o, records


def taps_reversed(original, nx, raw, window, weight):
    """The convolution's first tap is given to the current token."""
    return original(nx, raw, window, weight[:, ::-1])


def window_not_advanced(original, raw, window, count):
    """The convolution window stays what it was."""
    return window


def gate_silu(original, nx, o, gate, weight, eps):
    """SiLU instead of the sigmoid on KDA's output gate."""
    o = f32(o)
    y = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + eps)
    return nx.round(y * f32(weight) * jax.nn.silu(f32(gate)))


def l2_without_eps(original, x):
    """Both q and k are normalised without the epsilon."""
    x = f32(x)
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


def l2_eps_on_mean(original, x):
    """The epsilon is added to the mean of squares, as in an RMSNorm."""
    x = f32(x)
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPS * x.shape[-1])


# ---- MLA ----
def with_rope(original, nx, q, kv, w_uk, w_uv, visible):
    """Rotary embedding on the parts that are called rope and are not rotated."""
    nope, rank = w_uk.shape[1:]
    q_position = jnp.sum(visible, -1) - 1  # a token sees itself and all before it
    k_position = jnp.arange(kv.shape[1])[None]
    q = jnp.concatenate([q[..., :nope], _rotate(q[..., nope:], q_position[..., None])], -1)
    kv = jnp.concatenate([kv[..., :rank], _rotate(kv[..., rank:], k_position)], -1)
    return original(nx, q.astype(nx.dtype), kv.astype(nx.dtype), w_uk, w_uv, visible)


def _rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = position[..., None] * 1e4 ** (-jnp.arange(half) / half)
    a, b = f32(x[..., :half]), f32(x[..., half:])
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


def scale_without_rope(original, nx, q, kv, w_uk, w_uv, visible):
    """The softmax scale counts the nope width only."""
    wrong = (q.shape[-1] / w_uk.shape[1]) ** 0.5
    return original(nx, (q * wrong).astype(nx.dtype), kv, w_uk, w_uv, visible)


def sees_the_future(original, nx, q, kv, w_uk, w_uv, visible):
    """No causal mask inside the window."""
    return original(
        nx, q, kv, w_uk, w_uv, jnp.broadcast_to(visible.any(1, keepdims=True), visible.shape)
    )


def no_output_gate(original, nx, o, gate):
    """MLA without its output gate."""
    return nx.round(f32(o))


def no_read_scale(original, nx, rows, scale):
    """FP8 rows are read without their scale."""
    return nx.round(f32(rows))


# ---- feed-forward ----
def situ_uncapped_up(original, nx, gate, up, beta, linear_beta):
    """`linear_beta` is ignored."""
    return original(nx, gate, up, beta, 1e30)


def situ_silu(original, nx, gate, up, beta, linear_beta):
    """Plain SwiGLU."""
    return nx.round(jax.nn.silu(f32(gate)) * f32(up))


def situ_swapped(original, nx, gate, up, beta, linear_beta):
    """w1 and w3 change places."""
    return original(nx, up, gate, beta, linear_beta)


def nibbles_swapped(original, packed, scale):
    """The high nibble is the even column."""
    return original((packed >> 4) | (packed << 4), scale)


def router_bias_in_weight(original, logits, bias, top_k, groups=1, kept=1, scaling=1.0):
    """The selection bias enters the expert weights."""
    ids, _ = original(logits, bias, top_k, groups, kept, scaling)
    chosen = jnp.take_along_axis(jax.nn.sigmoid(logits) + bias, ids, axis=-1)
    return ids, chosen / (jnp.sum(chosen, -1, keepdims=True) + TINY) * scaling


def router_no_bias(original, logits, bias, *rest):
    """The bias is not used in the selection."""
    return original(logits, jnp.zeros_like(bias), *rest)


def router_no_groups(original, logits, bias, top_k, groups=1, kept=1, scaling=1.0):
    """The group stage is skipped."""
    return original(logits, bias, top_k, 1, 1, scaling)


def router_no_scaling(original, logits, bias, top_k, groups=1, kept=1, scaling=1.0):
    """`routed_scaling_factor` is forgotten."""
    return original(logits, bias, top_k, groups, kept, 1.0)


# ---- attention residuals ----
def mix_of_normalised(original, nx, prefix, snapshots, count, norm_weight, proj_weight, eps):
    """The mixture is taken over normalised sources."""

    def unit(x):
        return f32(x) * jax.lax.rsqrt(jnp.mean(f32(x) ** 2, -1, keepdims=True) + eps)

    return original(nx, unit(prefix), unit(snapshots), count, norm_weight, proj_weight, eps)


def masked_by_product(original, nx, prefix, snapshots, count, *rest):
    """Rows beyond the count are multiplied by zero instead of replaced."""
    valid = jnp.arange(snapshots.shape[1]) < count
    return original(nx, prefix, snapshots * valid[:, None], snapshots.shape[1], *rest)


def never_resets(original, *arguments, starts_block: bool):
    """The running sum goes on over the start of a block."""
    return original(*arguments, starts_block=False)


def snapshot_before_mix(
    original, static, w, prefix, snapshots, count, delta, *, starts_block: bool
):
    """The snapshot is taken first, so that the mix sees the running sum twice."""
    added = static.nx.round(f32(prefix) + f32(delta))
    if not starts_block:
        return original(static, w, prefix, snapshots, count, delta, starts_block=False)
    early = snapshots.at[:, count].set(added)
    x, after, _ = original(static, w, prefix, early, count + 1, delta, starts_block=False)
    return x, after, early


def never_commits(original, layer, pending, count, inputs, state, window) -> Any:
    """KDA state and window are not written back."""
    return state, window

"""The jitted step: forward, commit, logits, draw; the cache is donated."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, StepInputs, StepOutputs
from jax_impl.model import forward
from jax_impl.params import Weights
from jax_impl.sampling import draw
from jax_impl.static import Static

Rows = Literal["last", "all"]
Step = Callable[[Weights, Cache, StepInputs], tuple[Cache, StepOutputs, StepInputs]]


def step(
    static: Static,
    backend: Backend,
    rows: Rows,
    weights: Weights,
    cache: Cache,
    inputs: StepInputs,
    record: dict[str, Any] | None = None,
) -> tuple[Cache, StepOutputs, StepInputs]:
    """One step: T tokens of each of B sequences in, the token after the last real one out.

    Args:
        rows: `last` computes logits for each sequence's last real token only (prefill of long
            chunks), `all` for every token.
        record: if given, filled with every stage output while tracing.

    Returns:
        The cache, the outputs, and the inputs of the next decode step (one token per sequence), so
        that steps chain on the device.
    """
    found = forward(static, backend, weights, cache, inputs, record)
    return found.cache, *conclude(static, backend, rows, weights, inputs, found.hidden)


def conclude(
    static: Static,
    backend: Backend,
    rows: Rows,
    weights: Weights,
    inputs: StepInputs,
    hidden: jax.Array,
) -> tuple[StepOutputs, StepInputs]:
    """Logits, the drawn token and the next inputs from the hidden rows [N, D] of a step."""
    batch, tokens = inputs.tokens.shape
    hidden = hidden.reshape(batch, tokens, -1)
    last = jnp.maximum(inputs.count - 1, 0)
    real = inputs.row_live()
    if rows == "last":
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        real, last = jnp.any(real, axis=1, keepdims=True), jnp.zeros_like(last)
    flat = hidden.reshape(-1, hidden.shape[-1])
    values, top, argmax = backend.logits(static, weights.root, flat)
    shape = hidden.shape[:2]
    values = jnp.where(real[..., None], values.reshape(*shape, -1), 0.0)
    final = jnp.take_along_axis(values, last[:, None, None], axis=1)[:, 0]
    position = inputs.position + inputs.count
    token = draw(final, inputs.temperature, inputs.seed, position, inputs.filters)
    token = jnp.where(inputs.live, token, static.config.pad_token_id)
    finite = jnp.all(jnp.isfinite(values), axis=(1, 2))
    following = inputs.replace(
        tokens=token[:, None], count=jnp.minimum(inputs.count, 1), position=position
    )
    masked = [jnp.where(real, a.reshape(shape), 0) for a in (top, argmax)]
    return StepOutputs(token, finite, values, *masked), following


@lru_cache(maxsize=64)
def build_step(static: Static, backend: Backend = AUTO, rows: Rows = "last") -> Step:
    """The jitted step; compiles once per shape of the inputs. Donates the cache.

    The same arguments give the same callable, and with it the same compilations.
    """
    return jax.jit(
        lambda weights, cache, inputs: step(static, backend, rows, weights, cache, inputs),
        donate_argnums=1,
    )


@lru_cache(maxsize=16)
def build_recording_step(static: Static, backend: Backend = AUTO) -> Callable:
    """Like `build_step` with all rows, returning the stage outputs by name as a fourth result."""

    def recorded(weights: Weights, cache: Cache, inputs: StepInputs):
        record: dict[str, Any] = {}
        cache, outputs, following = step(static, backend, "all", weights, cache, inputs, record)
        return cache, outputs, following, record

    return jax.jit(recorded, donate_argnums=1)

"""One rank's share of the model on one device: sizes, caches, inputs and the programs to time.

Exchanges are looped back (`jax_impl.collectives`), so the results mean nothing beyond their shapes:
this is for timing compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.floor import KINDS, kind_of
from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.config import ConfigError, ModelConfig
from jax_impl.model import forward
from jax_impl.params import Weights
from jax_impl.random_step import Case
from jax_impl.speculate import verify
from jax_impl.static import Static
from jax_impl.step import build_step, step

MLA_EVERY = 4  # among the layers with experts, in the released pattern


def with_moe_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model cut to its dense layers and the first `layers` with experts, 3 KDA : 1 MLA.

    `layers` equal to the number of all layers means the whole model, unchanged.

    Raises:
        ConfigError: the ratio of the released pattern is not kept.
    """
    if layers == config.num_hidden_layers:
        return config
    if layers < MLA_EVERY or layers % MLA_EVERY:
        raise ConfigError(
            f"--layers {layers}: expected a multiple of {MLA_EVERY}, the layers with experts in "
            f"which KDA and MLA stand 3:1, or {config.num_hidden_layers}, the whole model; change "
            "it"
        )
    whole = config.first_k_dense_replace + layers
    mla = tuple(i for i in range(whole) if i % MLA_EVERY == MLA_EVERY - 1)
    return replace(config, num_hidden_layers=whole, mla_layers=mla)


def layer_kinds(config: ModelConfig) -> dict[str, int]:
    """Number of layers by kind; `kda` and `mla` are those with experts."""
    kinds = [kind_of(config, i) for i in range(config.num_hidden_layers)]
    return {kind: kinds.count(kind) for kind in KINDS}


One = Callable[[Weights, Cache, StepInputs], tuple[Cache, Any]]


def one_step(static: Static, backend: Backend, case: Case, method: Acceptance) -> One:
    """The step of a case: (weights, cache, inputs) -> (cache, outputs with `finite`)."""

    def run(weights: Weights, cache: Cache, inputs: StepInputs) -> tuple[Cache, Any]:
        if case.verifies:
            cache, outputs, _ = verify(static, backend, method, weights, cache, inputs)
            return cache, outputs
        cache, outputs, _ = step(static, backend, "last", weights, cache, inputs)
        return cache, outputs

    return run


def dispatched_step(static: Static, backend: Backend, case: Case, method: Acceptance) -> Any:
    """The jitted step as the engine calls it; a verification without its drafter. Donates cache."""
    if case.verifies:
        return jax.jit(one_step(static, backend, case, method), donate_argnums=1)
    return build_step(static, backend, "last")


def captured_loop(one: One) -> Any:
    """Jitted: (weights, cache, inputs, tokens [steps, B, T]) -> (cache, finite, last tokens).

    All steps are one program, so that nothing waits for the host. The barrier makes the weights
    depend on the turn: nothing computed from them alone can be taken out of the loop.
    """

    def run(weights: Weights, cache: Cache, inputs: StepInputs, tokens: jax.Array):
        def body(index, carry):
            cache, finite, _ = carry
            held, cache = lax.optimization_barrier((weights, cache))
            cache, outputs = one(held, cache, replace(inputs, tokens=tokens[index]))
            return cache, finite & jnp.all(outputs.finite), _emitted(outputs)

        start = (cache, jnp.bool_(True), jnp.zeros(tokens.shape[1:], jnp.int32))
        return lax.fori_loop(0, tokens.shape[0], body, start)

    return jax.jit(run, donate_argnums=1)


def _emitted(outputs: Any) -> jax.Array:
    """Tokens i32 [B, T] of either kind of outputs."""
    return outputs.tokens if hasattr(outputs, "tokens") else outputs.token[:, None]


def chosen_experts(static: Static, case: Case) -> Any:
    """Jitted: (weights, cache, inputs) -> ids i32 [layers with experts, N, k] of one step.

    By the standard path, whatever is timed: it compiles in a fraction of the time.
    """

    def run(weights: Weights, cache: Cache, inputs: StepInputs) -> jax.Array:
        record: dict[str, Any] = {}
        forward(static, AUTO, weights, cache, inputs, record, commit=not case.verifies)
        return jnp.stack([v for name, v in record.items() if name.endswith(".ids")])

    return jax.jit(run)


def distinct_counts(ids: np.ndarray) -> list[int]:
    """Distinct experts of every layer, from ids [layers, N, k]."""
    return [len(np.unique(layer)) for layer in np.asarray(ids)]

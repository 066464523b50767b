"""One speculative step as one program: verify, accept, commit, write context, draft.

Before a step the caches are exact for the `position` tokens processed so far, and the anchor, the
token at that position, is known. A step verifies the anchor and K drafts; the inputs that it
returns hold the next anchor and drafts, so that steps chain without a look at the host.

Rows that were not accepted leave nothing behind: the recurrent state and windows take in accepted
rows only, and latent rows of target and drafter beyond the new position are overwritten before
anything reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_impl.acceptance import accept
from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, SpeculativeOutputs, StepInputs, StepOutputs
from jax_impl.draft_weights import DraftWeights
from jax_impl.drafter import propose, write_context
from jax_impl.model import Record, forward
from jax_impl.params import Weights
from jax_impl.sampling import acceptance_uniforms, all_finite, token_noise
from jax_impl.sharding import (
    cache_specs,
    draft_specs,
    input_specs,
    output_specs,
    spread,
    weight_specs,
)
from jax_impl.static import DraftStatic, Static
from jax_impl.step import Turn, conclude, in_memory, in_place

SpeculativeStep = Callable[
    [Weights, DraftWeights, Cache, StepInputs], tuple[Cache, SpeculativeOutputs, StepInputs]
]
SpeculativePrefill = Callable[
    [Weights, DraftWeights, Cache, StepInputs], tuple[Cache, StepOutputs, StepInputs]
]


def speculative_step(
    static: Static,
    draft: DraftStatic,
    backend: Backend,
    method: Acceptance,
    drafts: int,
    weights: Weights,
    draft_weights: DraftWeights,
    cache: Cache,
    inputs: StepInputs,
) -> tuple[Cache, SpeculativeOutputs, StepInputs]:
    """One step for B sequences; see the module.

    Args:
        static: settings of the target.
        draft: settings of the drafter.
        backend: the stage functions.
        method: how drafts are drawn and judged.
        drafts: K.
        weights: of the target.
        draft_weights: of the drafter.
        cache: with `draft_kv`.
        inputs: tokens [B, 1 + K], the anchor and its drafts; `count` of them are real (fewer where
            a sequence has fewer drafts, 0 without room). Pad rows have slot PAD and count 0.

    Raises:
        ValueError: inputs of another width, or draft logits missing or not expected.
    """
    _check(inputs, method, drafts)
    cache, outputs, taps = verify(
        static, backend, method, weights, cache, inputs, draft.config.target_layer_ids
    )
    tokens, count = outputs.tokens, outputs.count
    cache = write_context(draft, backend, draft_weights, cache, inputs, taps, count)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    anchor = jnp.where(count > 0, last, inputs.tokens[:, 0])
    cache, following = propose(
        static, draft, backend, weights, draft_weights, cache,
        inputs.replace(position=inputs.position + count), anchor,
        drafts=drafts, sample=method.drafting == "probabilistic",
    )  # fmt: skip
    return cache, outputs, following


def verify(
    static: Static,
    backend: Backend,
    method: Acceptance,
    weights: Weights,
    cache: Cache,
    inputs: StepInputs,
    taps: tuple[int, ...] = (),
    record: Record | None = None,
) -> tuple[Cache, SpeculativeOutputs, jax.Array | None]:
    """The target's part of a step: verify anchor and drafts, accept, commit what was accepted.

    Returns the cache, what was emitted, and the tapped streams [N, G D]. `record`, if given, is
    filled as by `forward`, and with `logits` f32 [B, T, X], zeros in rows that are not real.
    """
    found = forward(static, backend, weights, cache, inputs, record, commit=False, taps=taps)
    values = _logits(static, backend, weights, inputs, found.hidden)
    if record is not None:
        record["logits"] = values
    tokens, count, finite = _judge(static, method, inputs, values)
    cache = _commit(static, backend, found.cache, found.pending, inputs, count)
    return cache, SpeculativeOutputs(tokens, count, finite), found.taps


def _check(inputs: StepInputs, method: Acceptance, drafts: int) -> None:
    if inputs.tokens.shape[1] != drafts + 1:
        raise ValueError(
            f"tokens {inputs.tokens.shape}: expected the anchor and {drafts} drafts per sequence"
        )
    sampled = method.drafting == "probabilistic"
    if sampled != (inputs.draft_logits is not None):
        raise ValueError(
            f"drafting is {method.drafting!r}, but draft_logits "
            + ("are missing" if sampled else "are given")
            + "; chain the inputs that the previous step or the prefill returned"
        )


def _logits(
    static: Static, backend: Backend, weights: Weights, inputs: StepInputs, hidden: jax.Array
) -> jax.Array:
    """F32 [B, T, X] from hidden [N, D]; zeros in rows that are not real."""
    values, _, _ = backend.logits(static, weights.root, hidden)
    values = values.reshape(*inputs.tokens.shape, -1)
    return jnp.where(inputs.row_live()[..., None], values, 0.0)


def _judge(
    static: Static, method: Acceptance, inputs: StepInputs, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens i32 [B, T], count i32 [B] and whether all logits are finite, from logits [B, T, X]."""
    width, real = inputs.tokens.shape[1], inputs.row_live()
    finite = all_finite(values, static.ranks)
    drafts = jnp.where(real[:, 1:], inputs.tokens[:, 1:], -1)
    uniforms = acceptance_uniforms(
        inputs.seed, inputs.position, width - 1, salted=method.rule == "block"
    )

    def noise(row: jax.Array) -> jax.Array:
        position = inputs.position + row + 1
        return token_noise(inputs.seed, position, values.shape[-1], static.ranks)

    tokens, count = accept(
        method, values, drafts, inputs.draft_logits, inputs.temperature, uniforms, noise,
        inputs.filters, static.ranks,
    )  # fmt: skip
    count = jnp.where(real[:, 0], count, 0)
    emitted = jnp.arange(width) < count[:, None]
    return jnp.where(emitted, tokens, static.config.pad_token_id), count, finite


def _commit(
    static: Static,
    backend: Backend,
    cache: Cache,
    pending: list[Any],
    inputs: StepInputs,
    count: jax.Array,
) -> Cache:
    """State and windows of all KDA layers take in each sequence's first `count` rows."""
    if len(pending) != len(static.config.kda_layers):
        raise ValueError(
            f"{len(pending)} layers to commit, expected {len(static.config.kda_layers)}"
        )
    with jax.named_scope("kda_commit"):
        state, window = backend.kda_commit(
            static, pending, count, inputs, cache.kda_state, cache.conv_window
        )
    return cache.replace(kda_state=state, conv_window=window)


def speculative_prefill(
    static: Static,
    draft: DraftStatic,
    backend: Backend,
    method: Acceptance,
    drafts: int,
    weights: Weights,
    draft_weights: DraftWeights,
    cache: Cache,
    inputs: StepInputs,
) -> tuple[Cache, StepOutputs, StepInputs]:
    """A chunk of known tokens [B, T], all of them committed, with their context rows.

    Returns the cache, the outputs of an ordinary step, and the inputs of a speculative step that
    may follow a sequence's last chunk (after any other chunk they mean nothing).
    """
    found = forward(static, backend, weights, cache, inputs, taps=draft.config.target_layer_ids)
    outputs, following = conclude(static, backend, "last", weights, inputs, found.hidden)
    cache = write_context(
        draft, backend, draft_weights, found.cache, inputs, found.taps, inputs.count
    )
    cache, following = propose(
        static, draft, backend, weights, draft_weights, cache, following, outputs.token,
        drafts=drafts, sample=method.drafting == "probabilistic",
    )  # fmt: skip
    return cache, outputs, following


@lru_cache(maxsize=64)
def build_speculative_step(
    static: Static,
    draft: DraftStatic,
    backend: Backend = AUTO,
    method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
    drafts: int = 7,
    mesh: Mesh | None = None,
) -> SpeculativeStep:
    """The jitted step; one compilation per batch size. Donates the cache.

    The same arguments give the same callable, and with it the same compilations. With a mesh the
    arrays are global ones, laid out as `jax_impl.sharding` says.

    Raises:
        ConfigError: the method does not fit the number of drafts, or the drafter the target.
    """
    _require(static, draft, method, drafts)
    run = partial(speculative_step, static, draft, backend, method, drafts)
    return _spread(run, static, draft, backend, mesh, P())


@lru_cache(maxsize=64)
def build_speculative_step_in_place(
    static: Static,
    draft: DraftStatic,
    backend: Backend = AUTO,
    method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
    drafts: int = 7,
    mesh: Mesh | None = None,
) -> Callable[[Weights, DraftWeights, Turn], Turn]:
    """The jitted step that writes over what it is given, as `step.build_step_in_place`."""
    _require(static, draft, method, drafts)
    run = partial(speculative_step, static, draft, backend, method, drafts)

    def turned(weights: Weights, draft_weights: DraftWeights, turn: Turn) -> Turn:
        cache, outputs, following = run(weights, draft_weights, turn.cache, turn.inputs)
        return Turn(cache, following, outputs)

    small = draft_specs(draft.config, draft.ranks.size)
    turn = Turn(cache_specs(static.run), input_specs(), P())  # type: ignore[arg-type]
    weights = weight_specs(static.config, static.run)
    return spread(turned, mesh, (weights, small, turn), turn, donate=2, **in_place(backend))


def first_speculative_turn(cache: Cache, inputs: StepInputs, mesh: Mesh | None = None) -> Turn:
    """A turn before any step of these inputs, as `step.first_turn`."""
    return Turn(cache, *in_memory(cache, inputs, emitted_shapes(inputs), P(), mesh))


def emitted_shapes(inputs: StepInputs) -> SpeculativeOutputs:
    """Shapes and dtypes of what a step of these inputs emits."""
    batch, width = inputs.tokens.shape
    shape = jax.ShapeDtypeStruct
    return SpeculativeOutputs(
        shape((batch, width), jnp.int32), shape((batch,), jnp.int32), shape((batch,), jnp.bool_)
    )  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def build_speculative_prefill(
    static: Static,
    draft: DraftStatic,
    backend: Backend = AUTO,
    method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
    drafts: int = 7,
    mesh: Mesh | None = None,
) -> SpeculativePrefill:
    """The jitted prefill of a chunk; otherwise as `build_speculative_step`."""
    _require(static, draft, method, drafts)
    run = partial(speculative_prefill, static, draft, backend, method, drafts)
    return _spread(run, static, draft, backend, mesh, output_specs())


@lru_cache(maxsize=16)
def build_speculative_loop(
    static: Static,
    draft: DraftStatic,
    backend: Backend = AUTO,
    method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
    drafts: int = 7,
    steps: int = 10,
    mesh: Mesh | None = None,
) -> SpeculativeStep:
    """`steps` steps in one program; outputs have `steps` as leading axis. Donates the cache."""
    _require(static, draft, method, drafts)
    one = partial(speculative_step, static, draft, backend, method, drafts)

    def run(weights: Weights, draft_weights: DraftWeights, cache: Cache, inputs: StepInputs):
        shapes = jax.eval_shape(one, weights, draft_weights, cache, inputs)[1]
        empty = jax.tree.map(lambda s: jnp.zeros((steps, *s.shape), s.dtype), shapes)

        def body(index, carry):
            cache, inputs, collected = carry
            cache, outputs, inputs = one(weights, draft_weights, cache, inputs)
            collected = jax.tree.map(lambda c, o: c.at[index].set(o), collected, outputs)
            return cache, inputs, collected

        cache, inputs, collected = lax.fori_loop(0, steps, body, (cache, inputs, empty))
        return cache, collected, inputs

    return _spread(run, static, draft, backend, mesh, P())


def _spread(
    function: Callable,
    static: Static,
    draft: DraftStatic,
    backend: Backend,
    mesh: Mesh | None,
    outputs: Any,
) -> Callable:
    cache, inputs = cache_specs(static.run), input_specs()
    small = draft_specs(draft.config, draft.ranks.size)
    weights = weight_specs(static.config, static.run), small
    return spread(
        function, mesh, (*weights, cache, inputs), (cache, outputs, inputs),
        donate=2, check=not backend.whole_stacks,
    )  # fmt: skip


def _require(static: Static, draft: DraftStatic, method: Acceptance, drafts: int) -> None:
    method.require(drafts)
    draft.config.require_target(static.config)

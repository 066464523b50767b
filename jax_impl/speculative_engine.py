"""Speculative decoding of several sequences on the engine's slots and pages.

A step verifies every sequence's anchor and drafts and proposes the next ones. Between steps the
drafts (and their logits, where they are drawn) wait on the device by slot, so that the sequences
of a step may be others than those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, SpeculativeOutputs, StepInputs, StepOutputs
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights
from jax_impl.engine import Engine, EngineError
from jax_impl.params import Weights
from jax_impl.plan import bucket
from jax_impl.sequences import Sequence
from jax_impl.sharding import ONE_DEVICE, Placement
from jax_impl.speculate import (
    build_speculative_prefill,
    build_speculative_step,
    emitted_shapes,
)
from jax_impl.static import DraftStatic
from jax_impl.step import in_memory, in_place, with_inputs


@struct.dataclass
class Waiting:
    """What stands by for each slot. S slots, K drafts."""

    tokens: jax.Array  # i32 [S, 1 + K], anchor and drafts
    logits: jax.Array | None  # f32 [S, K, X] of drawn drafts; None where they are not

    def given(self, inputs: StepInputs) -> StepInputs:
        """The inputs with what waits for their slots; pad rows get that of any slot."""
        row = jnp.maximum(inputs.slot, 0)
        logits = None if self.logits is None else self.logits[row]
        return inputs.replace(tokens=self.tokens[row], draft_logits=logits)

    def kept(self, following: StepInputs) -> Waiting:
        """With the next step's inputs in place of what was there; pad rows are dropped."""
        slot = jnp.where(following.live, following.slot, self.tokens.shape[0])
        tokens = self.tokens.at[slot].set(following.tokens, mode="drop")
        if self.logits is None:
            return Waiting(tokens, None)
        return Waiting(tokens, self.logits.at[slot].set(following.draft_logits, mode="drop"))


class WaitingTurn(NamedTuple):
    """What a step writes over, as `jax_impl.step.Turn`, with what waits."""

    cache: Cache
    waiting: Waiting
    inputs: StepInputs
    outputs: SpeculativeOutputs


class SpeculativeEngine(Engine):
    """An `Engine` whose decode steps verify drafts: one to 1 + K tokens per sequence and step.

    Attributes:
        draft: settings of the drafter.
        method: how drafts are drawn and judged.
        drafts: K.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: RunConfig,
        weights: Weights,
        draft_config: DraftConfig,
        draft_weights: DraftWeights,
        method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
        drafts: int = 7,
        backend: Backend = AUTO,
        *,
        chunk: int = 64,
        context: int | None = None,
        placement: Placement = ONE_DEVICE,
        check_replicas: bool = False,
        filters: bool = False,
    ) -> None:
        """Allocate the caches of both models; arguments as of `Engine`, and the drafter's.

        Filters restrict the target, whose distribution the text then has; the drafter draws
        from all of its own.

        Raises:
            ConfigError: the method does not fit the number of drafts, the drafter the target, or
                one of them the ranks.
            EngineError: as `Engine`, or a context beyond the drafter's positions.
        """
        method.require(drafts)
        draft_config.require_target(config)
        most = draft_config.max_position_embeddings
        if context is None:
            context = min(run.tokens_in(run.pages), config.max_position_embeddings, most)
        if context > most:
            raise EngineError(
                f"context {context}: the drafter has positions for {most} tokens, expected no "
                "more; make the context smaller"
            )
        super().__init__(
            config, run, weights, backend, chunk=chunk, context=context, placement=placement,
            check_replicas=check_replicas, draft_config=draft_config, filters=filters,
        )  # fmt: skip
        self.draft = DraftStatic(draft_config, run, placement.ranks)
        self.draft_weights, self.method, self.drafts = draft_weights, method, drafts
        zeros = lambda shape, dtype, cut: jax.jit(  # noqa: E731
            partial(jnp.zeros, shape, dtype), out_shardings=placement.sharding(cut)
        )()
        logits = None
        if method.drafting == "probabilistic":
            logits = zeros((run.slots, drafts, config.vocab_size), jnp.float32, 2)
        self._waiting = Waiting(zeros((run.slots, 1 + drafts), jnp.int32, None), logits)

    def decode(self, handles: Ids[int]) -> dict[int, list[int]]:
        """One verification for the given prefilled sequences.

        Returns the new tokens by handle. A sequence whose next token has no place left (pages or
        context) is finished and left out; so is one whose logits were not finite.

        Raises:
            EngineError: as `Engine.decode`.
        """
        seqs = self._ready(handles)
        self._look_ahead(seqs)
        rows = [(h, s) for h, s in zip(handles, seqs, strict=True) if self._has_room(s)]
        if not rows:
            return {}
        handles, seqs = [h for h, _ in rows], [s for _, s in rows]
        batch, width = bucket(len(seqs)), 1 + self.drafts
        inputs = self._inputs(seqs, [min(self._room(s), width) for s in seqs], batch, width)
        backend = self._stages("verify", inputs)
        turned = build_waiting_step(*self._build(backend))
        held = self._taken(backend, inputs)
        if held is None:
            mesh = self.placement.mesh
            held = in_memory(self.cache, inputs, emitted_shapes(inputs), P(), mesh)
            turn = WaitingTurn(self.cache, self._waiting, *held)
        else:
            turn = with_inputs(WaitingTurn(self.cache, self._waiting, *held), inputs)
        turn = turned(self.weights, self.draft_weights, turn)
        self.cache, self._waiting, *held = turn
        self._held[backend, inputs.tokens.shape] = held
        outputs = turn.outputs
        self._done("verify", batch, width, outputs)
        found = jax.device_get(outputs)
        counts = found.count.tolist()
        self._processed(seqs, counts, found.finite)
        return self._collect(handles, seqs, found.tokens, counts)

    def _build(self, backend: Backend) -> tuple[Any, ...]:
        mesh = self.placement.mesh
        return self.static, self.draft, backend, self.method, self.drafts, mesh

    def _advance(self, inputs: StepInputs) -> StepOutputs:
        prefill = build_waiting_prefill(*self._build(self._stages("prefill", inputs)))
        self.cache, self._waiting, outputs = prefill(
            self.weights, self.draft_weights, self.cache, self._waiting, inputs
        )
        return outputs

    def _reserve(self, seq: Sequence, length: int) -> None:
        """Pages for a prompt, and for the block behind it as far as there are."""
        super()._reserve(seq, length)
        ahead = min(length + self.drafts, self.context)
        self._give(seq, self.static.run.pages_for(ahead) - len(seq.pages))

    def _look_ahead(self, seqs: list[Sequence]) -> None:
        """Pages for what a step writes, as far as there are: 1 + K rows, then a block behind them.

        First come the anchors of all, for a sequence can do with less: fewer drafts are verified,
        and a block without pages only drafts worse.
        """
        for rows in (1, 1 + self.drafts, 1 + 2 * self.drafts):
            for seq in seqs:
                length = min(seq.processed + rows, self.context)
                self._give(seq, self.static.run.pages_for(length) - len(seq.pages))

    def _room(self, seq: Sequence) -> int:
        """Tokens that may still be processed."""
        held = self.static.run.tokens_in(len(seq.pages))
        return min(held, self.context) - seq.processed

    def _has_room(self, seq: Sequence) -> bool:
        if self._room(seq) >= 1:
            return True
        if seq.processed >= self.context:
            seq.finished = f"no room: all {self.context} tokens of the context are in use"
        else:
            seq.finished = (
                f"no room: {seq.processed} tokens fill {len(seq.pages)} page(s) of "
                f"{self.static.run.page_tokens}, and none of {self.static.run.pages} is free"
            )
        return False


@lru_cache(maxsize=64)
def build_waiting_step(*build: Any) -> Callable[..., Any]:
    """`build_speculative_step(*build)` on what waits, in place; one compilation per batch.

    (weights, draft weights, turn) -> turn. `count` of its inputs says how many of the waiting
    tokens are real; their `tokens` are not read. The inputs stay as they are.
    """
    inner, backend = build_speculative_step(*build), build[2]

    def turned(weights: Weights, draft_weights: DraftWeights, turn: WaitingTurn) -> WaitingTurn:
        cache, waiting, inputs, _ = turn
        given = waiting.given(inputs)
        cache, outputs, following = inner(weights, draft_weights, cache, given)
        return WaitingTurn(cache, waiting.kept(following), inputs, outputs)

    options = in_place(backend)["options"]
    return jax.jit(turned, donate_argnums=2, keep_unused=True, compiler_options=options)


@lru_cache(maxsize=16)
def build_waiting_prefill(*build: Any) -> Callable[..., Any]:
    """`build_speculative_prefill(*build)`; what it proposes waits.

    (weights, draft weights, cache, waiting, inputs) -> (cache, waiting, outputs); donates both.
    """
    inner = build_speculative_prefill(*build)

    def run(
        weights: Weights,
        draft_weights: DraftWeights,
        cache: Cache,
        waiting: Waiting,
        inputs: StepInputs,
    ):
        cache, outputs, following = inner(weights, draft_weights, cache, inputs)
        return cache, waiting.kept(following), outputs

    return jax.jit(run, donate_argnums=(2, 3))

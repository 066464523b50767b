"""Host side of generation: slots, pages, lengths and stop rules. Owns nothing numerical."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Ids
from typing import Any

import jax
import numpy as np

from jax_impl.backend import AUTO, Backend, planned
from jax_impl.cache import Cache, StepInputs, StepOutputs
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.params import Weights
from jax_impl.plan import BATCH_BUCKETS, Kind, Plan, StepShape, bucket, choose
from jax_impl.problems import listed
from jax_impl.sampling_config import Sampling
from jax_impl.sequences import Sequence, step_inputs
from jax_impl.sharding import (
    ONE_DEVICE,
    Placement,
    make_spread_cache,
    require_ranks,
    unequal_replicas,
)
from jax_impl.static import Static
from jax_impl.step import Turn, build_step, build_step_in_place, first_turn, with_inputs


class EngineError(ValueError):
    """A request that cannot be served; says what was asked, what is there and what to do."""


class Engine:
    """Generation: prefill in chunks, then batched decode steps.

    Attributes:
        sequences: the live sequences by handle; a finished one stays until `release`.
        cache: the device caches (replaced by every step; the old one is donated).
        context: most tokens that one sequence may hold; every step is compiled for it.
        steps: number of steps run by (kind, batch bucket, tokens); each key is one compilation.
        plans: number of steps run by (backend, reason).
    """

    def __init__(
        self,
        config: ModelConfig,
        run: RunConfig,
        weights: Weights,
        backend: Backend = AUTO,
        *,
        chunk: int = 64,
        context: int | None = None,
        placement: Placement = ONE_DEVICE,
        check_replicas: bool = False,
        draft_config: DraftConfig | None = None,
        filters: bool = False,
    ) -> None:
        """Allocate the cache.

        Args:
            config: the model.
            run: how to run it.
            weights: its weights.
            backend: the stage functions.
            chunk: prompt tokens per prefill step.
            context: most tokens that one sequence may hold; None: what all pages hold. The
                standard attention reads that many rows in each step, whatever a sequence's length.
            placement: the ranks; `weights` are laid out on them.
            check_replicas: after every step compare, bit by bit, what should be equal on all ranks
                (slow, for finding errors).
            draft_config: a drafter whose cache is allocated too (`SpeculativeEngine`).
            filters: whether sequences may have top-k, top-p or min-p. Every step then orders the
                vocabulary, gathered over the ranks, also for sequences without them; so there is
                one compilation per batch size whichever sequences come and go.

        Raises:
            EngineError: `chunk` or `context` out of range.
            ConfigError: the model does not divide by the ranks.
        """
        require_ranks(config, run, placement.ranks.size, draft_config)
        most = min(run.tokens_in(run.pages), config.max_position_embeddings)
        self.context = most if context is None else context
        if not 1 <= self.context <= most or chunk < 1:
            raise EngineError(
                f"context {self.context}, chunk {chunk}: expected 1..{most} tokens "
                f"({run.pages} pages of {run.page_tokens}, model limit "
                f"{config.max_position_embeddings}) and a chunk of at least 1; change them, or "
                "make more pages"
            )
        self.static, self.placement = Static(config, run, placement.ranks), placement
        self.check_replicas, self.filters = check_replicas, filters
        self.weights, self.backend, self.chunk = weights, backend, chunk
        self.cache: Cache = make_spread_cache(config, run, placement, draft_config)
        self.sequences: dict[int, Sequence] = {}
        self.steps: dict[tuple[str, int, int], int] = {}
        self.plans: dict[Plan, int] = {}
        self._held: dict[tuple[Backend, tuple[int, ...]], Any] = {}
        self._free_slots = list(range(run.slots))[::-1]
        self._free_pages = list(range(run.pages))[::-1]
        self._next_handle = 0

    def add(
        self,
        prompt: Ids[int],
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Ids[int] = (),
        limit: int | None = None,
    ) -> int:
        """Admit a sequence and return its handle; nothing runs yet.

        Args:
            prompt: token ids.
            temperature: 0 is greedy.
            top_k: how many of the most probable tokens may be drawn; 0: all. This and the next
                two (see `Sampling`) need an engine with `filters`, and a temperature.
            top_p: draws are from the most probable tokens that have this probability; 1: from all.
            min_p: share of the largest probability that a token needs to be drawn; 0: none.
            seed: of the draws; a token depends on (seed, position) alone.
            stop: ids that finish the sequence.
            limit: most tokens to generate; None: no limit.

        Raises:
            EngineError: empty prompt, ids outside the vocabulary, settings out of range (all of
                these at once), or no free slot.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        problems = [*self._bad_ids(prompt), *sampling.problems()]
        if limit is not None and limit < 1:
            problems.append(f"limit {limit}: expected at least 1 token, or None")
        if not self.filters and (on := sampling.filters()):
            problems.append(
                f"{', '.join(on)}: expected none, this engine was made without; make it with "
                "filters=True"
            )
        if problems:
            raise EngineError(listed("sequence not admitted", problems, "Change these."))
        if not self._free_slots:
            raise EngineError(
                f"all {self.static.run.slots} slots are in use, expected a free one; release a "
                "sequence or raise slots"
            )
        handle = self._next_handle
        self._next_handle += 1
        ids = [int(i) for i in prompt]
        slot = self._free_slots.pop()
        self.sequences[handle] = Sequence(ids, slot, sampling, frozenset(stop), limit)
        return handle

    def extend(self, handle: int, ids: Ids[int]) -> None:
        """Append known tokens to a kept sequence (a next turn); they are prefilled on demand.

        A finished sequence goes on. Where its cache went beyond a stop in the middle of accepted
        drafts, the next prefill starts over: a recurrent state cannot give tokens back.
        """
        if problems := self._bad_ids(ids):
            raise EngineError(listed("sequence not extended", problems, "Change these."))
        seq = self._get(handle)
        self._require_sound(handle, seq)
        if seq.processed > len(seq.ids):
            seq.processed = 0
        seq.ids.extend(int(i) for i in ids)
        seq.generated, seq.finished = 0, None

    def release(self, handle: int) -> None:
        """Forget a sequence; its slot and pages are free at once."""
        gone = self._get(handle)
        del self.sequences[handle]
        self._free_slots.append(gone.slot)
        self._free_pages.extend(gone.pages)

    def prefill(self, handle: int) -> int | None:
        """Process a sequence's unprocessed tokens in chunks, append the token that follows.

        Returns that token; None if the logits were not finite (see `Sequence.failed`).
        """
        seq = self._get(handle)
        self._require_open(handle, seq)
        while True:
            count = min(self.chunk, len(seq.ids) - seq.processed)
            if count < 1:
                raise EngineError(f"sequence {handle}: nothing to process; extend it first")
            outputs = self._run([seq], 1, self.chunk, [count])
            if seq.failed is not None:
                return None
            if seq.processed == len(seq.ids):
                return seq.take([int(outputs.token[0])])[0]

    def decode(self, handles: Ids[int]) -> dict[int, list[int]]:
        """One step for the given prefilled sequences.

        Returns the new tokens by handle, here one each; sequences whose logits were not finite are
        left out.

        Raises:
            EngineError: a sequence that is unknown, finished or not prefilled, given twice, or more
                of them than the largest batch.
        """
        seqs = self._ready(handles)
        outputs = self._run(seqs, bucket(len(seqs)), 1, [1] * len(seqs))
        return self._collect(handles, seqs, np.asarray(outputs.token)[:, None], [1] * len(seqs))

    def _ready(self, handles: Ids[int]) -> list[Sequence]:
        """The sequences, if one decode step can take all of them."""
        seqs = [self._get(h) for h in handles]
        for handle, seq in zip(handles, seqs, strict=True):
            self._require_open(handle, seq)
            waiting = len(seq.ids) - seq.processed
            if waiting != 1:
                raise EngineError(
                    f"sequence {handle}: {waiting} unprocessed tokens, decode takes exactly one; "
                    "prefill it first"
                )
        if len(set(handles)) != len(handles) or not 1 <= len(handles) <= BATCH_BUCKETS[-1]:
            raise EngineError(
                f"{len(handles)} sequences: expected 1..{BATCH_BUCKETS[-1]} different ones; split "
                "the batch, and give each handle once"
            )
        return seqs

    def _collect(
        self, handles: Ids[int], seqs: list[Sequence], tokens: np.ndarray, counts: Ids[int]
    ) -> dict[int, list[int]]:
        """Append each row's first `counts` of tokens [B, T]; new tokens of rows that went well."""
        found = {}
        for row, (handle, seq) in enumerate(zip(handles, seqs, strict=True)):
            if seq.failed is None:
                seq.emitted.append(int(counts[row]))
                found[handle] = seq.take(tokens[row, : counts[row]].tolist())
        return found

    def _run(self, seqs: list[Sequence], batch: int, tokens: int, counts: list[int]) -> StepOutputs:
        for seq, count in zip(seqs, counts, strict=True):
            self._reserve(seq, seq.processed + count)
        outputs = self._advance(self._inputs(seqs, counts, batch, tokens))
        self._done("decode" if tokens == 1 else "prefill", batch, tokens, outputs)
        self._processed(seqs, counts, outputs.finite)
        return outputs

    def _stages(self, kind: Kind, inputs: StepInputs) -> Backend:
        """The step gate: the stage table for a step, counted with its reason."""
        plan = choose(self.static.run, StepShape(kind, *inputs.tokens.shape))
        self.plans[plan] = self.plans.get(plan, 0) + 1
        return planned(plan, self.static.run, self.backend)

    def _advance(self, inputs: StepInputs) -> StepOutputs:
        """Run known tokens [B, T] through the model."""
        backend = self._stages("decode" if inputs.tokens.shape[1] == 1 else "prefill", inputs)
        mesh = self.placement.mesh
        if inputs.tokens.shape[1] > 1:
            step = build_step(self.static, backend, "last", mesh)
            self.cache, outputs, _ = step(self.weights, self.cache, inputs)
            return outputs
        turned = build_step_in_place(self.static, backend, "last", mesh)
        held = self._taken(backend, inputs)
        if held is None:
            turn = first_turn(self.static, self.weights, self.cache, inputs, mesh=mesh)
        else:
            turn = with_inputs(Turn(self.cache, *held), inputs)
        self.cache, *held = turned(self.weights, turn)
        self._held[backend, inputs.tokens.shape] = held
        return held[1]

    def _taken(self, backend: Backend, inputs: StepInputs) -> Any:
        """Inputs and outputs of the last such step, which the next one writes over, or None.

        Nobody else has them then: a step that is interrupted leaves none that are deleted.
        """
        return self._held.pop((backend, inputs.tokens.shape), None)

    def _inputs(
        self, seqs: list[Sequence], counts: list[int], batch: int, tokens: int
    ) -> StepInputs:
        width = self.static.run.pages_for(self.context)
        pad = self.static.config.pad_token_id
        return step_inputs(seqs, counts, batch, tokens, width, pad, filters=self.filters)

    def _done(self, kind: str, batch: int, tokens: int, outputs: Any) -> None:
        key = (kind, batch, tokens)
        self.steps[key] = self.steps.get(key, 0) + 1
        if self.check_replicas and (apart := unequal_replicas((self.cache, outputs))):
            raise EngineError(
                f"{kind} step {self.steps[key]}: not equal on all ranks, as they must be: "
                f"{', '.join(apart[:5])}. A device or an exchange computes wrongly; run "
                "`python -m parity run --suite sharded` on these devices"
            )

    def _processed(self, seqs: list[Sequence], counts: Ids[int], finite: jax.Array) -> None:
        for seq, count, fine in zip(seqs, counts, np.asarray(finite).tolist(), strict=False):
            seq.processed += int(count)
            if not fine:
                seq.failed = f"logits not finite at position {seq.processed - 1}"

    def _reserve(self, seq: Sequence, length: int) -> None:
        if length > self.context:
            raise EngineError(
                f"{length} tokens: beyond the context of {self.context} that this engine was made "
                "for; release the sequence or make an engine with a larger context"
            )
        needed = self.static.run.pages_for(length) - len(seq.pages)
        if needed > len(self._free_pages):
            raise EngineError(
                f"{length} tokens need {needed} more page(s) of {self.static.run.page_tokens}, "
                f"{len(self._free_pages)} of {self.static.run.pages} are free; release a sequence "
                "or raise pages"
            )
        self._give(seq, needed)

    def _give(self, seq: Sequence, pages: int) -> None:
        """Up to so many free pages."""
        for _ in range(min(pages, len(self._free_pages))):
            seq.pages.append(self._free_pages.pop())

    def _get(self, handle: int) -> Sequence:
        if handle not in self.sequences:
            raise EngineError(
                f"no sequence {handle}; expected one of {sorted(self.sequences)}; use what `add` "
                "returned and `release` has not seen"
            )
        return self.sequences[handle]

    @staticmethod
    def _require_sound(handle: int, seq: Sequence) -> None:
        if seq.failed is not None:
            raise EngineError(f"sequence {handle} failed ({seq.failed}); release it")

    def _require_open(self, handle: int, seq: Sequence) -> None:
        self._require_sound(handle, seq)
        if seq.finished is not None:
            raise EngineError(
                f"sequence {handle} is finished ({seq.finished}); extend or release it"
            )

    def _bad_ids(self, ids: Ids[int]) -> list[str]:
        vocab = self.static.config.vocab_size
        bad = [i for i in ids if not _is_id(i, vocab)]
        if len(ids) and not bad:
            return []
        found = "no token ids" if not len(ids) else f"ids outside 0..{vocab - 1}: {bad[:5]}"
        return [f"{found}; expected at least one id of the vocabulary; use this model's tokenizer"]


def _is_id(value: Any, vocabulary: int) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) < vocabulary
    except TypeError:
        return False


def describe_device() -> str:
    """Platform and kind of the default device, for reports."""
    device = jax.devices()[0]
    return f"{device.platform} ({device.device_kind})"

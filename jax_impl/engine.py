"""Host side of generation: slots, pages, lengths and stop rules. Owns nothing numerical."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.backend import AUTO, Backend
from jax_impl.cache import PAD, Cache, StepInputs, StepOutputs, make_cache
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.params import Weights
from jax_impl.static import Static
from jax_impl.step import build_step

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class EngineError(ValueError):
    """A request that cannot be served; says what was asked, what is there and what to do."""


@dataclass
class Sequence:
    """One sequence. `ids` are all known tokens, the first `processed` of which the cache holds."""

    ids: list[int]
    slot: int
    temperature: float
    seed: int
    processed: int = 0
    pages: list[int] = field(default_factory=list)
    failed: str | None = None


class Engine:
    """Generation on one device: prefill in chunks, then batched decode steps.

    Attributes:
        sequences: the live sequences by handle; a finished one stays until `release`.
        cache: the device caches (replaced by every step; the old one is donated).
        context: most tokens that one sequence may hold; every step is compiled for it.
        steps: number of steps run by (kind, batch bucket, tokens); each key is one compilation.
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

        Raises:
            EngineError: `chunk` or `context` out of range.
        """
        most = min(run.pages * run.page_size, config.max_position_embeddings)
        self.context = most if context is None else context
        if not 1 <= self.context <= most or chunk < 1:
            raise EngineError(
                f"context {self.context}, chunk {chunk}: expected 1..{most} tokens "
                f"({run.pages} pages of {run.page_size}, model limit "
                f"{config.max_position_embeddings}) and a chunk of at least 1"
            )
        self.static = Static(config, run)
        self.weights, self.backend, self.chunk = weights, backend, chunk
        self.cache: Cache = make_cache(config, run)
        self.sequences: dict[int, Sequence] = {}
        self.steps: dict[tuple[str, int, int], int] = {}
        self._free_slots = list(range(run.slots))[::-1]
        self._free_pages = list(range(run.pages))[::-1]
        self._next_handle = 0

    def add(self, prompt: Ids[int], *, temperature: float = 0.0, seed: int = 0) -> int:
        """Admit a sequence and return its handle; nothing runs yet.

        Raises:
            EngineError: empty prompt, ids outside the vocabulary, no free slot, bad temperature.
        """
        self._check_ids(prompt)
        if not 0.0 <= temperature < float("inf"):
            raise EngineError(f"temperature {temperature}: expected 0 (greedy) or above")
        if not 0 <= seed < 2**32:
            raise EngineError(f"seed {seed}: expected 0..{2**32 - 1}")
        if not self._free_slots:
            raise EngineError(
                f"all {self.static.run.slots} slots are in use; release a sequence or raise slots"
            )
        handle = self._next_handle
        self._next_handle += 1
        ids = [int(i) for i in prompt]
        self.sequences[handle] = Sequence(ids, self._free_slots.pop(), temperature, seed)
        return handle

    def extend(self, handle: int, ids: Ids[int]) -> None:
        """Append known tokens to a kept sequence (a next turn); they are prefilled on demand."""
        self._check_ids(ids)
        self._get(handle).ids.extend(int(i) for i in ids)

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
        while True:
            count = min(self.chunk, len(seq.ids) - seq.processed)
            if count < 1:
                raise EngineError(f"sequence {handle}: nothing to process; extend it first")
            outputs = self._run([seq], 1, self.chunk, [count])
            if seq.failed is not None:
                return None
            if seq.processed == len(seq.ids):
                token = int(outputs.token[0])
                seq.ids.append(token)
                return token

    def decode(self, handles: Ids[int]) -> dict[int, int]:
        """One token for each of the given prefilled sequences, in one step.

        Returns the new token by handle; sequences whose logits were not finite are left out.
        """
        seqs = [self._get(h) for h in handles]
        for handle, seq in zip(handles, seqs, strict=True):
            waiting = len(seq.ids) - seq.processed
            if waiting != 1:
                raise EngineError(
                    f"sequence {handle}: {waiting} unprocessed tokens, decode takes exactly one; "
                    "prefill it first"
                )
        if len(set(handles)) != len(handles) or not 1 <= len(handles) <= BATCH_BUCKETS[-1]:
            raise EngineError(
                f"{len(handles)} sequences: expected 1..{BATCH_BUCKETS[-1]} different ones"
            )
        bucket = next(b for b in BATCH_BUCKETS if b >= len(seqs))
        outputs = self._run(seqs, bucket, 1, [1] * len(seqs))
        tokens = np.asarray(outputs.token)
        found = {}
        for row, (handle, seq) in enumerate(zip(handles, seqs, strict=True)):
            if seq.failed is None:
                seq.ids.append(int(tokens[row]))
                found[handle] = seq.ids[-1]
        return found

    def _run(self, seqs: list[Sequence], batch: int, tokens: int, counts: list[int]) -> StepOutputs:
        for seq, count in zip(seqs, counts, strict=True):
            self._reserve(seq, seq.processed + count)
        width = -(-self.context // self.static.run.page_size)
        inputs = _step_inputs(seqs, counts, batch, tokens, width, self.static.config.pad_token_id)
        step = build_step(self.static, self.backend, "last")
        self.cache, outputs, _ = step(self.weights, self.cache, inputs)
        key = ("decode" if tokens == 1 else "prefill", batch, tokens)
        self.steps[key] = self.steps.get(key, 0) + 1
        finite = np.asarray(outputs.finite)
        for row, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            seq.processed += count
            if not finite[row]:
                seq.failed = f"logits not finite at position {seq.processed - 1}"
        return outputs

    def _reserve(self, seq: Sequence, length: int) -> None:
        if length > self.context:
            raise EngineError(
                f"{length} tokens: beyond the context of {self.context} that this engine was made "
                "for; release the sequence or make an engine with a larger context"
            )
        needed = -(-length // self.static.run.page_size) - len(seq.pages)
        if needed > len(self._free_pages):
            raise EngineError(
                f"{length} tokens need {needed} more page(s) of {self.static.run.page_size}, "
                f"{len(self._free_pages)} of {self.static.run.pages} are free; release a sequence "
                "or raise pages"
            )
        seq.pages += [self._free_pages.pop() for _ in range(max(needed, 0))]

    def _get(self, handle: int) -> Sequence:
        if handle not in self.sequences:
            raise EngineError(f"no sequence {handle}; live: {sorted(self.sequences)}")
        return self.sequences[handle]

    def _check_ids(self, ids: Ids[int]) -> None:
        vocab = self.static.config.vocab_size
        bad = [i for i in ids if not 0 <= int(i) < vocab]
        if not len(ids) or bad:
            found = "no token ids" if not len(ids) else f"ids outside 0..{vocab - 1}: {bad[:5]}"
            raise EngineError(f"{found}; expected at least one id of the vocabulary")


def _step_inputs(
    seqs: list[Sequence], counts: list[int], batch: int, tokens: int, width: int, pad_id: int
) -> StepInputs:
    """Host arrays of one step; rows beyond the sequences are pad rows."""
    rows = len(seqs)
    ids = np.full((batch, tokens), pad_id, np.int32)
    table = np.full((batch, width), PAD, np.int32)
    per_row = {
        "count": ([*counts], 0, np.int32),
        "position": ([s.processed for s in seqs], 0, np.int32),
        "slot": ([s.slot for s in seqs], PAD, np.int32),
        "temperature": ([s.temperature for s in seqs], 0, np.float32),
        "seed": ([s.seed for s in seqs], 0, np.uint32),
    }
    for row, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
        ids[row, :count] = seq.ids[seq.processed : seq.processed + count]
        table[row, : len(seq.pages)] = seq.pages
    vectors = {
        name: jnp.asarray(np.array(values + [fill] * (batch - rows), dtype))
        for name, (values, fill, dtype) in per_row.items()
    }
    return StepInputs(tokens=jnp.asarray(ids), page_table=jnp.asarray(table), **vectors)


def describe_device() -> str:
    """Platform and kind of the default device, for reports."""
    device = jax.devices()[0]
    return f"{device.platform} ({device.device_kind})"

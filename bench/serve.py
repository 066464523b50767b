"""Requests through an engine, timed by the host's clock; nothing here knows what a model is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from bench.decode_metrics import Group, Served, Step
from bench.timing import Clock
from jax_impl.plan import BATCH_BUCKETS, bucket
from jax_impl.processes import report

LIMIT = "limit"  # why a finished sequence stopped, as `jax_impl.engine` says it


class Serving(Protocol):
    """What is used of `jax_impl.engine.Engine`."""

    sequences: dict[int, Any]

    def add(
        self, prompt: Any, *, temperature: float, seed: int, stop: Any = (), limit: int | None
    ) -> int:
        """Admit a sequence."""
        ...

    def prefill(self, handle: int) -> int | None:
        """Process its prompt; the first token."""
        ...

    def decode(self, handles: Any) -> dict[int, list[int]]:
        """One step."""
        ...

    def release(self, handle: int) -> None:
        """Forget it."""
        ...


def warm_up_sizes(most: int, *, shrinking: bool) -> list[int]:
    """Requests of warm-up groups, so that every batch size of `most` requests' steps is compiled.

    `shrinking`: requests do not end together, so that steps of every smaller batch come too.
    """
    last = bucket(most)
    return [min(b, most) for b in BATCH_BUCKETS if b == last or (shrinking and b < last)]


def serve_group(
    engine: Serving,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Group:
    """Run the prompts together until each has `tokens` tokens; the end of text is ignored.

    Raises:
        ValueError: a sequence stopped for another reason; says which.
    """
    submitted = clock()
    handles = [
        engine.add(p, temperature=temperature, seed=(seed + i) % 2**32, limit=tokens)
        for i, p in enumerate(prompts)
    ]
    deliveries: dict[int, list[float]] = {}
    for handle in handles:
        report(0, "prefill")
        engine.prefill(handle)
        _require_sound(engine, handle)
        deliveries[handle] = [clock()]
    decode_begin, steps = clock(), []
    running = [h for h in handles if engine.sequences[h].finished is None]
    while running:
        report(len(steps) + 1, "decode step, waiting for its tokens")
        found = engine.decode(running)
        end = clock()
        steps.append(Step(end, len(running), tuple(engine.sequences[h].emitted[-1] for h in found)))
        for handle in running:
            _require_sound(engine, handle)
            deliveries[handle].append(end)
        running = [h for h in running if engine.sequences[h].finished is None]
    served = tuple(
        Served(submitted, tuple(deliveries[h]), engine.sequences[h].generated) for h in handles
    )
    for handle in handles:
        engine.release(handle)
    return Group(served, tuple(steps), submitted, decode_begin)


def _require_sound(engine: Serving, handle: int) -> None:
    seq = engine.sequences[handle]
    if seq.failed is not None:
        raise ValueError(f"request {handle}: {seq.failed}; check the weights")
    if seq.finished not in (None, LIMIT):
        raise ValueError(f"request {handle} ended early: {seq.finished}")

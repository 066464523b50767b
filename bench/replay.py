"""Decode steps chained on the device: what a step takes when the host does not look at its tokens.

The cross-check of steps that the host looks at: a step's inputs are what the step before returned,
all steps of a sample are dispatched one after the other, and only the end of the last is waited
for. The clock is the host's; where dispatching is slower than a step, that is what it shows.
"""

from __future__ import annotations

from typing import Any

import jax

from bench.timing import Clock
from jax_impl.engine import Engine, bucket
from jax_impl.speculate import build_speculative_step
from jax_impl.speculative_engine import SpeculativeEngine
from jax_impl.step import build_step

MOST = 32  # steps of a sample


def replay_ms(engine: Engine, handles: list[int], samples: int, clock: Clock) -> list[float]:
    """Milliseconds per step, one value per sample, behind prefilled sequences.

    Every sample starts at the same place and overwrites what the one before wrote; release the
    sequences afterwards.

    Raises:
        ValueError: no room for a single step.
    """
    width = 1 + engine.drafts if isinstance(engine, SpeculativeEngine) else 1
    seqs = [engine.sequences[h] for h in handles]
    room = min(engine.context - s.processed for s in seqs) // width
    steps = min(MOST, room - 1)
    if steps < 1:
        raise ValueError(f"no room to replay a step within a context of {engine.context} tokens")
    for seq in seqs:
        engine._reserve(seq, seq.processed + steps * width)
    inputs: Any = engine._inputs(seqs, [width] * len(seqs), bucket(len(seqs)), width)
    stages = engine._stages("verify" if width > 1 else "decode", inputs)
    built: Any
    if isinstance(engine, SpeculativeEngine):
        inputs = engine._waiting.given(inputs)
        built = build_speculative_step(*engine._build(stages))
        weights: tuple[Any, ...] = (engine.weights, engine.draft_weights)
    else:
        built = build_step(engine.static, stages, "last", engine.placement.mesh)
        weights = (engine.weights,)
    found = []
    for turn in range(samples + 2):  # the first two compile, for inputs of host and of device
        following, begin = inputs, clock()
        for _ in range(steps):
            engine.cache, outputs, following = built(*weights, engine.cache, following)
        jax.block_until_ready((engine.cache, outputs))
        if turn >= 2:
            found.append((clock() - begin) / steps * 1e3)
    return found

"""Decode steps chained on the device: what a step takes when the host does not look at its tokens.

The cross-check of steps that the host looks at: a step's inputs are what the step before returned,
all steps of a sample are dispatched one after the other, and only the end of the last is waited
for. Timed by the host's clock, and again, with the profiler, by the device's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from bench.activities import Activity, busy_us, record, span_us
from bench.result import median_figure
from bench.timing import Clock
from jax_impl.engine import Engine, bucket
from jax_impl.speculate import build_speculative_step_in_place, first_speculative_turn
from jax_impl.speculative_engine import SpeculativeEngine
from jax_impl.step import Turn, build_step_in_place, first_turn, with_inputs

MOST = 32  # steps of a sample
MOST_TRACED = 8  # a step has over a thousand activities
DEFINITION = (
    "replay_ms: a step when the host does not look at tokens: as many steps as fit, up to 32, each "
    "taking its inputs from the one before, dispatched one by one without waiting; by the host's "
    "clock from the first dispatch to the end of the last step, over their number. "
    "replay_device_ms: up to 8 such steps under the profiler, from the start of the first device "
    "activity to the end of the last by the trace's clock, over their number (on a CPU an activity "
    "is an instruction; where launching kernels takes longer than running them, tracing adds to "
    "it); replay_device_busy: the share of it in which an activity ran. "
    "host_over_replay, host_over_device: step_ms over these"
)


def chain(engine: Engine, handles: list[int]) -> tuple[Callable[[int], Any], int]:
    """A function that runs so many steps behind prefilled sequences, and the most it can run.

    Every call starts at the same place and overwrites what the one before wrote; release the
    sequences afterwards.

    Raises:
        ValueError: no room for a single step.
    """
    width = 1 + engine.drafts if isinstance(engine, SpeculativeEngine) else 1
    seqs = [engine.sequences[h] for h in handles]
    room = min(engine.context - s.processed for s in seqs) // width
    most = min(MOST, room - 1)
    if most < 1:
        raise ValueError(f"no room to replay a step within a context of {engine.context} tokens")
    for seq in seqs:
        engine._reserve(seq, seq.processed + most * width)
    inputs: Any = engine._inputs(seqs, [width] * len(seqs), bucket(len(seqs)), width)
    stages = engine._stages("verify" if width > 1 else "decode", inputs)
    mesh = engine.placement.mesh
    built: Any
    if isinstance(engine, SpeculativeEngine):
        inputs = engine._waiting.given(inputs)
        built = build_speculative_step_in_place(*engine._build(stages))
        weights: tuple[Any, ...] = (engine.weights, engine.draft_weights)
        turn = first_speculative_turn(engine.cache, inputs, mesh)
    else:
        built = build_step_in_place(engine.static, stages, "last", mesh)
        weights = (engine.weights,)
        turn = first_turn(engine.static, engine.weights, engine.cache, inputs, mesh=mesh)
    held = [turn.inputs, turn.outputs]

    def run(steps: int) -> Any:
        turn = with_inputs(Turn(engine.cache, *held), inputs)
        for _ in range(steps):
            turn = built(*weights, turn)
        engine.cache, *held[:] = turn
        return jax.block_until_ready(turn)

    return run, most


def replay_figures(
    engine: Engine,
    handles: list[int],
    samples: int,
    clock: Clock,
    trace: Callable[[Callable[[], Any]], list[Activity]] = record,
) -> dict[str, Any]:
    """`replay_ms`, `replay_device_ms` and `replay_device_busy` (`DEFINITION`).

    Args:
        engine: whose steps.
        handles: prefilled sequences, to be released afterwards.
        samples: of each figure.
        clock: the host's.
        trace: device activities of a call.

    Raises:
        ValueError: no room for a single step.
        RuntimeError: the profiler saw nothing.
    """
    run, steps = chain(engine, handles)
    host, device, busy = [], [], []
    for turn in range(samples + 2):  # the first two compile, for inputs of host and of device
        begin = clock()
        run(steps)
        if turn >= 2:
            host.append((clock() - begin) / steps * 1e3)
    traced = min(steps, MOST_TRACED)
    for _ in range(samples):
        seen = trace(lambda: run(traced))
        span = span_us(seen)
        device.append(span / traced / 1e3)
        busy.append(busy_us(seen) / span)
    return {
        "replay_ms": median_figure(host, "ms"),
        "replay_device_ms": median_figure(device, "ms"),
        "replay_device_busy": median_figure(busy, "share"),
    }

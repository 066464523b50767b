"""Host clocks around device work: a sample is a call, its end waited for, divided by its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

Clock = Callable[[], float]  # seconds, rising
FEWEST = 4  # samples whose halves can be compared


def sample_us(call: Callable[[], Any], wait: Callable[[Any], Any], steps: int, clock: Clock) -> Any:
    """Microseconds per step of one `call` that takes `steps` steps, and what it returned."""
    begin = clock()
    found = wait(call())
    return (clock() - begin) / steps * 1e6, found


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    *,
    steps: int,
    repeats: int,
    warmups: int = 2,
    budget_s: float = float("inf"),
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Microseconds per step of every call, `repeats` samples each, taken in turns.

    In turns, so that a slow change of the machine meets all of them alike. The first `warmups`
    rounds are not counted. Where `repeats` rounds as long as the last warm-up would take more than
    `budget_s` seconds there are fewer, but `FEWEST`.
    """

    def one_round() -> dict[str, float]:
        return {name: sample_us(call, wait, steps, clock)[0] for name, call in calls.items()}

    took = 0.0
    for _ in range(warmups):
        begin = clock()
        one_round()
        took = clock() - begin
    if took * repeats > budget_s:
        repeats = max(min(FEWEST, repeats), int(budget_s / took))
    rounds = [one_round() for _ in range(repeats)]
    return {name: [r[name] for r in rounds] for name in calls}


def per_layer_us(deep: list[float], shallow: list[float], layers: int) -> list[float]:
    """Time of one layer from steps of two depths that differ by `layers`, sample by sample.

    Raises:
        ValueError: numbers of samples or layers that give no difference.
    """
    if layers < 1 or len(deep) != len(shallow):
        raise ValueError(
            f"{len(deep)} and {len(shallow)} samples, {layers} layers: expected as many of each, "
            "and at least one layer between them"
        )
    return [(a - b) / layers for a, b in zip(deep, shallow, strict=True)]

"""Figures that others published, with their conditions. Not reproduced, never mixed with ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published pair: the specialised path and the stock one."""

    what: str
    specialised: float
    stock: float
    unit: str
    conditions: str


_STEP = "vLLM, 16 GB300, TP16, no speculation, ISL 1, OSL 1024, greedy, FP8 cache"
PUBLISHED = (
    Published(
        "throughput, one request", 842, 488, "tokens/s",
        "vLLM, 16 GB300, TP16, DSpark with 7 drafts, synthetic acceptance length 6, ISL 1, OSL 1k, "
        "prefill excluded",
    ),
    Published("throughput, one request", 838, 489, "tokens/s", "the same, an earlier table"),
    Published("step, batch 1", 3.90, 7.38, "ms", _STEP),
    Published("step, batch 2", 4.58, 8.79, "ms", _STEP),
    Published("step, batch 4", 5.75, 10.33, "ms", _STEP),
    Published("step, batch 8", 6.82, 12.19, "ms", _STEP),
    Published("step, batch 64", 17.75, 28.75, "ms", _STEP),
    Published(
        "one layer", 69, 130, "us",
        "vLLM, profiled; 13 and 23 kernels; fits the verification of 8 rows at TP16",
    ),
)  # fmt: skip


def tokens_per_second(acceptance_length: float, round_ms: float) -> float:
    """Tokens per second of one request: tokens of a round over its time.

    Raises:
        ValueError: not positive.
    """
    if acceptance_length <= 0 or round_ms <= 0:
        raise ValueError(
            f"acceptance length {acceptance_length}, round {round_ms} ms: expected both above 0"
        )
    return acceptance_length * 1000.0 / round_ms

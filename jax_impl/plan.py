"""The step gate: which backend serves a step, and why. Pure Python, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_impl.config import RunConfig

MAX_ROWS = 64  # rows that the kernels take
MAX_TOKENS = 8  # of one sequence
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # sequences of a step, pad rows included
Kind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class StepShape:
    """What a step is to do.

    Attributes:
        kind: known tokens, one token per sequence, or an anchor with its drafts.
        sequences: rows of the batch, pad rows included.
        tokens: of each sequence.
    """

    kind: Kind
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Which backend serves a step, and the reason in words."""

    backend: Literal["auto", "latency_specialized"]
    reason: str


def bucket(sequences: int) -> int:
    """The smallest batch that holds so many sequences."""
    return next(b for b in BATCH_BUCKETS if b >= sequences)


def choose(run: RunConfig, shape: StepShape) -> Plan:
    """The backend of a step; `latency_specialized` only where `run` asks for it."""
    if run.decode_backend == "auto":
        return Plan("auto", "as configured")
    rows = shape.sequences * shape.tokens
    if shape.kind == "prefill":
        return Plan("auto", "prefill")
    if rows > MAX_ROWS:
        return Plan("auto", f"{rows} rows, kernels take at most {MAX_ROWS}")
    if shape.tokens > MAX_TOKENS:
        found = f"{shape.tokens} tokens per sequence"
        return Plan("auto", f"{found}, kernels take at most {MAX_TOKENS}")
    return Plan("latency_specialized", f"{shape.kind}, {rows} rows")

"""One sequence of an engine, and the host arrays of a step over several."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jax_impl.cache import PAD, StepInputs
from jax_impl.sampling import Filters
from jax_impl.sampling_config import Sampling

STOP, LIMIT = "stop", "limit"  # why a sequence finished


@dataclass
class Sequence:
    """One sequence. `ids` are all known tokens, the first `processed` of which the cache holds.

    Attributes:
        sampling: how its tokens are drawn.
        stop: ids that end the text; the one found is kept.
        limit: most tokens to generate behind the prompt, or behind the latest extension.
        generated: tokens generated so far, counted as `limit` does.
        emitted: tokens that each decode step gave, before `stop` and `limit` cut them.
        finished: None while the text goes on, else `STOP`, `LIMIT` or a sentence about its room.
        failed: None, or what went wrong.
    """

    ids: list[int]
    slot: int
    sampling: Sampling = Sampling()  # noqa: RUF009  (frozen)
    stop: frozenset[int] = frozenset()
    limit: int | None = None
    processed: int = 0
    pages: list[int] = field(default_factory=list)
    generated: int = 0
    emitted: list[int] = field(default_factory=list)
    finished: str | None = None
    failed: str | None = None

    def take(self, tokens: Ids[int]) -> list[int]:
        """Append generated tokens up to the end of the text; returns those that count."""
        kept: list[int] = []
        for token in tokens:
            if self.finished is not None:
                break
            kept.append(int(token))
            self.generated += 1
            if kept[-1] in self.stop:
                self.finished = STOP
            elif self.generated == self.limit:
                self.finished = LIMIT
        self.ids += kept
        return kept


def step_inputs(
    seqs: Ids[Sequence],
    counts: Ids[int],
    batch: int,
    tokens: int,
    width: int,
    pad_id: int,
    *,
    filters: bool = False,
) -> StepInputs:
    """Host arrays of one step, the same in every process; rows beyond the sequences are pad rows.

    `counts` may be more than the known tokens of a sequence; what stands there is then not used.
    With `filters` every row has some, rows that restrict nothing the neutral ones: the program is
    then the same whichever sequences a step serves.
    """
    ids = np.full((batch, tokens), pad_id, np.int32)
    table = np.full((batch, width), PAD, np.int32)
    column = partial(_column, rows=batch)
    for row, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
        known = seq.ids[seq.processed : seq.processed + count]
        ids[row, : len(known)] = known
        table[row, : len(seq.pages)] = seq.pages
    draws = [s.sampling for s in seqs]
    return StepInputs(
        tokens=ids,  # type: ignore[arg-type]
        count=column(counts, 0, np.int32),
        position=column([s.processed for s in seqs], 0, np.int32),
        slot=column([s.slot for s in seqs], PAD, np.int32),
        page_table=table,  # type: ignore[arg-type]
        temperature=column([d.temperature for d in draws], 0, np.float32),
        seed=column([d.seed for d in draws], 0, np.uint32),
        filters=filters_of(draws, batch) if filters else None,
    )


def filters_of(draws: Ids[Sampling], rows: int) -> Filters:
    """Filters [rows] of requests, neutral ones behind them."""
    return Filters(
        _column([d.top_k for d in draws], 0, np.int32, rows=rows),
        _column([d.top_p for d in draws], 1, np.float32, rows=rows),
        _column([d.min_p for d in draws], 0, np.float32, rows=rows),
    )


def _column(values: Ids[float], fill: float, dtype: Any, *, rows: int) -> Any:
    """[rows], `fill` behind the values."""
    return np.array([*values, *[fill] * (rows - len(values))], dtype)

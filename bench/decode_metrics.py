"""Figures of served requests, from times alone; the definitions that the output carries.

Times are seconds of one clock. A group is as many requests as run together: all submitted at once,
prefilled one after the other, then decoded together until the last has all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from bench.result import figure

DEFINITIONS = {
    "step_ms": "wall time between the ends of consecutive decode steps (rounds when drafting: "
    "verify, accept, commit, context, draft), at exactly the stated running requests; median. The "
    "first step after a prefill is not counted.",
    "decode_tokens_s": "total decode rate without prefill: all tokens but each request's first, "
    "over the time from the end of the last prefill to the last token, summed over groups",
    "rounds_tokens_s": "running requests times mean tokens per request and step over step_ms: what "
    "decode_tokens_s tends to when no output is cut",
    "user_tokens_s": "per request: (tokens - 1) / (last token - first token), waiting for the "
    "prefills behind it in its group included. p50, p90, p99: the rate that 50, 90, 99 % of the "
    "requests reach",
    "ttft_ms": "per request: submission to first token, waiting for the prefills before it "
    "included; p50, and p90 and p99 that as many requests stay below",
    "itl_ms": "inter-token latency as a client sees it: time between deliveries to one request. "
    "When drafting one delivery holds several tokens; tpot_ms is per token. The first one holds "
    "the prefills behind the request in its group. p50, p90, p99",
    "tpot_ms": "per request: (last token - first token) / (tokens - 1), prefills as in "
    "user_tokens_s; median",
    "output_tokens_s": "output throughput: all tokens over the time from submission to the last "
    "token, prefill included, summed over groups",
    "latency_ms": "per request: submission to last token; p50, p90, p99",
    "accepted_length": "mean tokens per request and step, recovered or bonus token included, "
    "before the output limit cuts them",
}


@dataclass(frozen=True)
class Served:
    """One request: when it was submitted, when its tokens came, and how many in all."""

    submitted: float
    deliveries: tuple[float, ...]  # of the first token and of every step that gave one
    tokens: int

    @property
    def tpot(self) -> float:
        """Seconds per token behind the first."""
        return (self.deliveries[-1] - self.deliveries[0]) / (self.tokens - 1)


@dataclass(frozen=True)
class Step:
    """One decode step: its end, how many requests ran, and the tokens each was given."""

    end: float
    running: int
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Requests that ran together."""

    requests: tuple[Served, ...]
    steps: tuple[Step, ...]
    submitted: float
    decode_begin: float

    @property
    def end(self) -> float:
        """When the last token came."""
        return self.steps[-1].end

    def intervals(self, running: int) -> list[float]:
        """Seconds between the ends of consecutive steps with so many running requests."""
        return [b.end - a.end for a, b in pairwise(self.steps) if a.running == b.running == running]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; `share` in 0..1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def decode_figures(runs: Sequence[Sequence[Group]], running: int) -> dict[str, dict[str, Any]]:
    """All figures of the runs' groups; samples are one per run.

    Raises:
        ValueError: no step ran at the stated number of requests.
    """
    pooled = [g for run in runs for g in run]
    each = [_values(run, running) for run in runs]
    found = {
        name: figure(value, unit, [one[name][0] for one in each])
        for name, (value, unit) in _values(pooled, running).items()
    }
    counts = {
        "steps": sum(len(g.steps) for g in pooled),
        "steps_timed": sum(len(g.intervals(running)) for g in pooled),
        "requests": sum(len(g.requests) for g in pooled),
    }
    return found | {name: figure(value, "count") for name, value in counts.items()}


def _values(groups: Sequence[Group], running: int) -> dict[str, tuple[float, str]]:
    """(value, unit) of every timed figure of these groups together."""
    requests = [r for g in groups for r in g.requests]
    steps = [s for g in groups for s in g.intervals(running)]
    if not steps:
        raise ValueError(
            f"a run has no two consecutive steps with {running} running request(s); ask for more "
            "output tokens"
        )
    step, length = median(steps), fmean(e for g in groups for s in g.steps for e in s.emitted)
    found = {
        "step_ms": (step * 1e3, "ms"),
        "decode_tokens_s": (_rate(groups), "tokens/s"),
        "rounds_tokens_s": (running * length / step, "tokens/s"),
        "output_tokens_s": (_rate(groups, prefill=True), "tokens/s"),
        "tpot_ms": (median(r.tpot for r in requests) * 1e3, "ms"),
        "accepted_length": (length, "tokens"),
    }
    rates = [1 / r.tpot for r in requests]
    times = {
        "ttft_ms": [r.deliveries[0] - r.submitted for r in requests],
        "itl_ms": [b - a for r in requests for a, b in pairwise(r.deliveries)],
        "latency_ms": [r.deliveries[-1] - r.submitted for r in requests],
    }
    for share in (50, 90, 99):
        found[f"user_tokens_s.p{share}"] = (percentile(rates, 1 - share / 100), "tokens/s")
        for name, values in times.items():
            found[f"{name}.p{share}"] = (percentile(values, share / 100) * 1e3, "ms")
    return found


def _rate(groups: Sequence[Group], prefill: bool = False) -> float:
    """Tokens per second of decoding alone, or with prefill and its tokens."""
    tokens = sum(r.tokens - (not prefill) for g in groups for r in g.requests)
    return tokens / sum(g.end - (g.submitted if prefill else g.decode_begin) for g in groups)

"""`python -m bench agentic`: replay of multi-turn traffic, and what each user sees of it.

The trace file is described in `bench.traffic`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from bench import slice_parity
from bench.decode import check
from bench.decode_metrics import percentile
from bench.engine_options import AgenticOptions, engine_problems, rows_problems
from bench.engine_setup import load, plans_of
from bench.machine import command_line, describe_machine, with_clocks_now
from bench.options import see_help
from bench.result import SCHEMA, figure, noisy_names
from bench.serve import serve_group, warm_up_sizes
from bench.traffic import Turn, TurnServed, longest, read_trace, replay
from jax_impl.plan import BATCH_BUCKETS
from jax_impl.problems import listed
from jax_impl.processes import COMPILING, report
from jax_impl.progress import activity, count_bar

DEFINITIONS = {
    "user_tokens_s": "interactivity. Per user: tokens behind the first of all turns, over the time "
    "from first to last token of all turns, waiting for others' prefills included. p50, p90, p99: "
    "the rate that 50, 90, 99 % of the users reach",
    "ttft_ms": "per turn: from the moment it was due to its first token; waiting for a running "
    "step and for others' prefills included. p50, p90, p99",
    "output_tokens_s": "all answered tokens over the time from the first turn's moment to the last "
    "token",
    "reused_share": "tokens of the conversations that were in the cache when a turn came, over "
    "those and the ones that had to be processed",
}


def turn_figures(runs: Sequence[Sequence[TurnServed]]) -> dict[str, dict[str, Any]]:
    """All figures; samples are one per run."""
    found: dict[str, dict[str, Any]] = {}
    rates = [user_rates(run) for run in runs]
    pooled = [r for run in rates for r in run]
    ttft = [[(t.first - t.due) * 1e3 for t in run] for run in runs]
    waited = [v for run in ttft for v in run]
    for share in (50, 90, 99):
        low, high = 1 - share / 100, share / 100
        found[f"user_tokens_s.p{share}"] = figure(
            percentile(pooled, low), "tokens/s", [percentile(run, low) for run in rates]
        )
        found[f"ttft_ms.p{share}"] = figure(
            percentile(waited, high), "ms", [percentile(run, high) for run in ttft]
        )
    output = [
        sum(t.tokens for t in run) / (max(t.last for t in run) - min(t.due for t in run))
        for run in runs
    ]
    found["output_tokens_s"] = figure(percentile(output, 0.5), "tokens/s", output)
    turns = [t for run in runs for t in run]
    reused, processed = sum(t.reused for t in turns), sum(t.processed for t in turns)
    found["reused_share"] = figure(reused / (reused + processed), "share")
    found["turns"] = figure(len(turns), "count")
    return found


def user_rates(run: Sequence[TurnServed]) -> list[float]:
    """Tokens per second of every user."""
    by_user: dict[int, list[TurnServed]] = {}
    for turn in run:
        by_user.setdefault(turn.user, []).append(turn)
    return [
        sum(t.tokens - 1 for t in turns) / sum(t.last - t.first for t in turns)
        for turns in by_user.values()
    ]


def require_agentic(o: AgenticOptions, sessions: Sequence[Sequence[Turn]]) -> int:
    """Check what needs no model; tokens of the longest conversation, drafts included.

    Raises:
        ValueError: listing everything that is out of range.
    """
    needed = longest(sessions) + (o.drafts + 1 if o.drafts else 0)
    problems = engine_problems(o, needed)
    if not 1 <= o.users <= BATCH_BUCKETS[-1]:
        problems.append(f"--users {o.users}: expected 1 to {BATCH_BUCKETS[-1]}, the largest batch")
    else:
        problems += rows_problems("users", o.users, max(0, o.drafts), (o.backend,))
    if o.runs < 1:
        problems.append(f"--runs {o.runs}: expected at least 1")
    if not 0 < o.speed < math.inf:
        problems.append(f"--speed {o.speed}: expected a finite number above 0")
    if problems:
        raise ValueError(listed("agentic", problems, see_help("agentic")))
    return needed


def first_process_says(number: int) -> int:
    """The first process's number; all call it. One exchange where there are several."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return int(broadcast_one_to_all(np.int32(number)))


def _warm_up(engine: Any, o: AgenticOptions, most: int) -> None:
    """Steps of every batch size, within the `most` tokens that the longest conversation has."""
    for size in warm_up_sizes(o.users, shrinking=True):
        serve_group(engine, [[1]] * size, min(4 + 2 * o.drafts, most - 1))


def _measure(
    engine: Any, o: AgenticOptions, sessions: list[list[Turn]], vocabulary: int
) -> list[list[TurnServed]]:
    """The turns of every run."""
    runs = []
    with count_bar("measuring", o.runs) as progress:
        for run in range(o.runs):
            rng = np.random.default_rng([o.seed, run])

            def content(number: int, rng: Any = rng) -> list[int]:
                return rng.integers(0, vocabulary, number).tolist()

            runs.append(
                replay(
                    engine, sessions, o.users, content,
                    clock=time.perf_counter, agree=first_process_says,
                    temperature=o.temperature, seed=o.seed,
                )
            )  # fmt: skip
            progress(len(runs))
    return runs


def run_agentic(o: AgenticOptions, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result document.

    Raises:
        ValueError: options, trace, sizes or backend that cannot run; says why.
    """
    recorded = read_trace(o.trace)
    needed = require_agentic(o, recorded)
    sessions = [[Turn(t.new, t.output, t.pause_s / o.speed) for t in turns] for turns in recorded]
    report(None, "weights", allow=COMPILING)
    loaded = load(o, o.users, o.chunk, needed, (o.backend,))
    engine, vocabulary = loaded.engine(o.backend), loaded.config.vocab_size
    machine = describe_machine()
    report(0, "warm-up (compiles first)", allow=COMPILING)
    with activity("compiling, warm-up"):
        _warm_up(engine, o, longest(recorded))
        first_process_says(0)
    runs = _measure(engine, o, sessions, vocabulary)
    machine = with_clocks_now(machine)
    figures = turn_figures(runs)
    apart = check(loaded, engine, o.users)
    return {
        "schema": SCHEMA,
        "command": command_line(list(argv) if argv is not None else None),
        "conditions": machine
        | {
            "what": "multi-turn traffic, closed loop",
            "seed": o.seed,
            "shapes": {
                "model": str(o.checkpoint or f"random weights, preset {o.preset}"),
                "trace": str(o.trace), "sessions": len(sessions), "users": o.users,
                "turns": sum(map(len, sessions)), "longest": longest(sessions),
                "context": loaded.context, "tp": o.tp, "drafts": o.drafts,
                "processes": jax.process_count(),
                "kv_dtype": o.kv_dtype, "chunk": loaded.chunk,
            },
            "acceptance": loaded.acceptance,
            "backend": o.backend,
            "excluded": "loading, compilation and warm-up",
            "execution": f"{o.runs} runs; pauses of the trace divided by {o.speed:g}" + (
                "; before every step with somebody pausing, processes exchange who is due, which "
                "the times hold" if jax.process_count() > 1 else ""
            ),
            "definitions": DEFINITIONS,
            "plans": plans_of(engine, o.backend),
            "options": {k: str(v) if v is not None else None for k, v in asdict(o).items()},
            "noisy": noisy_names(figures),
        },
        "figures": figures,
        "parity": slice_parity.verdict(engine.static, apart),
    }  # fmt: skip

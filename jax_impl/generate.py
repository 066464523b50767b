"""What `k3 generate` does: load, prefill, decode, time it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Rate

from jax_impl.backend import Backend, choose_backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.engine import LIMIT, STOP, Engine, describe_device
from jax_impl.ids import parse_ids
from jax_impl.loader import load_weights, placed_bytes
from jax_impl.params import Weights
from jax_impl.processes import COMPILING, is_first, report
from jax_impl.sharding import Placement, place_ranks, require_ranks

if TYPE_CHECKING:
    from jax_impl.cli import GenerateOptions


def run_generate(path: Path, prompt: str, options: GenerateOptions) -> dict[str, Any]:
    """Generate `options.steps` tokens; the result holds ids, times and their conditions.

    Raises:
        ConfigError, CheckpointError, ValueError: input that cannot be run; before anything is
            loaded where that can be told.
    """
    checkpoint, ids = Checkpoint.open(path), parse_ids(prompt)
    run = _settings(checkpoint.config, ids, options)
    require_ranks(checkpoint.config, run, options.tp)
    backend = choose_backend(run, checkpoint.config, options.tp)
    placement = place_ranks(options.tp, run)
    if options.draft is not None:
        from jax_impl.generate_draft import speculative

        found = speculative(checkpoint, run, backend, ids, options, placement)
    else:
        found = _plain(checkpoint, run, backend, ids, options, placement)
    conditions = {
        "checkpoint": str(path),
        "device": describe_device(),
        "jax": jax.__version__,
        "backend": options.backend,
        "profile": options.profile,
        "compute": options.compute,
        "kv_dtype": run.kv_cache_dtype,
        "tp": options.tp,
        "processes": jax.process_count(),
        "experts": run.experts,
        "dcp": run.dcp,
        "batch": 1,
        "temperature": options.temperature,
        "seed": options.seed,
        "excluded": "loading, prefill and the first decode step (compilation)",
    }
    return {"prompt_ids": ids} | found | {"conditions": conditions | found.get("conditions", {})}


def _settings(config: ModelConfig, ids: list[int], options: GenerateOptions) -> RunConfig:
    """Run settings with just enough pages; refuses what the model cannot do, all at once."""
    # a last verification may write a whole block behind the tokens that are kept
    spare = 0 if options.draft is None else options.drafts + 1
    length = len(ids) + options.steps + spare
    outside = [i for i in ids if i >= config.vocab_size]
    problems = []
    if options.steps < 1 or options.chunk < 1:
        problems.append(f"steps {options.steps}, chunk {options.chunk}: expected at least 1")
    if length > config.max_position_embeddings:
        problems.append(
            f"{len(ids)} prompt tokens and {options.steps} steps: {length} tokens (drafts "
            f"included), but the model limit is {config.max_position_embeddings}; ask for fewer"
        )
    if outside:
        problems.append(f"prompt ids outside 0..{config.vocab_size - 1}: {outside[:5]}")
    if not 0.0 <= options.temperature < float("inf"):
        problems.append(f"temperature {options.temperature}: expected 0 (greedy) or above")
    if not 0 <= options.seed < 2**32:
        problems.append(f"seed {options.seed}: expected 0..{2**32 - 1}")
    if options.draft is None:
        problems += _speculation_without_draft(options)
    if problems:
        raise ConfigError("not started:" + "".join(f"\n  - {p}" for p in problems))
    run = RunConfig(
        profile=options.profile,
        compute=options.compute,
        kv_dtype=options.kv_dtype,
        kv_scale=options.kv_scale,
        slots=1,
        pages=1,
        page_size=options.page_size,
        decode_backend=options.backend,
        experts=options.experts,
        dcp=options.dcp,
        dcp_interleave=options.dcp_interleave,
    )
    return replace(run, pages=run.pages_for(length))


def _speculation_without_draft(options: GenerateOptions) -> list[str]:
    """Options that would be ignored: a plain run must not pass for a speculative one."""
    usual = type(options)()
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)}: only with --draft"
        for name in ("drafts", "accept", "accept_length", "drafting")
        if getattr(options, name) != getattr(usual, name)
    ]


def _plain(
    checkpoint: Checkpoint,
    run: RunConfig,
    backend: Backend,
    ids: list[int],
    options: GenerateOptions,
    placement: Placement,
) -> dict[str, Any]:
    weights = load_with_progress(checkpoint, run, placement)
    chunk = min(options.chunk, len(ids))
    engine = Engine(
        checkpoint.config, run, weights, backend, chunk=chunk, placement=placement,
        check_replicas=options.check_replicas,
    )  # fmt: skip
    done = drive(engine, ids, options)
    steady = done.times[1:]  # the first decode step holds its compilation
    return {
        "output_ids": done.ids,
        "stopped_by": done.stopped_by,
        "decode_tokens_per_s": len(steady) / sum(steady) if steady else None,
        "decode_steps_timed": len(steady),
        "first_token_s_with_compilation": done.first,
        "steps_by_backend": done.plans,
    }


@dataclass(frozen=True)
class Driven:
    """One generated text.

    Attributes:
        ids: generated ids.
        stopped_by: `eos`, `steps`, or a sentence about missing room.
        emitted: tokens of each decode step, before the end of the text cut them.
        times: seconds of each decode step.
        first: seconds of the prefill, compilation included.
        plans: steps by `backend: reason`, prefill included.
    """

    ids: list[int]
    stopped_by: str
    emitted: list[int]
    times: list[float]
    first: float
    plans: dict[str, int]


def drive(engine: Engine, ids: list[int], options: GenerateOptions) -> Driven:
    """Prefill `ids` and decode until the text ends.

    Raises:
        ConfigError: logits are not finite.
    """
    stop = () if options.ignore_eos else (engine.static.config.eos_token_id,)
    handle = engine.add(
        ids, temperature=options.temperature, seed=options.seed, stop=stop, limit=options.steps
    )
    sequence, times = engine.sequences[handle], []
    started = time.perf_counter()
    report(0, "prefill (compiles first)", allow=COMPILING)
    engine.prefill(handle)
    first = time.perf_counter() - started
    with steps_progress(options.steps) as progress:
        while sequence.failed is None and sequence.finished is None:
            progress(sequence.generated)
            compiles = 0.0 if times else COMPILING
            report(len(times) + 1, "decode step, waiting for its tokens", allow=compiles)
            started = time.perf_counter()
            if engine.decode([handle]):
                times.append(time.perf_counter() - started)
    if sequence.failed is not None or sequence.finished is None:
        raise not_finite(str(sequence.failed), sequence.generated)
    words = {STOP: "eos", LIMIT: "steps"}
    why = words.get(sequence.finished, sequence.finished)
    plans = {f"{plan.backend}: {plan.reason}": n for plan, n in engine.plans.items()}
    return Driven(sequence.ids[len(ids) :], why, sequence.emitted, times, first, plans)


def not_finite(where: str, done: int) -> ConfigError:
    """The error of a run whose logits stopped being finite."""
    return ConfigError(
        f"{where} after {done} generated token(s); check the weights, or run "
        "`python -m parity compare` on this checkpoint"
    )


def load_with_progress(
    checkpoint: Checkpoint, run: RunConfig, placement: Placement, more: int = 0
) -> Weights:
    """Load this process's weights, with bytes and rate on standard error."""
    columns = ("loading", BarColumn(), DownloadColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, quiet=not is_first())) as bar:
        task = bar.add_task("", total=placed_bytes(checkpoint, placement))

        def placed(size: int) -> None:
            bar.advance(task, size)
            report(None, "loading weights")

        return load_weights(checkpoint, placed, run, placement, more)


@contextmanager
def steps_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of generated tokens on standard error."""
    columns = ("decoding", BarColumn(), "{task.completed}/{task.total}")
    with Progress(*columns, console=Console(stderr=True, quiet=not is_first())) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)

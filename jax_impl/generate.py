"""What `k3 generate` does: load, prefill, decode, time it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jax_impl.backend import Backend, choose_backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, RunConfig
from jax_impl.engine import Engine, describe_device
from jax_impl.generate_checks import require, sampling_of
from jax_impl.loader import load_weights, placed_bytes
from jax_impl.params import Weights
from jax_impl.processes import COMPILING, report
from jax_impl.progress import activity, byte_bar, count_bar
from jax_impl.sequences import LIMIT, STOP
from jax_impl.sharding import ONE_DEVICE, Placement, place_ranks

if TYPE_CHECKING:
    from jax_impl.cli import GenerateOptions


def run_generate(path: Path, prompt: str, options: GenerateOptions) -> dict[str, Any]:
    """Generate `options.steps` tokens; the result holds ids, times and their conditions.

    Raises:
        ConfigError, CheckpointError, ValueError: input that cannot be run; before anything is
            loaded where that can be told.
    """
    asked = require(path, prompt, options)
    checkpoint, ids, run = asked.checkpoint, asked.ids, asked.run
    backend = choose_backend(run, checkpoint.config, options.tp)
    placement = place_ranks(options.tp, run)
    if asked.draft is not None:
        from jax_impl.generate_draft import speculative

        found = speculative(checkpoint, asked.draft, run, backend, ids, options, placement)
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
        **asdict(sampling_of(options)),
        "excluded": "loading, prefill and the first decode step (compilation)",
    }
    return {"prompt_ids": ids} | found | {"conditions": conditions | found.get("conditions", {})}


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
        check_replicas=options.check_replicas, filters=bool(sampling_of(options).filters()),
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
    handle = engine.add(ids, **asdict(sampling_of(options)), stop=stop, limit=options.steps)
    sequence, times = engine.sequences[handle], []
    started = time.perf_counter()
    report(0, "prefill (compiles first)", allow=COMPILING)
    with activity("compiling, prefill"):
        engine.prefill(handle)
    first = time.perf_counter() - started
    with count_bar("decoding", options.steps) as progress:
        while sequence.failed is None and sequence.finished is None:
            progress(sequence.generated)
            compiles = 0.0 if times else COMPILING
            report(len(times) + 1, "decode step, waiting for its tokens", allow=compiles)
            started = time.perf_counter()
            if engine.decode([handle]):
                times.append(time.perf_counter() - started)
        progress(sequence.generated, sequence.generated)  # an early end is an end
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
    checkpoint: Checkpoint,
    run: RunConfig | None = None,
    placement: Placement = ONE_DEVICE,
    more: int = 0,
) -> Weights:
    """Load this process's weights, with bytes and rate on standard error."""
    with byte_bar("loading", placed_bytes(checkpoint, placement)) as advance:

        def placed(size: int) -> None:
            advance(size, "")
            report(None, "loading weights")

        return load_weights(checkpoint, placed, run, placement, more)

"""What `k3 generate` does: load, prefill, decode, time it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Rate

from jax_impl.backend import choose_backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, RunConfig
from jax_impl.engine import Engine, describe_device
from jax_impl.ids import parse_ids
from jax_impl.loader import load_weights
from jax_impl.params import Weights

if TYPE_CHECKING:
    from jax_impl.cli import GenerateOptions


def run_generate(path: Path, prompt: str, options: GenerateOptions) -> dict[str, Any]:
    """Generate `options.steps` tokens; the result holds ids, times and their conditions."""
    if options.steps < 1 or options.chunk < 1:
        raise ConfigError(f"steps {options.steps}, chunk {options.chunk}: expected at least 1")
    ids = parse_ids(prompt)
    checkpoint = Checkpoint.open(path)
    length, limit = len(ids) + options.steps, checkpoint.config.max_position_embeddings
    if length > limit:
        raise ConfigError(
            f"{len(ids)} prompt tokens and {options.steps} steps: {length} tokens, but the model "
            f"limit is {limit}; ask for fewer steps"
        )
    pages = -(-length // max(options.page_size, 1))
    run = RunConfig(
        profile=options.profile,
        compute=options.compute,
        kv_dtype=options.kv_dtype,
        kv_scale=options.kv_scale,
        slots=1,
        pages=pages,
        page_size=options.page_size,
        decode_backend=options.backend,
    )
    backend = choose_backend(run)
    weights = load_with_progress(checkpoint, run)
    engine = Engine(checkpoint.config, run, weights, backend, chunk=min(options.chunk, len(ids)))
    handle = engine.add(ids, temperature=options.temperature, seed=options.seed)
    sequence = engine.sequences[handle]
    started = time.perf_counter()
    engine.prefill(handle)
    first = time.perf_counter() - started
    times = []
    stop = None if options.ignore_eos else checkpoint.config.eos_token_id
    with _steps(options.steps) as progress:
        while sequence.failed is None:
            progress(len(sequence.ids) - len(ids))
            if len(sequence.ids) - len(ids) >= options.steps or sequence.ids[-1] == stop:
                break
            started = time.perf_counter()
            engine.decode([handle])
            times.append(time.perf_counter() - started)
    if sequence.failed is not None:
        raise ConfigError(
            f"{sequence.failed} after {len(sequence.ids) - len(ids)} generated token(s); check the "
            "weights, or run `python -m parity compare` on this checkpoint"
        )
    steady = times[1:]  # the first decode step holds its compilation
    return {
        "prompt_ids": ids,
        "output_ids": sequence.ids[len(ids) :],
        "stopped_by": "eos" if sequence.ids[-1] == stop else "steps",
        "decode_tokens_per_s": len(steady) / sum(steady) if steady else None,
        "decode_steps_timed": len(steady),
        "first_token_s_with_compilation": first,
        "conditions": {
            "checkpoint": str(path),
            "device": describe_device(),
            "jax": jax.__version__,
            "backend": options.backend,
            "profile": options.profile,
            "compute": options.compute,
            "kv_dtype": run.kv_cache_dtype,
            "batch": 1,
            "temperature": options.temperature,
            "seed": options.seed,
            "excluded": "loading, prefill and the first decode step (compilation)",
        },
    }


def load_with_progress(checkpoint: Checkpoint, run: RunConfig) -> Weights:
    """Load all weights, with bytes and rate on standard error."""
    columns = ("loading", BarColumn(), DownloadColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=sum(s.nbytes for s in checkpoint.consumed.values()))
        return load_weights(checkpoint, lambda size: bar.advance(task, size), run=run)


@contextmanager
def _steps(total: int):
    with Progress(
        "decoding", BarColumn(), "{task.completed}/{task.total}", console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)

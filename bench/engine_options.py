"""Options of the commands that run an engine; no heavy imports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.options import see_help
from jax_impl.plan import BATCH_BUCKETS, MAX_ROWS, bucket
from jax_impl.problems import listed, seed_problems

BACKENDS = ("auto", "latency_specialized")


@dataclass(frozen=True)
class EngineOptions:
    """What runs.

    Attributes:
        checkpoint: directory of a released or prepared checkpoint; default: random weights.
        draft: directory of its drafter, with a checkpoint and --drafts.
        preset: sizes of random weights; `k3` are the released ones.
        tp: tensor-parallel ranks, one device each.
        experts: cut the width of every routed expert (tp), or give whole experts to ranks (ep).
        dcp: ranks that share the latent cache between them: 1 (each holds all) or as many as tp.
        backend: decode backend.
        drafts: drafted tokens per step; 0 decodes without speculation.
        accept: rule that judges drafts (real acceptance).
        accept_length: forces the mean tokens per step instead (synthetic acceptance), 1 to K + 1.
        drafting: whether the drafter takes its largest logit or draws.
        commit: how a verification keeps accepted rows only: replay of recorded updates of the KDA
            state, or a snapshot of it behind every row.
        temperature: 0 is greedy.
        context: most tokens of one sequence; default: what the command needs.
        kv_dtype: dtype of the latent caches; the FP8 scale is 1.
        page_size: rows of a cache page on one rank.
        chunk: prompt tokens per prefill step.
        seed: of random weights, prompts and draws.
        memory_fraction: share of a GPU's memory that JAX takes.
    """

    checkpoint: Path | None = None
    draft: Path | None = None
    preset: Literal["k3", "tiny", "tp16"] = "tiny"
    tp: int = 1
    experts: Literal["tp", "ep"] = "tp"
    dcp: int = 1
    backend: Literal["auto", "latency_specialized"] = "auto"
    drafts: int = 0
    accept: Literal["standard", "block"] = "block"
    accept_length: float | None = None
    drafting: Literal["greedy", "probabilistic"] = "greedy"
    commit: Literal["replay", "snapshots"] = "replay"
    temperature: float = 0.0
    context: int | None = None
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    page_size: int = 16
    chunk: int = 64
    seed: int = 0
    memory_fraction: float = 0.93


@dataclass(frozen=True)
class DecodeOptions(EngineOptions):
    """Decode steps through the engine, decode apart from prefill.

    Attributes:
        isl: prompt tokens.
        osl: output tokens; the end of text is ignored.
        batch: requests that run together.
        runs: measured runs.
        groups: of `batch` prompts in a run.
        replays: samples of `replay_ms`, the cross-check by steps whose tokens the host does not
            look at; 0 leaves it out.
        compare: two backends, run in turns in this process; their ratio is printed.
    """

    isl: int = 1
    osl: int = 1000
    batch: int = 1
    runs: int = 3
    groups: int = 4
    replays: int = 5
    compare: str | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends to run, in order."""
        return (self.backend,) if self.compare is None else tuple(self.compare.split(","))

    @property
    def needed(self) -> int:
        """Tokens of one sequence at most: prompt, output, and a block of drafts behind it."""
        return self.isl + self.osl + (self.drafts + 1 if self.drafts else 0)


def rows_problems(name: str, sequences: int, drafts: int, backends: tuple[str, ...]) -> list[str]:
    """Why steps of so many sequences would not all run on a forced backend."""
    rows = bucket(sequences) * (1 + drafts)
    if "latency_specialized" not in backends or rows <= MAX_ROWS:
        return []
    most = max((b for b in BATCH_BUCKETS if b * (1 + drafts) <= MAX_ROWS), default=1)
    return [
        f"--{name} {sequences}, --drafts {drafts}: steps of {bucket(sequences)} sequences (a power "
        f"of two) with {1 + drafts} row(s) each are {rows} rows, and latency_specialized takes at "
        f"most {MAX_ROWS}; expected --{name} of at most {most}"
    ]


def engine_problems(o: EngineOptions, needed: int) -> list[str]:
    """What is wrong with the options, as far as no model is needed to tell."""
    problems = seed_problems(o.seed)
    if not 0 <= o.drafts <= 7:
        problems.append(f"--drafts {o.drafts}: expected 0 to 7")
    if o.accept_length is not None and not (o.drafts and 1 <= o.accept_length <= o.drafts + 1):
        problems.append(
            f"--accept-length {o.accept_length}: expected 1 to drafts + 1 = {o.drafts + 1}, "
            "with --drafts"
        )
    if o.commit != "replay" and not o.drafts:
        problems.append(f"--commit {o.commit}: found without drafts, expected --drafts of 1 to 7")
    if (o.checkpoint is not None and o.drafts > 0) != (o.draft is not None):
        found = "given" if o.draft is not None else "missing"
        problems.append(
            f"--draft: found {found}, expected with --checkpoint and --drafts, and only then"
        )
    if o.context is not None and o.context < needed:
        problems.append(
            f"--context {o.context}: expected at least the {needed} tokens that prompt, output and "
            "drafts need"
        )
    if not 0.0 <= o.temperature < math.inf:
        problems.append(f"--temperature {o.temperature}: expected 0 (greedy) or above")
    if o.chunk < 1 or o.page_size < 1:
        problems.append(f"--chunk {o.chunk}, --page-size {o.page_size}: expected at least 1")
    return problems


def require_decode(o: DecodeOptions) -> None:
    """Check what needs no model.

    Raises:
        ValueError: listing everything that is out of range.
    """
    problems = engine_problems(o, o.needed)
    if not 1 <= o.batch <= 64:
        problems.append(f"--batch {o.batch}: expected 1 to 64, the largest batch")
    else:
        problems += rows_problems("batch", o.batch, max(0, o.drafts), o.backends)
    for name, least in (("isl", 1), ("osl", 4 + 2 * o.drafts), ("runs", 1), ("groups", 1)):
        if getattr(o, name) < least:
            problems.append(f"--{name} {getattr(o, name)}: expected at least {least}")
    if o.replays < 0:
        problems.append(f"--replays {o.replays}: expected at least 0")
    if o.compare is not None:
        names = o.backends
        if len(names) != 2 or len(set(names)) != 2 or not set(names) <= set(BACKENDS):
            problems.append(f"--compare {o.compare}: expected two of {','.join(BACKENDS)}")
    if problems:
        raise ValueError(listed("decode", problems, see_help("decode")))


@dataclass(frozen=True)
class AgenticOptions(EngineOptions):
    """Multi-turn traffic through the engine.

    Attributes:
        trace: the trace file, see `bench.traffic`.
        users: served at the same time.
        runs: replays of the whole trace.
        speed: divides the pauses.
    """

    trace: Path = Path(__file__).parent / "traces" / "small.jsonl"
    users: int = 2
    runs: int = 3
    speed: float = 1.0

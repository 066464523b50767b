"""Options of `python -m bench rank-slice`, and what is wrong with them; no heavy imports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.options import see_help
from jax_impl.number_list import Numbers
from jax_impl.plan import MAX_ROWS
from jax_impl.problems import listed, seed_problems

Sizes = Literal["k3", "tiny", "tp16"]


@dataclass(frozen=True)
class SliceOptions:
    """One rank's share of a decode step, exchanges looped back: compute only.

    Attributes:
        tp: over how many ranks the model is cut; one rank's share is run.
        rows: sequences in a step, one row each; comma separated.
        drafts: with drafts K also a verification of one sequence with 1 + K rows (without drafter).
        accept_length: tokens per verification that the forced acceptance commits, 1 to K + 1;
            default: 6, or K + 1 where that is less.
        layers: layers with experts (multiples of 4); two or more numbers give the time per layer
            from their differences. The number of all layers (93) means the whole model.
        backend: decode backend.
        context: tokens per sequence in the cache, those of the step included.
        preset: `k3`, the released sizes; the others are small, for trying the command out.
        kv_dtype: dtype of the latent cache.
        page_size: tokens per page.
        steps: steps of one sample.
        repeats: samples.
        budget: seconds for the samples of one case; slow ones get fewer, at least 4.
        warmups: rounds before the first sample.
        dispatched: also time one call per step, which costs as many compilations again.
        seed: of weights, caches and tokens.
        memory_fraction: share of the GPU's memory that JAX takes.
        compile_workers: programs compiled at the same time.
        compile_cache: folder in which compiled programs are kept for later runs.
    """

    tp: int = 16
    rows: Numbers = (1, 8, 64)
    drafts: int = 0
    accept_length: float | None = None
    layers: Numbers = (8, 20)
    backend: Literal["auto", "latency_specialized"] = "auto"
    context: int = 1024
    preset: Sizes = "k3"
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    page_size: int = 16
    steps: int = 20
    repeats: int = 20
    budget: float = 60.0
    warmups: int = 3
    dispatched: bool = True
    seed: int = 0
    memory_fraction: float = 0.93
    compile_workers: int = 6
    compile_cache: Path | None = None

    @property
    def length(self) -> float:
        """Tokens that a verification commits."""
        return min(6, self.drafts + 1) if self.accept_length is None else self.accept_length


def option_problems(o: SliceOptions) -> list[str]:
    """What is out of range, as far as no model is needed to tell."""
    problems = seed_problems(o.seed)
    if not o.rows or not all(1 <= n <= MAX_ROWS for n in o.rows):
        problems.append(f"--rows {o.rows}: expected numbers of 1 to {MAX_ROWS}, the largest batch")
    if len(set(o.rows)) != len(o.rows):
        problems.append(f"--rows {o.rows}: expected different numbers")
    if not 0 <= o.drafts <= 7:
        problems.append(f"--drafts {o.drafts}: expected 0 to 7")
    elif o.drafts and not 1 <= o.length <= o.drafts + 1:
        problems.append(
            f"--accept-length {o.length}: expected 1 to {o.drafts + 1}, drafts and one more"
        )
    elif not o.drafts and o.accept_length is not None:
        problems.append(f"--accept-length {o.accept_length}: only with --drafts")
    if not o.layers or len(set(o.layers)) != len(o.layers):
        problems.append(f"--layers {o.layers}: expected different numbers")
    if o.context <= o.drafts:
        problems.append(f"--context {o.context}: expected at least the {o.drafts + 1} row(s)")
    for name in ("page_size", "steps", "repeats", "compile_workers"):
        if getattr(o, name) < 1:
            option = name.replace("_", "-")
            problems.append(f"--{option} {getattr(o, name)}: expected at least 1")
    if o.warmups < 1:
        problems.append(f"--warmups {o.warmups}: expected at least 1")
    if not 0 < o.budget < math.inf:
        problems.append(f"--budget {o.budget}: expected a finite number of seconds above 0")
    return problems


def require_options(o: SliceOptions) -> None:
    """Check what needs no model.

    Raises:
        ValueError: listing everything that is out of range.
    """
    if problems := option_problems(o):
        raise ValueError(listed("rank-slice", problems, see_help("rank-slice")))

"""Options of `python -m bench startup`, and what is wrong with them; no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.rank_slice_options import Sizes, SliceOptions
from bench.rank_slice_options import option_problems as slice_problems
from jax_impl.number_list import Numbers
from jax_impl.problems import OUTSIDE, checkpoint_around

IN_FLIGHT = 16  # steps enqueued in a row; from 32 on a runtime makes its caller wait


@dataclass(frozen=True)
class StartupOptions:
    """One rank's decode step, exchanges looped back: what it costs before the device computes.

    Attributes:
        tp: over how many ranks the model is cut; one rank's share is compiled and run.
        rows: sequences in a step, one row each; comma separated, a program each.
        layers: layers with experts (multiples of 4), a program each; default: the whole model.
        backend: decode backend.
        context: tokens per sequence in the cache, those of the step included.
        preset: `k3`, the released sizes; the others are small, for trying the command out.
        kv_dtype: dtype of the latent cache.
        page_size: tokens per page.
        repeats: times that each program is compiled, with an empty cache and with a filled one.
        dispatch: also time the calls that enqueue a step, for which the weights have to be there.
        calls: calls that are timed, of each kind, rounded up to whole rounds of 15.
        budget: seconds for the calls of one program; slow ones get fewer, at least a round.
        seed: of weights, caches and tokens.
        memory_fraction: share of the GPU's memory that JAX takes.
        compile_cache: new or empty folder for the compiled programs, which stay there; default: a
            temporary one.
    """

    tp: int = 16
    rows: Numbers = (1,)
    layers: Numbers | None = None
    backend: Literal["auto", "latency_specialized"] = "auto"
    context: int = 1024
    preset: Sizes = "k3"
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    page_size: int = 16
    repeats: int = 1
    dispatch: bool = True
    calls: int = 200
    budget: float = 60.0
    seed: int = 0
    memory_fraction: float = 0.93
    compile_cache: Path | None = None

    def slice_options(self, rows: tuple[int, ...], layers: tuple[int, ...]) -> SliceOptions:
        """The rank slice whose step is compiled and called; `repeats` are the timed calls."""
        return SliceOptions(
            tp=self.tp, rows=rows, layers=layers, backend=self.backend, context=self.context,
            preset=self.preset, kv_dtype=self.kv_dtype, page_size=self.page_size, steps=1,
            repeats=self.calls, budget=self.budget, seed=self.seed,
            memory_fraction=self.memory_fraction,
        )  # fmt: skip


def option_problems(o: StartupOptions) -> list[str]:
    """What is out of range, as far as no model is needed to tell."""
    layers = (4,) if o.layers is None else o.layers
    found = slice_problems(o.slice_options(o.rows, layers))
    problems = [p for p in found if not p.startswith("--repeats")]  # those are the calls here
    for name in ("repeats", "calls"):
        if getattr(o, name) < 1:
            problems.append(f"--{name} {getattr(o, name)}: expected at least 1")
    if o.context <= IN_FLIGHT:  # so many steps in a row end there, none at position 0
        problems.append(f"--context {o.context}: expected at least {IN_FLIGHT + 1}")
    return problems + folder_problems(o.compile_cache)


def folder_problems(folder: Path | None) -> list[str]:
    """Why a folder cannot be the one that the first compilation finds empty."""
    if folder is None:
        return []
    if (around := checkpoint_around(folder / "programs")) is not None:
        found = f"found it inside {around}, which is input"
        return [f"--compile-cache {folder}: {found}; {OUTSIDE}"]
    if not folder.exists():
        return []
    if not folder.is_dir():
        return [f"--compile-cache {folder}: found a file, expected a new or an empty folder"]
    if any(folder.iterdir()):
        return [
            f"--compile-cache {folder}: found files in it, expected a new or an empty folder, for "
            "the first compilation must find nothing"
        ]
    return []

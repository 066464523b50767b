"""Options of `python -m bench layers`; no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.engine_options import BACKENDS
from bench.options import see_help
from bench.rank_slice_options import Sizes, SliceOptions, option_problems
from jax_impl.plan import MAX_ROWS
from jax_impl.problems import listed


@dataclass(frozen=True)
class LayersOptions:
    """One layer of each kind under the profiler, on one rank's share, exchanges looped back.

    Attributes:
        tp: over how many ranks the model is cut.
        rows: sequences in a step, one row each.
        drafts: with drafts K instead one sequence with 1 + K rows, as in a verification.
        backends: decode backends, comma separated.
        context: tokens per sequence in the cache.
        preset: `k3`, the released sizes; the others are small.
        kv_dtype: dtype of the latent cache.
        repeats: traced calls per layer kind.
        seed: of weights, caches and inputs.
        memory_fraction: share of the GPU's memory that JAX takes.
        picture: file for the timeline (PNG).
        perfetto: folder for Perfetto traces.
    """

    tp: int = 16
    rows: int = 8
    drafts: int = 0
    backends: str = "auto"
    context: int = 1024
    preset: Sizes = "k3"
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    repeats: int = 5
    seed: int = 0
    memory_fraction: float = 0.93
    picture: Path | None = None
    perfetto: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Backends to run, in order."""
        return tuple(self.backends.split(","))

    def slice_options(self, backend: str) -> SliceOptions:
        """The rank slice whose weights, cache and inputs are used."""
        return SliceOptions(
            tp=self.tp, rows=(self.rows,), drafts=self.drafts, layers=(4,), backend=backend,  # type: ignore[arg-type]
            context=self.context, preset=self.preset, kv_dtype=self.kv_dtype, seed=self.seed,
            steps=1, memory_fraction=self.memory_fraction,
        )  # fmt: skip


def require_layers(o: LayersOptions) -> None:
    """Check what needs no model.

    Raises:
        ValueError: listing everything that is out of range.
    """
    problems = option_problems(replace(o.slice_options("auto"), rows=(1,)))
    if not o.names or len(set(o.names)) != len(o.names) or not set(o.names) <= set(BACKENDS):
        problems.append(f"--backends {o.backends}: expected some of {','.join(BACKENDS)}")
    if not 1 <= o.rows <= MAX_ROWS:
        problems.append(f"--rows {o.rows}: expected 1 to {MAX_ROWS}")
    if o.repeats < 1:
        problems.append(f"--repeats {o.repeats}: expected at least 1")
    if o.picture is not None and o.picture.suffix != ".png":
        problems.append(f"--picture {o.picture}: expected a name that ends in .png")
    if problems:
        raise ValueError(listed("layers", problems, see_help("layers")))

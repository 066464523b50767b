"""Model, weights and engines of the commands that serve requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from bench.engine_options import EngineOptions
from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import BackendUnavailableError, choose_backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_memory import RELEASED as RELEASED_DRAFT
from jax_impl.draft_weights import DraftWeights, open_draft
from jax_impl.engine import Engine
from jax_impl.generate import load_with_progress
from jax_impl.loader import free_device_bytes, load_draft
from jax_impl.memory import require_room
from jax_impl.params import Weights
from jax_impl.progress import activity
from jax_impl.random_step import load_config
from jax_impl.random_weights import random_draft, random_weights
from jax_impl.sharding import Placement, place_ranks, require_ranks
from jax_impl.speculative_engine import SpeculativeEngine
from jax_impl.tiny_presets import PRESETS, draft_config, text_config


@dataclass(frozen=True)
class Loaded:
    """A model on its devices, ready to be run by engines."""

    options: EngineOptions
    config: ModelConfig
    run: RunConfig
    placement: Placement
    method: Acceptance
    weights: Weights
    draft_config: DraftConfig | None
    draft_weights: DraftWeights | None
    context: int
    chunk: int

    def engine(self, backend: str) -> Engine:
        """A new engine with a cache of its own.

        Raises:
            BackendUnavailableError: the backend cannot run here; lists every reason.
        """
        asked = replace(self.run, decode_backend=backend)
        stages = choose_backend(asked, self.config, self.options.tp)
        # bound weights serve both backends, and how they lie on the ranks is a matter of `run`
        run = self.run
        common: dict[str, Any] = {
            "chunk": self.chunk, "context": self.context, "placement": self.placement,
        }  # fmt: skip
        if self.draft_config is None or self.draft_weights is None:
            return Engine(self.config, run, self.weights, stages, **common)
        return SpeculativeEngine(
            self.config, run, self.weights, self.draft_config, self.draft_weights, self.method,
            self.options.drafts, stages, **common,
        )  # fmt: skip

    @property
    def acceptance(self) -> Any:
        """For the conditions of a result: how drafts are judged, `none` without drafts."""
        if not self.options.drafts:
            return "none"
        kind = "synthetic" if self.method.rule == "synthetic" else "real"
        spoken = {"kind": kind, "commit": self.run.commit}
        return self.method.describe(self.options.drafts) | spoken


def plans_of(engine: Engine, backend: str) -> dict[str, int]:
    """Steps by what served them and why, of an engine that was made for `backend`.

    Raises:
        BackendUnavailableError: decode steps of a forced backend were served by the other one, so
            that no time of this engine belongs under that name.
    """
    if backend == "auto":  # weights laid out for the kernels may be served by the standard path
        return {"auto: as configured": sum(engine.plans.values())}
    other = [p for p in engine.plans if p.backend != backend and p.reason != "prefill"]
    if other:
        raise BackendUnavailableError(
            f"{backend}: {sum(engine.plans[p] for p in other)} decode step(s) ran on "
            f"{other[0].backend} ({other[0].reason}), expected none; ask for fewer rows, or for "
            f"--backend {other[0].backend}"
        )
    return {f"{p.backend}: {p.reason}": n for p, n in engine.plans.items()}


def load(
    o: EngineOptions, batch: int, prompt: int, needed: int, backends: tuple[str, ...]
) -> Loaded:
    """Check everything, then load or make the weights.

    Args:
        o: the options.
        batch: sequences at the same time.
        prompt: tokens that a prefill has at least.
        needed: tokens of one sequence at most.
        backends: that will be asked for; each engine has a cache of its own.

    Raises:
        ValueError: options, sizes or backend that cannot run; says why.
    """
    checkpoint = None if o.checkpoint is None else Checkpoint.open(o.checkpoint)
    config: Any = load_config(o.preset) if checkpoint is None else checkpoint.config
    context = needed if o.context is None else o.context
    if context > config.max_position_embeddings:
        raise ConfigError(
            f"context {context}: the model's limit is {config.max_position_embeddings} tokens, "
            "expected no more; ask for less (--osl, --isl, --context, or a shorter trace)"
        )
    run = RunConfig(
        slots=batch, pages=1, page_size=o.page_size, kv_dtype=o.kv_dtype, experts=o.experts,
        kv_scale=1.0 if o.kv_dtype == "float8_e4m3fn" else None, dcp=o.dcp,
        commit=o.commit,
    )  # fmt: skip
    run = replace(run, pages=batch * run.pages_for(context))
    for backend in backends:
        choose_backend(replace(run, decode_backend=backend), config, o.tp)
    if "latency_specialized" in backends:
        run = replace(run, decode_backend="latency_specialized")
    method = Acceptance()
    if o.accept_length is not None:
        method = Acceptance("synthetic", o.drafting, o.accept_length)
    elif o.drafts:
        method = Acceptance(o.accept, o.drafting)
    small = _draft_config(o)
    if small is not None:
        method.require(o.drafts)
        small.require_target(config)
    require_ranks(config, run, o.tp, small)
    placement = place_ranks(o.tp, run)
    weights = _weights(o, checkpoint, config, run, placement)
    return Loaded(
        o, config, run, placement, method, weights, small,
        _draft_weights(o, small, placement), context, min(o.chunk, prompt),
    )  # fmt: skip


def _draft_config(o: EngineOptions) -> DraftConfig | None:
    if not o.drafts:
        return None
    if o.draft is not None:
        return open_draft(o.draft).config  # type: ignore[return-value]
    if o.preset == "k3":
        return DraftConfig.from_dict(RELEASED_DRAFT, source="the released drafter")
    preset = PRESETS[o.preset]
    made = draft_config(preset.draft, text_config(preset.target))
    return DraftConfig.from_dict(made, source=f"preset {o.preset}")


def _weights(
    o: EngineOptions,
    checkpoint: Checkpoint | None,
    config: ModelConfig,
    run: RunConfig,
    placement: Placement,
) -> Weights:
    if checkpoint is not None:
        return load_with_progress(checkpoint, run, placement)
    free = free_device_bytes()
    if free is not None:
        # emulated devices of one process share the host's memory
        sharing = len(placement.here) if jax.local_devices()[0].platform == "cpu" else 1
        require_room(config, free // sharing, run, o.tp, o.experts)
    with activity("random weights"):
        return random_weights(config, placement, o.seed, run)


def _draft_weights(
    o: EngineOptions, small: DraftConfig | None, placement: Placement
) -> DraftWeights | None:
    if small is None:
        return None
    if o.draft is not None:
        return load_draft(open_draft(o.draft), placement=placement)
    return random_draft(small, placement, o.seed)

"""`k3 generate --draft`: speculative generation of one sequence, and what was accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jax_impl.acceptance_config import SYNTHETIC_LABEL, Acceptance
from jax_impl.backend import Backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, RunConfig
from jax_impl.draft_memory import draft_token_bytes, draft_weight_bytes
from jax_impl.draft_weights import open_draft
from jax_impl.generate import Driven, drive, load_with_progress
from jax_impl.loader import load_draft
from jax_impl.sharding import Placement, require_ranks
from jax_impl.speculative_engine import SpeculativeEngine

if TYPE_CHECKING:
    from jax_impl.cli import GenerateOptions


def speculative(
    checkpoint: Checkpoint,
    run: RunConfig,
    backend: Backend,
    ids: list[int],
    options: GenerateOptions,
    placement: Placement,
) -> dict[str, Any]:
    """Generate with a drafter. A forced run (rule `synthetic`) returns no text.

    Raises:
        ConfigError: drafter, rule, drafts or ranks do not fit, or the text is too long for the
            drafter; before weights load.
        CheckpointError: the draft checkpoint is damaged.
    """
    method = Acceptance(options.accept, options.drafting, options.accept_length)
    method.require(options.drafts)
    draft_checkpoint = open_draft(options.draft)
    config = draft_checkpoint.config
    config.require_target(checkpoint.config)
    require_ranks(checkpoint.config, run, placement.ranks.size, config)
    length = len(ids) + options.steps + options.drafts + 1
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"{len(ids)} prompt tokens and {options.steps} steps: {length} tokens (drafts "
            f"included), but the drafter's limit is {config.max_position_embeddings}; ask for fewer"
        )
    cached = run.pages * run.page_tokens * draft_token_bytes(config, run.kv_cache_dtype)
    more = draft_weight_bytes(config, placement.ranks.size) + cached
    engine = SpeculativeEngine(
        checkpoint.config,
        run,
        load_with_progress(checkpoint, run, placement, more),
        config,
        load_draft(draft_checkpoint, placement=placement),
        method,
        options.drafts,
        backend,
        chunk=min(options.chunk, len(ids)),
        placement=placement,
        check_replicas=options.check_replicas,
    )
    return _result(drive(engine, ids, options), method, options)


def _result(done: Driven, method: Acceptance, options: GenerateOptions) -> dict[str, Any]:
    counts = done.emitted
    accepted = np.array(counts) - 1
    # the first step holds its compilation
    steady = list(zip(counts[1:], done.times[1:], strict=True))
    seconds = sum(t for _, t in steady)
    label = SYNTHETIC_LABEL if method.rule == "synthetic" else "real acceptance"
    text: dict[str, Any] = {"output_ids": done.ids}
    if method.rule == "synthetic":
        text = {"text": f"{SYNTHETIC_LABEL}: the tokens are no result and are not reported"}
    return text | {
        "stopped_by": done.stopped_by,
        "acceptance": label,
        "verify_steps": len(counts),
        "mean_acceptance_length": float(np.mean(counts)) if counts else None,
        "draft_acceptance_rate": float(np.mean(accepted) / options.drafts) if counts else None,
        "acceptance_by_position": [
            float(np.mean(accepted > i)) if counts else None for i in range(options.drafts)
        ],
        "decode_tokens_per_s": sum(c for c, _ in steady) / seconds if steady else None,
        "decode_steps_timed": len(steady),
        "first_token_s_with_compilation": done.first,
        "steps_by_backend": done.plans,
        "conditions": {"speculation": method.describe(options.drafts) | {"kind": label}},
    }

"""`k3 generate --draft`: speculative generation of one sequence, and what was accepted."""

from __future__ import annotations

import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_impl.acceptance_config import SYNTHETIC_LABEL, Acceptance
from jax_impl.backend import Backend
from jax_impl.cache import StepInputs, make_cache
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.generate import load_with_progress, not_finite, steps_progress
from jax_impl.loader import load_draft
from jax_impl.speculate import build_speculative_prefill, build_speculative_step
from jax_impl.static import DraftStatic, Static


def speculative(
    checkpoint: Checkpoint, run: RunConfig, backend: Backend, ids: list[int], options: Any
) -> dict[str, Any]:
    """Generate with a drafter. A forced run (rule `synthetic`) returns no text.

    Raises:
        ConfigError: drafter, rule or drafts do not fit; before weights load.
        CheckpointError: the draft checkpoint is damaged.
    """
    method = Acceptance(options.accept, options.drafting, options.accept_length)
    method.require(options.drafts)
    draft_checkpoint = open_draft(options.draft)
    draft_checkpoint.config.require_target(checkpoint.config)
    static, draft = Static(checkpoint.config, run), DraftStatic(draft_checkpoint.config, run)
    build = (static, draft, backend, method, options.drafts)
    weights = load_with_progress(checkpoint, run)
    draft_weights = load_draft(draft_checkpoint)
    cache = make_cache(checkpoint.config, run, draft=draft_checkpoint.config)

    started = time.perf_counter()
    prefill, chunk = build_speculative_prefill(*build), min(options.chunk, len(ids))
    for first in range(0, len(ids), chunk):
        inputs = _chunk(ids[first : first + chunk], first, chunk, run, options)
        cache, outputs, inputs = prefill(weights, draft_weights, cache, inputs)
    produced = [int(outputs.token[0])]
    first_token = time.perf_counter() - started
    if not bool(outputs.finite[0]):
        raise not_finite("logits not finite in the prompt", 0)

    step, counts, times = build_speculative_step(*build), [], []
    stop = None if options.ignore_eos else checkpoint.config.eos_token_id
    with steps_progress(options.steps) as progress:
        while len(produced) < options.steps and stop not in produced:
            started = time.perf_counter()
            cache, found, inputs = step(weights, draft_weights, cache, inputs)
            count = int(found.count[0])
            times.append(time.perf_counter() - started)
            if not bool(found.finite[0]):
                raise not_finite("logits not finite", len(produced))
            counts.append(count)
            produced += np.asarray(found.tokens[0, :count]).tolist()
            progress(min(len(produced), options.steps))
    return _result(produced, counts, times, method, options, stop) | {
        "first_token_s_with_compilation": first_token
    }


def _chunk(ids: list[int], first: int, width: int, run: RunConfig, options: Any) -> StepInputs:
    """Inputs of one prefill step: `ids` at positions from `first`, padded to `width`."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    return StepInputs(
        tokens=jnp.asarray(tokens),
        count=jnp.array([len(ids)], jnp.int32),
        position=jnp.array([first], jnp.int32),
        slot=jnp.zeros(1, jnp.int32),
        page_table=jnp.arange(run.pages, dtype=jnp.int32)[None],
        temperature=jnp.array([options.temperature], jnp.float32),
        seed=jnp.array([options.seed], jnp.uint32),
    )


def _result(
    produced: list[int],
    counts: list[int],
    times: list[float],
    method: Acceptance,
    options: Any,
    stop: int | None,
) -> dict[str, Any]:
    kept = produced[: options.steps]
    if stop in kept:
        kept = kept[: kept.index(stop) + 1]
    accepted = np.array(counts) - 1
    steady = list(zip(counts[1:], times[1:], strict=True))  # the first step holds its compilation
    seconds = sum(t for _, t in steady)
    label = SYNTHETIC_LABEL if method.rule == "synthetic" else "real acceptance"
    text: dict[str, Any] = {"output_ids": kept}
    if method.rule == "synthetic":
        text = {"text": f"{SYNTHETIC_LABEL}: the tokens are no result and are not reported"}
    return text | {
        "stopped_by": "eos" if kept[-1] == stop else "steps",
        "acceptance": label,
        "verify_steps": len(counts),
        "mean_acceptance_length": float(np.mean(counts)) if counts else None,
        "draft_acceptance_rate": float(np.mean(accepted) / options.drafts) if counts else None,
        "acceptance_by_position": [
            float(np.mean(accepted > i)) if counts else None for i in range(options.drafts)
        ],
        "decode_tokens_per_s": sum(c for c, _ in steady) / seconds if steady else None,
        "decode_steps_timed": len(steady),
        "conditions": {"speculation": method.describe(options.drafts) | {"kind": label}},
    }

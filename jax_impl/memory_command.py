"""What `k3 memory` does: check the options, estimate, and the rows to print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_impl import memory as estimates
from jax_impl.config import ConfigError, ModelConfig
from jax_impl.draft_config import MAX_DRAFTS, exchanged, is_draft
from jax_impl.problems import listed

if TYPE_CHECKING:
    from jax_impl.cli import MemoryOptions


def run_memory(
    checkpoint: Path, options: MemoryOptions
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """(result, rows of a table) for a config.json, or a directory that holds one.

    Raises:
        ConfigError: options, model or drafter that cannot be estimated; says why.
        DoesNotFitError: more than `device_gb`.
    """
    config = _require(checkpoint, options)
    settings = estimates.MemorySettings(
        ranks=options.tp,
        batch=options.batch,
        context=options.context,
        tokens=1 + options.drafts,
        kv_dtype=options.kv_dtype,
        router=options.router,
        experts=options.experts,
        commit=options.commit,
        dcp=options.dcp,
    )
    found = estimates.estimate(config, settings)
    result: dict[str, Any] = {}
    if options.draft is not None or options.drafts:
        from jax_impl.draft_memory import commit_forms, with_draft

        settings = with_draft(config, settings, options.draft)
        result["commit_forms"] = commit_forms(config, settings)
        found = estimates.estimate(config, settings)
    if options.device_gb is not None:
        device = int(options.device_gb * 1e9)
        found = estimates.require_fit(config, settings, device)
        result["largest_batch"] = estimates.largest_batch(config, settings, device)
        result["largest_context"] = estimates.largest_context(config, settings, device)
    size, tensors = estimates.checkpoint_size(config)
    result |= {"text_bytes": size, "text_tensors": tensors}
    result["per_rank_bytes"] = {what: size for what, size, _ in found.rows()}
    return result, _table(found.rows(), result.get("commit_forms", {}))


def _require(checkpoint: Path, o: MemoryOptions) -> ModelConfig:
    """The model, if it and the options can be estimated; refuses everything at once."""
    problems, config, drafter = [], None, None
    try:
        config = ModelConfig.load(checkpoint)
    except ConfigError as error:
        problems.append(str(error))
    try:
        if o.draft is not None:
            from jax_impl.draft_memory import draft_config

            drafter = draft_config(o.draft)
            if config is not None:
                drafter.require_target(config)
    except ConfigError as error:
        problems.append(f"--draft: {error}")
    if config is None and drafter is None and o.draft is not None and is_draft(checkpoint):
        problems.append(exchanged(checkpoint, o.draft))
    wrong = _option_problems(o, config)
    if len(problems) == 1 and config is None and not wrong:
        raise ConfigError(problems[0])
    problems += wrong
    if problems or config is None:
        do = "Change these; `k3 memory --help` has all options."
        raise ConfigError(listed("memory", problems, do))
    return config


def _option_problems(o: MemoryOptions, config: ModelConfig | None) -> list[str]:
    problems = [
        f"--{name} {getattr(o, name)}: expected at least 1"
        for name in ("tp", "batch", "context")
        if getattr(o, name) < 1
    ]
    if not 0 <= o.drafts <= MAX_DRAFTS:
        problems.append(f"--drafts {o.drafts}: expected 0 to {MAX_DRAFTS}")
    if o.dcp not in (1, o.tp):
        problems.append(f"--dcp {o.dcp}: expected 1 or the number of ranks, {o.tp}")
    if o.device_gb is not None and not 0 < o.device_gb < float("inf"):
        problems.append(f"--device-gb {o.device_gb}: expected more than 0, in 1e9 bytes")
    if config is not None and o.context > (most := config.max_position_embeddings):
        problems.append(
            f"--context: found {o.context:,}, the model allows at most {most:,} tokens; expected "
            "no more; ask for fewer"
        )
    return problems


def _table(
    parts: list[tuple[str, int, str]], forms: dict[str, dict[str, int]]
) -> list[tuple[str, ...]]:
    rows = [(what, f"{size / 1e9:12,.3f}", f"{size:,}", why) for what, size, why in parts]
    for form, sizes in forms.items():
        for what, size in sizes.items():
            how = f"{what.replace('_', ' ')} of one step, all KDA layers"
            rows.append((f"commit by {form}", f"{size / 1e9:12,.3f}", f"{size:,}", how))
    return rows

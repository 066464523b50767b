"""What `k3 generate` is asked for, checked before anything loads: all problems at once.

Settings are called what the command line calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jax_impl.acceptance_config import Acceptance, parse_rates
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig, exchanged, is_draft
from jax_impl.draft_weights import open_draft
from jax_impl.ids import parse_ids
from jax_impl.problems import listed, option
from jax_impl.sampling_config import Sampling
from jax_impl.sharding import require_ranks

if TYPE_CHECKING:
    from jax_impl.cli import GenerateOptions

T = TypeVar("T")
DO = "Change these; `k3 generate --help` has all options."
OTHER_NAMES = {"decode_backend": "backend", "rule": "accept", "length": "accept_length"}
OTHER_NAMES |= {"rates": "accept_rates"}


@dataclass(frozen=True)
class Asked:
    """A run that can be tried: both checkpoints (headers only), prompt and settings."""

    checkpoint: Checkpoint
    draft: Checkpoint | None
    ids: list[int]
    run: RunConfig


def require(path: Path, prompt: str, options: GenerateOptions) -> Asked:
    """What was asked for, with just enough pages.

    Raises:
        ConfigError, CheckpointError, ValueError: it cannot be run; lists everything that can be
            told from headers and options.
    """
    failed: list[ValueError] = []
    checkpoint = _tried(failed, lambda: Checkpoint.open(path))
    draft = None
    if options.draft is not None:
        place = options.draft
        draft = _tried(failed, lambda: open_draft(place))
        if checkpoint is None and draft is None and is_draft(path) and not is_draft(place):
            failed.append(ConfigError(exchanged(path, place)))
    ids = _tried(failed, lambda: _ids(prompt))
    settings = _run_settings(options)
    problems = RunConfig.problems(settings, _called)
    run = None if problems else RunConfig(**settings)
    problems += _option_problems(options)
    if checkpoint is not None and isinstance(checkpoint.config, ModelConfig):
        config = checkpoint.config
        drafter = None if draft is None else draft.config
        drafter = drafter if isinstance(drafter, DraftConfig) else None
        problems += _length_problems(config, drafter, ids or [], options)
        if drafter is not None:
            _tried(failed, lambda: drafter.require_target(config))
        if run is not None:
            _tried(failed, lambda: require_ranks(config, run, options.tp, drafter, _called))
    if len(failed) == 1 and not problems and (checkpoint is None or ids is None):
        raise failed[0]
    problems = [*map(str, failed), *problems]
    if problems or checkpoint is None or ids is None or run is None:
        raise ConfigError(listed("not started", problems, DO))
    return Asked(checkpoint, draft, ids, replace(run, pages=run.pages_for(_length(ids, options))))


def sampling_of(options: GenerateOptions) -> Sampling:
    """How the options draw."""
    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)


def acceptance_of(options: GenerateOptions) -> Acceptance:
    """How the options judge drafts.

    Raises:
        ValueError: rates that are no numbers.
    """
    rates = None if options.accept_rates is None else parse_rates(options.accept_rates)
    return Acceptance(options.accept, options.drafting, options.accept_length, rates)


def _tried(failed: list[ValueError], work: Callable[[], T]) -> T | None:
    """What `work` gives; None where it refuses, and the refusal is kept."""
    try:
        return work()
    except ValueError as error:
        failed.append(error)
        return None


def _ids(prompt: str) -> list[int]:
    try:
        return parse_ids(prompt)
    except ValueError as error:
        raise ValueError(f"--prompt-ids: {error}") from None


def _length(ids: list[int], options: GenerateOptions) -> int:
    """Tokens of prompt and text; a last verification may write a whole block behind them."""
    spare = 0 if options.draft is None else options.drafts + 1
    return len(ids) + options.steps + spare


def _length_problems(
    config: ModelConfig, drafter: DraftConfig | None, ids: list[int], options: GenerateOptions
) -> list[str]:
    """Ids that the model does not know, and texts that are too long for it or its drafter."""
    problems, length = [], _length(ids, options)
    limits = [("the model limit", config)]
    limits += [] if drafter is None else [("the drafter's limit", drafter)]
    problems += [
        f"{len(ids)} prompt tokens and {option('steps')} {options.steps}: {length} tokens (drafts "
        f"included), but {what} is {c.max_position_embeddings}; ask for fewer"
        for what, c in limits
        if length > c.max_position_embeddings
    ]
    if outside := [i for i in ids if i >= config.vocab_size]:
        problems.append(
            f"--prompt-ids: {outside[:5]} outside 0..{config.vocab_size - 1}; expected ids of this "
            "model's tokenizer"
        )
    return problems


def _option_problems(options: GenerateOptions) -> list[str]:
    problems = [
        f"--{name} {getattr(options, name)}: expected at least 1"
        for name in ("steps", "chunk")
        if getattr(options, name) < 1
    ]
    problems += sampling_of(options).problems(option)
    without = options.draft is None
    return problems + (_without_draft(options) if without else _speculation(options))


def _run_settings(options: GenerateOptions) -> dict[str, Any]:
    return {
        "profile": options.profile,
        "compute": options.compute,
        "kv_dtype": options.kv_dtype,
        "kv_scale": options.kv_scale,
        "slots": 1,
        "pages": 1,
        "page_size": options.page_size,
        "decode_backend": options.backend,
        "experts": options.experts,
        "dcp": options.dcp,
        "dcp_interleave": options.dcp_interleave,
        "commit": options.commit,
    }


def _called(name: str) -> str:
    """The option of a setting of `RunConfig` or `Acceptance`."""
    return option(OTHER_NAMES.get(name, name))


def _speculation(options: GenerateOptions) -> list[str]:
    try:
        return acceptance_of(options).problems(options.drafts, _called)
    except ValueError as error:
        found = f"--accept-rates: {error}"
    return [found, *Acceptance(drafting=options.drafting).problems(options.drafts, _called)]


def _without_draft(options: GenerateOptions) -> list[str]:
    """Options that would be ignored: a plain run must not pass for a speculative one."""
    usual = type(options)()
    return [
        f"{option(name)} {getattr(options, name)}: only with --draft; expected a drafter"
        for name in ("drafts", "accept", "accept_length", "accept_rates", "drafting", "commit")
        if getattr(options, name) != getattr(usual, name)
    ]

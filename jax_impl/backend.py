"""The tables of stage functions that a step is built from, and the configuration gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax_impl.config import ModelConfig, RunConfig
from jax_impl.plan import Plan
from jax_impl.stages import limits, specialized, standard

Stage = Callable[..., Any]


class Backend(NamedTuple):
    """One function per stage; signatures are those of `jax_impl.stages.standard`.

    With `whole_stacks` a stage gets each layer's weights as a `Layer`: the stacks and its place.
    """

    embed: Stage
    attn_in: Stage
    kda: Stage
    kda_step: Stage
    mla: Stage
    attn_out: Stage
    dense: Stage
    route: Stage
    experts: Stage
    moe_out: Stage
    head_in: Stage
    logits: Stage
    kda_commit: Stage
    draft_context: Stage
    draft_block: Stage
    draft_markov: Stage
    whole_stacks: bool = False


STAGES = tuple(name for name in Backend._fields if name != "whole_stacks")

AUTO = Backend(**{name: getattr(standard, name) for name in STAGES})
LATENCY_SPECIALIZED = Backend(
    **{name: getattr(specialized, name) for name in STAGES}, whole_stacks=True
)


class BackendUnavailableError(ValueError):
    """An explicitly requested backend that cannot run here; lists every reason."""


def planned(plan: Plan, run: RunConfig, backend: Backend) -> Backend:
    """The stage table of a step: `backend`, which `run` asks for, or `auto` where the plan says."""
    return backend if plan.backend == run.decode_backend else AUTO


def choose_backend(run: RunConfig, config: ModelConfig | None = None, ranks: int = 1) -> Backend:
    """The configuration gate: the stage table for `run.decode_backend`.

    Args:
        run: how to run.
        config: the model; None: only what does not depend on it is checked.
        ranks: over how many ranks it is cut.

    Raises:
        BackendUnavailableError: `latency_specialized` was asked for and cannot run. There is no
            silent fall-back.
    """
    if run.decode_backend == "auto":
        return AUTO
    from pallas_kernels.common import unmet_conditions  # only an explicit request looks at devices

    reasons = unmet_conditions() + specialized.unmet_settings(run)
    if config is not None:
        reasons += limits.unmet(config, run, ranks)
    if not reasons:
        return LATENCY_SPECIALIZED
    raise BackendUnavailableError(
        f"decode_backend {run.decode_backend!r} cannot run here:"
        + "".join(f"\n  - {r}" for r in reasons)
        + "\nUse decode_backend 'auto', the standard path."
    )

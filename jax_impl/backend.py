"""The table of stage functions that a step is built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax_impl.config import RunConfig
from jax_impl.stages import standard


class Backend(NamedTuple):
    """One function per stage; signatures are those of `jax_impl.stages.standard`."""

    embed: Callable
    attn_in: Callable
    kda: Callable
    mla: Callable
    attn_out: Callable
    dense: Callable
    route: Callable
    experts: Callable
    moe_out: Callable
    head_in: Callable
    logits: Callable
    kda_commit: Callable
    draft_context: Callable
    draft_block: Callable
    draft_markov: Callable


AUTO = Backend(**{name: getattr(standard, name) for name in Backend._fields})


class BackendUnavailableError(ValueError):
    """An explicitly requested backend that cannot run here; lists every reason."""


def choose_backend(run: RunConfig) -> Backend:
    """The configuration gate: the stage table for `run.decode_backend`.

    Raises:
        BackendUnavailableError: `latency_specialized` was asked for and cannot run. There is no
            silent fall-back.
    """
    if run.decode_backend == "auto":
        return AUTO
    from pallas_kernels.common import unmet_conditions  # only an explicit request looks at devices

    reasons = unmet_conditions()
    raise BackendUnavailableError(
        f"decode_backend {run.decode_backend!r} cannot run here:"
        + "".join(f"\n  - {r}" for r in reasons)
        + "\nUse decode_backend 'auto', the standard path."
    )

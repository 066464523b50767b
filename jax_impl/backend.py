"""The table of stage functions that a step is built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


AUTO = Backend(**{name: getattr(standard, name) for name in Backend._fields})

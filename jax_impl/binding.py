"""Weights as the kernels read them; the same arrays serve the standard stages.

Routed experts are repacked into tiles (`pallas_kernels.experts.pack`): the same bytes in another
order, so that they exist once on a device. `in_proj` gets rows of zeros up to a multiple of eight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.config import RunConfig
from jax_impl.params import Weights

ROWS = 8  # a matrix of a kernel has a multiple of so many rows
EXPERT_AXIS = 1  # of the packed arrays: experts and their tiles


def is_bound(run: RunConfig) -> bool:
    """Whether `run` wants bound weights."""
    return run.decode_backend == "latency_specialized"


def bind(weights: Weights) -> Weights:
    """One rank's weights with repacked experts; traced or not, the argument may be donated."""
    from pallas_kernels.experts import pack

    moe, kda = weights.moe, weights.kda
    if moe.w13_tiles is not None:
        return weights
    one = lambda layer: pack(*layer)  # noqa: E731
    # layer by layer: the repacking of one layer is all that is held twice
    w13, w2 = jax.lax.map(one, (moe.w13_packed, moe.w13_scale, moe.w2_packed, moe.w2_scale))
    missing = -kda.in_proj.shape[1] % ROWS
    in_proj = jnp.pad(kda.in_proj, ((0, 0), (0, missing), (0, 0)))
    return weights.replace(
        kda=kda.replace(in_proj=in_proj),
        moe=moe.replace(
            w13_packed=None, w13_scale=None, w2_packed=None, w2_scale=None,
            w13_tiles=w13, w2_tiles=w2,
        ),
    )  # fmt: skip


def bound_specs(specs: Weights, cut: Any) -> Weights:
    """Partition specs of bound weights from those of the checkpoint's arrays."""
    moe = specs.moe.replace(
        w13_packed=None, w13_scale=None, w2_packed=None, w2_scale=None, w13_tiles=cut, w2_tiles=cut
    )
    return specs.replace(moe=moe)

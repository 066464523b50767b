"""Weights as the kernels read them; the same arrays serve the standard stages.

Routed experts are repacked into tiles (`pallas_kernels.experts_pack`): the same bytes in another
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
TILES = {"w13_packed": "w13_tiles", "w2_packed": "w2_tiles"}


def is_bound(run: RunConfig) -> bool:
    """Whether `run` wants bound weights."""
    return run.decode_backend == "latency_specialized"


def bind(weights: Weights) -> Weights:
    """One rank's weights as the kernels read them; the argument may be donated.

    Experts that the loader has already packed stay as they are. Others are packed here, which
    holds them twice: for small models and tests.
    """
    from pallas_kernels.experts_pack import pack

    moe, kda = weights.moe, weights.kda
    missing = -kda.in_proj.shape[1] % ROWS
    in_proj = jnp.pad(kda.in_proj, ((0, 0), (0, missing), (0, 0)))
    weights = weights.replace(kda=kda.replace(in_proj=in_proj))
    if moe.w13_tiles is not None:
        return weights
    one = lambda layer: pack(*layer)  # noqa: E731
    w13, w2 = jax.lax.map(one, (moe.w13_packed, moe.w13_scale, moe.w2_packed, moe.w2_scale))
    return weights.replace(moe=_packed(moe, w13, w2))


def _packed(moe: Any, w13: Any, w2: Any) -> Any:
    gone = dict.fromkeys(("w13_packed", "w13_scale", "w2_packed", "w2_scale"))
    return moe.replace(w13_tiles=w13, w2_tiles=w2, **gone)


def tiles_shape(codes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tiles u32 [L, tiles, lines, 32] of codes u8 [L, E, rows, K/2]."""
    from pallas_kernels.mxfp4 import LINE, tile_lines
    from pallas_kernels.mxfp4 import ROWS as TILE

    layers, experts, rows, half = codes
    return layers, experts * rows // TILE, tile_lines(2 * half), LINE


def place_tiles(
    name: str,
    stack: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    start: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Pack experts u8 [1, n, ..] of the array `name` into a stack of tiles; may be donated.

    `start` is the layer and the first expert.
    """
    from pallas_kernels.experts_pack import pack_down, pack_gate_up

    tiles = (pack_gate_up if name == "w13_packed" else pack_down)(codes, scales)
    layer, expert = start
    first = expert * (tiles.shape[1] // codes.shape[1])
    zero = jnp.int32(0)
    return jax.lax.dynamic_update_slice(stack, tiles, (layer, first, zero, zero))


def bound_specs(specs: Weights, cut: Any) -> Weights:
    """Partition specs of bound weights from those of the checkpoint's arrays."""
    return specs.replace(moe=_packed(specs.moe, cut, cut))

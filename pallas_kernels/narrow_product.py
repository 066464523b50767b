"""A B of two shared-memory operands of 16 bits with few columns in B, f32, in registers.

Hopper: one wgmma over all of K. Blackwell, which has no wgmma: `mma.sync` over 64 of K at a time,
operands through registers; right, and not fast where A is read transposed. Compiled, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common

STEP = 64  # of K


def product(
    a: Callable[[Any, int], Any], b: Callable[[Any, int], Any], m: int, n: int, k: int
) -> jax.Array:
    """F32 [m, n]; `a(start, size)` and `b(start, size)` are [m, size] and [size, n] of K, refs.

    The caller's warpgroup has all of it when this returns. m a multiple of 64, n of 8.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not common.blackwell():

        def whole(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a(0, k), b(0, k))
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(whole, plgpu.ACC((m, n), jnp.float32))

    def step(j: jax.Array, acc: jax.Array) -> jax.Array:
        left, right = a(j * STEP, STEP), b(j * STEP, STEP)
        wide = plgpu.Layout.MMA_LHS(left.dtype), plgpu.Layout.MMA_RHS(left.dtype)
        x = plgpu.load(left, layout=wide[0], optimized=False)
        y = plgpu.load(right, layout=wide[1], optimized=False)
        return plgpu.mma(acc, x, y)

    zero = plgpu.layout_cast(jnp.zeros((m, n), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, k // STEP, step, zero)


def largest_piece(rows: int, n: int) -> int:
    """Rows of A per product, of `rows`, so that sums (and on Blackwell A) leave registers free."""
    if common.blackwell():
        return 64
    piece = rows
    while piece > 64 and (piece * n > 32 * 128 or rows % piece):
        piece -= 64
    return piece

"""The product of `skinny` on Blackwell: tcgen05 with the sums in tensor memory.

Same operands and results as the wgmma form: w in the 128-row place, x in the narrow one, f32 sums.
One warpgroup issues; the tensor core runs through the ring by itself, a slot is refilled when the
product that read it has signalled. Compiled for sm_100 and sm_103, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common

TILE = 128  # rows of w: tensor memory has 128 lanes


def scratch(width: int, stages: int) -> dict[str, Any]:
    """What `accumulate` needs."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return dict(
        acc=plgpu.TMEM((TILE, width), jnp.float32),
        read=plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        complete=plgpu.Barrier(num_barriers=1, orders_tensor_core=True),
    )


def accumulate(
    steps: jax.Array,
    stages: int,
    ready: Callable[[jax.Array, jax.Array, Any], Any],
    issue: Callable[[jax.Array, jax.Array], None],
    ws: Any,
    xs: Any,
    acc: Any,
    read: Any,
    complete: Any,
    seen: Any,
) -> tuple[jax.Array, Any]:
    """The sums f32 [128, width], and what `ready` has carried along.

    `ready(step, slot, seen)` waits for a slot (and may work on its x); `issue(step, slot)` fills
    one.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def step(j: jax.Array, seen: Any) -> Any:
        slot = lax.rem(j, stages)
        seen = ready(j, slot, seen)
        x = common.tref(xs.at[slot])
        plgpu.tcgen05_mma(acc, ws.at[slot], x, read.at[slot], accumulate=j > 0)

        @pl.when(j + stages < steps)
        def _() -> None:
            plgpu.barrier_wait(read.at[slot])
            issue(j + stages, slot)

        return seen

    seen = lax.fori_loop(0, steps, step, seen)
    plgpu.tcgen05_commit_arrive(complete.at[0])
    plgpu.barrier_wait(complete.at[0])
    return plgpu.async_load_tmem(acc), seen

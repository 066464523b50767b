"""Does a call write outside of its outputs? Arrays of one pattern lie on both sides of each one.

What a call takes for temporaries is one piece of memory to the allocator, so that a write from one
temporary into another is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PATTERN = 0xA5


class Guards:
    """For each size three arrays in a row, of which the middle one is given back: a hole."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Sizes in bytes, of outputs that are about to be made."""
        fill = jax.jit(lambda n: jnp.full(n, PATTERN, jnp.uint8), static_argnums=0)
        made = [[fill(size) for _ in range(3)] for size in sizes]
        jax.block_until_ready(made)
        self.holes = [middle.unsafe_buffer_pointer() for _, middle, _ in made]
        self.arrays = [array for before, _, after in made for array in (before, after)]
        for _, middle, _ in made:
            middle.delete()

    def changed(self) -> int:
        """Bytes that are not what they were."""
        return sum(int(np.sum(np.asarray(array) != PATTERN)) for array in self.arrays)

    def around(self, outputs: Sequence[jax.Array]) -> int:
        """How many of the outputs lie in the holes."""
        return sum(out.unsafe_buffer_pointer() in self.holes for out in outputs)


def guarded(call: Callable[[], Any]) -> dict[str, int]:
    """Run a call between guards: outputs, how many of them lay between guards, bytes changed."""
    sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(call))]
    guards = Guards(sizes)
    outputs = jax.block_until_ready(jax.tree.leaves(call()))
    return {
        "outputs": len(outputs),
        "outputs_between_guards": guards.around(outputs),
        "bytes_changed_outside": guards.changed(),
    }

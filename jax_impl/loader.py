"""Checkpoint to device: blocks of one array at a time, written into donated stacks.

The host never holds more than one block (`BLOCK_BYTES`) and the shard pages it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.checkpoint import Checkpoint, CheckpointError
from jax_impl.config import RunConfig
from jax_impl.params import Weights, from_arrays
from jax_impl.weights import WeightArray, layer_prefix, layers_of, weight_table

BLOCK_BYTES = 32 << 20
NAN_SCALE = 255  # E8M0 code of NaN

Progress = Callable[[int], None]  # called with the number of bytes placed since the last call


def load_weights(
    checkpoint: Checkpoint, progress: Progress | None = None, *, run: RunConfig | None = None
) -> Weights:
    """All weights of the text model on the default device, in the dtypes of the file.

    MXFP4 experts stay packed. `progress` is called after every block.

    Raises:
        CheckpointError: a scale byte is NaN (E8M0 255); names the tensor and the group.
    """
    arrays: dict[tuple[str, str], jax.Array] = {}
    for array in weight_table(checkpoint.config):
        stack = jnp.zeros(array.shape(checkpoint.config), array.dtype)
        for start, block in _blocks(checkpoint, array):
            stack = _place(stack, block, tuple(start))
            if progress is not None:
                progress(block.nbytes)
        arrays[array.kind, array.name] = stack
    return from_arrays(arrays)


@partial(jax.jit, donate_argnums=0)
def _place(stack: jax.Array, block: jax.Array, start: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_update_slice(stack, block, start)


def _blocks(
    checkpoint: Checkpoint, array: WeightArray
) -> Iterator[tuple[list[np.int32], np.ndarray]]:
    """(start index, values) of blocks that together fill the stack."""
    c = checkpoint.config
    if array.kind == "root":
        yield from _row_blocks(checkpoint, array)
        return
    for ordinal, layer in enumerate(layers_of(c, array.kind)):
        prefix = layer_prefix(c, array.kind, layer)
        if not array.per_expert:
            with checkpoint.reader() as reader:
                pieces = [reader.read(prefix + p.key, p) for p in array.parts]
                block = np.concatenate(pieces, axis=0)[None]
                del pieces
            yield _start(block, ordinal), block
            continue
        one = array.shape(c)[2:]
        step = max(1, BLOCK_BYTES // int(np.prod(one)))
        for first in range(0, c.num_experts, step):
            block = _experts(checkpoint, array, prefix, range(first, min(first + step, c.num_experts)))
            yield _start(block, ordinal, first), block


def _row_blocks(
    checkpoint: Checkpoint, array: WeightArray
) -> Iterator[tuple[list[np.int32], np.ndarray]]:
    # the embedding and the head are the largest single tensors: placed by rows
    (part,) = array.parts
    name = layer_prefix(checkpoint.config, "root", 0) + part.key
    rows = part.shape[0]
    step = rows
    if part.cut == 0:
        step = max(1, BLOCK_BYTES // (2 * int(np.prod(part.shape[1:], dtype=np.int64))))
    for first in range(0, rows, step):
        window = (first, min(first + step, rows)) if part.cut == 0 else None
        with checkpoint.reader() as reader:
            block = np.array(reader.read(name, part, window))
        start = _start(block)
        start[0] = np.int32(first)
        yield start, block


def _experts(
    checkpoint: Checkpoint, array: WeightArray, prefix: str, experts: range
) -> np.ndarray:
    block = np.empty((1, len(experts), *array.shape(checkpoint.config)[2:]), array.dtype)
    with checkpoint.reader() as reader:
        for i, e in enumerate(experts):
            row = 0
            for part in array.parts:
                name = prefix + part.key.format(e=e)
                data = reader.read(name, part)
                if array.name.endswith("_scale"):
                    _refuse_nan_scales(name, data)
                block[0, i, row : row + data.shape[0]] = data
                row += data.shape[0]
    return block


def _refuse_nan_scales(name: str, data: np.ndarray) -> None:
    bad = np.argwhere(data == NAN_SCALE)
    if bad.size:
        row, group = bad[0]
        raise CheckpointError(
            f"{name}: {len(bad)} scale byte(s) are 255 (NaN in E8M0), the first at row {row}, "
            f"group {group}; expected 0..254. The file is damaged: fetch it again."
        )


def _start(block: np.ndarray, *lead: int) -> list[np.int32]:
    return [np.int32(i) for i in (*lead, *[0] * (block.ndim - len(lead)))]

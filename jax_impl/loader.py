"""Checkpoint to device: blocks of one array at a time, written into donated stacks.

The host never holds more than about one block (`BLOCK_BYTES`), its copy on the way to the device
and the shard pages it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.checkpoint import Checkpoint, CheckpointError, Reader
from jax_impl.config import RunConfig
from jax_impl.memory import require_room
from jax_impl.params import Weights, from_arrays
from jax_impl.weights import BYTES, AnyConfig, WeightArray, layer_prefix, layers_of

BLOCK_BYTES = 8 << 20
NAN_SCALE = 255  # E8M0 code of NaN

Progress = Callable[[int], None]  # called with the number of bytes placed since the last call
Block = tuple[list[np.int32], np.ndarray]  # start index in the stack, values


def load_weights(
    checkpoint: Checkpoint, progress: Progress | None = None, run: RunConfig | None = None
) -> Weights:
    """All weights of the text model on the default device, in the dtypes of the file.

    MXFP4 experts stay packed. `progress` is called after every block. With `run` the cache that
    these settings need counts too when it is checked, before anything is read, whether all fits.

    Raises:
        DoesNotFitError: weights (and cache) exceed the device's free memory; nothing was read.
        CheckpointError: a value is not finite or a scale byte is NaN (E8M0 255); names tensor and
            place.
    """
    free = free_device_bytes()
    if free is not None:
        require_room(checkpoint.config, free, run)
    return from_arrays(load_arrays(checkpoint, progress))


def load_arrays(
    checkpoint: Checkpoint, progress: Progress | None = None
) -> dict[tuple[str, str], jax.Array]:
    """All arrays of the checkpoint's table on the default device, by (kind, name).

    Raises:
        CheckpointError: as for `load_weights`.
    """
    c, table = checkpoint.config, checkpoint.table
    stacked = [a for a in table if _nbytes(a, c) > BLOCK_BYTES]
    large = [(a.kind, a.name) for a in stacked]
    specs = tuple((a.shape(c), a.dtype) for a in stacked)
    arrays = dict(zip(large, _zeros(specs), strict=True))
    with checkpoint.reader() as reader:
        for array in table:
            key = array.kind, array.name
            if key in arrays:
                arrays[key] = _fill(arrays.pop(key), _blocks(checkpoint, reader, array), progress)
                continue
            whole = np.empty(array.shape(c), array.dtype)
            for start, block in _blocks(checkpoint, reader, array):
                at = tuple(slice(i, i + n) for i, n in zip(start, block.shape, strict=True))
                whole[at] = block
            arrays[key] = jnp.asarray(whole)
            if progress is not None:
                progress(whole.nbytes)
    return arrays


def _fill(stack: jax.Array, blocks: Iterator[Block], progress: Progress | None) -> jax.Array:
    for start, block in blocks:
        stack = _place(stack, block, tuple(start))
        # else the host runs ahead of the copies and their sources pile up
        stack.block_until_ready()
        if progress is not None:
            progress(block.nbytes)
    return stack


@partial(jax.jit, static_argnums=0)
def _zeros(specs: tuple[tuple[tuple[int, ...], str], ...]) -> list[jax.Array]:
    # one program for all: a compilation per array would cost more host memory than a block
    return [jnp.zeros(shape, dtype) for shape, dtype in specs]


def _nbytes(array: WeightArray, c: AnyConfig) -> int:
    return math.prod(array.shape(c)) * BYTES[array.dtype]


def free_device_bytes(device: jax.Device | None = None) -> int | None:
    """Free memory of the device (default: the first) in bytes; None where nobody can tell.

    An accelerator answers from its allocator; the CPU's memory is what Linux calls available.
    """
    device = device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if device.platform != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


@partial(jax.jit, donate_argnums=0)
def _place(stack: jax.Array, block: jax.Array, start: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_update_slice(stack, block, start)


def _blocks(checkpoint: Checkpoint, reader: Reader, array: WeightArray) -> Iterator[Block]:
    """Blocks that together fill the stack."""
    c = checkpoint.config
    if array.kind == "root":
        yield from _parts(reader, array, layer_prefix(c, "root", 0), ())
        return
    for ordinal, layer in enumerate(layers_of(c, array.kind)):
        prefix = layer_prefix(c, array.kind, layer)
        if not array.per_expert:
            yield from _parts(reader, array, prefix, (ordinal,))
            continue
        one = array.shape(c)[2:]
        step = max(1, BLOCK_BYTES // int(np.prod(one)))
        for first in range(0, c.num_experts, step):
            chosen = range(first, min(first + step, c.num_experts))
            block = _experts(reader, array, prefix, chosen, one)
            yield _start(block, ordinal, first), block


def _parts(
    reader: Reader, array: WeightArray, prefix: str, lead: tuple[int, ...]
) -> Iterator[Block]:
    """One layer of an array: in one block if it is small, else each part by rows."""
    sizes = [int(np.prod(p.shape, dtype=np.int64)) * BYTES[array.dtype] for p in array.parts]
    if sum(sizes) <= BLOCK_BYTES:
        block = np.concatenate([_finite(reader, prefix + p.key, p) for p in array.parts], axis=0)
        block = block.reshape(*(1 for _ in lead), *block.shape)
        yield _start(block, *lead), block
        return
    row = 0
    for part, size in zip(array.parts, sizes, strict=True):
        rows = part.shape[0]
        step = max(1, BLOCK_BYTES * rows // size)
        for first in range(0, rows, step):
            data = _finite(reader, prefix + part.key, part, (first, min(first + step, rows)))
            block = data.reshape(*(1 for _ in lead), *data.shape)
            yield _start(block, *lead, row + first), block
        row += rows


def _experts(
    reader: Reader, array: WeightArray, prefix: str, experts: range, one: tuple[int, ...]
) -> np.ndarray:
    block = np.empty((1, len(experts), *one), array.dtype)
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


def _finite(
    reader: Reader, name: str, part: Part, rows: tuple[int, int] | None = None
) -> np.ndarray:
    """Read a float tensor (or rows of it), refusing what is not finite.

    Some of it would show in no output: a NaN selection bias means an expert never chosen.
    """
    data = reader.read(name, part, rows=rows)
    # the exponent bits tell, and reading them is faster than a test in bf16
    bits, ones = (np.uint16, 0x7F80) if data.dtype.itemsize == 2 else (np.uint32, 0x7F800000)
    bad = np.argwhere((np.ascontiguousarray(data).view(bits) & ones) == ones)
    if bad.size:
        first = bad[0] + np.array([rows[0] if rows else 0, *[0] * (data.ndim - 1)])
        raise CheckpointError(
            f"{name}: {len(bad)} value(s) that are NaN or infinite, the first at {first.tolist()}; "
            "expected finite numbers. The file is damaged: fetch it again."
        )
    return data


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

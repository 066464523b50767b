"""Checkpoint to devices: blocks of one array at a time, written into donated stacks.

A process reads the shares of its own ranks and nothing else, each byte once. The host never holds
more than about one block (`BLOCK_BYTES` over all ranks of the process), its copy on the way to the
devices and the shard pages it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.binding import EXPERT_AXIS, TILES, is_bound, place_tiles, tiles_shape
from jax_impl.checkpoint import Checkpoint, Reader
from jax_impl.config import RunConfig
from jax_impl.draft_weights import DraftWeights, draft_from_arrays, draft_table
from jax_impl.memory import require_room
from jax_impl.params import Weights, from_arrays
from jax_impl.sharding import ONE_DEVICE, P, Placement, bind_spread, global_shape, spec
from jax_impl.value_checks import value_check
from jax_impl.weights import (
    BYTES,
    AnyConfig,
    Part,
    WeightArray,
    layer_prefix,
    layers_of,
    local_shape,
    rank_entries,
)

BLOCK_BYTES = 8 << 20

Progress = Callable[[int], None]  # called with the number of bytes placed since the last call
Block = tuple[list[np.int32], list[np.ndarray]]  # start index in a rank's stack, values per rank


def load_weights(
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    run: RunConfig | None = None,
    placement: Placement = ONE_DEVICE,
    more: int = 0,
) -> Weights:
    """All weights of the text model, in the dtypes of the file.

    MXFP4 experts stay 4-bit; where `run` wants bound weights they are put into the kernels' order
    block by block, so that they exist once. `progress` is called after every block. With `run` the
    cache that these settings need counts too when it is checked, before anything is read, whether
    all fits, and so do `more` bytes per rank (a drafter's).

    Raises:
        DoesNotFitError: weights (and cache) exceed the device's free memory; nothing was read.
        ConfigError: the model does not divide by the ranks; nothing was read.
        CheckpointError: a value is not finite or a scale byte is NaN (E8M0 255); names tensor and
            place.
    """
    free = free_device_bytes()
    if free is not None:
        # emulated devices of one process share the host's memory
        sharing = len(placement.here) if jax.local_devices()[0].platform == "cpu" else 1
        require_room(
            checkpoint.config, free // sharing - more, run, placement.ranks.size, placement.experts
        )
    packed = run is not None and is_bound(run)
    weights = from_arrays(load_arrays(checkpoint, progress, placement, packed=packed))
    return weights if run is None else bind_spread(weights, checkpoint.config, run, placement)


def load_draft(
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    placement: Placement = ONE_DEVICE,
) -> DraftWeights:
    """All weights of a drafter opened with `draft_weights.open_draft`."""
    table = draft_table(checkpoint.config, placement.ranks.size)  # type: ignore[arg-type]
    checkpoint = replace(checkpoint, table=table)
    return draft_from_arrays(load_arrays(checkpoint, progress, placement))


def placed_bytes(checkpoint: Checkpoint, placement: Placement = ONE_DEVICE) -> int:
    """Bytes that a load places on the devices of this process: what `progress` adds up to."""
    return len(placement.here) * sum(
        _nbytes(a, checkpoint.config, placement) for a in checkpoint.table
    )


def load_arrays(
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    placement: Placement = ONE_DEVICE,
    read: dict[str, int] | None = None,
    *,
    packed: bool = False,
) -> dict[tuple[str, str], jax.Array]:
    """All arrays of the checkpoint's table, by (kind, name).

    `read`, if given, is filled with the bytes read of each tensor. With `packed` the routed experts
    are two arrays of tiles in place of four, see `jax_impl.binding`.

    Raises:
        CheckpointError: as for `load_weights`.
    """
    c, table = checkpoint.config, checkpoint.table
    here, experts = len(placement.here), placement.experts
    apart = [a for a in table if packed and a.per_expert]
    table = [a for a in table if a not in apart]
    large = [a for a in table if here * _nbytes(a, c, placement) > BLOCK_BYTES]
    stacks = _zeros(large, c, placement)
    arrays: dict[tuple[str, str], jax.Array] = {}
    with checkpoint.reader() as reader:
        for array in table:
            key, cut = (array.kind, array.name), array.cut_axis(experts)
            blocks = _blocks(checkpoint, reader, array, placement)
            if key in stacks:
                arrays[key] = _fill(stacks.pop(key), blocks, cut, placement, progress)
                continue
            shape = array.shape(c, placement.ranks.size, experts)
            whole = [np.empty(shape, array.dtype) for _ in range(here)]
            for start, shares in blocks:
                at = tuple(slice(i, i + n) for i, n in zip(start, shares[0].shape, strict=True))
                for target, share in zip(whole, shares, strict=True):
                    target[at] = share
            arrays[key] = placement.assemble(whole, cut)
            if progress is not None:
                progress(here * whole[0].nbytes)
        for codes, scales in zip(apart[::2], apart[1::2], strict=True):
            blocks = _packed_blocks(checkpoint, reader, codes, scales, placement)
            arrays["moe", TILES[codes.name]] = _fill_packed(codes, c, blocks, placement, progress)
        if read is not None:
            read |= reader.read_bytes
    return arrays


def _packed_blocks(
    checkpoint: Checkpoint,
    reader: Reader,
    codes: WeightArray,
    scales: WeightArray,
    placement: Placement,
) -> Iterator[tuple[list[int], list[np.ndarray], list[np.ndarray]]]:
    """(layer, first expert), codes and scales per rank, of a few experts at a time."""
    c, shares = checkpoint.config, _Shares(reader, placement)
    _, number, *one = codes.shape(c, placement.ranks.size, placement.experts)
    few = tuple(scales.shape(c, placement.ranks.size, placement.experts)[2:])
    step = max(1, BLOCK_BYTES // (math.prod(one) * len(placement.here)))
    for ordinal, layer in enumerate(layers_of(c, codes.kind)):
        prefix = layer_prefix(c, codes.kind, layer)
        for first in range(0, number, step):
            chosen = range(first, min(first + step, number))
            yield (
                [ordinal, first],
                _experts(shares, codes, prefix, chosen, number, tuple(one)),
                _experts(shares, scales, prefix, chosen, number, few),
            )


def _fill_packed(
    codes: WeightArray,
    c: AnyConfig,
    blocks: Iterator[tuple[list[int], list[np.ndarray], list[np.ndarray]]],
    placement: Placement,
    progress: Progress | None,
) -> jax.Array:
    shape = tiles_shape(codes.shape(c, placement.ranks.size, placement.experts))
    whole = global_shape(shape, EXPERT_AXIS, placement.ranks.size if placement.mesh else 1)
    laid = placement.sharding(EXPERT_AXIS)
    stack = jax.jit(lambda: jnp.zeros(whole, jnp.uint32), out_shardings=laid)()
    place = _packer(placement, codes.name)
    for start, *both in blocks:
        assembled = [placement.assemble(shares, EXPERT_AXIS) for shares in both]
        stack = place(stack, *assembled, tuple(np.int32(i) for i in start))
        stack.block_until_ready()  # as in `_fill`
        if progress is not None:
            progress(sum(len(shares) * shares[0].nbytes for shares in both))
    return stack


@lru_cache(maxsize=32)
def _packer(placement: Placement, name: str) -> Callable:
    """The jitted packing of a block of experts into a stack of tiles, on every rank."""
    write = partial(place_tiles, name)
    if placement.mesh is None:
        return jax.jit(write, donate_argnums=0)
    laid = spec(EXPERT_AXIS)
    shared = jax.shard_map(
        write, mesh=placement.mesh, in_specs=(laid, laid, laid, P()), out_specs=laid
    )
    return jax.jit(shared, donate_argnums=0)


def _fill(
    stack: jax.Array,
    blocks: Iterator[Block],
    cut: int | None,
    placement: Placement,
    progress: Progress | None,
) -> jax.Array:
    place = _placer(placement, cut)
    for start, shares in blocks:
        stack = place(stack, placement.assemble(shares, cut), tuple(start))
        # else the host runs ahead of the copies and their sources pile up
        stack.block_until_ready()
        if progress is not None:
            progress(len(shares) * shares[0].nbytes)
    return stack


def _zeros(
    arrays: list[WeightArray], c: AnyConfig, placement: Placement
) -> dict[tuple[str, str], jax.Array]:
    # one program for all: a compilation per array would cost more host memory than a block
    ranks = placement.ranks.size if placement.mesh else 1
    cuts = [a.cut_axis(placement.experts) for a in arrays]
    local = [a.shape(c, placement.ranks.size, placement.experts) for a in arrays]
    shapes = [global_shape(s, cut, ranks) for s, cut in zip(local, cuts, strict=True)]

    def make() -> list[jax.Array]:
        return [jnp.zeros(s, a.dtype) for s, a in zip(shapes, arrays, strict=True)]

    made = jax.jit(make, out_shardings=[placement.sharding(cut) for cut in cuts])()
    return {(a.kind, a.name): m for a, m in zip(arrays, made, strict=True)}


def _nbytes(array: WeightArray, c: AnyConfig, placement: Placement) -> int:
    shape = array.shape(c, placement.ranks.size, placement.experts)
    return math.prod(shape) * BYTES[array.dtype]


@lru_cache(maxsize=32)
def _placer(placement: Placement, cut: int | None) -> Callable:
    """The jitted write of a block into a stack, on every rank at the same place."""
    if placement.mesh is None:
        return jax.jit(lax.dynamic_update_slice, donate_argnums=0)
    laid = spec(cut)
    write = jax.shard_map(
        lax.dynamic_update_slice, mesh=placement.mesh, in_specs=(laid, laid, P()), out_specs=laid
    )
    return jax.jit(write, donate_argnums=0)


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


def _blocks(
    checkpoint: Checkpoint, reader: Reader, array: WeightArray, placement: Placement
) -> Iterator[Block]:
    """Blocks that together fill the ranks' stacks."""
    c, shares = checkpoint.config, _Shares(reader, placement)
    if array.kind == "root":
        yield from _parts(shares, array, layer_prefix(c, "root", 0), ())
        return
    for ordinal, layer in enumerate(layers_of(c, array.kind)):
        prefix = layer_prefix(c, array.kind, layer)
        if not array.per_expert:
            yield from _parts(shares, array, prefix, (ordinal,))
            continue
        _, number, *one = array.shape(c, placement.ranks.size, placement.experts)
        step = max(1, BLOCK_BYTES // (math.prod(one) * len(placement.here)))
        for first in range(0, number, step):
            chosen = range(first, min(first + step, number))
            block = _experts(shares, array, prefix, chosen, number, tuple(one))
            yield _start(block[0], ordinal, first), block


class _Shares:
    """Reads the shares of one process's ranks."""

    def __init__(self, reader: Reader, placement: Placement) -> None:
        self.reader, self.placement = reader, placement
        self.ranks, self.here = placement.ranks.size, placement.here

    def read(
        self, name: str, part: Part, rows: tuple[int, int] | None, check: Callable[..., None]
    ) -> list[np.ndarray]:
        """Rows (start, stop) of every local rank's share of `part`; None: all of them."""
        if part.cut is None or self.ranks == 1:
            data = self.checked(name, part, rows, None, check)
            return [data] * len(self.here)
        entries = [rank_entries(part, self.ranks, rank) for rank in self.here]
        if part.cut == 0:
            first, stop = rows or (0, len(entries[0]))
            return [
                self.checked(name, part, (e[0] + first, e[0] + stop), None, check) for e in entries
            ]
        low, high = min(e[0] for e in entries), max(e[-1] for e in entries) + 1
        data = self.checked(name, part, rows, (low, high), check)
        return [data[:, [i - low for i in e]] for e in entries]

    def checked(
        self,
        name: str,
        part: Part,
        rows: tuple[int, int] | None,
        window: tuple[int, int] | None,
        check: Callable[..., None],
    ) -> np.ndarray:
        """`Reader.read`, after which `check` has seen the values."""
        data = self.reader.read(name, part, window, rows=rows)
        check(name, data, rows[0] if rows else 0, window[0] if window else 0)
        return data


def _parts(
    shares: _Shares, array: WeightArray, prefix: str, lead: tuple[int, ...]
) -> Iterator[Block]:
    """One layer of an array: in one block if it is small, else each part by rows."""
    check, local = value_check(array), [local_shape(p, shares.ranks) for p in array.parts]
    sizes = [math.prod(s) * BYTES[array.dtype] * len(shares.here) for s in local]
    extend = lambda a: a.reshape(*(1 for _ in lead), *a.shape)  # noqa: E731
    if sum(sizes) <= BLOCK_BYTES:
        read = [shares.read(prefix + p.key, p, None, check) for p in array.parts]
        block = [extend(np.concatenate(each, axis=0)) for each in zip(*read, strict=True)]
        yield _start(block[0], *lead), block
        return
    row = 0
    for part, (rows, *_), size in zip(array.parts, local, sizes, strict=True):
        step = max(1, BLOCK_BYTES * rows // size)
        for first in range(0, rows, step):
            at = first, min(first + step, rows)
            found = shares.read(prefix + part.key, part, at, check)
            yield _start(extend(found[0]), *lead, row + first), [extend(a) for a in found]
        row += rows


def _experts(
    shares: _Shares,
    array: WeightArray,
    prefix: str,
    experts: range,
    number: int,
    one: tuple[int, ...],
) -> list[np.ndarray]:
    """Experts of every local rank; `number` is how many each rank holds."""
    check = value_check(array)
    block = [np.empty((1, len(experts), *one), array.dtype) for _ in shares.here]
    spread = shares.placement.experts == "tp"
    for i, e in enumerate(experts):
        row = 0
        for part in array.parts:
            if spread:
                found = shares.read(prefix + part.key.format(e=e), part, None, check)
            else:
                names = [prefix + part.key.format(e=rank * number + e) for rank in shares.here]
                found = [shares.checked(name, part, None, None, check) for name in names]
            for target, data in zip(block, found, strict=True):
                target[0, i, row : row + data.shape[0]] = data
            row += found[0].shape[0]
    return block


def _start(block: np.ndarray, *lead: int) -> list[np.int32]:
    return [np.int32(i) for i in (*lead, *[0] * (block.ndim - len(lead)))]

"""A released checkpoint on disk, checked from its index and headers before anything is loaded.

No JAX import: `k3 check` runs without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_impl.config import ModelConfig
from jax_impl.problems import listed, unreadable_files
from jax_impl.weights import (
    BYTES,
    AnyConfig,
    Part,
    WeightArray,
    checkpoint_tensors,
    padded_lengths,
    weight_table,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
IGNORED_ROOTS = ("vision_tower.", "mm_projector.")  # the multimodal parts of the release
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}
_OTHER_BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "F16": 2, "I16": 2, "U16": 2}
_MAPPED = 256 << 20  # bytes read from open shards before they are unmapped
_AROUND = 128 << 10  # bytes that Linux may map beside each read: a 64 KiB window at both ends
_SHOWN = 20  # problems printed in full; the rest are counted
FETCH_AGAIN = (
    "Nothing was loaded. Fetch the named files again, all of one release, with their config.json "
    f"and {INDEX}."
)
CONVERT_AGAIN = "Nothing was loaded. Repair it as said, or convert the released checkpoint again."


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message lists what was found and expected."""


@dataclass(frozen=True)
class Stored:
    """One tensor as its shard's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # of the data in the file of a prepared checkpoint

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        item = BYTES.get(self.dtype) or _OTHER_BYTES.get(self.dtype, 1)
        return math.prod(self.shape) * item


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose text tensors are all present with the right shapes and dtypes.

    Attributes:
        table: the arrays that its tensors go to.
        consumed: tensors that the table asks for, by full name.
        ignored: tensors left out by rule (`IGNORED_ROOTS` in a target).
        unnamed_files: shard files in the directory that the index does not name.
        prepared: whether it was written by `k3 convert` (see `prepared`).
    """

    path: Path
    config: AnyConfig
    table: tuple[WeightArray, ...]
    consumed: dict[str, Stored]
    ignored: dict[str, Stored]
    unnamed_files: tuple[str, ...]
    prepared: bool = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: AnyConfig | None = None,
        table: tuple[WeightArray, ...] | None = None,
        ignored_roots: tuple[str, ...] = IGNORED_ROOTS,
    ) -> Checkpoint:
        """Check index, directory and headers; reads no tensor data but the `A_log` paddings.

        Args:
            path: the directory, of a released or a prepared checkpoint.
            config: None reads the target model's `config.json`.
            table: None takes the text model's arrays.
            ignored_roots: starts of the names that are left out by rule.

        Raises:
            ConfigError: `config.json` is missing or not implemented.
            CheckpointError: anything missing, truncated, renamed, of another shape or dtype, or a
                conversion that did not finish.
        """
        from jax_impl import prepared  # here, since it builds on this module

        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: not a directory. Expected a checkpoint directory with config.json, "
                f"{INDEX} and its shards."
            )
        if problem := unreadable_files(path):
            raise CheckpointError(problem)
        converted = prepared.is_prepared(path)
        if converted:
            stored, unread, problems = prepared.read_headers(path)
        config = config or ModelConfig.load(path)
        table = weight_table(config) if table is None else table
        if not converted:
            weight_map, total = _read_index(path)
            stored, unread, problems = _read_headers(path, weight_map)
            if not unread:
                problems += _total_difference(total, stored)
        consumed, left, more = _ledger(config, table, stored, unread)
        ignored = {n: s for n, s in left.items() if n.startswith(ignored_roots)}
        more += _left_over({n: s for n, s in left.items() if n not in ignored})
        raise_problems(path, problems + more, CONVERT_AGAIN if converted else FETCH_AGAIN)
        named = {s.file for s in stored.values()}
        unnamed = sorted(f.name for f in path.glob("*.safetensors") if f.name not in named)
        checkpoint = cls(path, config, table, consumed, ignored, tuple(unnamed), converted)
        checkpoint._check_paddings()
        return checkpoint

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest shard file."""
        files = {s.file for s in self.consumed.values()}
        return max((self.path / f).stat().st_size for f in files)

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Open shards for reading; unmapped at the end, since mapped pages count as memory."""
        from jax_impl.prepared import PreparedReader  # here, since it builds on this module

        reader = PreparedReader(self) if self.prepared else Reader(self)
        try:
            yield reader
        finally:
            reader.close()

    def _check_paddings(self) -> None:
        problems = []
        with self.reader() as reader:
            for name, part, _ in checkpoint_tensors(self.config, self.table):
                if part.padded:
                    tail = reader.read(name, part, tail=True)
                    bad = np.flatnonzero(tail != 0)
                    if bad.size:
                        at = part.shape[0] + int(bad[0])
                        problems.append(
                            f"{name}: entry {at} is {tail[bad[0]]:g}, expected zeros from entry "
                            f"{part.shape[0]} on (padding beyond the heads)"
                        )
        raise_problems(self.path, problems, CONVERT_AGAIN if self.prepared else FETCH_AGAIN)


class Reader:
    """Open shard files of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Nothing is opened until the first read."""
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}
        self._mapped = 0  # bytes read through the open mappings
        self.read_bytes: dict[str, int] = {}  # by tensor, summed over the reads
        self._budget = min(_MAPPED, checkpoint.largest_shard // 4)

    def read(
        self,
        name: str,
        part: Part,
        window: tuple[int, int] | None = None,
        *,
        rows: tuple[int, int] | None = None,
        tail: bool = False,
    ) -> np.ndarray:
        """One tensor in the shape of `part`; of its cut axis only `window` (start, stop) if given.

        Args:
            name: full name of the tensor.
            part: its row of the table.
            window: (start, stop) along the cut axis; ignored by parts that are not cut.
            rows: (start, stop) along the first axis, where that is not the windowed one.
            tail: the padding behind the part's entries instead (1-D parts only).

        Raises:
            CheckpointError: the shard is no longer what it was when the checkpoint was opened.
        """
        stored = self._checkpoint.consumed[name]
        first, end = (window if window and part.cut == 0 else rows) or (0, part.shape[0])
        if tail:
            first, end = part.shape[0], stored.shape[0]
        if end <= first:
            return np.zeros((0, *part.shape[1:]), stored.dtype)
        try:
            columns = (slice(*window),) if part.cut == 1 and window is not None else ()
            data = self._source(name, stored)[slice(first, end), *columns]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{name}: {stored.file} cannot be read any more: {error}. Was it changed after "
                "the check? Open the checkpoint again."
            ) from None
        self.read_bytes[name] = self.read_bytes.get(name, 0) + data.nbytes
        self._mapped += data.nbytes + _AROUND
        if self._mapped > self._budget:
            self.close()
        return data.reshape(data.shape[0], *part.shape[1:]) if part.stored else data

    def _source(self, name: str, stored: Stored) -> Any:
        """What slices of the tensor are taken from."""
        if stored.file not in self._open:
            path = self._checkpoint.path / stored.file
            self._open[stored.file] = safe_open(path, framework="numpy").__enter__()
        return self._open[stored.file].get_slice(name)

    def close(self) -> None:
        """Unmap all shards."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._mapped = 0


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return _single_file(path), None
        shards = len(list(path.glob("*.safetensors")))
        raise CheckpointError(
            f"{path}: no {INDEX} and no {SINGLE} ({shards} other safetensors file(s) found). "
            "The download looks incomplete; fetch the index too."
        )
    try:
        parsed = json.loads(index.read_text())
        weight_map = dict(parsed["weight_map"].items())
        total = parsed.get("metadata", {}).get("total_size")
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: not an index with a weight_map: {error!r}. Fetch the file again."
        ) from None
    odd = sorted({repr(f) for f in weight_map.values() if not is_plain_name(f)})
    if odd or not (total is None or type(total) is int):
        found = f"shard name(s) {', '.join(odd)}" if odd else f"metadata.total_size {total!r}"
        raise CheckpointError(
            f"{index}: found {found}, expected plain file names and a number of bytes. "
            "Fetch the file again."
        )
    wanted = sorted(set(weight_map.values()))
    missing = [f for f in wanted if not (path / f).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(wanted) - len(missing)} of {len(wanted)} shards found; missing "
            + ", ".join(missing)
            + ". The download looks incomplete; fetch the missing files again."
        )
    return weight_map, total


def is_plain_name(file: Any) -> bool:
    """Whether `file` names something in a directory and not outside of it."""
    return isinstance(file, str) and file not in ("", ".", "..") and Path(file).name == file


def _single_file(path: Path) -> dict[str, str]:
    with _opened(path / SINGLE) as handle:
        return {name: SINGLE for name in handle.keys()}  # noqa: SIM118  (not a mapping)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise CheckpointError(
            f"{file}: damaged or cut short ({size:,} bytes on disk; header and size do not agree: "
            f"{error}). Fetch the file again."
        ) from None
    with handle as inner:
        yield inner


def _read_headers(
    path: Path, weight_map: dict[str, str]
) -> tuple[dict[str, Stored], set[str], list[str]]:
    """What the shards hold, names in shards that cannot be read or lack them, and problems."""
    problems: list[str] = []
    unread: set[str] = set()
    stored: dict[str, Stored] = {}
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        try:
            with _opened(path / file) as handle:
                held = set(handle.keys())
                for name in sorted(names & held):
                    piece = handle.get_slice(name)
                    dtype = piece.get_dtype()
                    shape = tuple(piece.get_shape())
                    stored[name] = Stored(file, _DTYPES.get(dtype, dtype), shape)
        except CheckpointError as error:
            problems.append(str(error))
            unread |= names
            continue
        lacking, extra = sorted(names - held), sorted(held - names)
        problems += [f"{n}: the index places it in {file}, which lacks it" for n in lacking]
        problems += [f"{n}: in {file}, but not in the index" for n in extra]
        unread |= set(lacking)
    return stored, unread, problems


def _total_difference(total: int | None, stored: dict[str, Stored]) -> list[str]:
    found = sum(s.nbytes for s in stored.values())
    if total is None or total == found:
        return []
    return [
        f"{INDEX}: metadata.total_size is {total:,} bytes, but the named tensors hold {found:,}. "
        "Index and shards belong to different versions?"
    ]


def _ledger(
    config: AnyConfig, table: tuple[WeightArray, ...], stored: dict[str, Stored], unread: set[str]
) -> tuple[dict[str, Stored], dict[str, Stored], list[str]]:
    """Consumed tensors, all others, and problems: whatever is missing or different.

    Tensors in `unread` are reported already.
    """
    problems: list[str] = []
    consumed: dict[str, Stored] = {}
    for name, part, dtype in checkpoint_tensors(config, table):
        found = stored.get(name)
        if found is None:
            if name not in unread:
                wanted = list(part.stored or part.shape)
                problems.append(f"{name}: missing, expected {dtype} {wanted}")
            continue
        consumed[name] = found
        problems += _differences(config, name, part, dtype, found)
    return consumed, {n: s for n, s in stored.items() if n not in consumed}, problems


def _left_over(left: dict[str, Stored]) -> list[str]:
    return [
        f"{n}: left over ({left[n].dtype} {list(left[n].shape)}); no part of this model takes it"
        for n in sorted(left)
    ]


def _differences(config: AnyConfig, name: str, part: Part, dtype: str, found: Stored) -> list[str]:
    wanted = part.stored or part.shape
    problems = []
    if found.dtype != dtype:
        problems.append(f"{name}: dtype {found.dtype}, expected {dtype}")
    if part.padded:
        heads, padded = wanted[0], sorted({*padded_lengths(config)} - {wanted[0]})
        if found.shape not in [(n,) for n in (heads, *padded)]:
            problems.append(
                f"{name}: shape {list(found.shape)}, expected [{heads}] (one entry per head) or "
                f"{' or '.join(f'[{n}]' for n in padded)} (padded with zeros)"
            )
    elif found.shape != wanted:
        problems.append(f"{name}: shape {list(found.shape)}, expected {list(wanted)}")
    return problems


def raise_problems(path: Path, problems: list[str], do: str) -> None:
    """Raise one CheckpointError for all problems, if there are any; `do` says what to do."""
    if problems:
        more = f"  ... and {len(problems) - _SHOWN} more\n" if len(problems) > _SHOWN else ""
        count = f"{path}: {len(problems)} problem(s) with the checkpoint"
        raise CheckpointError(listed(count, problems[:_SHOWN], more + do))

"""A released checkpoint on disk, checked from its index and headers before anything is loaded.

No JAX import: `k3 check` runs without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_impl.config import ModelConfig
from jax_impl.weights import BYTES, Part, checkpoint_tensors, padded_lengths

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
IGNORED_ROOTS = ("vision_tower.", "mm_projector.")  # the multimodal parts of the release
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8"}
_SHOWN = 20  # problems printed in full; the rest are counted


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message lists what was found and expected."""


@dataclass(frozen=True)
class Stored:
    """One tensor as its shard's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return int(np.prod(self.shape, dtype=np.int64)) * BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose text tensors are all present with the right shapes and dtypes.

    Attributes:
        consumed: tensors of the text model, by full name.
        ignored: tensors left out by rule (`IGNORED_ROOTS`).
        unnamed_files: shard files in the directory that the index does not name.
    """

    path: Path
    config: ModelConfig
    consumed: dict[str, Stored]
    ignored: dict[str, Stored]
    unnamed_files: tuple[str, ...]

    @classmethod
    def open(cls, path: str | Path, config: ModelConfig | None = None) -> Checkpoint:
        """Check index, directory and headers; reads no tensor data but the `A_log` paddings.

        Raises:
            ConfigError: `config.json` is missing or not implemented.
            CheckpointError: anything missing, truncated, renamed, of another shape or dtype.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: not a directory. Expected a checkpoint directory with config.json, "
                f"{INDEX} and its shards."
            )
        config = config or ModelConfig.load(path)
        weight_map, total = _read_index(path)
        stored = _read_headers(path, weight_map)
        _check_total(total, stored)
        consumed, ignored = _ledger(config, stored)
        named = set(weight_map.values())
        unnamed = sorted(f.name for f in path.glob("*.safetensors") if f.name not in named)
        checkpoint = cls(path, config, consumed, ignored, tuple(unnamed))
        checkpoint._check_paddings()
        return checkpoint

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest shard file."""
        files = {s.file for s in self.consumed.values()}
        return max((self.path / f).stat().st_size for f in files)

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Open shards for reading; they are unmapped at the end, so mapped pages do not pile up."""
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()

    def _check_paddings(self) -> None:
        problems = []
        with self.reader() as reader:
            for name, part, _ in checkpoint_tensors(self.config):
                if part.padded:
                    tail = reader.read(name, part, tail=True)
                    bad = np.flatnonzero(tail != 0)
                    if bad.size:
                        at = part.shape[0] + int(bad[0])
                        problems.append(
                            f"{name}: entry {at} is {tail[bad[0]]:g}, expected zeros from entry "
                            f"{part.shape[0]} on (padding beyond the heads)"
                        )
        _raise(self.path, problems)


class Reader:
    """Open shard files of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Nothing is opened until the first read."""
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def read(
        self, name: str, part: Part, window: tuple[int, int] | None = None, *, tail: bool = False
    ) -> np.ndarray:
        """One tensor in the shape of `part`; only `window` (start, stop) of its cut axis if given.

        With `tail` the padding behind the part's entries instead (1-D parts only).
        """
        stored = self._checkpoint.consumed[name]
        if stored.file not in self._open:
            path = self._checkpoint.path / stored.file
            self._open[stored.file] = safe_open(path, framework="numpy").__enter__()
        source = self._open[stored.file].get_slice(name)
        if part.padded:
            start, stop = (part.shape[0], stored.shape[0]) if tail else (window or (0, part.shape[0]))
            return source[start:stop] if stop > start else np.zeros(0, stored.dtype)
        if window is None or part.cut is None:
            data = source[:]
        else:
            data = source[window[0] : window[1]] if part.cut == 0 else source[:, window[0] : window[1]]
        return data.reshape(data.shape[0], *part.shape[1:]) if part.stored else data

    def close(self) -> None:
        """Unmap all shards."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()


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
        weight_map = {str(k): str(v) for k, v in parsed["weight_map"].items()}
        total = parsed.get("metadata", {}).get("total_size")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map: {error!r}") from None
    wanted = sorted(set(weight_map.values()))
    missing = [f for f in wanted if not (path / f).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(wanted) - len(missing)} of {len(wanted)} shards found; missing "
            + ", ".join(missing)
            + ". The download looks incomplete; fetch the missing files again."
        )
    return weight_map, total


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


def _read_headers(path: Path, weight_map: dict[str, str]) -> dict[str, Stored]:
    problems: list[str] = []
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
            continue
        problems += [f"{n}: the index places it in {file}, which lacks it" for n in sorted(names - held)]
        problems += [f"{n}: in {file}, but not in the index" for n in sorted(held - names)]
    _raise(path, problems)
    return stored


def _check_total(total: int | None, stored: dict[str, Stored]) -> None:
    found = sum(s.nbytes for s in stored.values())
    if total is not None and total != found:
        raise CheckpointError(
            f"{INDEX}: metadata.total_size is {total:,} bytes, but the shards hold {found:,}. "
            "Index and shards belong to different versions?"
        )


def _ledger(
    config: ModelConfig, stored: dict[str, Stored]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Consumed and ignored tensors; whatever is missing, different or left over is an error."""
    problems: list[str] = []
    consumed: dict[str, Stored] = {}
    for name, part, dtype in checkpoint_tensors(config):
        found = stored.get(name)
        if found is None:
            problems.append(f"{name}: missing, expected {dtype} {list(part.stored or part.shape)}")
            continue
        consumed[name] = found
        problems += _differences(config, name, part, dtype, found)
    ignored = {n: s for n, s in stored.items() if n.startswith(IGNORED_ROOTS)}
    left = sorted(set(stored) - set(consumed) - set(ignored))
    problems += [
        f"{n}: left over ({stored[n].dtype} {list(stored[n].shape)}); no part of this model takes it"
        for n in left
    ]
    _raise(None, problems)
    return consumed, ignored


def _differences(
    config: ModelConfig, name: str, part: Part, dtype: str, found: Stored
) -> list[str]:
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


def _raise(path: Path | None, problems: list[str]) -> None:
    if problems:
        where = f"{path}: " if path else ""
        shown = "".join(f"\n  - {p}" for p in problems[:_SHOWN])
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{where}{len(problems)} problem(s) with the checkpoint:{shown}{more}")

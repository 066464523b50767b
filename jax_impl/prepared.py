"""A prepared checkpoint: what `k3 convert` writes, opened and read here; no JAX import.

    OUT/conversion.json    written first: source, its fingerprint; marks the directory as ours
    OUT/config.json        the source's, byte for byte
    OUT/root, layer_00000  one orbax item each, renamed into place when complete
        item.json          shape, dtype, bytes and CRC-32 of every array of the item
        KEY/.zarray, KEY/0.0   an array as orbax stores it (zarr 2)
    OUT/manifest.json      written last; without it nothing here is read

Arrays are the checkpoint's tensors, unfused and uncut, under their own names; an expert's tensors
are stacked over the layer's experts (`...experts.{e}.w1...` becomes `...experts.w1...`). They are
stored uncompressed, row-major and in one chunk, so that the chunk file is the array's bytes: any
rows or columns can be read for any number of ranks, and nothing else. `orbax` reads the items too.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from jax_impl.checkpoint import (
    CONVERT_AGAIN,
    INDEX,
    SINGLE,
    CheckpointError,
    Reader,
    Stored,
    is_plain_name,
    raise_problems,
)
from jax_impl.problems import refused_by_system
from jax_impl.weights import BYTES, AnyConfig, Part, WeightArray, layer_prefix, layers_of

FORMAT = "k3-prepared/1"
MANIFEST, STATE, MARKER, CONFIG = "manifest.json", "conversion.json", "item.json", "config.json"
EXPERT = "{e}."  # stands in a tensor's name for the expert number; left out of the array's name
_ZARR = {"bfloat16": "bfloat16", "float32": "<f4", "uint8": "|u1"}
_BLOCK = 8 << 20  # bytes read at a time for a checksum
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)

Progress = Callable[[str, int], None]  # item and bytes since the last call


@dataclass(frozen=True)
class StoredArray:
    """One array of an item.

    Attributes:
        tensor: name of the checkpoint tensor; `{e}` stands for the expert where it is stacked.
        shape: as stored; the experts are the first axis where it is stacked.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Name in the item."""
        return self.tensor.replace(EXPERT, "")

    @property
    def file(self) -> str:
        """The data's file, relative to the item: zarr names a chunk by its place in the grid."""
        return f"{self.key}/{'.'.join('0' for _ in self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * BYTES[self.dtype]

    @property
    def zarr(self) -> dict[str, Any]:
        """What `.zarray` has to say for the chunk file to be the array's bytes."""
        return {
            "zarr_format": 2,
            "shape": list(self.shape),
            "chunks": list(self.shape),
            "dtype": _ZARR[self.dtype],
            "order": "C",
            "compressor": None,
            "filters": None,
        }

    def described(self, crc: int) -> dict[str, Any]:
        """The entry in `item.json` and in the manifest."""
        shape = list(self.shape)
        values = {"dtype": self.dtype, "shape": shape, "bytes": self.nbytes, "crc32": crc}
        return {"tensor": self.tensor, **values}

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> tuple[StoredArray, int]:
        """The array and its checksum from such an entry; any of `_DAMAGED` if it is none."""
        found = cls(str(entry["tensor"]), str(entry["dtype"]), tuple(entry["shape"]))
        fits = found.dtype in BYTES and all(type(n) is int and n > 0 for n in found.shape)
        if not (fits and is_plain_name(found.key) and found.nbytes == entry["bytes"]):
            raise ValueError(f"{entry['tensor']}: its entry is not consistent")
        return found, int(entry["crc32"])


@dataclass(frozen=True)
class PlannedArray:
    """An array to be written, with the tensors that it takes and the row of the table."""

    stored: StoredArray
    names: tuple[str, ...]
    part: Part
    array: WeightArray


def plan_items(c: AnyConfig, table: tuple[WeightArray, ...]) -> dict[str, list[PlannedArray]]:
    """What every item of a prepared checkpoint holds: the root, then layer by layer."""
    every = ["root", *(item_name(i) for i in range(c.num_hidden_layers))]
    items: dict[str, list[PlannedArray]] = {name: [] for name in every}
    for array in table:
        for layer in (0,) if array.kind == "root" else layers_of(c, array.kind):
            item = "root" if array.kind == "root" else item_name(layer)
            prefix = layer_prefix(c, array.kind, layer)
            for part in array.parts:
                experts = range(c.num_experts) if array.per_expert else range(1)
                name = prefix + part.key
                shape = part.stored or part.shape
                shape = (len(experts), *shape) if array.per_expert else shape
                stored = StoredArray(name, array.dtype, shape)
                names = tuple(name.format(e=e) for e in experts)
                items[item].append(PlannedArray(stored, names, part, array))
    return items


def item_name(layer: int) -> str:
    """Directory of a layer (0-based)."""
    return f"layer_{layer:05d}"


def is_prepared(path: Path) -> bool:
    """Whether this is a prepared checkpoint, or the beginning of one."""
    released = any((path / file).exists() for file in (INDEX, SINGLE))
    return not released and any((path / file).exists() for file in (STATE, MANIFEST))


def read_manifest(path: Path) -> dict[str, Any]:
    """The parsed manifest.

    Raises:
        CheckpointError: there is none (how to resume the conversion), or it is not one.
    """
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointError(
            f"{path}: a conversion that did not finish ({MANIFEST} is missing; it is written "
            f"last). Run `k3 convert {_source(path)} {path}` to go on where it stopped."
        )
    try:
        parsed = json.loads(file.read_bytes())
        found = parsed["format"]
    except OSError as error:
        raise CheckpointError(refused_by_system(error)) from None
    except _DAMAGED as error:
        raise CheckpointError(
            f"{path}: {MANIFEST} cannot be read: {error!r}. {_repair(path)}"
        ) from None
    if found != FORMAT:
        raise CheckpointError(
            f"{file}: format {found!r}, expected {FORMAT!r}. Convert the released checkpoint again "
            "with this version, or use the version that wrote this one."
        )
    return parsed


def read_arrays(path: Path, manifest: dict[str, Any]) -> dict[str, dict[StoredArray, int]]:
    """Arrays and their checksums by item.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        items = {name: parse_entries(entries) for name, entries in manifest["items"].items()}
        odd = [name for name in items if not is_plain_name(name)]
        if odd:
            raise ValueError(f"item name(s) {odd}")
    except _DAMAGED as error:
        raise CheckpointError(
            f"{path}: {MANIFEST} is damaged: {error!r}. {_repair(path)}"
        ) from None
    return items


def parse_entries(entries: dict[str, Any]) -> dict[StoredArray, int]:
    """Arrays and their checksums from an item's entries; raises any of `_DAMAGED`."""
    found = dict(StoredArray.parse(entry) for entry in entries.values())
    if [array.key for array in found] != list(entries):
        raise ValueError("names and entries do not agree")
    return found


def read_headers(path: Path) -> tuple[dict[str, Stored], set[str], list[str]]:
    """As `checkpoint` reads shards: tensors by name, names that cannot be read, and problems.

    Raises:
        CheckpointError: the conversion did not finish, or the manifest is damaged.
    """
    manifest = read_manifest(path)
    problems = []
    config = path / CONFIG
    if config.exists() and sha256(config.read_bytes()) != manifest.get("config_sha256"):
        problems.append(f"{CONFIG}: changed since the conversion (its SHA-256 differs)")
    stored: dict[str, Stored] = {}
    unread: set[str] = set()
    for item, arrays in read_arrays(path, manifest).items():
        whole = (path / item).is_dir()
        if not whole:
            problems.append(f"{item}: missing")
        for array in arrays:
            tensors = _tensors(item, array)
            problem = array_problem(path / item, array) if whole else None
            if whole and problem is None:
                stored |= tensors
                continue
            unread |= set(tensors)
            if problem is not None:
                problems.append(f"{item}: {problem}")
    if unread:
        problems.insert(0, f"{len(unread)} tensor(s) cannot be read. {_repair(path)}")
    return stored, unread, problems


def _tensors(item: str, array: StoredArray) -> dict[str, Stored]:
    file = f"{item}/{array.file}"
    if EXPERT not in array.tensor:
        return {array.tensor: Stored(file, array.dtype, array.shape)}
    count, *shape = array.shape
    one = array.nbytes // count
    name = array.tensor.format
    return {name(e=e): Stored(file, array.dtype, tuple(shape), e * one) for e in range(count)}


def array_problem(item: Path, array: StoredArray) -> str | None:
    """What is wrong with an array's files, without reading its data; None: nothing."""
    header, data = item / array.key / ".zarray", item / array.file
    try:
        found = json.loads(header.read_bytes())
        differing = [k for k, v in array.zarr.items() if found[k] != v]
        size = data.stat().st_size
    except FileNotFoundError as error:
        return f"{array.key}: {Path(error.filename).name} is missing"
    except PermissionError as error:
        raise CheckpointError(refused_by_system(error)) from None
    except _DAMAGED as error:
        return f"{array.key}: damaged: {error!r}"
    if differing:
        pairs = (f"{k} {found[k]!r}, expected {array.zarr[k]!r}" for k in differing)
        return f"{array.key}: .zarray has " + "; ".join(pairs)
    if size != array.nbytes:
        return f"{array.key}: {size:,} bytes of data, expected {array.nbytes:,}"
    return None


def changed_arrays(
    item: Path, arrays: dict[StoredArray, int], progress: Progress | None = None
) -> Iterator[str]:
    """Read all data of an item and compare the checksums; yields a problem per bad array."""
    for array, expected in arrays.items():
        problem = array_problem(item, array)
        if problem is None:
            found = file_crc(item / array.file)
            if found != expected:
                problem = f"{array.key}: CRC-32 {found:08x}, expected {expected:08x}"
        if problem is not None:
            yield f"{item.name}: {problem}"
        if progress is not None:
            progress(item.name, array.nbytes)


def verify(path: str | Path, progress: Progress | None = None) -> int:
    """Read a whole prepared checkpoint and compare every checksum; returns the bytes read.

    Raises:
        CheckpointError: listing every array that is missing or changed.
    """
    path = Path(path)
    items = read_arrays(path, read_manifest(path))
    problems = [
        problem
        for item, arrays in items.items()
        for problem in changed_arrays(path / item, arrays, progress)
    ]
    if problems:
        problems.insert(0, f"{len(problems)} array(s) are damaged. {_repair(path)}")
    raise_problems(path, problems, CONVERT_AGAIN)
    return sum(array.nbytes for arrays in items.values() for array in arrays)


def file_crc(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(file, "rb", buffering=0) as data:
        while block := data.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def _source(path: Path) -> str:
    """Where the checkpoint was converted from, for messages."""
    try:
        return str(json.loads((path / STATE).read_bytes())["source"])
    except _DAMAGED:
        return "CKPT"


def _repair(path: Path) -> str:
    return (
        f"Delete {MANIFEST} and run `k3 convert {_source(path)} {path}`: it keeps what is whole "
        "and writes the rest."
    )


class _Mapped:
    """An array inside a mapped file; what is taken out of it is copied."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def __getitem__(self, at: Any) -> np.ndarray:
        return self._data[at].copy()


class PreparedReader(Reader):
    """Open array files of a prepared checkpoint."""

    def _source(self, name: str, stored: Stored) -> _Mapped:
        if stored.file not in self._open:
            with open(self._checkpoint.path / stored.file, "rb") as file:
                size = file.seek(0, 2)
                if size < stored.offset + stored.nbytes:
                    raise OSError(f"{size:,} bytes, fewer than when it was opened")
                self._open[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped = self._open[stored.file]
        count = math.prod(stored.shape)
        flat = np.frombuffer(mapped, np.dtype(stored.dtype), count, stored.offset)
        return _Mapped(flat.reshape(stored.shape))

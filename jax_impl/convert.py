"""Released checkpoint to prepared checkpoint (`prepared` has the format), one item at a time.

The host holds one layer and, while orbax writes it, orbax's copy. An item is written under another
name, synced and renamed when complete, and the manifest comes last; a conversion that was stopped
anywhere goes on with the items that are whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from jax_impl.checkpoint import Checkpoint, CheckpointError, Reader, is_draft
from jax_impl.draft_weights import open_draft
from jax_impl.prepared import (
    CONFIG,
    FORMAT,
    MANIFEST,
    MARKER,
    STATE,
    PlannedArray,
    Progress,
    changed_arrays,
    parse_entries,
    plan_items,
    sha256,
    verify,
)
from jax_impl.value_checks import value_check  #

PARTIAL = ".partial-"  # start of an item's name until it is complete
_SAMPLES, _SAMPLE = 16, 4096  # pieces of every shard that tell one source from another
_SLACK = 16 << 20  # bytes for headers, markers and the manifest

Save = Callable[[Path, dict[str, np.ndarray]], None]


def convert(
    checkpoint: Checkpoint, out: str | Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Write a prepared checkpoint, or finish one that was stopped; returns its figures.

    Args:
        checkpoint: a released target or drafter.
        out: directory that is absent, empty, or holds an unfinished conversion of this checkpoint.
        progress: called with the item and the bytes read of it since the last call (kept items
            count too), and with 0 bytes when the item is complete on disk. What it raises stops
            the conversion.

    Raises:
        CheckpointError: `out` holds something else, or has too little space (nothing is written);
            or a value is not finite or a scale byte is NaN (items written before it stay).
    """
    out, begin = Path(out).absolute(), time.perf_counter()
    items = plan_items(checkpoint.config, checkpoint.table)
    state = _state(checkpoint)
    _refuse_other(checkpoint, out, state)
    progress = progress or (lambda item, size: None)
    with _locked(out):
        entries = {item: _kept(out / item, arrays, progress) for item, arrays in items.items()}
        kept = [item for item, found in entries.items() if found is not None]
        rest = [item for item in items if item not in kept]
        _clear(out, rest)
        _require_space(out, sum(a.stored.nbytes for item in rest for a in items[item]))
        _write(out / STATE, _json(state))
        _write(out / CONFIG, (checkpoint.path / CONFIG).read_bytes())
        with checkpoint.reader() as reader, _saver() as save:
            for item, arrays in items.items():
                if item in rest:
                    report = partial(progress, item)
                    entries[item] = _write_item(out / item, arrays, reader, report, save)
                progress(item, 0)
        size = sum(a.stored.nbytes for arrays in items.values() for a in arrays)
        manifest = state | {
            "versions": {n: version(n) for n in ("orbax-checkpoint", "tensorstore", "jax")},
            "bytes": size,
            "tensors": len(checkpoint.consumed),
            "items": entries,
        }
        _write(out / MANIFEST, _json(manifest))
    written = size - sum(a.stored.nbytes for item in kept for a in items[item])
    seconds = time.perf_counter() - begin
    return {
        "source": str(checkpoint.path),
        "out": str(out),
        "items": len(items),
        "kept_items": len(kept),
        "arrays": sum(len(arrays) for arrays in items.values()),
        "tensors": len(checkpoint.consumed),
        "bytes": size,
        "written_bytes": written,
        "seconds": seconds,
        "written_bytes_per_second": written / seconds,
    }


def run_convert(path: Path, out: Path) -> dict[str, Any]:
    """What `k3 convert` does: open a target or a drafter, and show bytes, rate and time left.

    Raises:
        ConfigError, CheckpointError: as opening it and as `convert`.
    """
    checkpoint = open_draft(path) if is_draft(path) else Checkpoint.open(path)
    items = plan_items(checkpoint.config, checkpoint.table)
    total = sum(a.stored.nbytes for arrays in items.values() for a in arrays)
    try:
        with _shown("converting", total) as progress:
            return convert(checkpoint, out, progress)
    except KeyboardInterrupt:
        print(f"stopped; `k3 convert {path} {out}` goes on from here", file=sys.stderr)
        raise


def run_verify(checkpoint: Checkpoint) -> int:
    """What `k3 check --checksums` does: read all data; returns its bytes.

    Raises:
        CheckpointError: a released checkpoint, which has no checksums, or arrays that changed.
    """
    if not checkpoint.prepared:
        raise CheckpointError(
            f"{checkpoint.path}: a released checkpoint has no checksums; expected a prepared one "
            "(`k3 convert`). Leave out --checksums."
        )
    with _shown("reading", sum(s.nbytes for s in checkpoint.consumed.values())) as progress:
        return verify(checkpoint.path, progress)


@contextmanager
def _shown(what: str, total: int) -> Iterator[Progress]:
    """A bar of bytes on standard error, with the rate, the time left and the item."""
    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    item = TextColumn("{task.description}")
    with Bar(*columns, item, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda item, size: bar.update(task, advance=size, description=item)


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What identifies the conversion: its source, and what was sampled of it."""
    if checkpoint.prepared:
        raise CheckpointError(
            f"{checkpoint.path}: is a prepared checkpoint; expected a released one to convert"
        )
    config = sha256((checkpoint.path / CONFIG).read_bytes())
    return {
        "format": FORMAT,
        "source": str(checkpoint.path.absolute()),
        "config_sha256": config,
        "source_sample": _sample(checkpoint),
    }


def _sample(checkpoint: Checkpoint) -> str:
    """Digest of names, sizes and some data of all shards.

    Not of all data: that would take as long as the conversion. Times and places are left out, so
    that a copy of the source can finish what the source began.
    """
    pieces = []
    for file in sorted({s.file for s in checkpoint.consumed.values()}):
        with open(checkpoint.path / file, "rb") as shard:
            size = shard.seek(0, 2)
            pieces.append(f"{file} {size}".encode())
            for i in range(_SAMPLES):
                shard.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
                pieces.append(shard.read(_SAMPLE))
    return sha256(b"".join(pieces))


def _refuse_other(checkpoint: Checkpoint, out: Path, state: dict[str, Any]) -> None:
    """Refuse a directory that holds anything but an unfinished conversion of this checkpoint."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    elsewhere = "Remove it or choose another place."
    if not out.is_dir():
        raise CheckpointError(f"{out}: a file; expected a directory or nothing. {elsewhere}")
    if (out / MANIFEST).exists():
        raise CheckpointError(f"{out}: holds a complete prepared checkpoint. {elsewhere}")
    try:
        found = json.loads((out / STATE).read_bytes())
        differing = [
            k for k in ("format", "config_sha256", "source_sample") if found[k] != state[k]
        ]
    except FileNotFoundError:
        raise CheckpointError(
            f"{out}: holds other files; expected an empty directory, none, or an unfinished "
            f"conversion (with {STATE}). {elsewhere}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{out / STATE}: cannot be read: {error!r}. {elsewhere}") from None
    if differing:
        raise CheckpointError(
            f"{out}: an unfinished conversion of another checkpoint or version "
            f"({', '.join(differing)} differ; found {found.get('source')}, asked for "
            f"{checkpoint.path}). {elsewhere}"
        )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make the directory and keep other conversions out of it."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(f"{out}: another conversion is writing here; wait for it") from None
    finally:
        os.close(handle)
        if made and not any(out.iterdir()):
            out.rmdir()


def _kept(
    item: Path, arrays: list[PlannedArray], progress: Progress
) -> dict[str, dict[str, Any]] | None:
    """The entries of an item from an earlier run if it is whole, checksums compared; else None."""
    try:
        entries = json.loads((item / MARKER).read_bytes())
        found = parse_entries(entries)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None
    if list(found) != [a.stored for a in arrays] or any(changed_arrays(item, found)):
        return None
    progress(item.name, sum(a.nbytes for a in found))
    return entries


def _clear(out: Path, items: list[str]) -> None:
    """Remove what an earlier run left of items that are to be written."""
    for path in (*out.glob(PARTIAL + "*"), *(out / item for item in items)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _require_space(out: Path, size: int) -> None:
    stats = os.statvfs(out)
    free, needed = stats.f_bavail * stats.f_frsize, size + _SLACK if size else 0
    if needed > free:
        raise CheckpointError(
            f"{out}: {free:,} bytes are free, but the conversion needs {needed:,} more: "
            f"{needed - free:,} short. Nothing was written; free some space or choose another disk."
        )


def _write_item(
    item: Path,
    arrays: list[PlannedArray],
    reader: Reader,
    progress: Callable[[int], None],
    save: Save,
) -> dict[str, dict[str, Any]]:
    """Read, save, sync and rename one item; returns its entries."""
    values: dict[str, np.ndarray] = {}
    entries: dict[str, dict[str, Any]] = {}
    for planned in arrays:
        stored = planned.stored
        values[stored.key] = _gather(planned, reader, progress)
        entries[stored.key] = stored.described(zlib.crc32(values[stored.key].view(np.uint8).data))
    reader.close()  # its mapped pages count as memory, and saving takes a copy of the item
    new = item.with_name(PARTIAL + item.name)
    save(new, values)
    (new / MARKER).write_bytes(_json(entries))
    for path in new.rglob("*"):
        _sync(path)
    _sync(new)
    new.rename(item)
    _sync(item.parent)
    return entries


def _gather(planned: PlannedArray, reader: Reader, progress: Callable[[int], None]) -> np.ndarray:
    """One array of an item, its values checked."""
    stored, check = planned.stored, value_check(planned.array)
    found = np.empty((len(planned.names), *planned.part.shape), stored.dtype)
    for i, name in enumerate(planned.names):
        found[i] = reader.read(name, planned.part)
        check(name, found[i], 0, 0)
        progress(found[i].nbytes)
    return found.reshape(stored.shape)


@contextmanager
def _saver() -> Iterator[Save]:
    """Orbax, set so that an array's file is the array's bytes."""
    import orbax.checkpoint as ocp  # takes a second to import

    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # orbax warns of every item that it is not in its default format
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
    try:
        # in a thread of its own: an interrupt then waits for the item instead of breaking orbax
        with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(1) as thread:

            def save(path: Path, tree: dict[str, np.ndarray]) -> None:
                thread.submit(checkpointer.save, path, ocp.args.PyTreeSave(tree)).result()

            yield save
    finally:
        log.setLevel(level)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and to disk before anything that follows."""
    new = path.with_name(PARTIAL + path.name)
    new.write_bytes(content)
    _sync(new)
    new.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Force a file or directory to disk: a rename must not survive what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Recorded folders: what kind they are, and their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

KINDS = ("ops", "model", "dspark", "vllm")
_TENSORS, _META = "golden.safetensors", "golden.json"


class FolderError(ValueError):
    """A folder that is no recorded folder; the message says what was found and expected."""


@dataclass(frozen=True)
class Folder:
    """A recorded folder of a known kind."""

    path: Path
    kind: str

    @property
    def name(self) -> str:
        """Name for reports."""
        return self.path.name

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The parsed golden.json; empty if there is none."""
        return read_json(self.path / _META) if (self.path / _META).exists() else {}

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors of golden.safetensors by name; bf16 comes as ml_dtypes.bfloat16."""
        return read_tensors(self.path / _TENSORS)


def open_folder(path: str | Path) -> Folder:
    """Recognises a folder by the `kind` of its golden.json, else by its files.

    Raises:
        FolderError: it does not exist, or its kind is none of `KINDS`.
    """
    path = Path(path)
    if not path.is_dir():
        raise FolderError(
            f"{path}: not a directory. Expected a folder of recorded numbers; check the name."
        )
    meta = read_json(path / _META) if (path / _META).exists() else {}
    kind = meta.get("kind") or _guess(path)
    if kind not in KINDS:
        found = ", ".join(sorted(f.name for f in path.iterdir())[:8]) or "nothing"
        raise FolderError(
            f"{path}: unknown kind {kind!r} (found: {found}). Expected one of {', '.join(KINDS)}: "
            f"{_META} with a 'kind', or a checkpoint with {_TENSORS}, or operation files (a "
            "safetensors file and a JSON file of the same name that holds 'op'). See "
            "parity/golden/README.md."
        )
    return Folder(path.resolve(), kind)


def _guess(path: Path) -> str | None:
    config = path / "config.json"
    if (path / _TENSORS).exists() and not config.exists():
        names = tensor_names(path / _TENSORS)
        return "vllm" if any(n.endswith(".vllm_logprobs") for n in names) else None
    if (path / _TENSORS).exists() and config.exists():
        model_type = read_json(config).get("model_type")
        return {"kimi_k3": "model", "kimi_linear": "model", "k3_dspark": "dspark"}.get(model_type)
    if not (path / _TENSORS).exists() and any("op" in meta for _, meta in operations(path)):
        return "ops"
    return None


def operations(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file stem, sidecar) of every tensor file of a folder, by name; {} without a sidecar."""
    for file in sorted(path.glob("*.safetensors")):
        sidecar = file.with_suffix(".json")
        yield file.stem, read_json(sidecar) if sidecar.exists() else {}


def tensor_names(file: Path) -> list[str]:
    """Names of a safetensors file, from its header.

    Raises:
        FolderError: the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise FolderError(_damaged(file, "safetensors", error)) from None


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file.

    Raises:
        FolderError: the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FolderError(_damaged(file, "safetensors", error)) from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FolderError: the file is missing, damaged, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FolderError(_damaged(file, "JSON", error)) from None
    if not isinstance(found, dict):
        raise FolderError(
            f"{file}: expected a JSON object, found {type(found).__name__}; record the folder again"
        )
    return found


def _damaged(file: Path, form: str, error: Exception) -> str:
    return (
        f"{file}: not readable as {form}: {error}. Expected a whole {form} file; fetch or record "
        "it again."
    )

"""Messages that name every problem at once, and end with what to do about them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path

# what tells a folder of input: released and prepared checkpoints, recordings
OF_INPUTS = (
    "model.safetensors.index.json", "model.safetensors", "conversion.json", "golden.safetensors",
)  # fmt: skip
OUTSIDE = "expected a place outside of checkpoints and recordings"
KINDS = (".json", ".safetensors")  # files of a checkpoint


def is_whole(value: object) -> bool:
    """Whether a value is a whole number by type: no float, no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def listed(title: str, problems: Iterable[str], do: str) -> str:
    """`title`, a line per problem (what was found, what was expected), and what to do."""
    lines = (p.replace("\n", "\n    ") for p in problems)
    return f"{title}:" + "".join(f"\n  - {line}" for line in lines) + f"\n{do}"


def refused_by_system(error: OSError) -> str:
    """What the operating system refused: found, expected, what to do; an error of ours as it is."""
    if error.errno is None:
        return str(error)
    name = "a file" if error.filename is None else os.fsdecode(error.filename)
    found = f"{name}: found {error.strerror!r}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{found}, expected permission for this user; change the permissions of the file or of "
            "its folder, or choose another place"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{found}, expected room to write; free some, or choose another disk"
    return (
        f"{found}, expected something that can be read or written there; check the name and the "
        "disk, or choose another place"
    )


def unreadable_files(folder: Path) -> str | None:
    """What of a checkpoint's folder this user may not read, none of which need be damaged."""
    found: list[str] = []
    try:
        files = [f for f in sorted(folder.iterdir()) if f.suffix in KINDS and f.is_file()]
    except OSError as error:
        return refused_by_system(error)
    for file in files:
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            found.append(refused_by_system(error))
    if not found:
        return None
    title = f"{folder}: {len(found)} of {len(files)} file(s) cannot be read"
    return listed(title, found, "Nothing was loaded. Whether they are whole is not known yet.")


def checkpoint_around(path: str | Path) -> Path | None:
    """The checkpoint or recording that a path lies in, where nothing else may be written."""
    parents = Path(path).resolve().parents
    return next((d for d in parents if any(_there(d / name) for name in OF_INPUTS)), None)


def inside_input(path: str | Path) -> str | None:
    """Why nothing may be written at a path that lies in a checkpoint or recording."""
    if (around := checkpoint_around(path)) is None:
        return None
    return f"{path}: found inside {around}, which is input; {OUTSIDE}"


def is_model_config(file: Path) -> bool:
    """Whether a file is there that says what a model is, under whatever name."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def _there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:
        return False


def option(name: str) -> str:
    """What a command line calls the setting `name`."""
    return "--" + name.replace("_", "-")


def seed_problems(seed: int) -> list[str]:
    """Why a number is no seed: random numbers of JAX and NumPy take 32 bits, none negative."""
    if 0 <= seed < 2**32:
        return []
    return [f"--seed {seed}: expected 0 to {2**32 - 1}"]

"""Results for people (tables on stdout) and for machines (JSON, never half-written)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; plain lines where that is not a terminal of enough width."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def unwritable(option: str, target: str | Path | None) -> list[str]:
    """What keeps a file from being written, found before the work; `-` and None need none."""
    if target is None or str(target) == "-":
        return []
    file = Path(target)
    parent = next(d for d in file.absolute().parents if d.exists())
    other = "choose another place"
    if file.is_dir():
        return [f"{option}: {file} is a directory, expected the name of a file; {other}"]
    if not parent.is_dir():
        return [f"{option}: {parent} is a file, expected a directory; {other}"]
    try:
        with tempfile.TemporaryFile(dir=parent):
            return []
    except OSError as error:
        found = f"cannot write in {parent}: {error.strerror}"
        return [f"{option}: {found}, expected a place that can be written; {other}"]


def require_writable(option: str, target: str | Path | None) -> None:
    """Refuse a place that a result cannot be written to.

    Raises:
        ValueError: see `unwritable`.
    """
    if problems := unwritable(option, target):
        raise ValueError("\n".join(problems))


def write_json(target: str, result: Any) -> None:
    """Write `result` to the file `target` (whole or not at all), or to stdout for `-`."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(target), text)


def write_text(path: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it, so that nobody sees half of it.

    Raises:
        ValueError: nothing can be written there; says why.
    """
    if path.is_dir():
        raise ValueError(
            f"{path}: is a directory; expected the name of a file to write; choose another place"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written: {error.strerror}; choose a file elsewhere"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()

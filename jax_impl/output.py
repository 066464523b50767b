"""Results for people (tables on stdout) and for machines (JSON, never half-written)."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import tyro

from jax_impl.problems import OUTSIDE, checkpoint_around, is_model_config, refused_by_system
from jax_impl.progress import be_quiet

# exit statuses; 0 is success, 1 a result that is bad
BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 2, 130, 141


@dataclass(frozen=True)
class Output:
    """Where the result of a command goes.

    Attributes:
        json: write the result to this file ('-' for standard output, in place of the table).
        quiet: no table and no progress; errors still come, and what --json asks for.
    """

    json: str | None = None
    quiet: bool = False

    @property
    def talks(self) -> bool:
        """Whether a table goes to standard output."""
        return not self.quiet and self.json != "-"

    def prepare(self, *problems: str) -> None:
        """Begin a command: refuse what cannot be written before the work, set quietness.

        Raises:
            ValueError: the result cannot be written, or there are other `problems`; says all.
        """
        be_quiet(self.quiet)
        if found := [*unwritable("--json", self.json), *problems]:
            raise ValueError("\n".join(found))

    def deliver(
        self, result: Any, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
    ) -> None:
        """The result for machines, and then the table for people."""
        if self.json is not None:
            write_json(self.json, result)
        if self.talks:
            print_table(title, columns, rows)


SHOWN = Output()
Out = Annotated[Output, tyro.conf.arg(name="")]  # the type of the option in a command line


def called(module: str) -> str:
    """How a command line of `module` was called: by its script, or as a module.

    A completion is always the script's: a shell completes one word, not `python -m`.
    """
    script = f"k3-{module}"
    completion = sys.argv[1:2] and sys.argv[1].startswith(("--tyro-print-", "--tyro-write-"))
    return script if completion or Path(sys.argv[0]).name == script else f"python -m {module}"


def run_command(
    program: str,
    command: Callable[[], int],
    arguments: Sequence[str] | None = None,
    names: Iterable[str] = (),
) -> int:
    """Run a command; its exit status, `BAD_INPUT`, `INTERRUPTED` or `CLOSED_PIPE`.

    Args:
        program: its name in messages.
        command: parses the command line and does the work.
        arguments: of the command line; None: of this process.
        names: the subcommands, one of which is proposed in place of an unknown one.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(version_line(program))
        return 0
    try:
        try:
            return _run(program, command)
        except SystemExit as stop:
            if stop.code == BAD_INPUT and given:
                _propose(program, given[0], list(names))
            raise
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # whoever read has enough; nothing more may be written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _nobody_reads() -> bool:
    """Whether it is standard output that broke, and not a connection of the work."""
    watched = select.poll()
    try:
        watched.register(sys.stdout.fileno(), 0)  # an error is told without being asked for
    except (OSError, ValueError):  # not a file
        return False
    return any(event & select.POLLERR for _, event in watched.poll(0))


def version_line(program: str) -> str:
    """Name and version of a program, and what decides whether kernels run: JAX and Python."""
    from importlib import metadata
    from platform import python_version

    def installed(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    names = f"JAX {installed('jax')}, Python {python_version()}"
    return f"{program} {installed('kimi-k3-jax')} ({names})"


def _propose(program: str, given: str, names: list[str]) -> None:
    """The command that was meant, if one is alike."""
    if given.startswith("-") or given in names:
        return
    if close := get_close_matches(given, names, 1, 0.5):
        print(f"{program}: found no command {given!r}; did you mean {close[0]}?", file=sys.stderr)


def _run(program: str, command: Callable[[], int]) -> int:
    """The status of a command, with one message where it was refused or interrupted."""
    started = time.monotonic()
    try:
        return command()
    except (ValueError, OSError) as error:  # every error for the user is one of the two
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise
        said = refused_by_system(error) if isinstance(error, OSError) else str(error)
        print(f"{program}: {said}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{program}: interrupted after {time.monotonic() - started:.0f} s", file=sys.stderr)
        return INTERRUPTED


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
    around, config = checkpoint_around(file), is_model_config(file)
    if around is not None or config:
        what = f"inside {around}, which is input" if around else "the configuration of a model"
        return [f"{option}: found {file}, {what}; {OUTSIDE}; {other}"]
    if not parent.is_dir():
        return [f"{option}: {parent} is a file, expected a directory; {other}"]
    try:
        with tempfile.TemporaryFile(dir=parent):
            return []
    except OSError as error:
        found = f"cannot write in {parent}: {error.strerror}"
        return [f"{option}: {found}, expected a place that can be written; {other}"]


def json_number(value: float) -> float | str:
    """The value, or its name where JSON has no such number."""
    return value if math.isfinite(value) else str(value)


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

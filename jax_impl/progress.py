"""Progress on standard error: bytes with rate and time left, counts, and what takes a while.

Only the first of several processes shows it, and nobody does with `--quiet`. Where standard error
is no terminal, each bar is one line at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jax_impl.processes import is_first

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def be_quiet(quiet: bool) -> None:
    """Whether progress is shown from now on, in this context."""
    _quiet.set(quiet)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, quiet=_quiet.get() or not is_first())


@contextmanager
def _bar(
    what: str, total: float | None, columns: tuple[Any, ...], *, drawn: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar that a thread draws, or that is drawn at each call only."""
    from rich.progress import Progress

    with Progress(what, *columns, console=_console(), auto_refresh=drawn) as bar:
        task = bar.add_task("", total=total)
        yield lambda **changed: bar.update(task, refresh=not drawn, **changed)


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar of bytes with the rate and the time left; call it with bytes more and the item."""
    from rich import progress as p

    rate = (p.TransferSpeedColumn(), p.TimeRemainingColumn(), p.TextColumn("{task.description}"))
    with _bar(what, total, (p.BarColumn(), p.DownloadColumn(), *rate)) as update:
        yield lambda size, item="": update(advance=size, description=item)


@contextmanager
def count_bar(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar of things done of `total` with the time left; call it with how many are done.

    A second number is the new total, where fewer were done than expected.

    No thread draws it: that would take time from what is measured between the calls.
    """
    from rich import progress as p

    times = (p.TimeElapsedColumn(), p.TextColumn("left"), p.TimeRemainingColumn())
    columns = (p.BarColumn(), p.MofNCompleteColumn(), *times)
    with _bar(what, total, columns, drawn=False) as update:
        yield lambda done, total=None: update(completed=done, total=total)


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Something of unknown length, such as a compilation, with the time since it began."""
    from rich import progress as p

    with _bar(what, None, (p.SpinnerColumn(finished_text=" "), p.TimeElapsedColumn())) as update:
        yield
        update(total=1, completed=1)


def note(text: str) -> None:
    """A line."""
    if is_first() and not _quiet.get():
        print(text, file=sys.stderr, flush=True)

"""Messages that name every problem at once, and end with what to do about them."""

from __future__ import annotations

from collections.abc import Iterable


def listed(title: str, problems: Iterable[str], do: str) -> str:
    """`title`, a line per problem (what was found, what was expected), and what to do."""
    return f"{title}:" + "".join(f"\n  - {p}" for p in problems) + f"\n{do}"


def option(name: str) -> str:
    """What a command line calls the setting `name`."""
    return "--" + name.replace("_", "-")


def problems_of(error: Exception) -> list[str]:
    """The problems that `listed` put into an error's message; the message itself without any."""
    lines = str(error).splitlines()
    return [line[4:] for line in lines if line.startswith("  - ")] or [str(error)]

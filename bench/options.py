"""Option types that several commands share; no heavy imports."""

from __future__ import annotations


def see_help(command: str) -> str:
    """What to do about wrong options."""
    return f"Change these; `python -m bench {command} --help` has all options."

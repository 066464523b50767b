"""Options of `python -m bench ops`; no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class OpsOptions:
    """Every kernel over its cases, on one NVIDIA GPU.

    Attributes:
        match: parts of case names; none runs all.
        repeats: walks through a case's layers.
        replays: repetitions that must be equal bit by bit.
        list: print the names of the cases, run nothing.
    """

    match: tyro.conf.Positional[tuple[str, ...]] = ()
    repeats: int = 3
    replays: int = 1000
    list: bool = False

"""Options of `python -m bench ops`; no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class OpsOptions:
    """Every kernel over its cases, on one NVIDIA GPU.

    Attributes:
        preset: `k3`, the kernels at one rank's shapes; `tiny`, the standard formulas of small cases
            by the host's clock, on any device and without a kernel.
        match: parts of case names; none runs all.
        repeats: walks through a case's layers.
        replays: repetitions that must be equal bit by bit.
        list: print the names of the cases, run nothing.
    """

    match: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]")
    ] = ()
    preset: Literal["k3", "tiny"] = "k3"
    repeats: int = 3
    replays: int = 1000
    list: bool = False

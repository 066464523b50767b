"""Option types that several commands share; no heavy imports."""

from __future__ import annotations


def see_help(command: str) -> str:
    """What to do about wrong options."""
    return f"Change these; `python -m bench {command} --help` has all options."


def seed_problems(seed: int) -> list[str]:
    """Why a number is no seed: random numbers of JAX and NumPy take 32 bits, none negative."""
    if 0 <= seed < 2**32:
        return []
    return [f"--seed {seed}: expected 0 to {2**32 - 1}"]

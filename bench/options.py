"""Option types that several commands share; no heavy imports."""

from __future__ import annotations

from typing import Annotated

import tyro

from jax_impl.ids import is_plain


def see_help(command: str) -> str:
    """What to do about wrong options."""
    return f"Change these; `python -m bench {command} --help` has all options."


def seed_problems(seed: int) -> list[str]:
    """Why a number is no seed: random numbers of JAX and NumPy take 32 bits, none negative."""
    if 0 <= seed < 2**32:
        return []
    return [f"--seed {seed}: expected 0 to {2**32 - 1}"]


def numbers(text: str) -> tuple[int, ...]:
    """`1,8,64` as numbers.

    Raises:
        ValueError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(is_plain, parts)):
        raise ValueError(
            f"found {text!r}, expected whole numbers with commas, such as 1,8,64; correct it"
        )
    return tuple(map(int, parts))


Numbers = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N,N,...",
        instance_from_str=lambda args: numbers(args[0]),
        is_instance=lambda found: isinstance(found, tuple),
        str_from_instance=lambda found: [",".join(map(str, found))],
    ),
]

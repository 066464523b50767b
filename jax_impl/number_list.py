"""Options that take several whole numbers."""

from __future__ import annotations

import re
from typing import Annotated

import tyro


def numbers(text: str) -> tuple[int, ...]:
    """`1,8,64` as numbers.

    Raises:
        ValueError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):  # int() takes more than that
        raise ValueError(
            f"found {text!r}, expected whole numbers with commas, such as 1,8,64; correct it"
        )
    return tuple(int(part) for part in parts)


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

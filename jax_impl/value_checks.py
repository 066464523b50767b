"""Values that no checkpoint may hold; seen while it is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_impl.checkpoint import CheckpointError
from jax_impl.weights import WeightArray

NAN_SCALE = 255  # E8M0 code of NaN


def value_check(array: WeightArray) -> Callable[[str, np.ndarray, int, int], None]:
    """What refuses bad values of the array, given a tensor's name, values and their place."""
    if array.per_expert:
        return _refuse_nan_scales if array.name.endswith("_scale") else _accept
    return _refuse_not_finite


def _accept(name: str, data: np.ndarray, row: int, column: int) -> None:
    """Packed codes: every byte is a value."""


def _refuse_not_finite(name: str, data: np.ndarray, row: int, column: int) -> None:
    """Refuse what is not finite in values read from (row, column) on.

    Some of it would show in no output: a NaN selection bias means an expert never chosen.
    """
    # the exponent bits tell, and reading them is faster than a test in bf16
    bits, ones = (np.uint16, 0x7F80) if data.dtype.itemsize == 2 else (np.uint32, 0x7F800000)
    found = (np.ascontiguousarray(data).view(bits) & ones) == ones
    if found.any():  # much faster than looking for their places
        bad = np.argwhere(found)
        first = bad[0] + np.array([row, column, *[0] * data.ndim])[: data.ndim]
        raise CheckpointError(
            f"{name}: {len(bad)} value(s) that are NaN or infinite, the first at {first.tolist()}; "
            "expected finite numbers. The file is damaged: fetch it again."
        )


def _refuse_nan_scales(name: str, data: np.ndarray, row: int, column: int) -> None:
    found = data == NAN_SCALE
    if found.any():
        bad = np.argwhere(found)
        raise CheckpointError(
            f"{name}: {len(bad)} scale byte(s) are 255 (NaN in E8M0), the first at row "
            f"{row + bad[0][0]}, group {column + bad[0][1]}; expected 0..254. The file is damaged: "
            "fetch it again."
        )

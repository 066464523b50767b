"""Values of the small random checkpoints: pure functions of seed and name, bit for bit.

The recipe is in `make_tiny`. Needs NumPy and ml_dtypes only.
"""

import hashlib
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16, F32, U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.uint8)
GROUP = 32  # input columns of an expert that share a scale byte
CHUNK = 1 << 20  # values converted at a time, which bounds the wide temporaries


class Range(NamedTuple):
    """Uniform values in offset ± scale, stored as dtype."""

    scale: float
    offset: float = 0.0
    dtype: np.dtype = BF16


def stream(seed: int, key: str, size: int) -> np.ndarray:
    """The raw random numbers of a tensor: uint16 [size]."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    return generator.integers(0, 65536, size, dtype=np.uint16)


def uniform(seed: int, key: str, shape: tuple[int, ...], recipe: Range) -> np.ndarray:
    """Uniform values of the given shape in the recipe's range and dtype."""
    raw = stream(seed, key, math.prod(shape))
    out = np.empty(raw.shape, recipe.dtype)
    for start in range(0, raw.size, CHUNK):
        unit = raw[start : start + CHUNK].astype(np.float64) / 65535 * 2 - 1
        part = (unit * recipe.scale + recipe.offset).astype(np.float32)
        # By way of float32, as PyTorch rounds: directly, the last bit could differ.
        out[start : start + CHUNK] = part.astype(recipe.dtype)
    return out.reshape(shape)


def follow_bigram(base: np.ndarray, table: np.ndarray, gain: float, over: float) -> np.ndarray:
    """BF16 [vocab, n]: base, where the row of t's successor gets table[t] * gain / over on top."""
    out = np.empty(base.shape, BF16)
    step = max(1, CHUNK // base.shape[1])
    for start in range(0, len(out), step):
        tokens = np.arange(start, min(start + step, len(out)))
        successors = (5 * tokens + 7) % len(out)
        # Two operations in this order: the recipe is bit for bit.
        addend = table[tokens].astype(np.float32) * gain / over
        out[successors] = (base[successors].astype(np.float32) + addend).astype(BF16)
    return out


def codes(seed: int, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """U8 codes, two E2M1 numbers in a byte."""
    return stream(seed, key, math.prod(shape)).astype(np.uint8).reshape(shape)


def scale_bytes(seed: int, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """U8 E8M0 scales [rows, groups], centred so that the matrix has about unit gain."""
    rms = 2.95  # of an E2M1 number with a uniform code
    centre = 127 + round(math.log2(1.0 / (rms * math.sqrt(shape[1] * GROUP)))) - 1
    return (stream(seed, key, math.prod(shape)) % 3 + centre).astype(np.uint8).reshape(shape)

"""What a case of `python -m bench ops` is, and float64 helpers of its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

L2_TIMES = 3
L2_BYTES = 60 << 20
SITU = (4.0, 25.0)
REL_L2 = 4e-3  # largest error of a case that passes


@dataclass
class Problem:
    """One case, built on the device.

    Attributes:
        call: layer -> result.
        bytes: that must move per call.
        layers: how many distinct layers `call` takes.
        exact: (layer, rows) -> float64 result for these rows.
        standard: layer -> what the standard path gives.
        rows: rows compared with float64.
        notes: further figures, name -> (value, unit).
    """

    call: Callable[[jax.Array], jax.Array]
    bytes: int
    layers: int
    exact: Callable[[int, np.ndarray], np.ndarray]
    standard: Callable[[int], jax.Array]
    rows: np.ndarray
    notes: dict[str, tuple[float, str]] = field(default_factory=dict)


def stack_depth(nbytes: int) -> int:
    """Layers so that a buffer returns after three times the L2."""
    return max(2, -(-L2_TIMES * L2_BYTES // nbytes) + 1)


def normal(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Random bf16 on the device."""
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def f64(x: Any) -> np.ndarray:
    """On the host, in float64."""
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def bf16_round(x: np.ndarray) -> np.ndarray:
    """One rounding of float64 values to bf16."""
    return np.asarray(np.asarray(x, np.float32).astype(jnp.bfloat16), np.float64)


def attn_res64(
    new: np.ndarray, bank: np.ndarray, weights: list[np.ndarray], eps: float
) -> np.ndarray:
    """AttnRes in float64: of the new prefix [N, D], snapshots [N, J, D] and three weights [D]."""
    res_norm, res_proj, norm = weights
    s = np.concatenate([bank, new[:, None]], axis=1)
    score = (s @ (res_norm * res_proj)) / np.sqrt((s * s).mean(-1) + eps)
    share = np.exp(score - score.max(-1, keepdims=True))
    mixed = (share[..., None] / share.sum(-1)[:, None, None] * s).sum(1)
    return mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + eps) * norm


def situ64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiTU in float64."""
    b, c = SITU
    return b * np.tanh(gate / b) / (1 + np.exp(-gate)) * (c * np.tanh(up / c))

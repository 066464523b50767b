"""YaRN rotation of interleaved pairs (draft specification §2.5)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_impl.draft_config import Yarn
from jax_impl.numerics import Numerics, f32


def inverse_frequencies(width: int, yarn: Yarn) -> np.ndarray:
    """Angle per position of each of the width / 2 pairs, f64.

    Slow pairs are stretched by `factor`, fast ones are left alone, with a ramp between.
    """
    pairs = np.arange(width // 2)
    plain = yarn.rope_theta ** (-2.0 * pairs / width)

    def corner(turns: float) -> float:  # pair that turns so often within the original length
        length = yarn.original_max_position_embeddings
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(yarn.rope_theta))

    low = max(math.floor(corner(yarn.beta_fast)), 0)
    high = float(min(math.ceil(corner(yarn.beta_slow)), width - 1))
    high += 0.001 if low == high else 0.0
    ramp = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    return plain / yarn.factor * ramp + plain * (1.0 - ramp)


def _mscale(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def amplitude(yarn: Yarn) -> float:
    """Multiplier of cosine and sine."""
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(head_width: int, yarn: Yarn) -> float:
    """Scale of the attention scores, YaRN's correction included."""
    return head_width**-0.5 * _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rotate(
    nx: Numerics,
    x: Float[Array, "*rows w"],
    position: Int[Array, "*rows"],
    yarn: Yarn,
) -> Float[Array, "*rows w"]:
    """Turn the pairs (2j, 2j + 1) of `x` by position * inv_j; f32 inside, one rounding.

    `position` has the shape of the rows, or ones where it is shared.
    """
    inverse = jnp.asarray(inverse_frequencies(x.shape[-1], yarn), jnp.float32)
    angle = f32(position)[..., None] * inverse
    cos, sin = amplitude(yarn) * jnp.cos(angle), amplitude(yarn) * jnp.sin(angle)
    even, odd = f32(x[..., 0::2]), f32(x[..., 1::2])
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return nx.round(turned.reshape(x.shape))

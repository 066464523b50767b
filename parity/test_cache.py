"""The stored form of latent rows, and the two forms of a KDA commit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.numerics import Numerics
from jax_impl.ops.mla import from_cache, to_cache

FP8 = jnp.dtype("float8_e4m3fn")


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_fp8_rows_saturate_and_come_back_within_half_a_step(scale):
    x = np.array([0.0, 1.0, -3.3, 448.0, -448.0, 464.1, 1e6, -1e6, 2e-3], np.float32) * scale
    stored = to_cache(jnp.asarray(x), FP8, jnp.float32(scale))
    back = np.asarray(from_cache(Numerics("float32", "V"), stored, jnp.float32(scale)))
    clipped = np.clip(x, -448 * scale, 448 * scale)
    assert np.isfinite(back).all()
    assert np.array_equal(back[[3, 4, 5, 6, 7]], clipped[[3, 4, 5, 6, 7]])
    # e4m3 keeps three mantissa bits: half a step is 2^-4 of the value, 2^-10 below 2^-6
    assert (np.abs(back - clipped) <= np.maximum(np.abs(clipped) / 16, scale * 2.0**-10)).all()


def test_rows_without_fp8_are_stored_as_they_are():
    x = jnp.asarray([1.5, -448.5, 1e6], jnp.bfloat16)
    assert np.array_equal(np.asarray(to_cache(x, jnp.dtype("bfloat16"), None)), np.asarray(x))

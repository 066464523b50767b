"""Where kernels can be tested: the interpreter's conditions, and small helpers of the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common

WANTED = ".".join(map(str, common.MINIMUM_JAX))
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < common.MINIMUM_JAX,
    reason=f"JAX {jax.__version__} found; the Mosaic GPU interpreter needs {WANTED}",
)
needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason=f"an NVIDIA GPU; found {jax.default_backend()}"
)


def same_bits(got: jax.Array, want: jax.Array) -> bool:
    """Equal in every number, and NaN at the same places."""
    return bool(jnp.all((got == want) | (jnp.isnan(got) & jnp.isnan(want))))


def same(got: jax.Array, want: jax.Array, tolerance: float, kind: str = "rel_l2") -> None:
    """NaN at the same places, and the rest within `tolerance`."""
    a, b = (np.asarray(v.astype("float32"), np.float64) for v in (got, want))
    assert a.shape == b.shape
    assert (np.isnan(a) == np.isnan(b)).all(), "NaN at other places"
    keep = np.isfinite(b)
    error = np.abs(a - b)[keep]
    if kind == "max_abs":
        assert error.max(initial=0.0) <= tolerance
        return
    scale = np.sqrt((b[keep] ** 2).sum())
    assert np.sqrt((error**2).sum()) <= tolerance * scale, np.sqrt((error**2).sum()) / scale

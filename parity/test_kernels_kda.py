"""The KDA kernel in the Mosaic GPU interpreter, with race detection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common, kda
from parity.kernel_env import needs_interpreter, same
from parity.kernel_inputs import kda_inputs

SETTINGS = dict(eps=1e-5, lower_bound=-5.0)
LAYER = 1


@needs_interpreter
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
def test_kda(tokens, commit):
    """A pad row, a sequence without history, one with fewer real tokens, foreign slots of NaN."""
    fused, state, window, weights, rows = kda_inputs(tokens, heads=1, batch=3, slots=4)
    args = fused, state, window, weights, LAYER, rows
    got = kda.kda(*args, commit=commit, interpret=True, **SETTINGS)
    want = kda.reference(*args, commit=commit, **SETTINGS)
    real = np.arange(tokens)[None] < np.asarray(rows.count)[:, None]
    for name, a, b in zip(("heads", "state/update", "window/key", "g"), got, want, strict=False):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        if name == "heads" or not commit:
            a, b = (v.reshape(*real.shape, -1)[real] for v in (a, b))
            same(a, b, 4e-3 if name == "heads" else 1e-5)
        elif name == "state/update":
            same(a, b, 1e-5)
        else:
            same(a, b, 0.0, "max_abs")
    assert not common.races_found()


def test_limits_name_found_and_expected():
    s = jax.ShapeDtypeStruct
    weights = kda.Weights(
        s((1, 128, 128), jnp.bfloat16),
        s((1, 384, 4), jnp.float32),
        s((1, 1), jnp.float32),
        s((1, 128), jnp.float32),
        s((1, 128), jnp.float32),
    )
    index = s((1,), jnp.int32)
    reasons = kda.limits(
        s((9, 641), jnp.bfloat16),
        s((1, 2, 1, 128, 64), jnp.float32),
        s((1, 2, 2, 384), jnp.float32),
        weights,
        kda.Rows(index, index, index),
    )
    assert reasons == [
        "rows: found 9, expected 1 sequences of 1..8 tokens",
        "state of a head: found (128, 64), expected (128, 128)",
        "columns of fused: found 641, expected a multiple of 8, at least 641",
        "rows of window: found 2, expected 3",
        "dtype of window: found float32, expected bfloat16",
    ]

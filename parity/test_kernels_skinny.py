"""Skinny projections in the Mosaic GPU interpreter, with race detection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common, latent_up, route, skinny
from parity.kernel_env import needs_interpreter, same

SITU = (4.0, 25.0)
BF16 = jnp.bfloat16


def normal(rng, *shape, scale=1.0):
    return jnp.asarray(rng.standard_normal(shape) * scale, BF16)


@needs_interpreter
@pytest.mark.parametrize(
    ("m", "n", "k", "kw", "tuning"),
    [
        (1, 72, 384, {}, skinny.Tuning(stages=2, warpgroups=2)),
        (3, 128, 256, {"out_dtype": BF16}, skinny.Tuning(step=64, stages=2, warpgroups=3)),
        (9, 128, 256, {"situ": SITU}, skinny.Tuning(stages=2, warpgroups=1)),
        (5, 64, 512, {}, skinny.Tuning(stages=2, warpgroups=2, splits=2)),
    ],
)
def test_skinny(m, n, k, kw, tuning):
    """A row of NaN stays alone, pad rows (NaN in the interpreter) reach nobody."""
    rng = np.random.default_rng(m)
    x, w = normal(rng, m, k), normal(rng, 2, n, k, scale=k**-0.5)
    if m > 1:
        x = x.at[1].set(jnp.nan)
    got = skinny.skinny(x, w, jnp.int32(1), tuning=tuning, interpret=True, **kw)
    want = skinny.reference(x, [skinny.Projection(w, **kw)], 1)[0]
    assert got.dtype == want.dtype
    # f32: another order of summation; bf16: at most one rounding apart in a few places
    same(got, want, 1e-6 if got.dtype == jnp.float32 else 1e-3)
    assert not common.races_found()


@needs_interpreter
def test_route_with_shared_experts():
    rng = np.random.default_rng(0)
    k = 256
    x = normal(rng, 2, k)
    gate, down, shared = (normal(rng, 2, n, k, scale=k**-0.5) for n in (56, 72, 64))
    tuning = skinny.Tuning(stages=1, warpgroups=2)
    got = route.route(x, gate, down, shared, 1, betas=SITU, tuning=tuning, interpret=True)
    want = route.reference(x, gate, down, shared, 1, betas=SITU)
    assert [g.shape for g in got] == [(2, 56), (2, 72), (2, 32)]
    for a, b in zip(got, want, strict=True):
        same(a, b, 1e-6 if a.dtype == jnp.float32 else 1e-3)


@needs_interpreter
@pytest.mark.parametrize("k", [256, 96, 64])
def test_latent_up(k):
    """Also with columns that are no whole steps, as small models have: filled with zeros."""
    rng = np.random.default_rng(2)
    x, norm, w = normal(rng, 3, k), normal(rng, k), normal(rng, 1, 64, k, scale=1 / 16)
    tuning = skinny.Tuning(stages=2, warpgroups=1, splits=2) if k == 256 else None
    (got,) = latent_up.latent_up(x, norm, w, eps=1e-5, tuning=tuning, interpret=True)
    # the rounding sits elsewhere: two independent sets of bf16 roundings apart
    same(got, latent_up.reference(x, norm, w, eps=1e-5), 6e-3)


@needs_interpreter
def test_a_norm_sees_its_own_columns_only():
    """What stands beyond them in wider rows is another operand's."""
    rng = np.random.default_rng(4)
    x, norm, w = normal(rng, 3, 160), normal(rng, 96), normal(rng, 2, 64, 96, scale=0.1)
    items, kw = [skinny.Projection(w, BF16)], {"norm": (norm, 1e-5)}
    (got,) = skinny.projections(x.at[:, 96:].set(jnp.nan), items, 1, interpret=True, **kw)
    (want,) = skinny.reference(x, items, 1, **kw)
    same(got, want, 6e-3)


def test_limits_name_found_and_expected():
    x, w = jnp.zeros((65, 96), jnp.float32), jnp.zeros((1, 60, 96), BF16)
    reasons = skinny.limits(x, [skinny.Projection(w)])
    text = "; ".join(reasons)
    assert "rows of x: found 65, expected 1..64" in text
    assert "columns: found 96, expected a multiple of 64" in text
    assert "dtype of x: found float32, expected bfloat16" in text
    assert "rows of w[0]: found 60" in text
    with pytest.raises(ValueError, match="skinny: rows of x"):
        skinny.skinny(x, w)


@pytest.mark.parametrize("m", [1, 8, 16, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(3208, 7168), (7168, 768), (7168, 384), (448, 3584), (10240, 7168), (1152, 1536)]
)
def test_default_tuning_meets_the_limits(m, n, k):
    x = jax.ShapeDtypeStruct((m, k), BF16)
    w = jax.ShapeDtypeStruct((3, n, k), BF16)
    assert skinny.limits(x, [skinny.Projection(w)]) == []

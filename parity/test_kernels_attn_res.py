"""The AttnRes kernel in the Mosaic GPU interpreter, with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.numerics import Numerics, f32
from jax_impl.ops.attn_res import attn_res as standard
from jax_impl.ops.norm import rmsnorm
from pallas_kernels import attn_res, common
from parity.kernel_env import needs_interpreter, same

D, BANK = 512, 3
TUNING = attn_res.Tuning(parts=2)


def operands(rng, rows, count, dtype):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    snapshots = normal(rows, BANK, D).at[:, count:].set(jnp.nan)
    prefix, delta = normal(rows, D), normal(rows, D).astype(dtype)
    return prefix, snapshots, count, delta, normal(D), normal(1, D) * 0.05, normal(D)


@needs_interpreter
@pytest.mark.parametrize(
    ("rows", "count", "kw"),
    [
        (2, 0, {"snapshot": True}),
        (3, 2, {}),
        (1, BANK, {"reset": True}),
        (13, 1, {}),
    ],
)
@pytest.mark.parametrize("two", [False, True])
def test_attn_res(rows, count, kw, two):
    """Against the standard stages' formulas; what lies beyond `count` is NaN."""
    rng = np.random.default_rng(rows)
    dtype = jnp.float32 if kw.get("reset") else jnp.bfloat16
    prefix, snapshots, count, delta, *weights = operands(rng, rows, count, dtype)
    if rows > 1:
        prefix = prefix.at[0].set(jnp.nan)
    args = prefix, snapshots, jnp.int32(count), delta, *weights
    nx = Numerics()
    added = nx.round(f32(delta))
    if two:
        kw = kw | {"shared": jnp.asarray(rng.standard_normal((rows, D)), jnp.float32)}
        added = nx.round(f32(added) + f32(nx.round(kw["shared"])))
    x, new, bank = attn_res.attn_res(*args, eps=1e-5, tuning=TUNING, interpret=True, **kw)
    added = added if kw.get("reset") else nx.round(f32(prefix) + f32(added))
    mixed = standard(nx, added, snapshots, count, weights[0], weights[1], 1e-5)
    same(x, rmsnorm(nx, mixed, weights[2], 1e-5), 1e-3)
    same(new, added, 0.0, "max_abs")
    want = snapshots.at[:, count].set(added) if kw.get("snapshot") else snapshots
    same(bank, want, 0.0, "max_abs")
    for got, ref in zip((x, new, bank), attn_res.reference(*args, eps=1e-5, **kw), strict=True):
        same(got, ref, 1e-3)
    assert not common.races_found()


@needs_interpreter
def test_weights_of_a_layer():
    args = operands(np.random.default_rng(2), 2, 1, jnp.bfloat16)
    stacks = [jnp.stack([w * jnp.nan, w]) for w in args[4:]]
    call = dict(eps=1e-5, tuning=TUNING, interpret=True)
    got = attn_res.attn_res(*args[:4], *stacks, layer=jnp.int32(1), **call)
    for a, b in zip(got, attn_res.attn_res(*args, **call), strict=True):
        same(a, b, 0.0, "max_abs")
    for a, b in zip(got, attn_res.reference(*args[:4], *stacks, eps=1e-5, layer=1), strict=True):
        same(a, b, 1e-3)
    assert not common.races_found()


@needs_interpreter
@pytest.mark.parametrize("kw", [{}, {"snapshot": True, "layer": 1}])
def test_narrow_rows_are_filled_with_zeros(kw):
    """128 columns, of a small model: the means are of 128 numbers, not of 256."""
    args = operands(np.random.default_rng(5), 3, 2, jnp.bfloat16)
    snapshots = args[1][..., :128]
    row, weights = [args[0][:, :128], args[3][:, :128]], [w[..., :128] for w in args[4:]]
    if "layer" in kw:
        weights = [jnp.stack([w * jnp.nan, w]) for w in weights]
    shared = jnp.asarray(np.random.default_rng(6).standard_normal((3, 128)), jnp.float32)
    full = row[0], snapshots, jnp.int32(2), row[1], *weights
    kw = kw | {"eps": 1e-5, "shared": shared}
    got = attn_res.attn_res(*full, interpret=True, **kw)
    want = attn_res.reference(*full, **kw)
    for a, b, tolerance in zip(got, want, (1e-3, 0.0, 0.0), strict=True):
        same(a, b, tolerance, "rel_l2" if tolerance else "max_abs")
    assert not common.races_found()


@pytest.mark.parametrize("rows", [1, 2, 8, 13, 64])
@pytest.mark.parametrize("d", [128, 256, 512, 2048, 7168])
def test_default_tuning_meets_the_limits(rows, d):
    wide = jnp.zeros((rows, d), jnp.bfloat16)
    assert attn_res.limits(wide, jnp.zeros((rows, 8, d), jnp.bfloat16), wide) == []


def test_limits_name_found_and_expected():
    wide = jnp.zeros((65, 1100), jnp.bfloat16)
    bank, half = jnp.zeros((65, 2, 1100), jnp.bfloat16), jnp.zeros((65, 1100), jnp.float16)
    reasons = attn_res.limits(wide, bank, wide, shared=half, tuning=TUNING)
    assert reasons == [
        "rows: found 65, expected 1..64",
        "width: found 1100, expected 2 times one of (1024, 512, 256)",
        "dtype of shared: found float16, expected float32",
    ]

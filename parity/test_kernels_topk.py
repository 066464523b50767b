"""The router's choice in the Mosaic GPU interpreter, and the plain parts of it.

The choice itself is register code: on a GPU it is compared with the same reference
(`test_kernels_small_gpu`); here the twin runs inside the kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.ops.router import choose_experts
from pallas_kernels import common, topk
from parity.kernel_env import needs_interpreter, same

EXPERTS, CHOSEN, SCALING = 128, 4, 2.5


def operands(rows, seed=0, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, experts)).astype(np.float32)
    bias = rng.standard_normal((2, experts)).astype(np.float32) * 0.1
    if rows > 1:
        logits[1, 3:] = np.nan  # fewer numbers than are chosen
        logits[-1] = np.round(logits[-1])  # ties
        logits[0, :2] = np.inf, -np.inf
    return jnp.asarray(logits), jnp.asarray(bias)


def equal(got, want):
    """The same ids and units, and weights up to the last bits."""
    assert (got.ids == want.ids).all()
    same(got.weights, want.weights, 1e-6)
    count = int(want.units.count[0])
    assert int(got.units.count[0]) == count
    a, b = (np.asarray(u.table)[:count] for u in (got.units, want.units))
    used = np.arange(8) < b[:, 1:2]
    assert (a[:, :2] == b[:, :2]).all() and (a[:, 2:] == b[:, 2:])[used].all()


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_reference_is_the_router(rows):
    logits, bias = operands(rows)
    got = topk.reference(logits, bias, 1, k=CHOSEN, scaling=SCALING)
    ids, weights = choose_experts(logits, bias[1], CHOSEN, scaling=SCALING)
    assert (got.ids == ids).all()
    same(got.weights, weights, 0.0, "max_abs")


@needs_interpreter
@pytest.mark.parametrize(
    ("rows", "tuning", "experts"),
    [
        (1, None, EXPERTS),
        (2, None, EXPERTS),
        (8, None, EXPERTS),
        (13, None, EXPERTS),
        (64, topk.Tuning(ctas=4, warpgroups=2), EXPERTS),
        (13, None, 6),
    ],
)
def test_topk(rows, tuning, experts):
    logits, bias = operands(rows, experts=experts)
    rng = np.random.default_rng(1)
    hidden, stack = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((rows, 64), (2, 64, 64))
    )
    call = dict(k=CHOSEN, scaling=SCALING, shared=(hidden, stack) if rows == 2 else None)
    got = topk.topk(logits, bias, jnp.int32(1), **call, tuning=tuning, interpret=True)
    want = topk.reference(logits, bias, 1, **call)
    equal(got, want)
    if rows == 2:
        same(got.shared, want.shared, 1e-6)
    assert not common.races_found()


@pytest.mark.parametrize("rows", range(1, 65))
def test_default_tuning_meets_the_limits(rows):
    logits, bias = jnp.zeros((rows, 896)), jnp.zeros((3, 896))
    assert topk.limits(logits, bias, k=16) == []
    for width in (384, 768):
        s, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
        shared = s((rows, width), bf16), s((3, 7168, width), bf16)
        assert topk.limits(logits, bias, k=16, shared=shared) == []


def test_limits_name_found_and_expected():
    reasons = topk.limits(jnp.zeros((65, 1025)), jnp.zeros((2, 99), jnp.bfloat16), k=33)
    assert reasons == [
        "rows: found 65, expected 1..64",
        "experts: found 1025, expected 1..1024",
        "experts of bias: found 99, expected 1025",
        "k: found 33, expected 1..32",
        "dtype of bias: found bfloat16, expected float32",
    ]

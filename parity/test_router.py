"""Properties of the router and of the two expert forms, whatever the rows hold."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jax_impl.numerics import Numerics
from jax_impl.ops.experts import ExpertWeights, gathered, grouped
from jax_impl.ops.mxfp4 import dequantise
from jax_impl.ops.router import choose_experts
from jax_impl.ops.situ import situ, situ_mlp

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(arrays(np.float32, (3, 12), elements=ANY), st.sampled_from([(1, 1), (3, 2), (4, 1)]))
def test_ids_are_distinct_and_in_range_for_any_logits(logits, grouping):
    groups, kept = grouping
    ids, _ = choose_experts(jnp.asarray(logits), jnp.zeros(12), 3, groups, kept)
    ids = np.asarray(ids)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_rows_with_nan_or_infinite_logits_do_not_touch_the_others():
    rng = np.random.default_rng(0)
    usual = rng.normal(size=(8, 896)).astype(np.float32)
    broken = usual.copy()
    broken[5] = -np.inf
    broken[5, [3, 500, 895]] = 1.0
    broken[6:] = np.nan
    bias = jnp.asarray(rng.normal(size=896), jnp.float32)
    (ids, w), (ids2, w2) = (choose_experts(jnp.asarray(x), bias, 16) for x in (usual, broken))
    assert np.array_equal(ids[:5], ids2[:5])
    assert np.array_equal(np.asarray(w[:5]), np.asarray(w2[:5]))
    assert {len(set(row)) for row in np.asarray(ids2).tolist()} == {16}
    assert ((np.asarray(ids2) >= 0) & (np.asarray(ids2) < 896)).all()


def random_experts(rng: np.random.Generator, e: int, z: int, m: int) -> ExpertWeights:
    """Packed weights with scales near 2^-3."""

    def codes(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)

    def scales(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.integers(122, 126, shape), jnp.uint8)

    return ExpertWeights(
        codes(e, 2 * m, z // 2),
        scales(e, 2 * m, z // 32),
        codes(e, z, m // 2),
        scales(e, z, m // 32),
    )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_grouped_and_gathered_experts_agree_and_nan_rows_stay_alone(compute, rows):
    rng = np.random.default_rng(rows)
    nx, w = Numerics(compute, "V"), random_experts(rng, 5, 64, 32)
    latent = jnp.asarray(rng.normal(size=(rows, 64)), nx.dtype)
    ids = jnp.asarray(np.stack([rng.permutation(5)[:3] for _ in range(rows)]))
    a = np.asarray(gathered(nx, latent, ids, w, (4.0, 25.0)), np.float32)
    b = np.asarray(grouped(nx, latent, ids, w, (4.0, 25.0)), np.float32)
    # one bf16 step where the two summation orders round apart; f32 noise otherwise
    unit = {"float32": 1e-6, "bfloat16": 2.0**-7}[compute]
    assert np.max(np.abs(a - b)) <= unit * np.max(np.abs(a))
    poisoned = np.asarray(
        grouped(nx, latent.at[rows - 1].set(jnp.nan), ids, w, (4.0, 25.0)), np.float32
    )
    assert np.array_equal(poisoned[: rows - 1], b[: rows - 1])
    assert np.isnan(poisoned[rows - 1]).all()


@given(arrays(np.uint8, (4, 16)), arrays(np.uint8, (4, 1), elements=st.integers(0, 254)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_mxfp4_equals_exact_arithmetic(packed, scale):
    got = np.asarray(dequantise(jnp.asarray(packed), jnp.asarray(scale))).astype(np.float64)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(4, 32)
    exact = np.ldexp(table[codes], scale.astype(int) - 127)
    largest = np.ldexp(255.0, 120)  # of bf16
    expected = np.where(np.abs(exact) > largest, np.copysign(np.inf, exact), exact)
    assert np.array_equal(got, expected)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


def test_all_three_feed_forward_parts_use_situ():
    nx = Numerics("float32", "H")
    value = 5.970436  # SiTU(4, 2); SiLU gating would give 7.856110
    bound = 1e-6 * value  # float32: relative 1e-6, as for every operation
    assert abs(float(situ(nx, jnp.float32(4), jnp.float32(2), 4.0, 25.0)) - value) < bound
    x, half = jnp.ones((1, 32)), jnp.full((32, 32), 1 / 32)
    gate_up = jnp.concatenate([4 * half, 2 * half])
    plain = situ_mlp(nx, x, gate_up, jnp.eye(32), 4.0, 25.0)  # dense and shared experts
    assert np.allclose(plain, value, rtol=0, atol=bound)
    # routed: one nonzero code per row, 4.0 in gate rows and 2.0 in up rows; down is the identity
    packed = np.zeros((1, 64, 16), np.uint8)
    packed[0, :32, 0], packed[0, 32:, 0] = 6, 4
    down = np.zeros((1, 32, 16), np.uint8)
    for i in range(32):
        down[0, i, i // 2] = 2 << (4 * (i % 2))
    ones = jnp.full((1, 64, 1), 127, jnp.uint8)
    w = ExpertWeights(jnp.asarray(packed), ones, jnp.asarray(down), ones[:, :32])
    for form in (gathered, grouped):
        routed = form(nx, x, jnp.zeros((1, 1), jnp.int32), w, (4.0, 25.0))
        assert np.allclose(routed, value, rtol=0, atol=bound)

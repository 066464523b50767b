"""Routed experts in the Mosaic GPU interpreter, with race detection."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.numerics import Numerics
from jax_impl.ops.experts import ExpertWeights, routed_experts
from pallas_kernels import common, experts, experts_pack, mxfp4, units
from parity.kernel_env import needs_interpreter, same

BETAS = (4.0, 25.0)
E, Z, M, K = 6, 512, 64, 3


def raw_weights(rng, width, z=Z):
    shapes = (2 * width, z // 2), (2 * width, z // 32), (z, width // 2), (z, width // 32)
    limits = (0, 256), (117, 123), (0, 256), (117, 123)
    return [
        rng.integers(*limit, (2, E, *shape), dtype=np.uint8)
        for shape, limit in zip(shapes, limits, strict=True)
    ]


@needs_interpreter
@pytest.mark.parametrize(
    ("n", "width", "z"), [(1, 192, Z), (3, M, Z), (12, M, Z), (3, M, 256), (3, M, 64)]
)
def test_experts(n, width, z):
    """Against the standard path: one row, rows that share experts, rows beyond eight."""
    rng = np.random.default_rng(n)
    raw = raw_weights(rng, width, z)
    w13, w2 = experts_pack.pack(*raw)
    x = jnp.asarray(rng.standard_normal((n, z)), jnp.bfloat16)
    ids = jnp.asarray(np.stack([rng.permutation(E)[:K] for _ in range(n)]), jnp.int32)
    weights = jnp.asarray(rng.random((n, K)), jnp.float32)
    if n > 1:
        x = x.at[1].set(jnp.nan)
    if n > 8:  # more than eight rows of one expert
        ids = ids.at[:, 0].set(0).at[:, 1:].set(jnp.maximum(ids[:, 1:], 1))
        ids = ids.at[:, 2].set(jnp.where(ids[:, 2] == ids[:, 1], ids[:, 1] % 5 + 1, ids[:, 2]))
    tuning = experts.Tuning(ctas=2, warpgroups=2, down_warpgroups=2)
    if z != Z:  # as a small model gets it
        tuning = replace(experts.default_tuning(n, width, z), ctas=2, down_warpgroups=2)
        assert tuning.warpgroups == max(z // 128, 1)
    got = experts.experts(
        x, ids, weights, w13, w2, jnp.int32(1), width=width, betas=BETAS, tuning=tuning,
        interpret=True,
    )  # fmt: skip
    one = ExpertWeights(*(a[1] for a in raw))
    want = routed_experts(Numerics(), x, ids, weights, one, BETAS)
    same(got, want, 1e-3)
    assert not common.races_found()


def test_reference_equals_the_standard_path():
    rng = np.random.default_rng(0)
    raw = raw_weights(rng, 192)
    w13, w2 = experts_pack.pack(*raw)
    x = jnp.asarray(rng.standard_normal((2, Z)), jnp.bfloat16)
    ids = jnp.asarray([[0, 3, 5], [3, 1, 2]], jnp.int32)
    weights = jnp.asarray(rng.random((2, K)), jnp.float32)
    got = experts.reference(x, ids, weights, w13, w2, 1, width=192, betas=BETAS)
    one = ExpertWeights(*(a[1] for a in raw))
    same(got, routed_experts(Numerics(), x, ids, weights, one, BETAS), 1e-3)


@pytest.mark.parametrize(("n", "k", "e"), [(1, 4, 9), (3, 4, 5), (8, 4, 40), (20, 4, 6)])
def test_units_cover_every_pair_once(n, k, e):
    rng = np.random.default_rng(n)
    ids = np.stack([rng.permutation(e)[:k] for _ in range(n)])
    count, table = units.plan(jnp.asarray(ids, jnp.int32), e, interpret=True)
    table = np.asarray(table)[: int(count[0])]
    seen = []
    for expert, used, *slots in table:
        assert 1 <= used <= 8
        columns = [slot % 8 for slot in slots[:used]]
        assert len(set(columns)) == used
        for slot in slots[:used]:
            pair = slot // 8
            assert ids.reshape(-1)[pair] == expert
            assert slot % 8 == (pair // k if n <= 8 else columns.index(slot % 8))
            seen.append(pair)
    assert sorted(seen) == list(range(n * k))
    # an expert is read once per eight of its rows, no more
    wanted = sum(-(-c // 8) for c in np.unique(ids, return_counts=True)[1])
    assert len(table) == wanted


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_default_tuning_meets_the_limits(n, ranks):
    width, z, e = 3072 // ranks, 3584, 896
    w13 = jax.ShapeDtypeStruct((92, e * width // 32, mxfp4.tile_lines(z), 32), jnp.uint32)
    w2 = jax.ShapeDtypeStruct((92, e * z // 64, mxfp4.tile_lines(width), 32), jnp.uint32)
    latent = jax.ShapeDtypeStruct((n, z), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((n, 16), jnp.int32)
    assert experts.limits(latent, ids, w13, w2, width=width) == []
    assert w13.size * 4 // 92 // e + w2.size * 4 // 92 // e == 3 * width * z * 17 // 32


def test_limits_name_found_and_expected():
    latent, ids = jnp.zeros((65, 96), jnp.float32), jnp.zeros((65, 2), jnp.int32)
    w = jnp.zeros((1, 1, 1, 1), jnp.uint32)
    text = "; ".join(experts.limits(latent, ids, w, w, width=96))
    assert "rows: found 65, expected 1..64" in text
    assert "expert width: found 96, expected a multiple of 64" in text

"""Routed experts of one row with their choice, in one kernel."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    common,
    experts,
    experts_pack,
    experts_row,
    meeting,
    mxfp4,
    skinny,
    topk,
)
from pallas_kernels.experts_row import Row
from parity.kernel_env import needs_gpu, needs_interpreter, same, same_bits

BF16, F32 = jnp.bfloat16, jnp.float32
BETAS = (4.0, 25.0)


def normal(seed, *shape, scale=1.0, dtype=BF16):
    return (jax.random.normal(jax.random.key(seed), shape, F32) * scale).astype(dtype)


def row_of(kind, e, z, d, m, seed=0):
    """Operands of two layers, of which the second is meant."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((1, e)).astype(np.float32)
    bias = rng.standard_normal((2, e)).astype(np.float32) * 0.1
    latent, hidden = normal(seed + 1, 1, z), normal(seed + 2, 1, m)
    if kind == "ties":
        logits, bias = np.round(logits * 2), np.zeros_like(bias)
    if kind == "equal":
        logits, bias = np.zeros_like(logits), np.zeros_like(bias)
    if kind == "not_finite":  # fewer numbers than are chosen
        logits[0, 5:] = np.nan
        logits[0, :2] = np.inf, -np.inf
    if kind == "nan":
        logits[:], latent, hidden = np.nan, latent * jnp.nan, hidden * jnp.nan
    shared = normal(seed + 3, 2, d, m, scale=0.05)
    return Row(latent, jnp.asarray(logits), jnp.asarray(bias), hidden, shared)


def packed(e, z, width, seed=0):
    """w13 and w2 of two layers, the first of which holds zeros."""

    def one(key):
        def codes(i, *shape):
            return jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint8)

        def scales(i, *shape):
            return jax.random.randint(jax.random.fold_in(key, i), shape, 114, 122).astype(jnp.uint8)

        return experts_pack.pack(
            codes(0, e, 2 * width, z // 2), scales(1, e, 2 * width, z // 32),
            codes(2, e, z, width // 2), scales(3, e, z, width // 32),
        )  # fmt: skip

    found = jax.jit(one)(jax.random.key(seed))
    return [jnp.zeros((2, *a.shape), a.dtype).at[1].set(a) for a in found]


@needs_interpreter
def test_the_kernels_in_the_interpreter():
    e, z, width, k = 128, 256, 64, 4
    row, weights = row_of("ties", e, z, 64, 64), packed(e, z, width)
    settings = dict(k=k, scaling=2.5, width=width, betas=BETAS)
    tuning = experts.Tuning(ctas=10, warpgroups=1, finishers=1, one_kernel=True)
    got = experts_row.experts_row(
        row, *weights, meeting.counters(), 1, tuning=tuning, interpret=True, **settings
    )
    want = experts_row.reference(row, *weights, 1, **settings)
    assert (got.ids == want.ids).all()
    same(got.weights, want.weights, 1e-6)
    same(got.beside, want.beside, 1e-6)
    same(got.routed, want.routed, 1e-3)
    assert not common.races_found()


def shapes(rows, ranks, m=None):
    s, e, z, width = jax.ShapeDtypeStruct, 896, 3584, 3072 // ranks
    m = m or 6144 // ranks
    row = Row(
        s((rows, z), BF16), s((rows, e), F32), s((92, e), F32), s((rows, m), BF16),
        s((92, 7168, m), BF16),
    )  # fmt: skip
    w13 = s((92, e * width // 32, mxfp4.tile_lines(z), 32), jnp.uint32)
    w2 = s((92, e * z // 64, mxfp4.tile_lines(width), 32), jnp.uint32)
    return row, w13, w2, width


def test_a_rank_of_sixteen_meets_the_limits():
    *arrays, width = shapes(1, 16)
    assert experts_row.limits(*arrays, k=16, width=width) == []


def test_limits_name_found_and_expected():
    *arrays, width = shapes(1, 8)  # wider: more tiles than CTAs
    assert experts_row.limits(*arrays, k=16, width=width) == [
        "tiles of W13: found 192, expected fewer than 132 CTAs"
    ]
    *arrays, width = shapes(2, 16, m=2008)
    assert experts_row.limits(*arrays, k=16, width=width) == [
        "rows: found 2, expected 1",
        "shape of hidden: found (2, 2008), expected (1, 2008)",
        "columns of shared: found 2008, expected a multiple of 32, at most 1024",
    ]
    *arrays, width = shapes(1, 16)
    assert experts_row.limits(*arrays, k=12, width=width) == [
        "chosen experts in pairs: found 12, expected a multiple of 8"
    ]
    few = replace(experts.default_tuning(1, width, 3584), ctas=98)
    assert experts_row.limits(*arrays, k=16, width=width, tuning=few) == [
        "units of shared per CTA: found 224, expected at most 16, one per warp",
        "tiles of the latent: found 56, expected at most 49 pairs",
    ]


def both_ways(e, z, width, d, m, k, own_barriers=True):
    """(one kernel, `topk` and `experts`), jitted: (row, w13, w2) -> `Found`."""
    settings = dict(width=width, betas=BETAS)
    tuning = replace(experts.default_tuning(1, width, z), own_barriers=own_barriers)

    @partial(jax.jit, static_argnums=3)
    def one(row, w13, w2, times=1):
        out = []
        for _ in range(times):  # counters that a kernel before it leaves, as in a step
            w = jnp.zeros((1, 64, z), BF16)
            _, counters = skinny.projections(row.latent, [skinny.Projection(w)], zeros=True)
            found = experts_row.experts_row(
                row, w13, w2, counters, 1, k=k, scaling=2.5, tuning=tuning, **settings
            )
            out.append(found)
        return out

    @jax.jit
    def two(row, w13, w2):
        beside = row.hidden, row.shared
        c = topk.topk(row.logits, row.bias, 1, k=k, scaling=2.5, shared=beside)
        total = experts.experts(row.latent, c.ids, c.weights, w13, w2, 1, units=c.units, **settings)
        return experts_row.Found(total, c.shared, c.ids, c.weights)

    return one, two


KINDS = ["normal", "ties", "equal", "not_finite", "nan"]
# of a TP16 rank; few CTAs for the product; a warpgroup per CTA; two, and most columns
SIZES = [
    (896, 3584, 192, 7168, 384, 16),
    (128, 512, 256, 1024, 192, 16),
    (128, 128, 64, 128, 64, 4),
    (256, 256, 64, 256, 1024, 4),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("own_barriers", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"experts{s[0]}width{s[2]}")
def test_in_one_kernel(sizes, own_barriers):
    """Against two kernels: all the same bits, but for the order in which sums are added.

    The same bits from every call, several in one program as well.
    """
    e, z, width, d, m, _ = sizes
    weights = packed(e, z, width)
    one, two = both_ways(*sizes, own_barriers)
    for seed, kind in enumerate(KINDS):
        row = row_of(kind, e, z, d, m, seed)
        (got,), want = one(row, *weights), two(row, *weights)
        assert (got.ids == want.ids).all(), kind
        assert same_bits(got.weights, want.weights), kind
        same(got.routed, want.routed, 1e-6)
        same(got.beside, want.beside, 1e-5)
        beside = skinny.reference(row.hidden, [skinny.Projection(row.shared)], 1)[0]
        same(got.beside, beside, 1e-5)
        for _ in range(40):
            for found in one(row, *weights, 5):
                assert all(map(same_bits, found, got)), kind


@pytest.mark.gpu
@needs_gpu
def test_a_weighted_expert_is_that_expert():
    """One of the weights 1 and the rest next to nothing: no expert meets another one's weight."""
    sizes = e, z, width, d, m, _ = SIZES[0]
    weights = packed(e, z, width)
    one, two = both_ways(*sizes)
    row = row_of("normal", e, z, d, m)
    for best in (0, 7, 895):
        logits = jnp.full((1, e), -30.0).at[0, best].set(30.0)
        found = row._replace(logits=logits)
        (got,), want = one(found, *weights), two(found, *weights)
        same(got.routed, want.routed, 1e-6)


@pytest.mark.gpu
@needs_gpu
def test_against_the_reference():
    sizes = 896, 3584, 192, 7168, 384, 16
    e, z, width, d, m, k = sizes
    weights, row = packed(e, z, width), row_of("normal", e, z, d, m)
    (got,) = both_ways(*sizes)[0](row, *weights)
    want = experts_row.reference(row, *weights, 1, k=k, scaling=2.5, width=width, betas=BETAS)
    assert (got.ids == want.ids).all()
    same(got.weights, want.weights, 1e-6)
    same(got.beside, want.beside, 1e-5)
    same(got.routed, want.routed, 4e-3)
    settings = dict(k=k, scaling=2.5, width=width, betas=BETAS, out_dtype=BF16)
    rounded = experts_row.experts_row(row, *weights, meeting.counters(), 1, **settings)
    assert same_bits(rounded.routed, got.routed.astype(BF16))

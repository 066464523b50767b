"""Kernels on a GPU: what the interpreter cannot run (clusters, register code), real shapes too.

Figures and the comparison with float64 at every real shape are `python -m bench ops`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    attn_res,
    experts,
    experts_pack,
    kda,
    latent_up,
    mxfp4,
    route,
    skinny,
    units,
)
from parity.kernel_env import needs_gpu, same, same_bits
from parity.kernel_inputs import kda_inputs

pytestmark = [pytest.mark.gpu, needs_gpu]
SITU = (4.0, 25.0)
BF16 = jnp.bfloat16


def normal(seed, *shape, scale=1.0):
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (x * scale).astype(BF16)


def with_nan_row(x, row=1):
    return x.at[row].set(jnp.nan) if x.shape[0] > row else x


@pytest.mark.parametrize("m", [1, 13, 64])
@pytest.mark.parametrize("splits", [1, 4, 8])
def test_clusters_and_clipped_copies(m, splits):
    n, k = 200, 1024
    x, w = with_nan_row(normal(0, m, k)), normal(1, 2, n, k, scale=1 / 32)
    tuning = skinny.Tuning(stages=2, warpgroups=1, splits=splits)
    for kw in ({}, {"out_dtype": BF16}):
        got = skinny.skinny(x, w, 1, tuning=tuning, **kw)
        same(got, skinny.reference(x, [skinny.Projection(w, **kw)], 1)[0], 2e-3)
    w = w[:, :128]
    got = skinny.skinny(x, w, 0, situ=SITU, tuning=tuning)
    same(got, skinny.reference(x, [skinny.Projection(w, situ=SITU)])[0], 4e-3)


@pytest.mark.parametrize("m", [1, 8, 64])
def test_route_and_latent_up(m):
    x = with_nan_row(normal(0, m, 7168))
    gate, down, shared = (normal(i, 1, n, 7168, scale=1 / 85) for i, n in enumerate((56, 224, 768)))
    got = route.route(x, gate, down, shared, betas=SITU)
    for a, b in zip(got, route.reference(x, gate, down, shared, betas=SITU), strict=True):
        same(a, b, 4e-3)
    x, norm, w = with_nan_row(normal(3, m, 3584)), normal(4, 3584), normal(5, 1, 448, 3584)
    (got,) = latent_up.latent_up(x, norm, w, eps=1e-5)
    same(got, latent_up.reference(x, norm, w, eps=1e-5), 4e-3)


@pytest.mark.parametrize("m", [1, 2, 9, 64])
@pytest.mark.parametrize(("k", "warpgroups"), [(64, 1), (192, 3), (256, 2)])
def test_latent_up_whose_sums_meet_in_one_cta(m, k, warpgroups):
    """Too few columns for a cluster: nothing may be written to another CTA's memory."""
    x, norm, w = with_nan_row(normal(3, m, k)), normal(4, k), normal(5, 1, 128, k, scale=k**-0.5)
    tuning = skinny.Tuning(step=64, stages=2, warpgroups=warpgroups)
    (got,) = latent_up.latent_up(x, norm, w, eps=1e-5, tuning=tuning)
    same(got, latent_up.reference(x, norm, w, eps=1e-5), 4e-3)
    for _ in range(50):
        assert same_bits(got, latent_up.latent_up(x, norm, w, eps=1e-5, tuning=tuning)[0])


@pytest.mark.parametrize("n", [2, 8, 9, 64])
def test_unit_plan(n):
    for e in (40, 896):
        rng = np.random.default_rng(e)
        ids = jnp.asarray(np.stack([rng.permutation(e)[:16] for _ in range(n)]), jnp.int32)
        got, want = units.plan(ids, e), units.group_rows(ids)
        count = int(want.count[0])
        assert int(got.count[0]) == count
        a, b = np.asarray(got.table)[:count], np.asarray(want.table)[:count]
        used = np.arange(8) < b[:, 1:2]
        assert (a[:, :2] == b[:, :2]).all() and (a[:, 2:] == b[:, 2:])[used].all()


def test_decode_is_exact():
    """Every code under every scale byte, read out by products with unit vectors."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import common

    def body(w, x, y, ws, xs, bar):
        at = jax.lax.axis_index("part")
        plgpu.copy_gmem_to_smem(w, ws, bar.at[0])
        plgpu.copy_gmem_to_smem(x.at[at], xs, bar.at[0])
        plgpu.barrier_wait(bar.at[0])
        y[at] = mxfp4.multiply(mxfp4.zeros(), ws, xs, 128, interpret=False)

    call = common.kernel(
        body,
        "decode",
        out_type=jax.ShapeDtypeStruct((16, 64, 8), jnp.float32),
        grid=(16,),
        grid_names=("part",),
        scratch_types=dict(
            ws=plgpu.SMEM((mxfp4.BLOCK_LINES, 32), jnp.uint32),
            xs=plgpu.SMEM((4, 8, 32), BF16),
            bar=plgpu.Barrier(num_barriers=1, num_arrivals=2),
        ),
    )
    rng = np.random.default_rng(0)
    scales = np.minimum(np.arange(256), 254).astype(np.uint8).reshape(64, 4)
    nibbles = np.stack([np.tile(rng.permutation(16), 2) for _ in range(256)]).reshape(64, 128)
    codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
    units_ = (jnp.eye(128) * mxfp4.LIFT).astype(BF16).reshape(16, 8, 128)
    got = call(mxfp4.pack(codes, scales)[0], jax.vmap(mxfp4.operand_order)(units_))
    got = np.asarray(got, np.float64).transpose(1, 0, 2).reshape(64, 128)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = np.concatenate([table, -table])[nibbles]
    want = want * 2.0 ** (np.repeat(scales, 32, axis=-1).astype(int) - 127)
    finite = np.abs(want) < 2.0**128
    assert (got[finite] == want[finite]).all()
    assert np.isinf(got[~finite]).all() and (~finite).sum() < 64


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(
    ("n", "width", "z"),
    [(1, 192, 3584), (7, 384, 3584), (40, 192, 3584), (7, 256, 256), (3, 64, 64)],
)
def test_experts(n, width, z, one):
    """All scale bytes that keep the sums finite; up to 40 rows of one expert; a row of NaN."""
    e, k = 20, 4
    rng = np.random.default_rng(n)

    def scales(*shape):
        # a few far-out ones, one whole row each
        s = rng.integers(112, 124, shape, dtype=np.uint8)
        s[:, 0] = 20
        s[:, 1] = 150
        return s

    raw = [
        rng.integers(0, 256, (e, 2 * width, z // 2), dtype=np.uint8),
        scales(e, 2 * width, z // 32),
        rng.integers(0, 256, (e, z, width // 2), dtype=np.uint8),
        scales(e, z, width // 32),
    ]
    w13, w2 = (a[None] for a in experts_pack.pack(*raw))
    assert w2.shape[1:] == (e * z // 64, mxfp4.tile_lines(width), 32)
    x = with_nan_row(normal(1, n, z))
    ids = np.stack([1 + rng.permutation(e - 1)[:k] for _ in range(n)])
    ids[:, 0] = 0
    ids = jnp.asarray(ids, jnp.int32)
    weights = jax.random.uniform(jax.random.key(2), (n, k))
    tuning = replace(experts.default_tuning(n, width, z), one_kernel=one)
    call = jax.jit(lambda *a: experts.experts(*a, 0, width=width, betas=SITU, tuning=tuning))
    got = call(x, ids, weights, w13, w2)
    want = experts.reference(x, ids, weights, w13, w2, width=width, betas=SITU)
    for columns in (slice(0, 1), slice(1, 2), slice(2, None)):  # of very different size
        same(got[:, columns], want[:, columns], 4e-3)
    for _ in range(50):
        again = call(x, ids, weights, w13, w2)
        assert bool(jnp.all((again == got) | jnp.isnan(got)))


def test_layer_beyond_two_to_the_31():
    """The index of the last layer's last expert exceeds 2^31 elements (u32 and bytes)."""
    width, z, e, layers = 192, 3584, 896, 14
    per13, per2 = mxfp4.tile_lines(z) * 32 * 6, mxfp4.tile_lines(width) * 32 * 56
    assert layers * e * per13 > 2**31
    one = [
        jax.random.bits(jax.random.key(0), (e, 2 * width, z // 2), jnp.uint8),
        jax.random.randint(jax.random.key(1), (e, 2 * width, z // 32), 114, 122).astype(jnp.uint8),
        jax.random.bits(jax.random.key(2), (e, z, width // 2), jnp.uint8),
        jax.random.randint(jax.random.key(3), (e, z, width // 32), 114, 122).astype(jnp.uint8),
    ]
    a, b = jax.jit(experts_pack.pack)(*one)
    w13 = jnp.zeros((layers, *a.shape), jnp.uint32).at[layers - 1].set(a)
    w2 = jnp.zeros((layers, *b.shape), jnp.uint32).at[layers - 1].set(b)
    assert w2.size == layers * e * per2
    x = normal(4, 1, z)
    ids = jnp.arange(e - 16, e, dtype=jnp.int32)[None]
    weights = jnp.full((1, 16), 1 / 16, jnp.float32)
    call = dict(width=width, betas=SITU)
    got = experts.experts(x, ids, weights, w13, w2, jnp.int32(layers - 1), **call)
    same(got, experts.reference(x, ids, weights, a[None], b[None], 0, **call), 4e-3)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("count", "kw"), [(0, {"snapshot": True}), (3, {}), (8, {"reset": True})])
def test_attn_res(rows, count, kw):
    d = 7168
    snapshots = normal(0, rows, 8, d).at[:, count:].set(jnp.nan)
    prefix, delta = with_nan_row(normal(1, rows, d)), normal(2, rows, d)
    if kw.get("reset"):
        delta = delta.astype(jnp.float32)
    weights = normal(3, d), normal(4, 1, d, scale=0.02), normal(5, d)
    args = prefix, snapshots, jnp.int32(count), delta, *weights
    got = attn_res.attn_res(*args, eps=1e-5, **kw)
    want = attn_res.reference(*args, eps=1e-5, **kw)
    same(got[0], want[0], 2e-3)
    same(got[1], want[1], 0.0, "max_abs")
    same(got[2], want[2], 0.0, "max_abs")


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(
    ("heads", "batch", "tokens"), [(6, 1, 1), (6, 1, 8), (12, 8, 8), (6, 64, 1)]
)
def test_kda(heads, batch, tokens, commit):
    fused, state, window, weights, rows = kda_inputs(tokens, heads, batch, slots=batch + 2)
    settings = dict(eps=1e-5, lower_bound=-5.0, commit=commit)
    want = kda.reference(fused, state, window, weights, 1, rows, **settings)
    real = np.arange(tokens)[None] < np.asarray(rows.count)[:, None]
    call = jax.jit(
        lambda *a: kda.kda(*a[:3], kda.Weights(*a[3:8]), 1, kda.Rows(*a[8:]), **settings)
    )
    got = call(fused, state, window, *weights, *rows)
    again = call(fused, state, window, *weights, *rows)
    for i, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert bool(jnp.all((a == c) | jnp.isnan(a))), "replay differs"
        if i == 0 or not commit:
            a, b = (v.reshape(*real.shape, -1)[real] for v in (a, b))
            same(a, b, 4e-3 if i == 0 else 1e-5)
        else:
            same(a, b, 1e-5 if i == 1 else 0.0, "rel_l2" if i == 1 else "max_abs")

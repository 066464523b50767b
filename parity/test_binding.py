"""Weights as the kernels read them: packed while loading; what the standard stages make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.binding import bind
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.loader import load_weights
from jax_impl.make_tiny import make_checkpoint
from jax_impl.numerics import Numerics
from jax_impl.ops.experts import ExpertWeights, PackedExperts, routed_experts

SPECIALIZED = RunConfig(decode_backend="latency_specialized")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("binding") / "synthetic"
    make_checkpoint(folder, preset="synthetic", seed=0)
    return Checkpoint.open(folder / "target")


def test_packed_while_loading_equals_packed_afterwards(checkpoint):
    """Bit for bit, and every byte of progress is reported."""
    seen: list[int] = []
    got = load_weights(checkpoint, seen.append, SPECIALIZED)
    plain = load_weights(checkpoint)
    assert sum(seen) == sum(a.nbytes for a in jax.tree.leaves(plain))
    want = bind(plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.array_equal(np.asarray(a), np.asarray(b))
    assert got.kda.in_proj.shape[1] % 8 == 0
    before = plain.moe.w13_packed.nbytes + plain.moe.w13_scale.nbytes
    assert got.moe.w13_tiles.nbytes == before, "the same bytes in another order"


@pytest.mark.parametrize("rows", [3, 100])
def test_standard_experts_read_tiles(checkpoint, rows):
    """Both forms of the standard experts (gathered, grouped) give the same bits from tiles."""
    plain = load_weights(checkpoint)
    packed = bind(plain)
    moe = jax.tree.map(lambda a: a[1], plain.moe)
    c, nx = checkpoint.config, Numerics()
    width, latent = c.moe_intermediate_size, c.routed_expert_hidden_size
    a = ExpertWeights(moe.w13_packed, moe.w13_scale, moe.w2_packed, moe.w2_scale)
    b = PackedExperts(packed.moe.w13_tiles[1], packed.moe.w2_tiles[1], width, latent)
    assert a.number == b.number == c.num_experts
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, latent)), jnp.bfloat16)
    chosen = [rng.permutation(c.num_experts)[: c.num_experts_per_token] for _ in range(rows)]
    ids = jnp.asarray(np.stack(chosen))
    share = jnp.asarray(rng.random(ids.shape), jnp.float32)
    betas = c.activation_situ_beta, c.activation_situ_linear_beta
    one, other = (routed_experts(nx, x, ids, share, w, betas) for w in (a, b))
    assert np.array_equal(np.asarray(one), np.asarray(other))
    assert float(jnp.abs(one).max()) > 0

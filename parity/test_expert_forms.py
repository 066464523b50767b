"""The forms of the standard experts against each other: which one runs must not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.numerics import Numerics
from jax_impl.ops import experts as ops

E, Z, M, K, BETAS = 20, 64, 32, 4, (1.5, 0.7)


def random_experts(rng: np.random.Generator) -> ops.ExpertWeights:
    """E experts of latent Z and width M; scales around 2^-4."""

    def drawn(low: int, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, shape, dtype=np.uint8))

    return ops.ExpertWeights(
        drawn(0, 256, E, 2 * M, Z // 2),
        drawn(121, 126, E, 2 * M, Z // 32),
        drawn(0, 256, E, Z, M // 2),
        drawn(121, 126, E, Z, M // 32),
    )


@pytest.mark.parametrize("rows", [65, 100, 128, 256])
def test_parts_and_groups_equal_the_gathered_form(rows):
    """More pairs than are gathered at once; ids of another rank are in between."""
    rng = np.random.default_rng(rows)
    w, nx = random_experts(rng), Numerics("float32")
    x = jnp.asarray(rng.standard_normal((rows, Z)), jnp.float32)
    ids = np.stack([rng.permutation(E + 4)[:K] for _ in range(rows)])
    mine = jnp.asarray(np.minimum(ids, E))
    assert ops.GATHER_PAIRS < mine.size <= ops.DECODE_PAIRS
    whole = ops.gathered(nx, x, mine, w, BETAS)
    here = np.asarray(ids < E)[..., None]
    for form in (ops.gathered_in_parts, ops.grouped):
        found = np.where(here, form(nx, x, mine, w, BETAS), 0)
        want = np.where(here, whole, 0)
        # f32 sums of 64 and 32 products in another order: 1e-6 of the largest
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()
        assert np.abs(want).max() > 0.1


def test_largest_decode_step_has_no_loop_over_experts():
    """64 rows of 16 experts take four turns; a turn per expert costs a GPU 100 times as much."""
    rng = np.random.default_rng(0)
    w, nx = random_experts(rng), Numerics()
    ids = jnp.zeros((64, 16), jnp.int32)
    x, share = jnp.ones((64, Z), jnp.bfloat16), jnp.ones(ids.shape, jnp.float32)
    text = str(jax.make_jaxpr(lambda *a: ops.routed_experts(nx, *a, BETAS))(x, ids, share, w))
    assert "length=4" in text and "while" not in text

"""The MLA kernels on a GPU at real shapes: the whole stage against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity import mla_inputs
from parity.kernel_env import needs_gpu, same

pytestmark = [pytest.mark.gpu, needs_gpu]
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
KINDS = [(BF16, None), (FP8, 1.0), (FP8, 4.0)]


def check(case, replays=20):
    """Within twice the standard path's error and 4e-3; the same bits again and again."""
    layer = jnp.int32(1)
    step = jax.jit(mla_inputs.kernels(case))
    got, cache = step(case.arrays, case.cache, layer)
    want, stored = jax.jit(mla_inputs.standard(case))(case.arrays, case.cache, layer)
    assert bool(jnp.isfinite(got).all())
    # another order in the sum of squares may tip single roundings of new rows; NaN stays put
    same(cache, stored, 1e-2)
    untouched = (
        np.asarray(cache[0].astype(jnp.float32)),
        np.asarray(case.cache[0].astype(jnp.float32)),
    )
    np.testing.assert_array_equal(*untouched)
    for result, held in ((got, cache), (want, stored)):
        truth = mla_inputs.exact(case, held, 1)
        error = np.linalg.norm(np.asarray(result.astype(jnp.float32), np.float64) - truth)
        if result is got:
            ours = error / np.linalg.norm(truth)
        else:
            standard = error / np.linalg.norm(truth)
    assert ours <= min(2 * standard, 4e-3), (ours, standard)
    for _ in range(replays):
        assert bool((step(case.arrays, case.cache, layer)[0] == got).all())


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize("context", [1, 513, 8192, 131072])
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_one_sequence(heads, context, dtype, scale):
    check(mla_inputs.make([context], 1, heads, dtype, scale))


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_unequal_lengths_and_a_pad_row(heads, dtype, scale):
    check(mla_inputs.make([1, 700, 0, 64, 65, 3000, 128, 8191], 1, heads, dtype, scale))


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_verification(heads, dtype, scale, tokens):
    lengths = [8192, 0, 520, tokens]
    counts = [tokens, 0, 1, tokens]
    check(mla_inputs.make(lengths, tokens, heads, dtype, scale, counts=counts))


@pytest.mark.parametrize(("dtype", "scale"), KINDS[::2])
def test_page_size_changes_nothing(dtype, scale):
    """The same bits from pages of 16 to 256 rows as from 64."""
    case = mla_inputs.make([1000, 257], 1, 6, dtype, scale)
    want, _ = jax.jit(mla_inputs.kernels(case))(case.arrays, case.cache, jnp.int32(1))
    assert bool(jnp.isfinite(want).all())
    for page in (16, 32, 128, 256):
        other = mla_inputs.repaged(case, page)
        got, _ = jax.jit(mla_inputs.kernels(other))(other.arrays, other.cache, jnp.int32(1))
        assert bool((got == want).all()), page


@pytest.mark.parametrize(("batch", "tokens"), [(64, 1), (8, 8)])
@pytest.mark.parametrize(("dtype", "scale"), KINDS[::2])
def test_64_rows(batch, tokens, dtype, scale):
    lengths = [tokens + 37 * i for i in range(batch)]
    check(mla_inputs.make(lengths, tokens, 6, dtype, scale))

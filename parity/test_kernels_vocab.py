"""The head and the Markov step in the Mosaic GPU interpreter, with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.numerics import Numerics
from jax_impl.ops.draft import markov_bias
from jax_impl.sampling import argmax
from pallas_kernels import common, skinny, vocab
from parity.kernel_env import needs_interpreter, same

K = 256
TUNING = skinny.Tuning(stages=2, warpgroups=1)


def operands(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, K)), rng.standard_normal((columns, K)) / 16
    w[columns // 2 + 3] = w[7]  # a tie, wherever these two are largest
    x[-1] = 40 * w[7]
    if rows > 1:
        x[0] = np.nan
    base = rng.standard_normal((rows, columns)).astype(np.float32)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(base)


@needs_interpreter
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (2, 200), (8, 72), (13, 128), (64, 64)])
def test_head(rows, columns):
    """As `stages.standard.logits`; ids are those of the kernel's own logits."""
    x, w, _ = operands(rows, columns)
    logits, top, best = vocab.vocab(x, w, tuning=TUNING, interpret=True)
    want = Numerics().linear(x, w).astype(jnp.float32)
    same(logits, want, 1e-3)
    same(
        top, jnp.asarray(np.asarray(logits).max(-1)), 0.0, "max_abs"
    )  # jnp.max may skip NaN on CPUs
    assert (best == jnp.argmax(logits, -1)).all() and best.dtype == jnp.int32
    assert int(best[-1]) == 7  # not the equal one behind it
    for a, b in zip((logits, top), vocab.reference(x, w), strict=False):
        same(a, b, 1e-3)
    assert not common.races_found()


@needs_interpreter
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (2, 200), (8, 72), (13, 64)])
def test_markov_step(rows, columns):
    """As one turn of `stages.draft.draft_markov` without temperature."""
    x, w, base = operands(rows, columns)
    base = base.at[-1, 3].set(jnp.nan)
    logits, top, best = vocab.vocab(x, w, base, tuning=TUNING, interpret=True)
    same(logits, base + markov_bias(Numerics(), x, w), 1e-6)
    assert (best == argmax(logits)).all()
    values = np.where(np.isnan(logits), -np.inf, logits)
    assert np.array_equal(top, values.max(-1))
    want = vocab.reference(x, w, base)
    same(logits, want[0], 1e-6)
    same(jnp.maximum(top, -99), jnp.maximum(want[1], -99), 1e-6)
    assert not common.races_found()


@needs_interpreter
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_of_a_table(rows):
    """Numbers outside the table are clipped; what stands in other rows of it does not matter."""
    x, w, base = operands(rows, 72)
    table = jnp.full((40, K), jnp.nan, jnp.bfloat16).at[jnp.arange(rows) + 7].set(x)
    table = table.at[0].set(1).at[39].set(2)
    ids = jnp.arange(rows, dtype=jnp.int32) + 7
    if rows > 1:
        ids, x = ids.at[1].set(-1).at[2].set(40), x.at[1].set(1).at[2].set(2)
    tuning = skinny.Tuning(stages=1, warpgroups=1)  # the slot is used twice
    got = vocab.vocab(table, w, base, ids=ids, tuning=tuning, interpret=True)
    for a, b in zip(got, vocab.vocab(x, w, base, tuning=tuning, interpret=True), strict=True):
        assert np.array_equal(a, b, equal_nan=True)
    assert (vocab.reference(table, w, base, ids=ids)[2] == vocab.reference(x, w, base)[2]).all()
    assert not common.races_found()


def test_the_best_candidate():
    """NaN before all, then the largest, the lower id in ties; a row of -inf has an id too."""
    nan, inf = np.nan, np.inf
    rows = [[1, 3, 3, 2], [1, nan, 5, nan], [-inf] * 4, [-0.0, 0.0, -1, -2]]
    ids = jnp.asarray([[5, 40, 70, 100]] * 4, jnp.int32)
    top, best = vocab._best(jnp.asarray(rows, jnp.float32), ids)
    assert best.tolist() == [40, 40, 5, 5]
    assert np.array_equal(top, [3, nan, -inf, 0], equal_nan=True)


@pytest.mark.parametrize("m", [1, 2, 8, 13, 64])
@pytest.mark.parametrize(("rows", "k"), [(10240, 7168), (20480, 7168), (10240, 256)])
def test_default_tuning_meets_the_limits(m, rows, k):
    assert vocab.limits(jnp.zeros((m, k), jnp.bfloat16), jnp.zeros((rows, k), jnp.bfloat16)) == []


def test_limits_name_found_and_expected():
    x, w = jnp.zeros((65, 256), jnp.bfloat16), jnp.zeros((60, 256), jnp.bfloat16)
    tuning = skinny.Tuning(stages=1, splits=2)
    reasons = vocab.limits(x, w, jnp.zeros((65, 61), jnp.bfloat16), tuning=tuning)
    assert reasons == [
        "rows of x: found 65, expected 1..64",
        "rows of w[0]: found 60, expected a multiple of 8 (pad them)",
        "splits: found 2, expected 1",
        "shape of base: found (65, 61), expected (65, 60)",
        "dtype of base: found bfloat16, expected float32",
    ]

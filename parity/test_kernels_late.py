"""Output projections inside the kernels that make the heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    common,
    kda,
    kda_out,
    late_product,
    meeting,
    mla_attend,
    mla_value,
    mla_value_out,
    skinny,
)
from pallas_kernels.late_product import Sizes, Tuning
from pallas_kernels.skinny import Projection
from parity import mla_inputs
from parity.kernel_env import needs_gpu, needs_interpreter, same, same_bits
from parity.kernel_inputs import kda_inputs

BF16, F32 = jnp.bfloat16, jnp.float32
SETTINGS = dict(eps=1e-5, lower_bound=-5.0)
D = 7168


def normal(seed, *shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape, F32) * scale).astype(BF16)


def against_float64(y, x, w, limit=1e-6):
    """NaN in the rows of x that hold one, and within `limit` of the exact product elsewhere."""
    x, w = (np.asarray(v.astype(F32), np.float64) for v in (x, w))
    want = x @ w.T
    assert (np.isnan(np.asarray(y)) == np.isnan(want)).all()
    seen = ~np.isnan(want)
    error = (np.asarray(y, np.float64) - want)[seen]
    assert np.linalg.norm(error) <= limit * np.linalg.norm(want[seen])


@needs_interpreter
@pytest.mark.parametrize(
    ("n", "k", "warpgroups"), [(1, 256, 2), (3, 128, 4), (8, 768, 2), (2, 768, 3)]
)
def test_product_in_the_interpreter(n, k, warpgroups):
    rows = 48 if warpgroups == 3 else 64  # a multiple of 16 per group of rows; tiles do not overlap
    x, w = normal(0, n, k).at[1:2].set(jnp.nan), normal(1, 2, 3 * rows, k).at[0].set(jnp.nan)
    tuning = Tuning(rows)
    y = late_product.alone(x, w, 1, warpgroups=warpgroups, tuning=tuning, interpret=True)
    against_float64(y, x, w[1])
    assert not common.races_found()


@needs_interpreter
@pytest.mark.parametrize(("tokens", "commit"), [(1, True), (2, False)])
def test_kda_out_in_the_interpreter(tokens, commit):
    fused, state, window, weights, rows = kda_inputs(tokens, heads=1, batch=3, slots=4)
    w = normal(3, 2, 128, 128)
    args, kw = (fused, state, window, weights, 1, rows), SETTINGS | dict(commit=commit)
    got, y, zeros = kda_out.kda_out(*args, w, meeting.counters(), interpret=True, **kw)
    for a, b in zip(got, kda.kda(*args, interpret=True, **kw), strict=True):
        assert same_bits(a, b)
    against_float64(y, got[0], w[1])
    assert not zeros.any()
    want = kda_out.reference(*args, w, **kw)[1]
    real = np.arange(tokens)[None] < np.asarray(rows.count)[:, None]
    same(*(v.reshape(*real.shape, -1)[real] for v in (y, want)), 4e-3)
    assert not common.races_found()


@needs_interpreter
def test_value_out_in_the_interpreter():
    case = mla_inputs.make([200, 0, 70], 2, 2, BF16, sizes=(128, 64, 64), page=16)
    a, w = case.arrays, normal(3, 2, 256, 2 * 64).at[0].set(jnp.nan)
    parts, _ = mla_inputs.parts_of(case, interpret=True, tuning=mla_attend.Tuning(3, 8))(
        a, case.cache, 1
    )
    operands = parts, a["ends"], a["gate"], a["kv_b"]
    cut = mla_value_out.Tuning(mla_value.Tuning(4), Tuning(64))
    heads, y, zeros = mla_value_out.value_out(
        *operands, w, meeting.counters(), 1, heads=2, tuning=cut, interpret=True
    )
    want = mla_value.value(*operands, 1, heads=2, tuning=cut.value, interpret=True)
    assert same_bits(heads, want) and not zeros.any()
    against_float64(y, heads, w[1])
    same(y, mla_value_out.reference(*operands, w, 1, heads=2)[1], 4e-3)
    assert not common.races_found()


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 8), (9, 1)])
def test_value_out_takes_up_to_eight_rows(batch, tokens):
    s, t = jax.ShapeDtypeStruct, mla_attend.default_tuning(batch, tokens * 6, True)
    shape, n = (batch, -(-tokens * 6 // t.columns), t.splits, t.columns), batch * tokens
    found = mla_value_out.limits(
        mla_attend.Parts(s((*shape, 512), F32), s(shape, F32)), s((batch, tokens), jnp.int32),
        s((n, 768), BF16), s((2, 1536, 512), BF16), s((2, D, 768), BF16), heads=6,
    )  # fmt: skip
    assert (found == []) == (n <= 8)


@pytest.mark.parametrize("makers", [6, 12, 18, 24, 30, 36, 42, 48])
@pytest.mark.parametrize("warpgroups", [2, 4])
def test_default_tuning_meets_the_limits(makers, warpgroups):
    s, w = Sizes(8, D, 768, warpgroups), jax.ShapeDtypeStruct((2, D, 768), BF16)
    t = late_product.default_tuning(s, makers)
    assert late_product.limits(s, makers, w, t) == []
    assert t.rows <= 96


def test_limits_name_found_and_expected():
    s, w = Sizes(9, 1000, 776, 2), jax.ShapeDtypeStruct((2, 1000, 768), F32)
    assert late_product.limits(s, 120, w, Tuning(72)) == [
        "dtype of w: found float32, expected bfloat16",
        "rows of x: found 9, expected 1..8",
        "shape of a layer's w: found (1000, 768), expected (1000, 776)",
        "columns of w: found 776, expected a multiple of 32",
        "rows of a CTA: found 72, expected a multiple of 16 up to 1000",
        "CTAs: found 134, expected at most 132, one per multiprocessor",
    ]
    s, w = Sizes(1, D, 2304, 2), jax.ShapeDtypeStruct((2, D, 2304), BF16)
    assert late_product.limits(s, 6, w, Tuning(64)) == [
        "registers that hold w: found 288, expected at most 199"
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("n", "d", "k", "warpgroups", "tuning"),
    [
        (1, D, 768, 2, Tuning(64)),
        (8, D, 768, 2, Tuning(96)),
        (5, D, 768, 2, Tuning(80, 0, True)),
        (8, D, 768, 4, Tuning(96, 0)),
        (3, 200, 128, 2, Tuning(64)),
        (2, 1000, 96, 4, Tuning(256)),
        (4, 256, 1536, 2, Tuning(64)),
        (2, 7168, 768, 3, Tuning(96)),
    ],
)
def test_register_code_of_the_product(n, d, k, warpgroups, tuning):
    x, w = normal(0, n, k).at[1:2].set(jnp.nan), normal(1, 2, d, k).at[0].set(jnp.nan)
    y = late_product.alone(x, w, 1, warpgroups=warpgroups, tuning=tuning)
    against_float64(y, x, w[1])


def replayed(call, args, times=100):
    """The first result; the others have its bits, several in one program too."""

    @partial(jax.jit, static_argnums=0)
    def run(count, args):
        out = []
        for _ in range(count):  # counters that a kernel before it leaves, as in a step
            one = jnp.zeros((1, 64), BF16)
            *_, counters = skinny.projections(
                one, [Projection(jnp.zeros((1, 64, 64), BF16))], zeros=True
            )
            out.append(call(counters, *args))
        return out

    (first,) = run(1, args)
    for _ in range(times // 5):
        for found in run(5, args):
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(found), strict=True):
                assert same_bits(a, b)
    return first


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens"), [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (1, 8), (2, 4), (4, 2)]
)
def test_kda_out(batch, tokens, commit):
    """The bits of `kda`; a product near the exact one; pad rows and foreign layers hold NaN."""
    fused, state, window, weights, rows = kda_inputs(tokens, 6, batch, slots=batch + 2)
    w = normal(3, 2, D, 768, scale=768**-0.5).at[0].set(jnp.nan)
    kw = SETTINGS | dict(commit=commit)

    def call(counters, *args):
        return kda_out.kda_out(*args[:4], 1, *args[4:], counters, **kw)

    args = fused, state, window, weights, rows
    found, y, zeros = replayed(call, (*args, w))
    want = jax.jit(lambda *a: kda.kda(*a[:4], 1, a[4], **kw))(*args)
    for a, b in zip(found, want, strict=True):
        assert same_bits(a, b)
    assert not zeros.any()
    against_float64(y, found[0], w[1])
    same(y, skinny.skinny(found[0], w, 1), 1e-6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([1], 1),
        ([8192], 1),
        ([1, 700], 1),
        ([70, 0, 3000], 1),
        ([65, 128, 1000, 64], 1),
        ([1, 700, 0, 64, 65], 1),
        ([1, 700, 0, 64, 65, 3000, 128, 8191], 1),
        ([520], 8),
        ([129, 0, 66], 2),
    ],
)
def test_value_out(lengths, tokens):
    """The bits of `mla_value`, however its rows are cut; a product near the exact one."""
    case = mla_inputs.make(lengths, tokens, 6, BF16)
    a, w = case.arrays, normal(3, 2, D, 768, scale=768**-0.5).at[0].set(jnp.nan)
    parts, _ = jax.jit(mla_inputs.parts_of(case))(a, case.cache, jnp.int32(1))
    operands = parts, a["ends"], a["gate"], a["kv_b"]

    def call(counters, *args):
        return mla_value_out.value_out(*args, counters, 1, heads=6)

    heads, y, zeros = replayed(call, (*operands, w))
    assert same_bits(heads, mla_value.value(*operands, 1, heads=6))
    assert not zeros.any()
    against_float64(y, heads, w[1])
    same(y, skinny.skinny(heads, w, 1), 1e-6)

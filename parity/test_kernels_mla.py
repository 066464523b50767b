"""The MLA kernels in the Mosaic GPU interpreter, with race detection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common, mla_attend, mla_query, mla_value, paged
from parity import mla_inputs
from parity.kernel_env import needs_interpreter, same

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
Tuning = mla_attend.Tuning
CASES = [  # lengths, tokens, heads, dtype, scale, page, tuning, more
    ([1], 1, 2, BF16, None, 16, Tuning(2, 8), {}),
    ([70, 0, 200], 1, 6, BF16, None, 64, Tuning(3, 8), {}),
    ([129, 66], 3, 3, BF16, None, 128, Tuning(2, 8, 2, 1), {"counts": [3, 2]}),
    ([150], 2, 6, FP8, 4.0, 32, Tuning(2, 16, 1, 2), {}),
    ([65, 0], 2, 5, FP8, 0.1, 64, Tuning(1, 16, 2, 3), {}),
]


@needs_interpreter
@pytest.mark.parametrize(
    ("lengths", "tokens", "heads", "dtype", "scale", "page", "tuning", "more"), CASES
)
def test_step(lengths, tokens, heads, dtype, scale, page, tuning, more):
    """All three: pages not in use, rows beyond the end and everything of pad rows hold NaN."""
    case = mla_inputs.make(
        lengths, tokens, heads, dtype, scale, sizes=(128, 64, 64), page=page, **more
    )
    step = jax.jit(mla_inputs.kernels(case, interpret=True, tuning=tuning))
    got, cache = step(case.arrays, case.cache, 1)
    want, stored = jax.jit(mla_inputs.standard(case))(case.arrays, case.cache, 1)
    same(cache, stored, 0.0, "max_abs")
    same(got, want, 4e-3)
    assert bool(jnp.isfinite(got).all())
    truth = mla_inputs.exact(case, stored, 1)

    def error(x):
        return np.linalg.norm(np.asarray(x.astype(jnp.float32), np.float64) - truth)

    assert error(got) <= 2 * error(want) + 1e-12
    assert not common.races_found()


@needs_interpreter
def test_page_size_changes_nothing():
    case = mla_inputs.make([150, 0, 40], 1, 3, BF16, sizes=(128, 64, 64))

    def run(case):
        step = jax.jit(mla_inputs.kernels(case, interpret=True, tuning=Tuning(2, 8)))
        return step(case.arrays, case.cache, 1)[0]

    want = run(case)
    assert bool(jnp.isfinite(want).all()) and float(jnp.abs(want).max()) > 0.1
    for page in (16, 128):
        assert bool((run(mla_inputs.repaged(case, page)) == want).all()), page


@needs_interpreter
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, None), (FP8, 4.0)])
def test_each_kernel_against_its_reference(dtype, scale):
    case = mla_inputs.make([200, 0, 70], 2, 3, dtype, scale, sizes=(128, 64, 64), page=16)
    a, kw = case.arrays, dict(heads=case.heads)
    t = Tuning(3, 8)
    args = a["q"], a["kv_a"], a["kv_b"], 1, a["norm"]
    rest = a["place"], a["kv_scale"]
    more = dict(eps=1e-6, tokens=2, columns=t.columns)
    held = jax.new_ref(case.cache)
    q = mla_query.query(*args, held, 1, *rest, **kw, **more, interpret=True)
    cache = jax.freeze(held)
    want_q, want_cache = mla_query.reference(*args, case.cache, 1, *rest, **kw, **more)
    same(q[:, :6], want_q[:, :6], 0.0, "max_abs")
    same(cache, want_cache, 0.0, "max_abs")
    args = want_q, cache, 1, a["table"], a["ends"], a["kv_scale"]
    more = dict(latent=case.latent, scale=case.scale, tuning=t)
    parts = mla_attend.attend(*args, **kw, **more, interpret=True)
    want = mla_attend.reference(*args, **kw, **more)
    for got, ref in zip(
        *(mla_attend.merge(p, a["ends"], case.heads) for p in (parts, want)), strict=True
    ):
        seen = jnp.isfinite(ref)
        assert bool((jnp.isfinite(got) == seen).all())
        same(jnp.where(seen, got, 0), jnp.where(seen, ref, 0), 3e-3)
    got = mla_value.value(parts, a["ends"], a["gate"], a["kv_b"], 1, **kw, interpret=True)
    same(got, mla_value.reference(parts, a["ends"], a["gate"], a["kv_b"], 1, **kw), 1e-3)
    assert not common.races_found()


def test_rows_seen_and_written():
    table = jnp.asarray([[3, 1, -1], [-1, -1, -1], [0, -1, -1]], jnp.int32)
    seen = paged.ends(jnp.asarray([15, 7, 16]), jnp.asarray([2, 0, 1]), 2)
    assert seen.tolist() == [[16, 17], [0, 0], [17, 0]]
    # the last one's page is missing
    assert paged.place(seen, table, 16).tolist() == [63, 16, -1, -1, -1, -1]


def test_limits_name_found_and_expected():
    q, cache = jnp.zeros((1, 6, 192), BF16), jnp.zeros((1, 4, 24, 192), jnp.float32)
    table, ends = jnp.zeros((2, 4), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    reasons = mla_attend.limits(q, cache, table, ends, heads=6, latent=128)
    text = "; ".join(reasons)
    assert "shape of q: found (1, 6, 192), expected (1, 8, 192)" in text
    assert "sequences of table: found 2, expected 1" in text
    assert "dtype of cache: found float32, expected bfloat16 or float8_e4m3fn" in text
    assert "page: found 24" in text
    with pytest.raises(ValueError, match="mla_attend: "):
        mla_attend.attend(q, cache, 0, table, ends, heads=6, latent=128, scale=1.0)


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 8), (8, 1), (8, 8), (64, 1), (9, 7)])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_default_tuning_meets_the_limits(batch, tokens, heads, dtype):
    t = mla_attend.default_tuning(batch, tokens * heads, dtype == FP8)
    columns = common.round_up(tokens * heads, t.columns)
    shape = jax.ShapeDtypeStruct
    q = shape((batch, columns, 576), mla_attend.query_dtype(dtype))
    cache, table = shape((2, 64, 64, 576), dtype), shape((batch, 9), jnp.int32)
    ends = shape((batch, tokens), jnp.int32)
    assert mla_attend.limits(q, cache, table, ends, heads=heads, latent=512) == []

"""The comparison that every timed program passes: what it must accept, and what it must refuse."""

import jax.numpy as jnp
import pytest

from bench import slice_parity
from jax_impl.backend import AUTO
from jax_impl.config import RunConfig
from jax_impl.random_step import Case, load_config, make_inputs, random_cache, random_stream
from jax_impl.random_weights import random_weights
from jax_impl.sharding import ONE_DEVICE
from jax_impl.static import Static

CONTEXT = 4  # every row is written by the step itself


@pytest.fixture(scope="module")
def checked():
    """From a backend to the failed quantities of the MLA layer, with an FP8 cache."""
    config = load_config("tiny")
    case = Case("verify4", 2, 4)
    run = RunConfig(
        slots=2, pages=2, page_size=CONTEXT, kv_dtype="float8_e4m3fn", kv_scale=1.0,
        compute="bfloat16",
    )  # fmt: skip
    static = Static(config, run, ONE_DEVICE.ranks)
    weights = random_weights(config, ONE_DEVICE, 3, run)
    cache = random_cache(config, run, ONE_DEVICE, 3)
    inputs, _ = make_inputs(config, run, case, CONTEXT, 1, 3)
    stream = random_stream(static, case, 3)
    layer = slice_parity.checked_layers(static)["mla"]

    def failed(backend):
        apart = slice_parity.layer_check(static, backend, layer)(weights, cache, inputs, *stream)
        verdict = slice_parity.verdict(static, {"mla": {k: float(v) for k, v in apart.items()}})
        wrong = {c["what"].removeprefix("mla.") for c in verdict["comparisons"] if not c["passed"]}
        assert (verdict["verdict"] == "failed") == bool(wrong)
        return wrong

    return failed


def test_heads_are_judged_over_the_rows_that_were_written(checked):
    """Rows on the two sides of an FP8 step differ by 6 % at most; that is the rows' own limit."""
    assert not checked(AUTO)


@pytest.mark.parametrize(
    ("factor", "shift", "wrong"),
    [(1.03, 0, "heads"), (1, 0.1, "kv_latent"), (float("nan"), 0, "heads")],
)
def test_a_wrong_part_is_named(checked, factor, shift, wrong):
    def mla(static, w, layer, x, inputs, kv, scale):
        moved = x + jnp.asarray(shift, x.dtype) * jnp.roll(x, 1, axis=-1)
        heads, kv = AUTO.mla(static, w, layer, moved, inputs, kv, scale)
        return heads * jnp.asarray(factor, heads.dtype), kv

    assert wrong in checked(AUTO._replace(mla=mla))

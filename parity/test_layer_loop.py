"""The repeated layers as one loop: the same step as layer by layer, for stages that take stacks."""

from dataclasses import replace
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.backend import AUTO, STAGES, Backend
from jax_impl.cache import StepInputs, make_cache
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.model import Repeat, forward, repeated
from jax_impl.params import Layer, LayerWeights, abstract_weights
from jax_impl.static import Static
from jax_impl.tiny_presets import PRESETS, text_config
from parity.kernel_env import same

TINY = ModelConfig.from_dict(text_config(PRESETS["tiny"].target), source="preset tiny")
# two dense layers and one with experts; three times two layers alike, of which the second starts a
# block; one layer more
CONFIG = replace(
    TINY, num_hidden_layers=10, attn_res_block_size=2, mla_layers=(1, 3, 5, 7),
    first_k_dense_replace=2,
)  # fmt: skip


def stacks_sliced(part):
    if isinstance(part, LayerWeights):
        return LayerWeights(*map(stacks_sliced, part))
    return part.sliced() if isinstance(part, Layer) else part


def of_stacks(stage):
    """A standard stage that takes stacks and a place in them."""

    @wraps(stage)
    def run(static, *args, **kw):
        return stage(static, *map(stacks_sliced, args), **kw)

    return run


LOOPED = Backend(**{name: of_stacks(getattr(AUTO, name)) for name in STAGES}, whole_stacks=True)


def random_weights():
    rng = np.random.default_rng(0)

    def value(path, a):
        name = str(path[-1])
        if a.dtype == jnp.uint8:
            drawn = (
                rng.integers(117, 121, a.shape)
                if "scale" in name
                else rng.integers(0, 256, a.shape)
            )
        else:
            drawn = rng.standard_normal(a.shape) * 0.1 + ("norm" in name)
        return jnp.asarray(drawn, a.dtype)

    return jax.tree_util.tree_map_with_path(value, abstract_weights(CONFIG))


def inputs(tokens):
    rng = np.random.default_rng(1)
    i32 = jnp.int32
    return StepInputs(
        tokens=jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, tokens)), i32),
        count=jnp.full(2, tokens, i32), position=jnp.asarray([0, 5], i32),
        slot=jnp.asarray([1, 0], i32), page_table=jnp.asarray([[0, 1], [2, 3]], i32),
        temperature=jnp.zeros(2), seed=jnp.zeros(2, jnp.uint32),
    )  # fmt: skip


def test_layers_that_repeat_are_found():
    assert repeated(CONFIG) == Repeat(3, 2, 3)
    assert repeated(replace(CONFIG, mla_layers=(1, 3, 4, 5, 7))) == Repeat(3, 2, 1)
    assert repeated(replace(CONFIG, num_hidden_layers=4)).turns == 0
    released = replace(
        CONFIG, first_k_dense_replace=1, num_hidden_layers=93, attn_res_block_size=12,
        mla_layers=(*range(3, 92, 4), 92),
    )  # fmt: skip
    assert repeated(released) == Repeat(2, 12, 7)


@pytest.mark.parametrize(
    ("commit", "taps"),
    [pytest.param(True, (), marks=pytest.mark.slow), (False, (0, 1, 2, 5, 7, 8, 9))],
)
def test_the_loop_is_the_same_step(commit, taps):
    run = RunConfig(compute="float32", slots=2, pages=4, page_size=8)
    static, weights = Static(CONFIG, run), random_weights()

    def step(backend):
        call = lambda w, c, i: forward(static, backend, w, c, i, commit=commit, taps=taps)  # noqa: E731
        return jax.jit(call)(weights, make_cache(CONFIG, run), inputs(3))

    want, got = step(AUTO), step(LOOPED)
    assert jnp.isfinite(want.hidden).all() and len(want.pending) == (0 if commit else 6)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same(a, b, 1e-5)  # float32 sums in another order


def test_the_loop_is_there():
    run = RunConfig(compute="float32", slots=2, pages=4, page_size=8)
    static, weights = Static(CONFIG, run), random_weights()
    for backend, loops in ((AUTO, False), (LOOPED, True)):
        call = lambda w, c, i, b=backend: forward(static, b, w, c, i).hidden  # noqa: E731
        text = str(jax.make_jaxpr(call)(weights, make_cache(CONFIG, run), inputs(1)))
        assert ("length=3" in text) is loops

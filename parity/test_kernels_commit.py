"""The commit kernel in the Mosaic GPU interpreter, with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common, kda, kda_commit
from parity.kernel_env import needs_interpreter, same

LAYERS, TOKENS, SLOTS = 2, 3, 5


def inputs(counts, positions, slots, heads=1, held=LAYERS):
    rng = np.random.default_rng(0)
    batch, width = len(counts), kda.WIDTH

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    update, key = (normal(LAYERS, batch, TOKENS, heads, width) for _ in range(2))
    g = -jnp.abs(normal(LAYERS, batch, TOKENS, heads, width))
    raw = normal(LAYERS, batch, TOKENS, 3 * heads * width).astype(jnp.bfloat16)
    state = normal(held, SLOTS, heads, width, width)
    window = normal(held, SLOTS, 3, 3 * heads * width).astype(jnp.bfloat16)
    for slot, position in zip(slots, positions, strict=True):
        if slot >= 0 and position == 0:
            state, window = state.at[:, slot].set(jnp.nan), window.at[:, slot].set(jnp.nan)
    rows = kda.Rows(*(jnp.asarray(a, jnp.int32) for a in (slots, positions, counts)))
    return update, key, g, raw, state, window, rows


@needs_interpreter
def test_stacks_with_more_layers_than_were_recorded():
    """The layers beyond keep their bits."""
    args = inputs((3, 1), (5, 9), (4, 0), held=LAYERS + 2)
    got, want = kda_commit.kda_commit(*args, interpret=True), kda_commit.reference(*args)
    same(got[0], want[0], 1e-6)
    for new, old in zip((*got, want[0]), (*args[4:6], args[4]), strict=True):
        same(new[LAYERS:], old[LAYERS:], 0.0, "max_abs")
    fewer = (*args[:4], args[4][:1], args[5][:1], args[6])
    assert "layers of state: found 1, expected at least 2" in " ".join(kda_commit.limits(*fewer))


@needs_interpreter
@pytest.mark.parametrize(
    ("counts", "positions", "slots"),
    [((3, 0, 1, 2), (5, 0, 9, 0), (4, -1, 0, 2)), ((0, 0), (7, 0), (1, 3))],
)
def test_commit(counts, positions, slots):
    """Every count, a pad row, sequences without history; other slots keep their bits."""
    args = inputs(counts, positions, slots)
    got, want = kda_commit.kda_commit(*args, interpret=True), kda_commit.reference(*args)
    same(got[0], want[0], 1e-6)
    same(got[1], want[1], 0.0, "max_abs")
    others = [s for s in range(SLOTS) if s not in slots]
    for new, old in zip(got, args[4:6], strict=True):
        same(new[:, others], old[:, others], 0.0, "max_abs")
    assert not common.races_found()

"""Many speculative steps, and every number of drafts, in float32 against plain decoding."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.cache import StepInputs
from jax_impl.step import build_step
from parity import metrics
from parity.speculation import (
    PAGE,
    STARTS,
    B,
    K,
    as_bits,
    decode_plainly,
    differences,
    forced,
    inputs_of,
    started,
)
from parity.tolerances import tolerance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exact(models):
    """The models in float32."""
    return dataclasses.replace(models, run=dataclasses.replace(models.run, compute="float32"))


@pytest.fixture(scope="module")
def text(exact):
    """Plain decoding in float32."""
    return decode_plainly(exact)


@pytest.mark.parametrize(
    ("drafts", "commit"), [*((k, "replay") for k in range(1, K)), (4, "snapshots")]
)
def test_every_count_of_every_number_of_drafts(exact, text, drafts, commit):
    """Counts 0..K in one batch of eight; plain decoding has another row bucket, so no bits."""
    models = dataclasses.replace(exact, run=dataclasses.replace(exact.run, commit=commit))
    accepted = np.arange(B) % (drafts + 1)
    tokens = forced(text.text, STARTS, accepted, 2, models.config.vocab_size, drafts)
    step = models.step(drafts=drafts)
    cache, out, following = step(
        models.weights, models.draft_weights, started(models, text, STARTS),
        inputs_of(tokens, [drafts + 1] * B, STARTS),
    )  # fmt: skip
    assert np.array_equal(out.count, accepted + 1)
    for b, a in enumerate(accepted):
        want = text.text[b, STARTS[b] + 1 : STARTS[b] + a + 2]
        assert np.array_equal(out.tokens[b, : a + 1], want)
    found = differences(models, text, cache, STARTS + accepted + 1)
    assert found["state, relative"] <= 1e-3
    assert found["window"] <= 1e-4 and found["latent"] <= 1e-4
    assert np.array_equal(following.position, STARTS + accepted + 1)
    # another step of the same shapes, whatever is in them, compiles nothing
    step(models.weights, models.draft_weights, cache, following.replace(count=following.count - 1))
    assert step._cache_size() == 1


SEQUENCES, STEPS, EACH = 2, 200, 96  # pages of a sequence: room for 768 tokens


def long_inputs(tokens, position) -> StepInputs:
    """Both sequences, in slots 3 and 1, on scattered pages."""
    pages = np.random.default_rng(5).permutation(SEQUENCES * EACH + 3)[: SEQUENCES * EACH]
    tokens = np.asarray(tokens)
    return StepInputs(
        tokens=jnp.asarray(tokens, jnp.int32),
        count=jnp.asarray((tokens >= 0).sum(1), jnp.int32),
        position=jnp.asarray(position, jnp.int32), slot=jnp.array([3, 1], jnp.int32),
        page_table=jnp.asarray(pages.reshape(SEQUENCES, EACH), jnp.int32),
        temperature=jnp.zeros(SEQUENCES), seed=jnp.zeros(SEQUENCES, jnp.uint32),
    )  # fmt: skip


def test_two_hundred_steps_of_random_counts_follow_plain_decoding(exact):
    """State within 1e-4 relative L2 all along, and the text where its margin decides."""
    run = dataclasses.replace(exact.run, slots=4, pages=SEQUENCES * EACH + 3, page_size=PAGE)
    models = dataclasses.replace(exact, run=run)
    rng = np.random.default_rng(11)
    chance = np.array([8, 4, 2, 2, 1, 1, 1, 1]) / 20
    counts = rng.choice(K + 1, (STEPS, SEQUENCES), p=chance)
    ends = 1 + np.cumsum(counts + 1, axis=0)  # tokens processed after each step
    assert ends.max() + K < EACH * PAGE and (np.bincount(counts.ravel()) > 0).all()
    checked = {*ends[STEPS // 4 :: STEPS // 4].ravel().tolist(), *ends[-1].tolist()}

    plain, cache = build_step(models.static, rows="all"), models.cache().replace(draft_kv=None)
    text, margins, states = np.zeros((SEQUENCES, ends.max() + K + 2), int), [], {}
    text[:, 0] = rng.integers(4, models.config.vocab_size, SEQUENCES)
    for i in range(text.shape[1] - 1):
        tokens = np.full((SEQUENCES, K + 1), -1)
        tokens[:, 0] = text[:, i]
        cache, out, _ = plain(models.weights, cache, long_inputs(tokens, [i] * SEQUENCES))
        text[:, i + 1] = np.asarray(out.token)
        margins.append(metrics.margin_rows(np.asarray(out.logits[:, 0])))
        if i + 1 in checked:
            states[i + 1] = as_bits(cache.kda_state)[:, [3, 1]]
    margins = np.stack(margins, 1)  # of the token at position i + 1

    step, cache = models.step(), models.cache()
    position, near = np.zeros(SEQUENCES, int), tolerance("speculative_text", "float32").limit
    first = np.full((SEQUENCES, K + 1), -1)
    first[:, 0] = text[:, 0]
    cache, out, _ = step(models.weights, models.draft_weights, cache, long_inputs(first, position))
    assert np.array_equal(out.count, [1, 1])
    position = position + 1
    for number, accepted in enumerate(counts):
        tokens = forced(text, position, accepted, number, models.config.vocab_size)
        inputs = long_inputs(tokens, position)
        cache, out, _ = step(models.weights, models.draft_weights, cache, inputs)
        assert np.array_equal(out.count, accepted + 1), number
        position = position + accepted + 1
        for b, p in enumerate(position):
            same = int(out.tokens[b, accepted[b]]) == text[b, p]
            assert same or margins[b, p - 1] <= near, (number, b, margins[b, p - 1])
            if p in states and p == ends[number, b]:
                want = states[p][:, b]
                gap = as_bits(cache.kda_state)[:, [3, 1][b]] - want
                assert np.sqrt((gap**2).sum() / (want**2).sum()) <= 1e-4, (number, b)
    assert np.array_equal(position, ends[-1])
    assert step._cache_size() == 1

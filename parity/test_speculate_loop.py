"""Speculative steps in a row: from prompts, in one program, with every acceptance rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.cache import StepInputs
from jax_impl.config import ConfigError
from jax_impl.sampling import Filters
from jax_impl.speculate import build_speculative_loop, build_speculative_step
from jax_impl.static import DraftStatic
from parity.speculation import (
    SLOTS,
    STARTS,
    B,
    K,
    as_bits,
    forced,
    inputs_of,
    rows_of,
    started,
)  # fmt: skip


def test_the_loop_from_prompts_gives_the_plain_text(models, plain):
    """Unequal prompts in chunks, real drafts, inputs stay on the device; context is complete."""
    prompts, prefill, step = np.array([1, 5, 9, 2, 16, 7, 11, 3]), models.prefill(), models.step()
    cache, done, following = models.cache(), np.zeros(B, int), None
    while (done < prompts).any():
        count = np.minimum(prompts - done, K + 1)
        tokens = np.zeros((B, K + 1), int)
        for b in range(B):
            tokens[b, : count[b]] = plain.text[b, done[b] : done[b] + count[b]]
        rows = np.where(count > 0, count, -1)  # finished prompts sit out as pad rows
        cache, _, chunk = prefill(
            models.weights, models.draft_weights, cache, inputs_of(tokens, rows, done)
        )
        done = done + np.maximum(count, 0)
        last = jnp.asarray((count > 0) & (done == prompts))
        following = chunk if following is None else merged(last, chunk, following)
    assert following is not None
    text = [[*plain.text[b, : prompts[b]], int(following.tokens[b, 0])] for b in range(B)]
    histogram = np.zeros(K + 1, int)
    for _ in range(12):
        cache, out, following = step(models.weights, models.draft_weights, cache, following)
        histogram += np.bincount(np.asarray(out.count) - 1, minlength=K + 1)
        for b in range(B):
            text[b] += np.asarray(out.tokens[b, : out.count[b]]).tolist()
    for b in range(B):
        assert text[b] == plain.text[b, : len(text[b])].tolist()
    assert histogram[1:].sum() > 0.2 * histogram.sum()  # the drafter is of use
    assert step._cache_size() == 1
    # the drafter's context rows are those of one pass over the whole text
    fresh, length = models.cache(), np.array([len(t) - 1 for t in text])
    for start in range(0, length.max(), K + 1):
        count = np.clip(length - start, 0, K + 1)
        tokens = plain.text[:, start : start + K + 1]
        rows = np.where(count > 0, count, -1)
        fresh, _, _ = prefill(
            models.weights, models.draft_weights, fresh, inputs_of(tokens, rows, [start] * B)
        )
    got, want = rows_of(cache.draft_kv), rows_of(fresh.draft_kv)
    for b, n in enumerate(length):
        gap = (
            got[:, b, :n] - want[:, b, :n]
        )  # rows of unit size; other windows, other bf16 roundings
        assert np.sqrt((gap**2).mean()) < 0.05


def merged(take: jax.Array, new: StepInputs, old: StepInputs) -> StepInputs:
    """Rows of `new` where `take`, else of `old`."""
    pick = lambda a, b: jnp.where(take.reshape(-1, *(1 for _ in a.shape[1:])), a, b)  # noqa: E731
    return jax.tree.map(pick, new, old)


RANDOM = Acceptance("block", "probabilistic")


def test_ten_steps_in_one_loop_equal_ten_steps(models, plain):
    """Block verification of sampled drafts, mixed temperatures, filters, one pad row."""
    prompts = np.array([1, 5, 8, 2, 6, 7, 3, -1])
    inputs = inputs_of(plain.text[:, : K + 1], prompts, [0] * B).replace(
        temperature=jnp.array([0, 0.7, 1.5, 0, 1.0, 1.0, 2.0, 1.0]),
        filters=Filters(
            jnp.array([0, 0, 9, 0, 0, 40, 0, 0]),
            jnp.array([1, 0.9, 1, 1, 1, 0.95, 1, 1], jnp.float32),
            jnp.array([0, 0, 0, 0, 0.05, 0, 0, 0], jnp.float32),
        ),
    )
    prefill, step = models.prefill(RANDOM), models.step(RANDOM)
    loop = build_speculative_loop(models.static, models.draft, AUTO, RANDOM, K, 10)
    w = models.weights, models.draft_weights
    cache, _, start = prefill(*w, models.cache(), inputs)
    looped = loop(*w, jax.tree.map(jnp.copy, cache), start)
    tokens, counts, following = [], [], start
    for _ in range(10):
        cache, out, following = step(*w, cache, following)
        tokens.append(np.asarray(out.tokens))
        counts.append(np.asarray(out.count))
    assert np.array_equal(looped[1].tokens, tokens)
    assert np.array_equal(looped[1].count, counts)
    for a, b in zip(jax.tree.leaves(looped[2]), jax.tree.leaves(following), strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jnp.float32:
            assert np.array_equal(a, b)
    np.testing.assert_allclose(
        as_bits(looped[0].kda_state)[:, SLOTS[:7]],
        as_bits(cache.kda_state)[:, SLOTS[:7]],
        rtol=1e-3,
        atol=1e-5,
    )
    assert step._cache_size() == 1
    counts = np.array(counts)
    assert (counts[:, 7] == 0).all()
    assert (counts[:, 1:7] > 1).any()
    # temperature 0 among sampled requests: the plain text
    for b in (0, 3):
        own = [int(start.tokens[b, 0])]
        for t, c in zip(tokens, counts, strict=True):
            own += t[b, : c[b]].tolist()
        assert own == plain.text[b, prompts[b] : prompts[b] + len(own)].tolist()


def test_forced_length_six_emits_six_tokens_every_step(models, plain):
    method = Acceptance("synthetic", length=6)
    loop = build_speculative_loop(models.static, models.draft, AUTO, method, K, 4)
    tokens = forced(plain.text, STARTS, np.zeros(B, int), 2, models.config.vocab_size)
    inputs = inputs_of(tokens, [K + 1] * B, STARTS).replace(
        temperature=jnp.array([0, 1.0] * 4, jnp.float32)
    )
    _, out, following = loop(
        models.weights, models.draft_weights, started(models, plain, STARTS), inputs
    )
    assert (np.asarray(out.count) == 6).all()
    assert np.array_equal(out.tokens[0, :, :5], tokens[:, 1:6])  # the drafts, right or wrong
    assert np.array_equal(following.position, STARTS + 24)


def check_drafts(models, plain, drafts):
    """The plain text through K = `drafts`, two requests and a pad row."""
    prompts, batch = np.array([3, 5, -1, 2]), 4
    inputs = inputs_of(plain.text[:batch, :5], prompts, [0] * batch, batch=batch)
    w = models.weights, models.draft_weights
    cache, out, following = models.prefill(drafts=drafts)(*w, models.cache(), inputs)
    text = [[int(t)] for t in out.token]
    step = models.step(drafts=drafts)
    for _ in range(8):
        cache, out, following = step(*w, cache, following)
        for b in range(batch):
            text[b] += np.asarray(out.tokens[b, : out.count[b]]).tolist()
    for b in (0, 1, 3):
        assert text[b] == plain.text[b, prompts[b] : prompts[b] + len(text[b])].tolist()
    assert step._cache_size() == 1


def test_one_draft(models, plain):
    check_drafts(models, plain, 1)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", range(2, K))
def test_all_other_numbers_of_drafts(models, plain, drafts):
    check_drafts(models, plain, drafts)


def test_inputs_and_settings_that_are_refused(models):
    inputs = inputs_of(np.zeros((B, K)), [1] * B, [0] * B)
    w = models.weights, models.draft_weights, models.cache()
    with pytest.raises(ValueError, match="expected the anchor and 7 drafts"):
        models.step()(*w, inputs)
    with pytest.raises(ValueError, match="draft_logits are missing"):
        models.step(RANDOM)(*w, inputs_of(np.zeros((B, K + 1)), [1] * B, [0] * B))
    with pytest.raises(ConfigError, match=r"drafts: found 8, expected 1\.\.7"):
        models.step(drafts=8)
    other = dataclasses.replace(models.draft_config, vocab_size=385)
    with pytest.raises(ConfigError, match="vocab_size: draft 385, expected the target's 384"):
        build_speculative_step(models.static, DraftStatic(other, models.run))


def test_the_same_settings_give_the_same_compiled_step(models):
    again = dataclasses.replace(models, run=dataclasses.replace(models.run))
    assert models.step() is again.step()
    assert models.step(RANDOM) is not models.step()

"""The speculative step: what it commits, and what stays invisible."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.backend import AUTO
from jax_impl.cache import Cache
from parity.speculation import (
    PAGE,
    SLOTS,
    STARTS,
    STEPS,
    B,
    K,
    as_bits,
    committed,
    differences,
    forced,
    inputs_of,
    started,
)  # fmt: skip


@pytest.mark.parametrize("shift", [0, 3, 6])
@pytest.mark.parametrize("commit", ["replay", "snapshots"])
def test_every_accepted_count_commits_what_plain_decoding_has(models, plain, commit, shift):
    """Counts 0..7 in one batch, from positions 0..8; the shift pairs them differently."""
    models = dataclasses.replace(models, run=dataclasses.replace(models.run, commit=commit))
    accepted = (np.arange(B) + shift) % (K + 1)
    out, following, cache, found = committed(models, plain, models.step(), accepted)
    assert np.array_equal(out.count, accepted + 1)
    for b, a in enumerate(accepted):
        s = STARTS[b]
        assert np.array_equal(out.tokens[b, : a + 1], plain.text[b, s + 1 : s + a + 2])
        assert (np.asarray(out.tokens[b, a + 1 :]) == models.config.pad_token_id).all()
    assert np.asarray(out.finite).all()
    assert np.array_equal(following.position, STARTS + accepted + 1)
    assert found["window"] == 0.0
    assert found["latent"] == 0.0
    if commit == "snapshots":
        assert found["state"] == 0.0
    else:
        assert found["state, relative"] <= 1e-3
    # slots, and pages beyond the sequences', that nobody owns
    idle = np.setdiff1d(np.arange(models.run.slots), SLOTS)
    assert np.isnan(as_bits(cache.kda_state)[:, idle]).all()
    assert np.isnan(as_bits(cache.conv_window)[:, idle]).all()


@lru_cache(maxsize=1)
def mutant_backend():
    """A commit that is wrong as the first sequence's seed says: +1, -1, or no commit in layer 1."""

    def commit(static, pending, count, inputs, state, window):
        kind = inputs.seed[0]
        wrong = count + jnp.where(kind == 1, 1, 0) - jnp.where(kind == 2, 1, 0)
        wrong = jnp.minimum(wrong, inputs.tokens.shape[1])
        found = AUTO.kda_commit(static, pending, wrong, inputs, state, window)
        nothing = AUTO.kda_commit(static, pending, 0 * count, inputs, state, window)
        return tuple(
            a.at[1].set(jnp.where(kind == 3, b[1], a[1]))
            for a, b in zip(found, nothing, strict=True)
        )

    return AUTO._replace(kda_commit=commit)


@pytest.mark.parametrize(
    "kind", [0, 1, 2, 3], ids=["right", "one too many", "one too few", "layer skipped"]
)
def test_wrong_commits_are_rejected(models, plain, kind):
    step = models.step(backend=mutant_backend())
    accepted = np.array([0, 2, 6, 3, 1, 5, 4, 2])  # below 7, so that one more is another state
    _, _, _, found = committed(models, plain, step, accepted, seeds=kind)
    if kind == 0:
        assert found["window"] == 0.0 and found["state, relative"] <= 1e-3
    else:
        assert found["window"] > 0.1 and found["state"] > 1e-2


@pytest.mark.parametrize("commit", ["replay", "snapshots"])
def test_fifty_steps_of_random_counts_follow_plain_decoding(models, plain, commit):
    models = dataclasses.replace(models, run=dataclasses.replace(models.run, commit=commit))
    rng, step = np.random.default_rng(3), models.step()
    position, histogram = STARTS.copy(), np.zeros(K + 1, int)
    cache = started(models, plain, STARTS)
    for number in range(50):
        room = (STEPS - 1 - position) - (50 - number)  # one token per remaining step
        drawn = rng.choice(K + 1, B, p=np.array([8, 4, 2, 2, 1, 1, 1, 1]) / 20)
        accepted = np.clip(drawn, 0, np.maximum(room, 0))
        tokens = forced(plain.text, position, accepted, number, models.config.vocab_size)
        inputs = inputs_of(tokens, [K + 1] * B, position)
        cache, out, _ = step(models.weights, models.draft_weights, cache, inputs)
        assert np.array_equal(out.count, accepted + 1)
        histogram += np.bincount(accepted, minlength=K + 1)
        position = position + accepted + 1
        last = np.asarray(out.tokens)[np.arange(B), accepted]
        assert np.array_equal(last, plain.text[np.arange(B), position])
    assert (histogram > 0).all()
    found = differences(models, plain, cache, position)
    if commit == "snapshots":
        assert not any(found.values())
    else:  # the last bit of a state may turn a bf16 rounding, and that the text's later numbers
        assert found["state"] < 0.1
    assert step._cache_size() == 1


def test_what_rejected_rows_wrote_is_never_seen(models, plain):
    accepted = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    outcomes = []
    for poison in (False, True):
        out, following, cache, _ = committed(models, plain, models.step(), accepted)
        for _ in range(3):
            if poison:
                cache = poisoned_beyond(cache, np.asarray(following.position))
            cache, out, following = models.step()(
                models.weights, models.draft_weights, cache, following
            )
            outcomes.append((np.asarray(out.tokens), np.asarray(following.tokens)))
            outcomes.append((as_bits(cache.kda_state)[:, SLOTS], np.asarray(out.finite)))
    half = len(outcomes) // 2
    for clean, dirty in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(clean, dirty, strict=True))


def poisoned_beyond(cache: Cache, position: np.ndarray) -> Cache:
    """NaN in every latent row, of target and drafter, at or beyond each sequence's position."""
    table = np.asarray(inputs_of(np.zeros((B, 1)), [1] * B, [0] * B).page_table)
    keep = np.zeros(cache.kv_latent.shape[1:3], bool)
    for b, p in enumerate(position):
        at = np.arange(p)
        keep[table[b, at // PAGE], at % PAGE] = True
    hide = lambda kv: jnp.where(jnp.asarray(keep)[..., None], kv, jnp.nan)  # noqa: E731
    return cache.replace(kv_latent=hide(cache.kv_latent), draft_kv=hide(cache.draft_kv))


def test_rejected_drafts_do_not_matter(models, plain):
    accepted = np.array([0, 1, 2, 3, 4, 5, 6, 0])
    a, b = (committed(models, plain, models.step(), accepted, seed=seed) for seed in (5, 6))
    assert np.array_equal(a[0].tokens, b[0].tokens)
    assert np.array_equal(a[1].tokens, b[1].tokens)  # the next drafts
    assert np.array_equal(as_bits(a[2].kda_state), as_bits(b[2].kda_state), equal_nan=True)
    assert np.array_equal(as_bits(a[2].conv_window), as_bits(b[2].conv_window), equal_nan=True)


def test_pad_rows_change_nothing_and_permuted_requests_give_the_same(models, plain):
    accepted = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    full_out, full_next, full_cache, _ = committed(models, plain, models.step(), accepted)
    tokens = forced(plain.text, STARTS, accepted, 2, models.config.vocab_size)
    live = np.array([1, 0, 1, 1, 0, 0, 1, 0], bool)
    inputs = inputs_of(tokens, np.where(live, K + 1, -1), STARTS)
    order = np.array([4, 6, 0, 1, 3, 7, 2, 5])
    inputs = jax.tree.map(lambda a: a[order], inputs)
    before = started(models, plain, STARTS)
    old = [as_bits(x) for x in jax.tree.leaves(before)]
    cache, out, following = models.step()(models.weights, models.draft_weights, before, inputs)
    back = np.argsort(order)
    for got, want in (
        (out.tokens, full_out.tokens),
        (out.count, full_out.count),
        (following.tokens, full_next.tokens),
    ):
        assert np.array_equal(np.asarray(got)[back][live], np.asarray(want)[live])
    assert np.array_equal(np.asarray(out.count)[back][~live], [0] * 4)
    assert (np.asarray(out.tokens)[back][~live] == models.config.pad_token_id).all()
    assert np.asarray(out.finite).all()
    assert np.array_equal(np.asarray(following.count)[back], np.where(live, K + 1, 0))
    state = as_bits(cache.kda_state)
    assert np.array_equal(state[:, SLOTS[live]], as_bits(full_cache.kda_state)[:, SLOTS[live]])
    table = np.asarray(inputs_of(tokens, [1] * B, STARTS).page_table)
    idle = np.setdiff1d(np.arange(models.run.slots), SLOTS[live])
    others = np.setdiff1d(np.arange(models.run.pages), table[live])
    new = [as_bits(x) for x in jax.tree.leaves(cache)]
    for a, b, where in zip(old, new, (idle, idle, others, others), strict=True):
        assert np.array_equal(a[:, where], b[:, where], equal_nan=True)


def test_fewer_drafts_no_drafts_and_no_room(models, plain):
    """Requests with 0..7 drafts in one batch; then one whose pages are full stands still."""
    given = np.array([0, 1, 2, 3, 4, 5, 6, 0])
    tokens = forced(plain.text, STARTS, np.full(B, K), 2, models.config.vocab_size)
    inputs = inputs_of(tokens, given + 1, STARTS)
    cache, out, _ = models.step()(
        models.weights, models.draft_weights, started(models, plain, STARTS), inputs
    )
    assert np.array_equal(out.count, given + 1)  # all given drafts are right
    found = differences(models, plain, cache, STARTS + given + 1)
    assert found["window"] == 0.0 and found["latent"] == 0.0
    position = STARTS + given + 1
    assert np.array_equal(
        np.asarray(out.tokens)[np.arange(B), given], plain.text[np.arange(B), position]
    )
    # two pages each: room for 16 tokens, some sequences stop there, nobody writes elsewhere
    cache = started(models, plain, STARTS)
    inputs = inputs_of(tokens, [K + 1] * B, STARTS, pages=2)
    for _ in range(5):
        cache, out, inputs = models.step()(models.weights, models.draft_weights, cache, inputs)
    assert (np.asarray(inputs.position) <= 16).all()
    full = np.asarray(inputs.position) == 16
    assert full.any()
    assert (np.asarray(inputs.count)[full] == 0).all()
    found = differences(models, plain, cache, np.asarray(inputs.position))
    assert found["state, relative"] <= 1e-3
    kept = np.asarray(inputs_of(tokens, [1] * B, STARTS, pages=2).page_table)
    others = np.setdiff1d(np.arange(models.run.pages), kept)
    assert np.isnan(as_bits(cache.kv_latent)[:, others]).all()


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["replay", "snapshots"])
def test_the_cache_is_aliased_whole_and_never_copied(models, commit):
    models = dataclasses.replace(models, run=dataclasses.replace(models.run, commit=commit))
    cache, inputs = models.cache(), inputs_of(np.zeros((B, K + 1)), [K + 1] * B, STARTS)
    lowered = models.step().lower(models.weights, models.draft_weights, cache, inputs)
    compiled, leaves = lowered.compile(), jax.tree.leaves(cache)
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in leaves)
    names = {"float32": "f32", "bfloat16": "bf16"}
    for leaf in leaves:
        shape = f"= {names[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"
        made = [line for line in compiled.as_text().splitlines() if shape in line]
        assert made
        assert not [line for line in made if " copy(" in line or " copy-start(" in line]

"""The speculative step: what is committed, what stays invisible, and that steps chain.

The reference is plain decoding through the same row bucket: steps of 1 + K tokens per sequence of
which one is real. Only then are products of the same shape, and bits comparable.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.cache import PAD, Cache, StepInputs, make_cache
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, load_draft, open_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.params import Weights
from jax_impl.sampling import Filters
from jax_impl.speculate import (
    build_speculative_loop,
    build_speculative_prefill,
    build_speculative_step,
)
from jax_impl.static import DraftStatic, Static
from jax_impl.step import build_step

B, K = 8, 7  # 64 rows
PAGE, PAGES = 8, 24  # tokens per page, pages per sequence
SLOTS = np.array([3, 7, 1, 8, 5, 0, 9, 2])
STARTS = np.array([0, 1, 3, 5, 2, 8, 4, 6])  # tokens processed before the step under test
STEPS = 168  # tokens of plain text per sequence


@dataclasses.dataclass(frozen=True)
class Models:
    """Target and drafter, under one set of run settings."""

    config: ModelConfig
    weights: Weights
    draft_config: DraftConfig
    draft_weights: DraftWeights
    run: RunConfig

    @property
    def static(self) -> Static:
        return Static(self.config, self.run)

    @property
    def draft(self) -> DraftStatic:
        return DraftStatic(self.draft_config, self.run)

    def cache(self, fill: float = np.nan) -> Cache:
        """A cache full of one number."""
        empty = make_cache(self.config, self.run, draft=self.draft_config)
        return jax.tree.map(lambda a: jnp.full(a.shape, fill, a.dtype), empty)

    def step(self, method: Acceptance = Acceptance(), drafts: int = K, backend=AUTO):  # noqa: B008
        return build_speculative_step(self.static, self.draft, backend, method, drafts)

    def prefill(self, method: Acceptance = Acceptance(), drafts: int = K):  # noqa: B008
        return build_speculative_prefill(self.static, self.draft, AUTO, method, drafts)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    """Five layers, of which the last is tapped: three KDA, two MLA; bf16."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny"
    make_checkpoint(directory, "tiny", 0, overrides={"num_hidden_layers": 5})
    from parity.driver import load

    config, weights = load(directory / "target")
    draft = open_draft(directory / "draft")
    assert draft.config.target_layer_ids == (1, 4)
    run = RunConfig(slots=10, pages=B * PAGES + 3, page_size=PAGE)
    return Models(config, weights, draft.config, load_draft(draft), run)


def inputs_of(tokens, count, position, *, batch=B, pages=PAGES) -> StepInputs:
    """Inputs for the first `batch` sequences; a count below 0 marks a pad row."""
    count = np.asarray(count)
    table = (
        np.random.default_rng(0).permutation(B * PAGES + 3)[: B * PAGES].reshape(B, PAGES)[:batch]
    )
    table = np.where((np.arange(PAGES) < pages) & (count[:, None] >= 0), table, -1)
    return StepInputs(
        tokens=jnp.asarray(tokens, jnp.int32),
        count=jnp.asarray(np.maximum(count, 0), jnp.int32),
        position=jnp.asarray(np.where(count < 0, 0, position), jnp.int32),
        slot=jnp.asarray(np.where(count < 0, PAD, SLOTS[:batch]), jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
        temperature=jnp.zeros(batch, jnp.float32),
        seed=jnp.arange(batch, dtype=jnp.uint32),
    )


@dataclasses.dataclass(frozen=True)
class Plain:
    """Plain greedy decoding, token by token, of B sequences.

    `text[b, i]` is the token at position i; `states[i]`, `windows[i]` are the caches of all slots
    after i tokens; `latents` the latent rows [L, B, positions, row].
    """

    text: np.ndarray
    states: list[np.ndarray]
    windows: list[np.ndarray]
    latents: np.ndarray
    cache: Cache


@pytest.fixture(scope="module")
def plain(models) -> Plain:
    step = build_step(models.static, rows="all")
    cache = models.cache().replace(draft_kv=None)
    text = np.zeros((B, STEPS + 1), int)
    text[:, 0] = np.random.default_rng(1).integers(4, models.config.vocab_size, B)
    states, windows = [as_bits(cache.kda_state)], [as_bits(cache.conv_window)]
    for i in range(STEPS):
        tokens = np.full((B, K + 1), -1)
        tokens[:, 0] = text[:, i]
        cache, out, _ = step(models.weights, cache, inputs_of(tokens, [1] * B, [i] * B))
        text[:, i + 1] = np.asarray(out.token)
        states.append(as_bits(cache.kda_state)[:, SLOTS])
        windows.append(as_bits(cache.conv_window)[:, SLOTS])
    return Plain(text, states, windows, rows_of(cache.kv_latent), cache)


def as_bits(x) -> np.ndarray:
    """As float32, in which bf16 keeps every bit."""
    return np.asarray(x.astype(jnp.float32))


def rows_of(kv) -> np.ndarray:
    """Paged rows in order of position: [L, B, positions, row]."""
    table = np.asarray(inputs_of(np.zeros((B, 1)), [1] * B, [0] * B).page_table)
    kv = as_bits(kv)[:, table]
    return kv.reshape(kv.shape[0], B, -1, kv.shape[-1])


def started(models: Models, plain: Plain, starts: np.ndarray) -> Cache:
    """A cache as plain decoding leaves it after `starts` tokens; NaN where nothing is."""
    cache = models.cache()
    state, window, kv = (
        np.array(as_bits(x)) for x in (cache.kda_state, cache.conv_window, cache.kv_latent)
    )
    table = np.asarray(inputs_of(np.zeros((B, 1)), [1] * B, [0] * B).page_table)
    for b, start in enumerate(starts):
        if start:
            state[:, SLOTS[b]] = plain.states[start][:, b]
            window[:, SLOTS[b]] = plain.windows[start][:, b]
        at = np.arange(start)
        kv[:, table[b, at // PAGE], at % PAGE] = plain.latents[:, b, :start]
    return cache.replace(
        kda_state=jnp.asarray(state),
        conv_window=jnp.asarray(window, cache.conv_window.dtype),
        kv_latent=jnp.asarray(kv, cache.kv_latent.dtype),
        draft_kv=jnp.zeros_like(cache.draft_kv),
    )


def forced(
    text: np.ndarray, position: np.ndarray, accepted: np.ndarray, seed: int, vocabulary: int
):
    """Anchor and drafts [B, 1 + K] of which exactly the first `accepted` continue the text."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (B, K + 1))
    for b, (p, a) in enumerate(zip(position, accepted, strict=True)):
        tokens[b, : a + 1] = text[b, p : p + a + 1]
        if a < K and tokens[b, a + 1] == text[b, p + a + 1]:
            tokens[b, a + 1] = (tokens[b, a + 1] + 1) % vocabulary
    return tokens


def differences(models, plain, cache: Cache, position: np.ndarray) -> dict[str, float]:
    """Largest differences between a cache and plain decoding after `position` tokens."""
    found = {"state": 0.0, "state, relative": 0.0, "window": 0.0, "latent": 0.0}
    state, window = as_bits(cache.kda_state)[:, SLOTS], as_bits(cache.conv_window)[:, SLOTS]
    latents = rows_of(cache.kv_latent)
    for b, p in enumerate(position):
        pairs = {
            "state": (state[:, b], plain.states[p][:, b]),
            "window": (window[:, b], plain.windows[p][:, b]),
            "latent": (latents[:, b, :p], plain.latents[:, b, :p]),
        }
        for name, (got, want) in pairs.items():
            gap = np.abs(got - want)
            assert np.isfinite(gap).all(), (name, b)
            found[name] = max(found[name], float(gap.max(initial=0.0)))
            if name == "state":  # what 1e-5 absolute does not cover, relative to the value
                beyond = np.maximum(gap - 1e-5, 0) / np.maximum(np.abs(want), 1e-30)
                found["state, relative"] = max(found["state, relative"], float(beyond.max()))
    return found


def committed(models, plain, step, accepted, starts=STARTS, seed=2, seeds=None):
    """One step with forced accepted counts: outputs, differences from plain decoding."""
    tokens = forced(plain.text, starts, accepted, seed, models.config.vocab_size)
    inputs = inputs_of(tokens, [K + 1] * B, starts)
    if seeds is not None:
        inputs = inputs.replace(seed=jnp.full(B, seeds, jnp.uint32))
    cache, out, following = step(
        models.weights, models.draft_weights, started(models, plain, starts), inputs
    )
    return out, following, cache, differences(models, plain, cache, starts + accepted + 1)


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
    print(found)
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

    def commit(static, layer, pending, count, inputs, state, window):
        kind = inputs.seed[0]
        wrong = count + jnp.where(kind == 1, 1, 0) - jnp.where(kind == 2, 1, 0)
        wrong = jnp.where((kind == 3) & (layer == 1), 0, wrong)
        wrong = jnp.minimum(wrong, inputs.tokens.shape[1])
        return AUTO.kda_commit(static, layer, pending, wrong, inputs, state, window)

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
    print(found, histogram)
    if commit == "snapshots":
        assert not any(found.values())
    else:  # the last bit of a state may turn a bf16 rounding, and that the text's later numbers
        assert found["state"] < 0.1
    assert step._cache_size() == 1


def test_the_loop_from_prompts_gives_the_plain_text(models, plain):
    """Unequal prompts in chunks, real drafts, inputs stay on the device; context is complete."""
    prompts, prefill, step = np.array([1, 5, 9, 2, 16, 7, 11, 3]), models.prefill(), models.step()
    cache, done = models.cache(), np.zeros(B, int)
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
        following = chunk if done.max() <= K + 1 else merged(last, chunk, following)
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
        print("context rms", np.sqrt((gap**2).mean()))
        assert np.sqrt((gap**2).mean()) < 0.05


def merged(take: jax.Array, new: StepInputs, old: StepInputs) -> StepInputs:
    """Rows of `new` where `take`, else of `old`."""
    pick = lambda a, b: jnp.where(take.reshape(-1, *(1 for _ in a.shape[1:])), a, b)  # noqa: E731
    return jax.tree.map(pick, new, old)


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


@pytest.mark.parametrize("drafts", [1, 3])
def test_other_numbers_of_drafts(models, plain, drafts):
    check_drafts(models, plain, drafts)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [2, 4, 5, 6, 7])
def test_all_numbers_of_drafts(models, plain, drafts):
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
    with pytest.raises(ConfigError, match="vocab_size: draft 385, target 384"):
        build_speculative_step(models.static, DraftStatic(other, models.run))


def test_the_same_settings_give_the_same_compiled_step(models):
    again = dataclasses.replace(models, run=dataclasses.replace(models.run))
    assert models.step() is again.step()
    assert models.step(RANDOM) is not models.step()

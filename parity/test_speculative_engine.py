"""Several speculative sequences at once: admission, stops, extension, room, other caches."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import generate_draft
from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.checkpoint import Checkpoint
from jax_impl.cli import GenerateOptions
from jax_impl.config import ConfigError, RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.engine import LIMIT, STOP, Engine, EngineError
from jax_impl.loader import load_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.sharding import ONE_DEVICE
from jax_impl.speculative_engine import SpeculativeEngine, build_waiting_prefill, build_waiting_step
from parity.driver import load
from parity.speculation import Models

K = 3
CHUNK, CONTEXT = 8, 64
SHORT = 62  # a context of as many pages, so that no further program is compiled
RUN = RunConfig(compute="float32", profile="V", slots=5, pages=60, page_size=4)
PROMPTS = ([40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [60], [71, 72, 73, 74])
SAMPLED = Acceptance("block", "probabilistic")


@pytest.fixture(scope="module")
def pair_directory(tmp_path_factory):
    """A KDA layer, an MLA layer that is tapped, and a drafter of two layers."""
    directory = tmp_path_factory.mktemp("pair") / "tiny"
    make_checkpoint(directory, "tiny", 0, overrides={"num_hidden_layers": 2})
    return directory


@pytest.fixture(scope="module")
def models(pair_directory) -> Models:
    """The pair, loaded."""
    config, weights = load((pair_directory / "target").resolve())
    draft = open_draft(pair_directory / "draft")
    return Models(config, weights, draft.config, load_draft(draft), RUN)


def engine(models: Models, run=RUN, method=Acceptance(), shuffle=None, **settings):  # noqa: B008
    """An engine; `shuffle` scatters its slots and pages."""
    e = SpeculativeEngine(
        models.config, run, models.weights, models.draft_config, models.draft_weights, method, K,
        **{"chunk": CHUNK, "context": CONTEXT} | settings,
    )  # fmt: skip
    if shuffle is not None:
        rng = np.random.default_rng(shuffle)
        rng.shuffle(e._free_slots)
        rng.shuffle(e._free_pages)
    return e


def alone(models, prompt, tokens, method=Acceptance(), run=RUN, **settings):  # noqa: B008
    """One sequence in an engine of its own: text and what each step emitted."""
    e = engine(models, run, method)
    handle = e.add(prompt, **settings)
    e.prefill(handle)
    seq = e.sequences[handle]
    while len(seq.ids) - len(prompt) < tokens:
        e.decode([handle])
    return seq.ids, seq.emitted


def plain(models, prompt, tokens, run=RUN):
    """Text of the engine without a drafter."""
    e = Engine(models.config, run, models.weights, chunk=CHUNK, context=CONTEXT)
    handle = e.add(prompt, limit=tokens)
    e.prefill(handle)
    while e.sequences[handle].finished is None:
        e.decode([handle])
    return e.sequences[handle].ids


def same_so_far(seq, want):
    """Text and counts of a sequence are the beginning of (text, counts)."""
    ids, emitted = want
    assert seq.emitted == emitted[: len(seq.emitted)]
    assert seq.ids[: len(ids)] == ids[: len(seq.ids)]


@pytest.mark.parametrize(
    "method",
    [Acceptance(), pytest.param(SAMPLED, marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_sequences_together_are_as_each_alone(models, method):
    """Unequal lengths, scattered pages, others in and out between steps, a padded batch."""
    settings = [
        {"temperature": t, "seed": s} if method is SAMPLED else {}
        for t, s in ((1.0, 3), (0.7, 4), (0.0, 5))
    ]
    want = [alone(models, p, 24, method, **s) for p, s in zip(PROMPTS, settings, strict=True)]
    if method is not SAMPLED:
        for prompt, (ids, emitted) in zip(PROMPTS, want, strict=True):
            assert ids == plain(models, prompt, len(ids) - len(prompt))
            assert max(emitted) > 1
    e = engine(models, method=method, shuffle=1)
    a = e.add(PROMPTS[0], **settings[0])
    e.prefill(a)
    for _ in range(2):
        e.decode([a])
    b, c = (e.add(p, **s) for p, s in zip(PROMPTS[1:], settings[1:], strict=True))
    for handle in (b, c):
        e.prefill(handle)
    handles = [a, b, c]
    for group in ([c, a, b], [b], [b, c, a], [c], [c], handles, [a]):
        found = e.decode(group)
        assert set(found) == set(group) and all(found.values())
    for handle, one in zip(handles, want, strict=True):
        same_so_far(e.sequences[handle], one)
    assert e.steps == {("prefill", 1, CHUNK): 4, ("verify", 1, 4): 6, ("verify", 4, 4): 3}
    assert build_waiting_step(*e._build(AUTO))._cache_size() == 2  # one per batch bucket
    assert build_waiting_prefill(*e._build(AUTO))._cache_size() == 1


def test_a_kept_sequence_is_extended(models):
    """As one prompt of all tokens so far; a released slot and its pages serve again."""
    e = engine(models, shuffle=2)
    kept = e.add(PROMPTS[0], limit=9)
    other = e.add(PROMPTS[2])
    for handle in (kept, other):
        e.prefill(handle)
    while e.sequences[kept].finished is None:
        e.decode([kept, other])
    seq = e.sequences[kept]
    assert seq.finished == LIMIT and len(seq.ids) == len(PROMPTS[0]) + 9
    with pytest.raises(EngineError, match=r"is finished \(limit\); extend or release it"):
        e.decode([kept])
    e.extend(kept, [90, 91, 92])
    whole, start = list(seq.ids), len(seq.ids)
    e.release(other)
    e.prefill(kept)
    while seq.finished is None:
        e.decode([kept])
    assert seq.ids[start:] == plain(models, whole, 9)[start:]


def test_a_stop_inside_accepted_drafts_ends_the_text_there(models):
    """The cache went on; an extension starts over, and gives what a fresh sequence gives."""
    ids, emitted = alone(models, PROMPTS[0], 40)
    text = ids[len(PROMPTS[0]) :]
    starts = 1 + np.cumsum([0, *emitted])[:-1]  # the first token is the prefill's
    inside = [
        s for s, n in zip(starts, emitted, strict=True) if n >= 3 and text.index(text[s]) == s
    ]
    e = engine(models, shuffle=3)
    handle = e.add(PROMPTS[0], stop=[text[inside[0]]])
    e.prefill(handle)
    seq = e.sequences[handle]
    while seq.finished is None:
        e.decode([handle])
    assert seq.finished == STOP and seq.ids == ids[: len(PROMPTS[0]) + inside[0] + 1]
    assert seq.processed > len(seq.ids)
    e.extend(handle, [95, 96])
    assert seq.processed == 0 and seq.finished is None
    whole = list(seq.ids)
    seq.stop, seq.limit = frozenset(), 10
    e.prefill(handle)
    while seq.finished is None:
        e.decode([handle])
    assert seq.ids == plain(models, whole, 10)


def test_a_first_token_may_stop(models):
    ids, _ = alone(models, PROMPTS[1], 2)
    e = engine(models)
    handle = e.add(PROMPTS[1], stop=[ids[1]])
    assert e.prefill(handle) == ids[1]
    assert e.sequences[handle].finished == STOP


def test_a_sequence_without_room_is_finished_and_says_why(models):
    """At the end of the context, and where pages are gone; others go on."""
    e = engine(models, context=SHORT)
    full, short = e.add(PROMPTS[0]), e.add(PROMPTS[1])
    for handle in (full, short):
        e.prefill(handle)
    ends_without_room(e, full)
    seq = e.sequences[full]
    assert seq.finished == f"no room: all {SHORT} tokens of the context are in use"
    assert len(seq.ids) == SHORT + 1 and seq.ids == plain(models, PROMPTS[0], 53)[: SHORT + 1]
    assert set(e.decode([short])) == {short}

    e = engine(models)
    del e._free_pages[6:]  # as if other sequences held them
    full, short = e.add(PROMPTS[0]), e.add(PROMPTS[1])
    for handle in (full, short):
        e.prefill(handle)
    ends_without_room(e, full)
    assert "page(s) of 4, and none of 60 is free" in e.sequences[full].finished
    ends_without_room(e, short)
    assert len(e.sequences[full].pages) + len(e.sequences[short].pages) == 6
    for handle, prompt in ((full, PROMPTS[0]), (short, PROMPTS[1])):
        ids = e.sequences[handle].ids
        assert ids == plain(models, prompt, 24)[: len(ids)]
        assert len(ids) == 4 * len(e.sequences[handle].pages) + 1


def ends_without_room(e, handle):
    """Decode until it is finished, in steps that all give something, but the last."""
    for _ in range(60):
        found = e.decode([handle])
        if e.sequences[handle].finished is not None:
            assert found == {}
            return
        assert found[handle]
    raise AssertionError("goes on for ever")


def test_generation_without_room_ends(models, pair_directory, monkeypatch):
    """Where a cache is too small for what was asked, the text ends with the reason."""
    monkeypatch.setattr(
        generate_draft, "SpeculativeEngine", partial(SpeculativeEngine, context=SHORT)
    )
    checkpoint = Checkpoint.open(pair_directory / "target")
    options = GenerateOptions(
        steps=90, draft=pair_directory / "draft", drafts=K, ignore_eos=True, chunk=CHUNK
    )
    found = generate_draft.speculative(checkpoint, RUN, AUTO, PROMPTS[0], options, ONE_DEVICE)
    assert found["stopped_by"] == f"no room: all {SHORT} tokens of the context are in use"
    assert len(found["output_ids"]) == SHORT + 1 - len(PROMPTS[0])
    limit = open_draft(options.draft).config.max_position_embeddings
    with pytest.raises(ConfigError, match=f"the drafter's limit is {limit}; ask for fewer"):
        generate_draft.speculative(
            checkpoint, RUN, AUTO, PROMPTS[0], dataclasses.replace(options, steps=limit), ONE_DEVICE
        )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_an_fp8_cache_serves_both_models(models, scale):
    """The text is the plain one over the same cache; the drafter's rows are rounded ones."""
    run = dataclasses.replace(RUN, kv_dtype="float8_e4m3fn", kv_scale=scale)
    engines = [engine(models, r) for r in (run, RUN)]
    for e in engines:
        handle = e.add(PROMPTS[0], limit=16)
        e.prefill(handle)
    rows = [np.asarray(e.cache.draft_kv.astype(jnp.float32)) for e in engines]
    assert engines[0].cache.draft_kv.dtype == jnp.float8_e4m3fn
    table = engines[0].sequences[handle].pages
    assert table == engines[1].sequences[handle].pages
    stored, exact = (r[:, table].reshape(r.shape[0], -1, r.shape[-1])[:, :11] for r in rows)
    stored = stored * scale
    error = np.sqrt(np.square(stored - exact).mean() / np.square(exact).mean())
    assert 1e-3 < error < 2**-4  # three bits of mantissa
    e = engines[0]
    while e.sequences[handle].finished is None:
        e.decode([handle])
    seq = e.sequences[handle]
    assert seq.ids == plain(models, PROMPTS[0], 16, run)
    assert max(seq.emitted) > 1  # the drafter is of use


def test_a_sequence_that_is_not_finite_is_named_and_others_go_on(models):
    e = engine(models)
    bad, good = e.add([1, 2, 3]), e.add([4, 5, 6])
    for handle in (bad, good):
        e.prefill(handle)
    slot = e.sequences[bad].slot
    e.cache = e.cache.replace(kda_state=e.cache.kda_state.at[:, slot].set(np.nan))
    assert set(e.decode([bad, good])) == {good}
    assert "logits not finite" in e.sequences[bad].failed
    assert e.sequences[good].failed is None


def test_settings_that_are_refused(models):
    most = models.draft_config.max_position_embeddings
    with pytest.raises(EngineError, match=f"the drafter has positions for {most} tokens"):
        engine(models, context=most + 1)
    with pytest.raises(EngineError, match="limit 0: expected at least 1 token"):
        engine(models).add([1], limit=0)

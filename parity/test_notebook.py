"""The API of notebooks: pure, confined to its session, and the same arithmetic as the engines."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_impl.config import ConfigError
from jax_impl.engine import Engine
from jax_impl.speculative_engine import SpeculativeEngine
from jax_impl.stages import standard
from parity import notebook as k3

ROOT = Path(__file__).parents[1]
SMALL = {"num_hidden_layers": 3, "attn_res_block_size": 2}
PROMPT, STEPS = (5, 17, 101, 4, 9, 250), 6


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> k3.Session:
    """KDA with a dense part, KDA and MLA with experts, two AttnRes blocks."""
    return k3.make_tiny(tmp_path_factory.mktemp("notebook"), overrides=SMALL, tokens=64)


@pytest.fixture(scope="module")
def first(session) -> k3.Pass:
    return k3.prefill(session, PROMPT, record=True)


def leaves(state: k3.State) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state.cache)]


def slow_decay(static, w, layer, x, inputs, state, window):
    """`kda` whose gate forgets half as fast."""
    gentler = dataclasses.replace(
        static.config, gate_lower_bound=static.config.gate_lower_bound / 2
    )
    changed = dataclasses.replace(static, config=gentler)
    return standard.kda(changed, w, layer, x, inputs, state, window)


def test_tokens_are_those_of_the_engine(session, first):
    run = dataclasses.replace(session.run, slots=2)
    engine = Engine(session.config, run, session.weights, chunk=len(PROMPT))
    handle = engine.add(PROMPT)
    engine.prefill(handle)
    for _ in range(STEPS - 1):
        engine.decode([handle])
    assert first.new == k3.greedy(session, PROMPT, 1)
    assert k3.greedy(session, PROMPT, STEPS) == tuple(engine.sequences[handle].ids[len(PROMPT) :])


def test_a_state_survives_the_steps_from_it(session, first):
    before = [x.copy() for x in leaves(first.state)]
    one, two = k3.step(session, first.state), k3.step(session, first.state)
    assert one.new == two.new and np.array_equal(one.logits, two.logits)
    assert all(np.array_equal(a, b) for a, b in zip(before, leaves(first.state), strict=True))
    moved = [not np.array_equal(a, b) for a, b in zip(before, leaves(one.state), strict=True)]
    assert len(moved) == 4 and all(moved)  # state, window, latents, the drafter's rows
    assert not any(x.is_deleted() for x in jax.tree.leaves(first.state.cache))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.state.position = 0  # type: ignore[misc]


def test_feeding_token_by_token_is_prefill(session, first):
    state = k3.new_state(session)
    rows = []
    for token in PROMPT:
        found = k3.feed(
            session, dataclasses.replace(state, ids=state.ids[: state.position]), [token]
        )
        rows.append(found.logits[0])
        state = found.state
    assert state.ids == first.state.ids and state.position == len(PROMPT)
    assert np.abs(np.array(rows) - first.logits).max() < 1e-3 * np.abs(first.logits).max()


def test_stages_have_their_shapes(session, first):
    c, rows = session.config, len(PROMPT)
    assert first.stages["embed"].shape == first.stages["hidden"].shape == (rows, c.hidden_size)
    assert first.stages["layer01.ids"].shape == (rows, c.num_experts_per_token)
    assert first.stages["layer01.latent"].shape == (rows, c.routed_expert_hidden_size)
    assert first.stages["layer01.heads"].shape == (rows, c.kda_width)
    assert first.logits.shape == (rows, c.vocab_size)
    assert k3.step(session, first.state).stages == {}


def test_views(session, first):
    c = session.config
    kda, mla = c.kda_layers[1], c.mla_layers[0]
    state = k3.kda_state(session, first.state, kda)
    assert state.shape == (c.kda_num_heads, c.kda_head_dim, c.kda_head_dim) and state.any()
    assert k3.latent_rows(session, first.state, mla).shape == (len(PROMPT), c.kv_row)
    for view, layer in ((k3.kda_state, mla), (k3.latent_rows, kda)):
        with pytest.raises(k3.SessionError, match=f"layer {layer}: expected"):
            view(session, first.state, layer)


def test_depth_mixtures_are_what_the_stages_mixed(session, first):
    """Recomputed from the weights: the mixture of the sources, normed, is the stage's output."""
    c, mixed = session.config, k3.depth_mixtures(session, first)
    assert len(mixed) == 2 * c.num_hidden_layers + 1
    for place, weights in mixed.items():
        assert weights.shape == (len(PROMPT), c.num_snapshots + 1)
        assert np.allclose(weights.sum(-1), 1, atol=1e-6), place
        layer = c.num_hidden_layers if place == "head_in" else int(place[5:7])
        taken = c.snapshots_before(layer) + (place.endswith("out") and c.starts_block(layer))
        assert not weights[:, taken:-1].any() and weights[:, :taken].all()
    layer = c.num_hidden_layers - 1
    sources = np.concatenate(
        [first.stages["snapshots"], first.stages[f"layer{layer:02d}.prefix"][:, None]], axis=1
    )
    mix = (mixed[f"layer{layer:02d}.attn_out"][..., None] * sources).sum(1)
    norm = np.asarray(session.weights.layer.post_attention_layernorm[layer], np.float32)
    want = mix / np.sqrt((mix**2).mean(-1, keepdims=True) + c.rms_norm_eps) * norm
    assert np.abs(want - first.stages[f"layer{layer:02d}.y"]).max() < 1e-4
    with pytest.raises(k3.SessionError, match="record=True"):
        k3.depth_mixtures(session, k3.step(session, first.state))


def test_verification_keeps_what_plain_decoding_gives(session, first):
    text = k3.greedy(session, PROMPT, STEPS)
    right = k3.verify(session, first.state, text[1:4])
    assert right.new == text[1:5] and right.state.position == len(PROMPT) + 4
    wrong = k3.verify(session, first.state, [text[1], (text[2] + 1) % 300, text[3]])
    assert wrong.new == text[1:3]
    # nothing of the rejected rows is left: the text goes on as if they had never been
    state = wrong.state
    for token in text[3:]:
        found = k3.step(session, state)
        assert found.new == (token,)
        state = found.state


@pytest.mark.parametrize("drafts", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_speculation_is_that_of_the_engine(session, first, drafts):
    config, weights = session.draft
    run = dataclasses.replace(session.run, slots=2)
    engine = SpeculativeEngine(
        session.config, run, session.weights, config, weights, drafts=drafts, chunk=len(PROMPT)
    )
    handle = engine.add(PROMPT)
    engine.prefill(handle)
    state, counts = first.state, []
    for _ in range(5):
        engine.decode([handle])
        found = k3.verify(session, state, k3.draft(session, state, drafts))
        counts.append(len(found.new))
        state = found.state
    assert counts == engine.sequences[handle].emitted and len(set(counts)) > 1
    assert state.ids == tuple(engine.sequences[handle].ids)


def test_drawn_drafts_and_forced_acceptance(session, first):
    drawn = k3.draft(session, first.state, 3, sample=True, temperature=1.0, seed=4)
    assert drawn.logits is not None and drawn.logits.shape == (3, session.config.vocab_size)
    block = k3.Acceptance("block", "probabilistic")
    found = k3.verify(session, first.state, drawn, block, temperature=1.0, seed=4)
    assert 1 <= len(found.new) <= 4
    forced = k3.Acceptance("synthetic", length=3.0)
    assert len(k3.verify(session, first.state, [1, 1, 1], forced).new) == 3
    with pytest.raises(k3.SessionError, match="draft logits given"):
        k3.verify(session, first.state, drawn)


def test_filters_restrict_every_kind_of_pass(session, first):
    best = {"temperature": 9.0, "top_k": 1, "seed": 7}
    plain = k3.step(session, first.state)
    assert k3.step(session, first.state, **best).new == plain.new
    found = k3.verify(session, first.state, [*plain.new, 1], **best).new
    assert found[:1] == plain.new and found[1] == k3.step(session, plain.state).new[0]
    three = set(np.argsort(-plain.logits[-1])[:3].tolist())
    hot = {"temperature": 50.0, "top_k": 3}
    wide = {k3.step(session, first.state, **hot, seed=s).new[0] for s in range(9)}
    assert wide <= three and len(wide) > 1


def test_a_replaced_stage_serves_every_pass_of_its_session_and_no_other(session, first):
    other = k3.replace_stages(session, kda=slow_decay)
    changed = k3.prefill(other, PROMPT)
    assert np.abs(changed.logits - first.logits).max() > 0.1
    again = k3.prefill(session, PROMPT, record=True)
    assert np.array_equal(again.logits, first.logits) and session.backend.kda is standard.kda
    # plain steps and verification run the same replaced stage
    one, two = k3.step(other, changed.state), k3.verify(other, changed.state, [3, 4])
    original = k3.step(session, changed.state)
    gap = np.abs(one.logits[0] - two.logits[0]).max()
    assert gap < 1e-3 < 0.1 < np.abs(one.logits - original.logits).max()


def test_the_derived_step_is_the_standard_one(session, first):
    """`kda_step` of a session whose `kda` is replaced by itself: bit for bit."""
    same = k3.replace_stages(session, kda=lambda *arguments: standard.kda(*arguments))
    found = k3.prefill(same, PROMPT)
    assert np.array_equal(found.logits, first.logits)
    assert all(
        np.array_equal(a, b) for a, b in zip(leaves(found.state), leaves(first.state), strict=True)
    )


def test_a_replaced_commit_is_used_by_plain_decoding(session, first):
    def forgetful(static, pending, count, inputs, state, window):
        state, window = standard.kda_commit(static, pending, count, inputs, state, window)
        return state * 0, window

    found = k3.prefill(k3.replace_stages(session, kda_commit=forgetful), PROMPT)
    assert not np.asarray(found.state.cache.kda_state).any()
    assert np.array_equal(found.logits, first.logits)  # within a pass nothing is committed


def test_other_settings(session, first):
    blocks = k3.replace_config(session, attn_res_block_size=3)
    assert np.abs(k3.prefill(blocks, PROMPT).logits - first.logits).max() > 0.1
    rounded = k3.replace_run(session, compute="bfloat16")
    other = k3.prefill(rounded, PROMPT, record=True)
    assert other.state.cache.conv_window.dtype == "bfloat16"
    assert other.stages["embed"].dtype == np.float32  # on the host
    assert 0 < np.abs(other.logits - first.logits).max() < 2
    assert np.allclose(k3.depth_mixtures(rounded, other)["head_in"].sum(-1), 1)


def test_comparison_with_torch_passes(session, first):
    found = k3.compare(session, first.state.ids, prompt=len(PROMPT))
    assert found.passed and not found.failed
    layers = found.by_layer("prefix_sum_out")
    assert list(layers) == list(range(session.config.num_hidden_layers))
    assert all(0 < v.value <= v.limit for v in layers.values())
    assert "layer02" in found.table() and "passed" in found.table()
    with pytest.raises(k3.SessionError, match="expected one of"):
        found.by_layer("nothing")
    assert k3.torch_greedy(session, PROMPT, STEPS) == k3.greedy(session, PROMPT, STEPS)
    drift = k3.drift(first, k3.torch_prefill(session, PROMPT))
    assert list(drift)[-1] == "logits" and 0 < max(drift.values()) < 1e-4


def test_comparison_names_the_layers_that_a_change_breaks(session, first):
    other = k3.replace_stages(session, kda=slow_decay)
    found = k3.compare(other, PROMPT)
    broken = {
        layer for layer, v in found.by_layer("prefix after attention").items() if not v.passed
    }
    assert broken == set(session.config.kda_layers) and not found.passed
    drift = k3.drift(k3.prefill(other, PROMPT, record=True), k3.torch_prefill(session, PROMPT))
    assert drift["layer00"] > 1e-3  # from the first KDA layer on
    with pytest.raises(k3.SessionError, match="tokens differ"):
        k3.drift(first, k3.torch_prefill(session, (1, 2)))


def test_a_session_without_drafter_and_the_folder_used_again(session):
    plain = k3.load(session.path, tokens=32)
    assert plain.draft is None and plain.tokens == 32
    state = k3.prefill(plain, PROMPT).state
    with pytest.raises(k3.SessionError, match="no drafter; give `draft`"):
        k3.draft(plain, state)
    again = k3.make_tiny(session.path.parents[1], overrides=SMALL, tokens=64)
    assert again.path == session.path
    other = k3.make_tiny(session.path.parents[1], overrides=SMALL | {"attn_res_block_size": 4})
    assert other.path != session.path and other.config.attn_res_block_size == 4


def test_wrong_calls_say_what_to_do(session, first):
    state, vocabulary = first.state, session.config.vocab_size
    plain = k3.load(session.path, tokens=64)
    wrong = [
        (lambda: k3.prefill(session, []), "no tokens to process"),
        (
            lambda: k3.prefill(session, [vocabulary], seed=-1),
            r"outside the vocabulary[\s\S]*seed -1",
        ),
        (lambda: k3.prefill(session, [1] * 65), "room for 64; make one with `tokens=`"),
        (lambda: k3.step(plain, state), "the state has other caches"),
        (lambda: k3.step(session, state, temperature=-1), "expected 0 .greedy. or a finite"),
        (lambda: k3.prefill(session, [5], top_p=2, min_p=-1), r"top_p 2[\s\S]*min_p -1: expected"),
        (lambda: k3.step(session, state, top_k=2), "top_k 2: expected temperature above 0"),
        (lambda: k3.verify(session, k3.new_state(session), [1]), "the anchor; prefill first"),
        (lambda: k3.replace_stages(session, kdaa=slow_decay), "kdaa: no such stage; there are"),
        (lambda: k3.replace_stages(session, kda_step=slow_decay), "made of kda and kda_commit"),
        (lambda: k3.replace_stages(session, route=lambda x: x), r"route: [\s\S]*\(static, w, y\)"),
        (lambda: k3.replace_config(session, hidden=3), "hidden: no field of ModelConfig"),
        (lambda: k3.replace_config(session, num_experts=6), r"moe.gate[\s\S]*expected bfloat16"),
        (lambda: k3.replace_run(session, slots=4), "slots: a session takes"),
        (lambda: k3.load(session.path, tokens=0), "tokens 0"),
        (lambda: k3.compare(session, PROMPT, prompt=0), "prompt 0"),
        (lambda: k3.greedy(session, PROMPT, 0), "steps 0"),
        # arguments of another type
        (lambda: k3.load(7), "path: found int, expected a folder"),
        (lambda: k3.load(session.path, draft=7), "draft: found int, expected a folder"),
        (lambda: k3.load(session.path, tokens=2.5), "tokens 2.5: expected room for a whole number"),
        (lambda: k3.prefill(session, "5,17"), "ids: found '5,17', expected a list of whole"),
        (lambda: k3.prefill(session, [5, 1.5]), r"found \[1.5\], expected a list of whole numbers"),
        (lambda: k3.prefill(session, 5), "ids: found 5, expected a list"),
        (lambda: k3.prefill("tiny", [5]), "session: found str, expected Session; make one with"),
        (lambda: k3.step(session, first), "state: found Pass, expected State; a Pass has one as"),
        (lambda: k3.verify(session, state, [1.0]), r"drafts: found \[1.0\], expected a list"),
        (lambda: k3.compare(session, [5.0, 6]), r"found \[5.0\], expected a list of whole numbers"),
        (lambda: k3.compare(session, PROMPT, prompt="1"), "prompt '1': expected a whole number"),
        (lambda: k3.torch_greedy(session, PROMPT, 2.0), "steps 2.0: expected a whole number"),
        (lambda: k3.torch_greedy(session, [vocabulary], 1), "expected ids of the vocabulary"),
        (lambda: k3.torch_prefill(session, []), "expected at least one token"),
        (lambda: k3.make_tiny("x", overrides=[1]), "overrides: found list, expected dict"),
        (lambda: first.stages["layer2.heads"], r"expected one of embed, .*mean 'layer02.heads'"),
        (lambda: k3.step(session, state).stages["embed"], "nothing was recorded; run the pass"),
        (lambda: k3.replace_run(first, compute="float32"), "session: found Pass, expected Session"),
        (lambda: k3.replace_stages(None, kda=slow_decay), "session: found NoneType, expected"),
        (lambda: k3.kda_state(session, first, 0), "state: found Pass, expected State; a Pass has"),
        (lambda: k3.latent_rows(state, session, 2), "session: found State, expected Session"),
        (lambda: k3.depth_mixtures(session, state), "found: found State, expected Pass; `prefill`"),
        (lambda: k3.torch_prefill(session, PROMPT, dtype="float16"), "dtype: found 'float16', exp"),
        (lambda: k3.torch_prefill(session, PROMPT, profile="X"), r"profile: found 'X', .*\('H', "),
        (lambda: k3.verify(session, state, [1], "block"), "method: found str, expected Acceptance"),
        (lambda: k3.verify(session, state, k3.Drafts((1, 2.5))), r"drafts: found \[2.5\], exp"),
        (
            lambda: k3.verify(
                session, state, k3.Drafts((1, 2), np.zeros((3, 4))),
                k3.Acceptance(drafting="probabilistic"),
            ),
            r"draft logits: found shape \(3, 4\), expected \(2, \d+\).*what `draft` returned",
        ),
    ]  # fmt: skip
    for call, message in wrong:
        with pytest.raises(k3.SessionError, match=message):
            call()
    with pytest.raises(ConfigError, match=r"expected 1\.\.7"):
        k3.draft(session, state, 9)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rms_norm_eps": -1.0, "attn_res_block_size": 0}, "size: found 0, expected a positive"),
        ({"num_experts_per_token": 999}, "num_experts_per_token 999 > experts"),
        ({"attn_res_block_size": 2.5}, "expected a number .int, below 2.31., found 2.5"),
        ({"gate_lower_bound": "low"}, "gate_lower_bound: expected a number .float"),
        ({"mla_layers": (3, 99)}, r"mla_layers: found \(3, 99\), expected a rising tuple"),
        ({"weights_prefix": 3}, "weights_prefix: found 3, expected a text"),
    ],
)
def test_values_that_no_model_has_are_refused(session, changes, found):
    with pytest.raises(
        ConfigError, match=rf"config not replaced:[\s\S]*{found}[\s\S]*Change these"
    ):
        k3.replace_config(session, **changes)


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (lambda y: y[:, :-1], r"float32\[\d+, \d+, \d+\]|float32\[\d+, \d+\]"),
        (lambda y: y.astype("bfloat16"), "found outputs bfloat16"),
        (lambda y: (y, y), r"found outputs \("),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_a_stage_with_other_outputs_is_named(session, outputs, found):
    other = k3.replace_stages(session, dense=lambda *a: outputs(standard.dense(*a)))
    with pytest.raises(k3.SessionError, match=found) as raised:
        k3.prefill(other, PROMPT)
    text = str(raised.value)
    assert text.startswith("stage dense: found outputs") and "expected float32[" in text
    assert "replace_stages(dense=...)" in text


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"num_hidden_layers": "4"}, "num_hidden_layers: found '4', expected a whole number"),
        ({"hidden_size": 64.0}, "hidden_size: found 64.0, expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0, expected at least 1"),
        ({"linear_attn_config": 3}, "linear_attn_config: found 3, expected a dict"),
        ({"linear_attn_config": {"num_heads": None}}, "num_heads: found None, expected a whole"),
    ],
)
def test_overrides_of_another_type_are_refused(overrides, found, tmp_path):
    with pytest.raises(ValueError, match=rf"cannot make this checkpoint: {found}.*change these"):
        k3.make_tiny(tmp_path, overrides=overrides)
    assert not list(tmp_path.iterdir())


def test_drift_is_of_a_whole_recorded_pass(session, first):
    after = k3.step(session, first.state, record=True)
    ids = after.state.ids[: after.state.position]
    reference = k3.torch_prefill(session, ids)
    wrong = [
        ((after, reference), "found a pass over 1 of 7 tokens, expected all .* use prefill"),
        ((first, reference), "tokens differ"),
        ((k3.step(session, first.state), reference), "nothing was recorded"),
        ((reference, first), "found: found Reference, expected Pass"),
        ((first, first), "reference: found Pass, expected Reference; `torch_prefill` makes one"),
    ]
    for arguments, message in wrong:
        with pytest.raises(k3.SessionError, match=message):
            k3.drift(*arguments)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"length": "2"}, "length: found '2', expected 1..4 tokens"),
        ({"rates": 0.5}, "rates: found 0.5, expected 3 numbers"),
        ({"rates": ("a", "b", "c")}, "rates: found .*, expected 3 numbers"),
        ({"rates": [0.5, 0.6, 0.1]}, "rates: found .*not rising"),
    ],
)
def test_settings_of_acceptance_of_another_type_are_refused(settings, found):
    with pytest.raises(ConfigError, match=rf"acceptance:[\s\S]*{found}[\s\S]*Change these"):
        k3.Acceptance("synthetic", **settings).require(3)


def test_a_list_of_rates_is_taken(session, first):
    rates = k3.Acceptance("synthetic", rates=[1, 0, 0])
    assert rates == k3.Acceptance("synthetic", rates=(1, 0, 0))
    assert len(k3.verify(session, first.state, [1, 2, 3], rates).new) == 2


def test_stable_names_are_the_documented_ones():
    page = (ROOT / "docs" / "reference" / "notebook.md").read_text()
    page = page.partition("## Stage outputs")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.M)) == sorted(k3.__all__)
    for name in k3.__all__:
        assert inspect.getdoc(getattr(k3, name)), name


@pytest.mark.slow
def test_the_example_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "tutorial.md", "exec"), {})
    shape, good, broken = capsys.readouterr().out.splitlines()
    assert shape.startswith("(3, ") and good == "True" and "injected layer01" in broken


def test_torch_comes_only_with_what_needs_it():
    tree = ast.parse(inspect.getsource(k3))
    top = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert not {m for m in top if m and m.split(".")[0] in ("torch", "torch_ref")}
    assert "parity.pair" not in top and "parity.driver" not in top

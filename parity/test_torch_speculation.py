"""Checks the PyTorch reference of speculative decoding: draft, acceptance rules, whole loop.

The draft is compared with recorded numbers in `golden/dspark_tiny16`. The rules are compared with
hand-made examples and, by exact enumeration over small vocabularies, with the distribution of the
target. The loop is compared with plain decoding on a small random pair, for every accepted count.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jax_impl.make_tiny import make_checkpoint
from torch_ref import ops, speculation
from torch_ref.draft import Draft
from torch_ref.draft_config import DraftConfig, rope_frequencies, rope_multipliers
from torch_ref.loader import Shards
from torch_ref.model import Model, greedy
from torch_ref.numerics import Numerics, linear
from torch_ref.speculation import (
    Enumeration,
    Noise,
    Plan,
    Rule,
    Sampling,
    SpeculativeLoop,
    accept,
    enumerate_step,
    generate,
    plan,
    process,
    target_joint,
)

GOLDEN = Path(__file__).parent / "golden"
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SETTINGS = [Numerics(t, profile=p) for t in (F64, F32, BF16) for p in ("H", "V")]
ONE = Sampling(temperature=1.0)
STANDARD, BLOCK, GREEDY = Rule("standard"), Rule("block"), Rule("greedy")

# Base logits of the draft, largest error at a standard deviation of 2.9. float64: sum order only,
# measured 2e-14. float32: the recording's own float32 run deviates 1.3e-5.
LOGITS = {F64: 1e-12, F32: 1e-4}
# bfloat16, root mean square; the recording's own bf16 run deviates 0.047, ours 0.03 to 0.05.
BF16_RMS = 0.15
# Inner streams (values up to 10) are recorded as float32 of the float64 run.
STREAMS = {F64: 1e-6, F32: 1e-4}
# Printed examples carry six decimals; printed frequencies nine significant digits.
PRINTED, PRINTED_RELATIVE = 1e-6, 2e-9
# Sums of products of probabilities in float64.
EXACT = 1e-12
# States and logits in float64 after windows of other lengths: sums are ordered differently (1e-15
# per operation) and the layers amplify it; a rejected token that stays moves them by more than 0.1.
STATE = 1e-10


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keeps the sum order of a run independent of the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def error(found, expected) -> float:
    found, expected = (torch.as_tensor(x, dtype=F64) for x in (found, expected))
    return float((found - expected).abs().max())


# --- the draft against recorded numbers ---


@cache
def recorded():
    where = GOLDEN / "dspark_tiny16"
    return (
        load_file(where / "golden.safetensors"),
        json.loads((where / "golden.json").read_text())["cases"],
    )


@cache
def golden_draft(nm: Numerics) -> Draft:
    target = Model.load(GOLDEN / "model_tiny16", nm)
    return Draft.load(GOLDEN / "dspark_tiny16", target, nm)


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("nm", SETTINGS, ids=lambda nm: f"{nm.dtype}-{nm.profile}"[6:])
def test_recorded_block(nm, case):
    tensors, cases = recorded()
    draft, state, streams = golden_draft(nm), golden_draft(nm).new_state(), {}
    g = {n.removeprefix(f"case{case}."): x for n, x in tensors.items()}
    draft.write_context(g["taps"][:10], state)
    draft.write_context(g["taps"][10:], state)
    out = draft.propose(cases[case]["anchor_id"], len(g["taps"]), state, 7, record=streams)
    assert out.ids.tolist() == g["draft_ids"].tolist() == g["bf16_draft_ids"].tolist()
    if nm.dtype == BF16:
        assert (out.base_logits.double() - g["base_logits_f64"]).square().mean() < BF16_RMS**2
        return
    assert error(out.base_logits, g["base_logits_f64"]) < LOGITS[nm.dtype]
    assert error(out.logits, g["logits_f64"]) < LOGITS[nm.dtype]
    inner = {"final_hidden": out.hidden, "context": draft.context(g["taps"])}
    for i, rows in enumerate(state.rows):
        rank = draft.config.kv_lora_rank
        inner[f"layers.{i}.context_latent"] = rows[:, :rank]
        inner[f"layers.{i}.context_k_pe"] = rows[:, rank:]
        inner[f"layers.{i}.hidden_out"] = streams[f"layers.{i}.hidden_out"]
    for name, value in inner.items():
        assert error(value, g[name]) < STREAMS[nm.dtype], name


def test_recorded_taps():
    tensors, _ = recorded()
    draft = golden_draft(SETTINGS[0])
    ids = load_file(GOLDEN / "model_tiny16" / "golden.safetensors")["seq_ids"][:28]
    _, taps = draft.target_pass(ids, draft.target.new_state())
    assert error(taps, tensors["case1.taps"]) < STREAMS[F64]
    assert error(taps[:24], tensors["case0.taps"]) < STREAMS[F64]


# --- properties of the draft ---


def fields() -> dict:
    """The configuration file of the recorded draft."""
    return json.loads((GOLDEN / "dspark_tiny16" / "config.json").read_text())


def variant(**changes) -> Draft:
    """The recorded draft in float64 with other fields in its configuration.

    `fc_norm` and `aux_hidden_stream` are set behind the file, which may not ask for them.
    """
    base = golden_draft(SETTINGS[0])
    behind = {k: v for k, v in changes.items() if k in ("fc_norm", "aux_hidden_stream")}
    data = fields() | {k: v for k, v in changes.items() if k not in behind}
    config = dataclasses.replace(DraftConfig.from_dict(data, base.target.config), **behind)
    tensors = dict(Shards(GOLDEN / "dspark_tiny16"))
    if not config.enable_confidence_head:
        tensors = {n: x for n, x in tensors.items() if not n.startswith("confidence_head.")}
    for i, _ in enumerate(config.target_layer_ids if config.fc_norm else ()):
        tensors[f"fc_norm.{i}.weight"] = torch.linspace(0.5, 1.5, config.target_hidden_size) + i
    return Draft(config, tensors, base.target, SETTINGS[0])


def block(draft: Draft, k: int, taps=None):
    tensors, cases = recorded()
    taps = tensors["case0.taps"] if taps is None else taps
    state = draft.new_state()
    draft.write_context(taps, state)
    return draft.propose(cases[0]["anchor_id"], len(taps), state, k)


def test_block_is_not_causal_unless_the_file_says_so():
    both = golden_draft(SETTINGS[0])
    assert error(block(both, 7).base_logits[:3], block(both, 3).base_logits) > 0.1
    causal = variant(non_causal=False)
    assert error(block(causal, 7).base_logits[:3], block(causal, 3).base_logits) < EXACT
    assert error(block(causal, 7).base_logits[6], block(both, 7).base_logits[6]) > 1e-3


def test_window_hides_older_context():
    taps, draft = recorded()[0]["case0.taps"], variant(sliding_window=5)
    changed = torch.cat([taps[:-5] + 1, taps[-5:]])
    assert error(block(draft, 7, changed).logits, block(draft, 7).logits) == 0
    changed[-5] += 1
    assert error(block(draft, 7, changed).logits, block(draft, 7).logits) > 1e-3
    assert error(block(draft, 7).logits, block(golden_draft(SETTINGS[0]), 7).logits) > 1e-3


def test_norm_per_tap():
    draft, taps = variant(fc_norm=True), recorded()[0]["case0.taps"].double()
    normed = []
    for i, part in enumerate(taps.split(128, dim=-1)):
        weight = (torch.linspace(0.5, 1.5, 128) + i).double()
        normed.append(part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    plain = golden_draft(SETTINGS[0])
    assert error(draft.context(taps), plain.context(torch.cat(normed, dim=-1))) < EXACT
    assert error(draft.context(taps), plain.context(taps)) > 0.1


def test_mixture_stream_is_that_of_the_next_consumer():
    draft = variant(aux_hidden_stream="attn_res", target_layer_ids=[2, 3, 8])
    model = draft.target
    _, taps = draft.target_pass(range(3, 12), model.new_state())
    prefix, snapshots, state = model.weights.embed(torch.arange(3, 12)), [], model.new_state()
    mixes = []
    for layer in range(9):
        prefix, snapshots = model.layer(layer, prefix, snapshots, state)
        if layer in (2, 3):
            w, site = model.weights.layer(layer + 1), "self_attention"
            names = (f"{site}_res_norm.weight", f"{site}_res_proj.weight")
            weights = [w[n] for n in names]
        else:
            names = (f"model.output_attn_res_{n}.weight" for n in ("norm", "proj"))
            weights = [model.weights.root(n) for n in names]
        if layer in (2, 3, 8):
            mixes.append(ops.attn_res(prefix, snapshots, *weights, 1e-5, SETTINGS[0]))
    assert error(taps, torch.cat(mixes, dim=-1)) < EXACT


def test_markov_bias_and_confidence():
    draft, stored = golden_draft(SETTINGS[0]), Shards(GOLDEN / "dspark_tiny16")
    out = block(draft, 7)
    w1, w2 = (stored[f"markov_head.markov_w{i}.weight"].double() for i in (1, 2))
    assert error(out.logits - out.base_logits, w1[out.previous] @ w2.T) < EXACT
    assert out.previous.tolist() == [recorded()[1][0]["anchor_id"], *out.ids[:-1].tolist()]
    weight, bias = (stored[f"confidence_head.proj.{n}"].double() for n in ("weight", "bias"))
    x = torch.cat([out.hidden, w1[out.previous]], dim=-1)
    assert error(draft.confidence(out), torch.sigmoid(x @ weight[0] + bias)) < EXACT


def test_drawn_drafts_and_their_logits():
    draft = golden_draft(SETTINGS[0])
    tensors, cases = recorded()
    state = draft.new_state()
    draft.write_context(tensors["case0.taps"], state)
    noise = gumbel(torch.Generator().manual_seed(1), 7, 512)
    out = draft.propose(cases[0]["anchor_id"], 24, state, 7, sampling=Sampling(2.0), noise=noise)
    assert out.ids.tolist() == (out.logits / 2.0 + noise).argmax(-1).tolist()
    assert out.ids.tolist() != tensors["case0.draft_ids"].tolist()
    assert error(out.base_logits, tensors["case0.base_logits_f64"]) < LOGITS[F64]
    with pytest.raises(ValueError, match="noise"):
        draft.propose(5, 24, state, 7, sampling=Sampling(2.0))


def test_context_must_reach_the_anchor():
    draft, state = golden_draft(SETTINGS[0]), golden_draft(SETTINGS[0]).new_state()
    draft.write_context(recorded()[0]["case0.taps"], state)
    with pytest.raises(ValueError, match="anchor at 25, but the context ends before 24"):
        draft.propose(5, 25, state, 7)
    with pytest.raises(ValueError, match=r"expected \[T, 384\]"):
        draft.write_context(torch.zeros(2, 128), state)


# --- configuration and tensors of the draft ---


def released() -> dict:
    """The published configuration, by its fields."""
    sizes = {
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "num_target_layers": 5,
        "target_layer_ids": [2, 23, 47, 71, 89],
        "target_hidden_size": 7168,
        "target_num_hidden_layers": 93,
        "mask_token_id": 163837,
        "markov_rank": 256,
    }
    return fields() | sizes


class Released:
    """Stands in for the configuration of the released target."""

    hidden_size, vocab_size, num_hidden_layers = 7168, 163840, 93


def test_released_sizes():
    config = DraftConfig.from_dict(released(), Released)
    shapes = [spec.shape for spec in config.specs().values()]
    total = sum(math.prod(shape) for shape in shapes)
    assert (len(shapes) + 1, total) == (68, 2_387_907_841)  # one more is the embedding copy
    assert total + 163840 * 7168 == 3_562_312_961


def test_released_rotation():
    rope = released()["rope_parameters"]
    found = rope_frequencies(rope, 64)
    printed = {
        0: 1.0,
        1: 0.713111085,
        8: 0.0668740305,
        15: 6.27130338e-3,
        16: 4.07828307e-3,
        24: 6.20229892e-5,
        31: 8.76441291e-7,
    }
    for j, value in printed.items():
        assert float(found[j]) == pytest.approx(value, rel=PRINTED_RELATIVE), j
    amplitude, factor = rope_multipliers(rope)
    assert amplitude == 1 and 192**-0.5 * factor == pytest.approx(0.13086080, rel=1e-7)
    short = rope | {"original_max_position_embeddings": 128}  # the lower bound is clamped to 0
    assert float(rope_frequencies(short, 64)[0]) == 1
    plain = rope_frequencies({"rope_type": "default", "rope_theta": 50000}, 64)
    assert error(plain, [50000 ** (-2 * j / 64) for j in range(32)]) < EXACT


def test_rotation_turns_neighbours_by_the_distance():
    draft = golden_draft(SETTINGS[0])
    x, y = torch.randn(2, 1, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    at = [draft.rotate(v, torch.tensor([p])) for v, p in ((x, 3), (y, 10), (x, 1003), (y, 1010))]
    assert float((at[0] * at[1]).sum() - (at[2] * at[3]).sum()) == pytest.approx(0, abs=EXACT)
    unit = draft.rotate(torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]]).double(), torch.tensor([1]))
    assert unit[0, :2].tolist() == pytest.approx([math.cos(1), math.sin(1)])


def test_refused_configurations():
    target = golden_draft(SETTINGS[0]).target.config
    data = fields()
    broken = {k: v for k, v in data.items() if k not in ("markov_rank", "v_head_dim")}
    broken |= {"qk_norm": True, "mla_use_nope": True}
    broken["rope_parameters"] = {
        k: v for k, v in data["rope_parameters"].items() if k != "mscale"
    } | {"truncate": True}
    with pytest.raises(ValueError) as told:
        DraftConfig.from_dict(broken, target)
    names = ("v_head_dim", "markov_rank", "rope_parameters.mscale", "qk_norm", "mla_use_nope")
    for name in (*names, "rope_parameters.truncate"):
        assert name in str(told.value)
    changes = {
        "vocab_size": 256,
        "target_num_hidden_layers": 8,
        "target_layer_ids": [4, 1, 9],
        "rope_theta": 10000,
    }
    with pytest.raises(ValueError) as told:
        DraftConfig.from_dict(data | changes, target)
    for name in (*changes, "draft_vocab_size"):
        assert name in str(told.value)
    for name, value in (("aux_hidden_stream", "attn_res"), ("fc_norm", True), ("surprise", 1)):
        with pytest.raises(ValueError, match=name):
            DraftConfig.from_dict(data | {name: value}, target)


def test_refused_tensors(tmp_path):
    base = golden_draft(SETTINGS[0])
    assert base.skipped == ("embed_tokens.weight",)
    tensors = dict(Shards(GOLDEN / "dspark_tiny16"))
    del tensors["embed_tokens.weight"]  # may be absent
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields()))
    assert Draft.load(tmp_path, base.target, SETTINGS[0]).skipped == ()
    del tensors["context_norm.weight"]
    tensors |= {"fc.weight": torch.zeros(1), "final_norm.weight": torch.zeros(3)}
    with pytest.raises(ValueError) as told:
        Draft(base.config, tensors, base.target, SETTINGS[0])
    for text in ("context_norm.weight is missing", "fc.weight is unknown", "final_norm.weight has"):
        assert text in str(told.value)
    headless = variant(enable_confidence_head=False)
    with pytest.raises(ValueError, match="no confidence head"):
        headless.confidence(block(headless, 2))


# --- processing ---


def log(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64).log()


def shares(logits, **settings) -> list[float]:
    settings = {"temperature": 1.0} | settings
    return torch.softmax(process(logits, Sampling(**settings)), dim=-1).tolist()


def test_filters_in_their_order():
    row = log([0.5, 0.25, 0.125, 0.125])
    # After min-p the first token holds 2/3, so top-p drops the second, which else would stay.
    assert shares(row, min_p=0.3, top_p=0.6) == [1, 0, 0, 0]
    assert shares(row, top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # The same with top-k before top-p.
    assert shares(row, top_k=2, top_p=0.6) == [1, 0, 0, 0]
    # At temperature 2 the last tokens have half the largest probability: above min-p.
    assert min(shares(row, temperature=2.0, min_p=0.3)) > 0
    assert shares(row, min_p=0.3) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # Ties: all that equal the k-th stay; top-p takes the lower id first.
    assert min(shares(row, top_k=3)) == pytest.approx(0.125)
    assert shares(row, top_p=0.8) == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0])
    assert shares(row, top_p=1e-9) == [1, 0, 0, 0] == shares(row, min_p=1.0)
    assert process(row, ONE).dtype == F64 and process(row.bfloat16(), ONE).dtype == F32


def test_refused_settings():
    with pytest.raises(ValueError) as told:
        Sampling(temperature=-1, min_p=2, top_k=0, top_p=0)
    for name in ("temperature", "min_p", "top_k", "top_p"):
        assert name in str(told.value)
    with pytest.raises(ValueError, match="temperature 0"):
        process(torch.zeros(3), Sampling())


def test_filters_leave_the_draft_alone():
    target, draft = log([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]), log([[0.5, 0.25, 0.25]])
    settings = Sampling(temperature=1.0, top_k=2)
    noise = torch.zeros(2, 3, dtype=F64)
    # Token 1: 1/3 after the filter against 1/4, accepted for certain; token 2 is filtered out.
    for token, expected in ((1, 1), (2, 0)):
        out = accept(
            STANDARD, target, [token], settings, draft_logits=draft, uniforms=[0.99], noise=noise
        )
        assert out.accepted == expected
    assert out.last.tolist() == pytest.approx([2 / 3, 1 / 3, 0])


# --- worked examples of the rules ---

T = log(
    [[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.4, 0.1], [0.05, 0.15, 0.3, 0.5]]
)
D = log([[0.2, 0.5, 0.1, 0.2], [0.5, 0.25, 0.15, 0.1], [0.1, 0.3, 0.2, 0.4]])
N = torch.tensor(
    [[0.1, -0.2, 0.3, 1.5], [0.4, 0, -0.5, 0.9], [1.2, 0.7, -0.1, 0.2], [0, 0.25, 0.6, -0.3]],
    dtype=F64,
)
ROWS = {f"T{i}": row.exp().tolist() for i, row in enumerate(T)}

STANDARD_EXAMPLES = {
    "S1": ([1, 0, 2], [0.55, 0.15, 0.99], [1, 0, 2, 2], "T3"),
    "S2": ([1, 0, 2], [0.55, 0.25, 0.99], [1, 1], [0, 0.777778, 0, 0.222222]),
    "S3": ([1, 0, 2], [0.65, 0.01, 0.01], [0], [0.666667, 0, 0.333333, 0]),
    "S4": ([0, 3, -1], [0.99, 0.99, 0.01], [0, 3, 0], "T2"),
    "S5": ([3, 1, 3], [0.45, 0.95, 0.30], [3, 1, 0], [0.428571, 0, 0.571429, 0]),
    "S6": ([-1, 0, 2], [0.01, 0.01, 0.01], [3], "T0"),
}
STANDARD_POINT = {
    "O1": ([0, 1, 2], [0.35, 0.55, 0.38], [0, 1, 2, 2], "T3"),
    "O2": ([0, 1, 2], [0.35, 0.65, 0.10], [0, 3], [0.25, 0, 0.25, 0.5]),
    "O3": ([3, 1, 2], [0.20, 0.10, 0.10], [0], [0.444444, 0.333333, 0.222222, 0]),
}
BLOCK_EXAMPLES = {
    "B1": ([1, 0, 2], [0.2, 0.5, 0.2], [1, 0, 2, 2], "T3"),
    "B2": ([1, 0, 2], [0.2, 0.5, 0.3], [1, 1], [0, 0.846154, 0, 0.153846]),
    "B3": ([1, 0, 2], [0.3, 0.1, 0.5], [0], [0.666667, 0, 0.333333, 0]),
    "B4": ([0, 1, 2], [0.999, 0.999, 0.999], [0, 1, 2, 2], "T3"),
    "B5": ([2, 1, 3], [0.9, 0.9, 0.5], [2, 1, 0], [0.428571, 0, 0.571429, 0]),
    "B6": ([3, 0, 2], [0.99, 0.99, 0.15], [3, 0, 2, 2], "T3"),
    "B7": ([1, 1, -1], [0.10, 0.55, 0.01], [1, 1, 0], "T2"),
    "B8": ([1, 1, -1], [0.95, 0.65, 0.01], [1, 1, 0], "T2"),
}
# What the standard rule does with the same drafts and uniforms.
BLOCK_AS_STANDARD = {
    "B1": [1, 1],
    "B2": [1, 1],
    "B3": [1, 0, 2, 2],
    "B4": [0, 1, 2, 2],
    "B5": [2, 1, 0],
    "B6": [0],
    "B7": [1, 1, 0],
}
BLOCK_THRESHOLDS = {
    "B1": [0.245283, 0, 0.24],
    "B4": [1, 1, 1],
    "B5": [1, 1, 0.25],
    "B6": [0.090909, 0, 0.2],
    "B7": [0.245283, 1],
}
BLOCK_POINT = {
    "C1": ([0, 1, 2], [0.25, 0.20, 0.09], [0, 1, 2, 2], "T3"),
    "C2": ([0, 1, 2], [0.20, 0.20, 0.50], [0, 3], [0.25, 0, 0.25, 0.5]),
    "C3": ([0, 1, 2], [0.25, 0.20, 0.50], [3], [0, 0.5, 0.333333, 0.166667]),
}


def decide(rule, drafts, uniforms, *, point=False, sampling=ONE, noise=N):
    return accept(
        rule,
        T,
        drafts,
        sampling,
        draft_logits=None if point else D,
        uniforms=uniforms,
        noise=noise,
    )


def check(out, tokens, last):
    assert (out.accepted, out.tokens) == (len(tokens) - 1, tokens)
    expected = ROWS[last] if isinstance(last, str) else last
    assert out.last.tolist() == pytest.approx(expected, abs=PRINTED)


@pytest.mark.parametrize("name", STANDARD_EXAMPLES)
def test_standard_examples(name):
    drafts, uniforms, tokens, last = STANDARD_EXAMPLES[name]
    check(decide(STANDARD, drafts, uniforms), tokens, last)


@pytest.mark.parametrize("name", [*STANDARD_POINT, *BLOCK_POINT])
def test_point_mass_examples(name):
    rule = STANDARD if name in STANDARD_POINT else BLOCK
    drafts, uniforms, tokens, last = (STANDARD_POINT | BLOCK_POINT)[name]
    check(decide(rule, drafts, uniforms, point=True), tokens, last)
    if rule is BLOCK:
        found = plan(BLOCK, T.exp(), None, drafts).threshold
        assert found == pytest.approx([0.210526, 0.159292, 0.096], abs=PRINTED)


@pytest.mark.parametrize("name", BLOCK_EXAMPLES)
def test_block_examples(name):
    drafts, uniforms, tokens, last = BLOCK_EXAMPLES[name]
    check(decide(BLOCK, drafts, uniforms), tokens, last)
    if name in BLOCK_AS_STANDARD:
        assert decide(STANDARD, drafts, uniforms).tokens == BLOCK_AS_STANDARD[name]
    else:
        assert decide(STANDARD, drafts, uniforms).accepted == 0
    if name in BLOCK_THRESHOLDS:
        found = plan(BLOCK, T.exp(), D.exp(), drafts).threshold
        assert found == pytest.approx(BLOCK_THRESHOLDS[name], abs=PRINTED)


def test_block_without_a_denominator():
    assert plan(BLOCK, T[:3].exp(), T[:2].exp(), [1, 2]).threshold == [1, 1]


def test_block_conditioned_on_one_draft():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], dtype=F64)
    draft = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], dtype=F64)
    found = plan(BLOCK, target, draft, [0, 1])
    assert found.threshold == pytest.approx([0.3548387, 0.4464286], abs=PRINTED)
    assert found.probabilities() == pytest.approx([0.357143, 0.196429, 0.446429], abs=PRINTED)
    assert found.last[0].tolist() == pytest.approx([0, 0.5, 0.5])
    assert found.last[1].tolist() == pytest.approx([0.2727273, 0, 0.7272727], abs=PRINTED)
    found = plan(STANDARD, target, draft, [0, 1])
    assert found.probabilities() == pytest.approx([0.285714, 0.267857, 0.446429], abs=PRINTED)
    assert found.last[1].tolist() == pytest.approx([1 / 3, 0, 2 / 3])


@pytest.mark.parametrize("rule", [GREEDY, STANDARD, BLOCK], ids=lambda r: r.name)
def test_greedy_examples(rule):
    rows = torch.tensor(
        [[0.1, 2, -1, 0.5], [1.5, 0.2, 1.4, -0.3], [0, 0, 3, 1], [0.3, 0.9, 0.9, -2]]
    )
    examples = {
        (1, 0, 2): [1, 0, 2, 1],
        (1, 2, 2): [1, 0],
        (3, 0, 2): [1],
        (1, -1, 2): [1, 0],
        (): [1],
    }
    for drafts, tokens in examples.items():
        out = accept(rule, rows[: len(drafts) + 1], drafts, Sampling())
        assert (out.accepted, out.tokens) == (len(tokens) - 1, tokens)
    rows[0, 1] = float("nan")
    assert accept(rule, rows, [1, 0, 2], Sampling()).tokens == [3]


def test_race_of_exponentials():
    noise = -log([0.7, 0.2, 1.5, 0.4]).expand(4, 4)
    for uniforms, full, point in (
        ([0.55, 0.15, 0.99], None, [0]),
        ([0.55, 0.25, 0.99], [1, 1], [0]),
        ([0.65, 0.01, 0.01], [0], [0]),
    ):
        out = decide(STANDARD, [1, 0, 2], uniforms, noise=noise)
        assert out.accepted == 3 if full is None else out.tokens == full
        assert decide(STANDARD, [1, 0, 2], uniforms, point=True, noise=noise).tokens == point
    for draft, candidates in ((D.exp(), [0, 1, 0]), (None, [0, 1, 1])):
        last = plan(STANDARD, T.exp(), draft, [1, 0, 2]).last
        assert (last.log() + noise)[:3].argmax(-1).tolist() == candidates


# --- synthetic acceptance ---


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (1.0, 3, [0, 0, 0]),
        (1.25, 3, [0.25, 0, 0]),
        (2.0, 3, [1, 0, 0]),
        (3.5, 7, [1, 1, 0.5, 0, 0, 0, 0]),
        (5.3, 7, [1, 1, 1, 1, 0.2999999999999998, 0, 0]),
        (3.78, 7, [1, 1, 0.78, 0, 0, 0, 0]),
        (4.0, 3, [1, 1, 1]),
        (8.0, 7, [1] * 7),
        (6.0, 7, [1, 1, 1, 1, 1, 0, 0]),
    ],
)
def test_synthetic_schedule(length, k, rates):
    rule = Rule("synthetic", length=length)
    assert rule.unconditional(k) == pytest.approx(rates, abs=1e-15)
    assert rule.conditional(k) == pytest.approx(rates, abs=1e-15)
    assert 1 + sum(rule.unconditional(k)) == pytest.approx(length)


GIVEN = Rule("synthetic", rates=(0.9, 0.72, 0.36))
SYNTHETIC = {
    "Y1": ([3, 3, 3], [0.89, 0.79, 0.49], [3, 3, 3, 3], ([3, 3, 3, 2], "T3"), ([3, 3, 3, 2], "T3")),
    "Y2": (
        [3, 3, 3],
        [0.89, 0.81, 0.10],
        [3, 1],
        ([3, 1], [0, 0.777778, 0, 0.222222]),
        ([3, 1], [0.125, 0.75, 0.125, 0]),
    ),
    "Y3": (
        [1, 0, 1],
        [0.5, 0.5, 0.7],
        [1, 0, 2],
        ([1, 0, 0], [0.428571, 0, 0.571429, 0]),
        ([1, 0, 0], [0.333333, 0, 0.533333, 0.133333]),
    ),
    "Y4": ([3, -1, 0], [0.5, 0.0001, 0.1], [3, 1], ([3, 1], "T1"), ([3, 1], "T1")),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_examples(name):
    drafts, uniforms, at_zero, full, point = SYNTHETIC[name]
    assert decide(GIVEN, drafts, uniforms, sampling=Sampling()).tokens == at_zero
    check(decide(GIVEN, drafts, uniforms), *full)
    check(decide(GIVEN, drafts, uniforms, point=True), *point)


def test_synthetic_length_six_is_six():
    rule, rows = Rule("synthetic", length=6), torch.zeros(8, 5)
    for uniforms in ([1e-9] * 7, [0.99999994] * 7, torch.rand(7).clamp(min=1e-6)):
        out = accept(rule, rows, [1, 2, 3, 4, 1, 2, 3], Sampling(), uniforms=uniforms)
        assert out.tokens == [1, 2, 3, 4, 1, 0]
    label = rule.describe(7)
    for text in ("synthetic acceptance", "length 6", "7 drafts", "minimum-variance", "0.714286"):
        assert text in label


def test_synthetic_with_an_empty_residual_draws_from_the_row():
    certain = log([[1, 0], [0.5, 0.5]])
    noise = torch.zeros(2, 2, dtype=F64)
    rule = Rule("synthetic", length=1)
    out = accept(rule, certain, [0], ONE, uniforms=[0.5], noise=noise)
    assert out.last.tolist() == [1, 0] and out.accepted == 0


def test_refused_rules():
    for length in (0.5, 9.0):
        with pytest.raises(ValueError, match=rf"{length} with 7 drafts must lie in 1\.\.8"):
            Rule("synthetic", length=length).unconditional(7)
    for rates in ((0.5, 0.6), (1.1, 1.0), (0.5,)):
        with pytest.raises(ValueError, match="never growing"):
            Rule("synthetic", rates=rates).unconditional(2)
    for fields in ({}, {"length": 2.0, "rates": (0.5,)}):
        with pytest.raises(ValueError, match="exactly one"):
            Rule("synthetic", **fields)
    with pytest.raises(ValueError, match="neither"):
        Rule("block", length=2.0)
    with pytest.raises(ValueError, match="not one of"):
        Rule("blocks")
    with pytest.raises(ValueError, match="needs temperature 0"):
        decide(GREEDY, [1, 0, 2], [0.5] * 3)
    with pytest.raises(ValueError, match="outside"):
        decide(STANDARD, [1, 0, 2], [0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="needs uniforms"):
        decide(BLOCK, [1, 0, 2], None)
    with pytest.raises(ValueError, match="3 target rows for 3 drafts"):
        accept(STANDARD, T[:3], [1, 0, 2], Sampling())


# --- exact enumeration ---


@pytest.mark.parametrize("scan_all", [False, True])
def test_probabilities_are_those_of_the_uniforms(scan_all):
    ready = Plan([0.25, 0.75, 0.5], not scan_all, scan_all, T)
    grid = [(i + 0.5) / 4 for i in range(4)]  # the thresholds are multiples of the spacing
    counts = [0] * 4
    for uniforms in itertools.product(grid, repeat=3):
        counts[ready.accepted(uniforms)] += 1 / 64
    assert ready.probabilities() == pytest.approx(counts, abs=EXACT)


def by_context(seed: int, size: int):
    """A distribution that depends on every token on the left."""

    @cache
    def at(context: tuple[int, ...]) -> torch.Tensor:
        key = seed
        for token in context:
            key = key * (size + 1) + token + 1
        draws = torch.rand(size, dtype=F64, generator=torch.Generator().manual_seed(key))
        return draws.square() / draws.square().sum()

    return at


def distance(found: Enumeration, target_at, k: int) -> float:
    """Total variation between the first K + 1 tokens and the target's."""
    return 0.5 * float((found.joint - target_joint(target_at, k + 1)).abs().sum())


def test_two_tokens():
    target, draft = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    target, draft = target / target.sum(), draft / draft.sum()
    for rule, mean in ((STANDARD, 10 / 9), (BLOCK, 11 / 9)):
        found = enumerate_step(rule, lambda _: target, lambda _: draft, 2)
        assert found.mean_accepted == pytest.approx(mean, abs=1e-7)
        first_two = found.joint.sum(-1).flatten().tolist()
        assert first_two == pytest.approx([1 / 9, 2 / 9, 2 / 9, 4 / 9], abs=1e-7)
        assert distance(found, lambda _: target, 2) < EXACT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("point", [False, True], ids=["drawn", "point"])
def test_distribution_of_the_target_is_kept(seed, point):
    target, draft = by_context(seed, 3), by_context(seed + 100, 3)
    means = {}
    for rule in (STANDARD, BLOCK):
        found = enumerate_step(rule, target, draft, 3, point=point)
        assert distance(found, target, 3) < EXACT
        assert float(found.accepted.sum()) == pytest.approx(1, abs=EXACT)
        means[rule.name] = found.mean_accepted
    if point:  # point masses leave nothing to gain
        assert means["block"] == pytest.approx(means["standard"], abs=EXACT)
    else:
        assert means["block"] > means["standard"]


def test_accepted_counts_of_the_tables():
    tables = {
        ("standard", 1): [0.3, 0.7],
        ("standard", 2): [0.3, 0.315, 0.385],
        ("standard", 3): [0.3, 0.315, 0.13475, 0.25025],
        ("block", 1): [0.3, 0.7],
        ("block", 2): [0.3, 0.21, 0.49],
        ("block", 3): [0.3, 0.21, 0.1285, 0.3615],
    }
    for (name, k), expected in tables.items():
        found = enumerate_step(Rule(name), lambda c: T[len(c)].exp(), lambda c: D[len(c)].exp(), k)
        assert found.accepted.tolist() == pytest.approx(expected, abs=EXACT)
        assert distance(found, lambda c: T[len(c)].exp(), k) < EXACT


def test_synthetic_counts_follow_the_rates():
    target, draft = by_context(1, 3), by_context(2, 3)
    found = enumerate_step(Rule("synthetic", length=2.5), target, draft, 3)
    assert found.accepted.tolist() == pytest.approx([0, 0.5, 0.5, 0], abs=EXACT)
    assert distance(found, target, 3) > 0.01  # forced acceptance changes the text


def early_end(ready: Plan, *_) -> Plan:
    return ready._replace(scan_all=False)


def other_residual(ready: Plan, *args) -> Plan:
    return ready._replace(last=plan(STANDARD, *args).last)


@pytest.mark.parametrize("wrong", [early_end, other_residual], ids=lambda f: f.__name__)
def test_enumeration_finds_wrong_block_rules(wrong, monkeypatch):
    monkeypatch.setattr(speculation, "plan", lambda rule, *args: wrong(plan(rule, *args), *args))
    target = by_context(1, 3)
    assert distance(enumerate_step(BLOCK, target, by_context(2, 3), 3), target, 3) > 1e-3


# --- the loop on a small random pair ---

PROMPT = list(range(40, 56))
STEPS = {7: 60, 3: 15, 1: 25}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    where = tmp_path_factory.mktemp("pair") / "pair"
    make_checkpoint(where, "tiny", seed=2)
    target = Model.load(where / "target", SETTINGS[0])
    return target, Draft.load(where / "draft", target, SETTINGS[0])


@pytest.fixture(scope="module")
def plain(pair):
    """Plain greedy text, long enough for every test of this file."""
    return greedy(pair[0], PROMPT, 300)[0].tolist()


def gumbel(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return -(
        -torch.rand(*shape, dtype=F64, generator=generator).clamp(1e-12, 1 - 1e-12).log()
    ).log()


def noise_by_position(vocabulary: int, seed: int = 0) -> Noise:
    def source(salt: int, position: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * seed + 10 * position + salt)

    return Noise(
        lambda position, k: torch.rand(k, dtype=F64, generator=source(0, position)).clamp(1e-9),
        lambda position, rows: torch.stack(
            [gumbel(source(1, position + i), vocabulary) for i in range(rows)]
        ),
        lambda position, k: torch.stack(
            [gumbel(source(2, position + i), vocabulary) for i in range(k)]
        ),
    )


@pytest.mark.parametrize("k", STEPS)
def test_greedy_text_is_plain_text(pair, plain, k):
    target, draft = pair
    found = generate(target, draft, PROMPT, STEPS[k], k, GREEDY)
    assert len(found.ids) == 1 + sum(found.accepted) + STEPS[k]
    shared = min(len(found.ids), len(plain))
    assert shared > STEPS[k] and found.ids[:shared] == plain[:shared]
    assert min(found.histogram(k)) > 0, found.histogram(k)  # every count 0..K occurs
    assert found.label == f"greedy acceptance, {k} drafts"


def assert_committed(loop: SpeculativeLoop, text: list[int]) -> None:
    """Both states are those of a fresh pass over the prompt and all tokens before the anchor."""
    target, draft = loop.draft.target, loop.draft
    state, context = target.new_state(), draft.new_state()
    _, taps = draft.target_pass([*PROMPT, *text[:-1]], state)
    draft.write_context(taps, context)
    assert loop.position == state.position == context.position == loop.draft_state.position
    found = loop.target_state
    pairs = [*zip(found.kda_state, state.kda_state, strict=True)]
    pairs += zip(found.conv_window, state.conv_window, strict=True)
    pairs += zip(found.kv_latent, state.kv_latent, strict=True)
    pairs += zip(loop.draft_state.rows, context.rows, strict=True)
    for a, b in pairs:
        assert a.shape == b.shape and error(a, b) < STATE


def test_every_accepted_count_commits_the_accepted_tokens(pair, plain):
    """Drafts are taken from the plain text up to a wanted count, then made wrong."""
    _, draft = pair
    loop = SpeculativeLoop(draft, PROMPT, 7, GREEDY)
    generator = torch.Generator().manual_seed(0)
    for wanted in (0, 7, 1, 6, 2, 5, 3, 4, 7, 0):
        done = len(loop.ids)
        ids = torch.randint(0, 384, (7,), generator=generator)
        ids[:wanted] = torch.tensor(plain[done : done + wanted], dtype=torch.long)
        if wanted < 7 and int(ids[wanted]) == plain[done + wanted]:
            ids[wanted] = (ids[wanted] + 1) % 384
        loop.proposal = loop.proposal._replace(ids=ids)
        old = loop.target_state.clone()
        out = loop.step()
        assert out.accepted == wanted and loop.ids == plain[: len(loop.ids)]
        assert_committed(loop, loop.ids)
    # What a loop without rollback would be left with: the tolerance above would not let it pass.
    draft.target.forward([plain[done - 1], *ids.tolist()], old)
    assert error(old.kda_state[0], loop.target_state.kda_state[0]) > 0.1


@pytest.mark.parametrize("rule", [STANDARD, BLOCK], ids=lambda r: r.name)
@pytest.mark.parametrize("drawn", [False, True], ids=["point", "drawn"])
def test_sampled_text(pair, rule, drawn):
    target, draft = pair
    settings = {
        "sampling": Sampling(temperature=0.8, min_p=0.01, top_k=50, top_p=0.95),
        "noise": noise_by_position(384),
        "draw_drafts": drawn,
    }
    loop = SpeculativeLoop(draft, PROMPT, 4, rule, **settings)
    counts = [loop.step().accepted for _ in range(6)]
    assert len(loop.ids) == 7 + sum(counts) and sum(counts) > 0
    assert_committed(loop, loop.ids)
    again = generate(target, draft, PROMPT, 6, 4, rule, **settings)
    assert (again.ids, again.accepted) == (loop.ids, counts)


def test_vanishing_temperature_is_greedy(pair, plain):
    target, draft = pair
    found = generate(
        target,
        draft,
        PROMPT,
        4,
        3,
        BLOCK,
        sampling=Sampling(temperature=1e-6),
        noise=noise_by_position(384),
        draw_drafts=True,
    )
    assert found.ids == plain[: len(found.ids)]


def test_synthetic_loop_gives_its_length(pair):
    target, draft = pair
    rule = Rule("synthetic", length=6)
    noise = noise_by_position(384)
    found = generate(target, draft, PROMPT, 3, 7, rule, noise=noise)
    assert found.accepted == [5, 5, 5] and len(found.ids) == 19
    assert found.label.startswith("synthetic acceptance, length 6, 7 drafts")
    with pytest.raises(ValueError, match=r"length 9 with 7 drafts must lie in 1\.\.8"):
        generate(target, draft, PROMPT, 3, 7, Rule("synthetic", length=9), noise=noise)
    with pytest.raises(ValueError, match="needs noise"):
        generate(target, draft, PROMPT, 3, 7, rule)


def test_draft_and_target_belong_together(pair):
    with pytest.raises(ValueError, match="another target"):
        generate(golden_draft(SETTINGS[0]).target, pair[1], PROMPT, 1, 3, GREEDY)


def test_head_is_the_targets(pair):
    target, draft = pair
    loop = SpeculativeLoop(draft, PROMPT, 3, GREEDY)
    head = target.weights.root("lm_head.weight")
    assert error(loop.proposal.base_logits, linear(loop.proposal.hidden, head, SETTINGS[0])) == 0

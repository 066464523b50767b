"""The drafter: configuration, weights, rotation, recorded outputs, what a block sees."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_impl import drafter
from jax_impl.backend import AUTO
from jax_impl.cache import Cache, StepInputs, make_cache
from jax_impl.checkpoint import CheckpointError
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig, Yarn
from jax_impl.draft_weights import (
    DraftWeights,
    abstract_draft_weights,
    draft_table,
    load_draft,
    open_draft,
)
from jax_impl.make_tiny import plan
from jax_impl.numerics import Numerics
from jax_impl.ops import yarn
from jax_impl.ops.draft import confidence
from jax_impl.params import Weights
from jax_impl.speculate import build_speculative_prefill
from jax_impl.stages.draft import combine
from jax_impl.static import DraftStatic, Static
from jax_impl.weights import checkpoint_tensors
from parity.driver import load

# fmt: off
RELEASED = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168,
    "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": False, "mla_use_output_gate": False,
    "vocab_size": 163840, "draft_vocab_size": 163840, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576, "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 32768,
        "rope_theta": 50000, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_target_layers": 5, "target_layer_ids": [2, 23, 47, 71, 89], "target_hidden_size": 7168,
    "target_num_hidden_layers": 93, "mask_token_id": 163837, "bos_token_id": 163584,
    "eos_token_id": 163586, "pad_token_id": 163839, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "_torchspec_version": "0.1.0",
}
# fmt: on


# ---- configuration ----


def test_the_released_configuration(golden_dir):
    c = DraftConfig.from_dict(RELEASED)
    assert c.target_layer_ids == (2, 23, 47, 71, 89)
    assert (c.non_causal, c.sliding_window, c.confidence_width) == (True, None, 7424)
    tensors = list(checkpoint_tensors(c, draft_table(c)))
    assert len(tensors) == 68 - 1  # all but the copy of the embedding
    assert sum(math.prod(part.shape) for _, part, _ in tensors) == 2_387_907_841
    per_layer = [p for name, p, _ in tensors if name.startswith("layers.3.")]
    assert sum(math.prod(p.shape) for p in per_layer) == 409_419_776
    c.require_target(ModelConfig.load(golden_dir / "k3_config.json"))
    local = abstract_draft_weights(c, 16)
    assert local.layer.q_b_proj.shape == (5, 4 * 192, 1536)
    assert local.root.context_proj.shape == (448, 35840)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"mla_use_nope": True}, ["mla_use_nope: found True, only False is implemented"]),
        (
            {"mla_use_output_gate": True, "surprise": 3, "hidden_size": None},
            [
                "mla_use_output_gate: found True",
                "surprise: unknown setting",
                "hidden_size: expected a number (int, below 2^31), found None",
                "3 setting(s)",
            ],
        ),
        ({"use_qk_norm": True}, ["use_qk_norm: unknown setting (True)"]),
        ({"draft_vocab_size": 32000}, ["draft_vocab_size: found 32000, only 163840"]),
        ({"target_layer_ids": []}, ["target_layer_ids: expected a list of layer numbers"]),
        ({"target_layer_ids": [2, 23]}, ["num_target_layers: found 5, only 2"]),
        ({"target_layer_ids": [2, 23, 71, 47, 89]}, ["expected ascending layers within 0..92"]),
        ({"target_layer_ids": [2, 23, 47, 71, 93]}, ["expected ascending layers within 0..92"]),
        ({"dspark_bonus_anchor": True}, ["dspark_bonus_anchor: found True"]),
        ({"sample_from_anchor": False}, ["sample_from_anchor: found False"]),
        ({"fc_norm": True}, ["fc_norm: found True"]),
        ({"aux_hidden_stream": "attn_res"}, ["aux_hidden_stream: found 'attn_res'"]),
        ({"markov_head_type": "gated"}, ["markov_head_type: found 'gated'"]),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            ["rope_parameters.rope_type: found 'linear'"],
        ),
        ({"rope_theta": 10000}, ["rope_theta: found 10000, only 50000.0"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads: found 8, only 64"]),
        ({"mask_token_id": 163840}, ["mask_token_id: found 163840"]),
        ({"sliding_window": 0}, ["sliding_window: expected null or a positive number"]),
        (
            {"enable_confidence_head": 1},
            ["enable_confidence_head: expected true or false, found 1"],
        ),
        ({"model_type": "kimi_k3"}, ["model_type is 'kimi_k3', expected 'k3_dspark'"]),
    ],
)
def test_configurations_that_are_refused(changes, messages):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(RELEASED | changes)
    for message in messages:
        assert message in str(caught.value)


def test_every_missing_setting_is_named():
    ignored = {
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "_torchspec_version",
    }
    optional = {"tie_word_embeddings", "torch_dtype", "model_type"}
    for name in set(RELEASED) - ignored - optional:
        with pytest.raises(ConfigError, match=name):
            DraftConfig.from_dict({k: v for k, v in RELEASED.items() if k != name})


def test_a_drafter_of_another_target_is_refused():
    draft = DraftConfig.from_dict(plan("tiny").draft_config)
    target = ModelConfig.from_dict(plan("tp16").target_config)
    with pytest.raises(ConfigError, match="hidden_size: draft 112, target 256"):
        draft.require_target(target)


# ---- weights ----


def copy_of(source: Path, target: Path, change) -> Path:
    """The draft checkpoint `source` with its tensors passed through `change`."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors")
    return target


def test_every_tensor_is_accounted_for(golden_dir, tmp_path):
    source = golden_dir / "dspark_tiny16"
    checkpoint = open_draft(source)
    assert list(checkpoint.ignored) == ["embed_tokens.weight"]
    assert len(checkpoint.consumed) == 43
    weights = load_draft(checkpoint)
    tensors = load_file(source / "model.safetensors")
    as_f32 = lambda a: np.asarray(a, np.float32)  # noqa: E731
    want = tensors["confidence_head.proj.weight"].astype(np.float32)
    assert np.array_equal(as_f32(weights.root.confidence_proj), want)
    joined = [tensors[f"layers.2.self_attn.{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert np.array_equal(
        as_f32(weights.layer.a_proj[2]), np.concatenate(joined).astype(np.float32)
    )
    renamed = copy_of(
        source, tmp_path / "a", lambda t: {k.replace("w1", "w3"): v for k, v in t.items()}
    )
    with pytest.raises(CheckpointError) as caught:
        open_draft(renamed)
    assert "markov_head.markov_w1.weight: missing" in str(caught.value)
    assert "markov_head.markov_w3.weight: left over" in str(caught.value)
    config = json.loads((source / "config.json").read_text()) | {"enable_confidence_head": False}
    (renamed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.bias: left over"):
        open_draft(renamed)


# ---- rotation ----

RELEASED_YARN = Yarn(50000.0, 32.0, 32768.0, 32.0, 1.0, 1.0, 1.0)


def test_yarn_frequencies_and_scale():
    found = yarn.inverse_frequencies(64, RELEASED_YARN)
    want = {
        0: 1.0, 1: 0.713111085, 8: 0.0668740305, 15: 6.27130338e-3, 16: 4.07828307e-3,
        24: 6.20229892e-5, 31: 8.76441291e-7,
    }  # fmt: skip
    for pair, value in want.items():
        assert math.isclose(found[pair], value, rel_tol=2e-9), pair
    assert math.isclose(yarn.softmax_scale(192, RELEASED_YARN), 0.13086080, rel_tol=1e-7)
    assert yarn.amplitude(RELEASED_YARN) == 1.0
    other = dataclasses.replace(RELEASED_YARN, mscale=0.5)
    assert math.isclose(yarn.amplitude(other), (0.05 * math.log(32) + 1) / (0.1 * math.log(32) + 1))


def test_yarn_corners_are_clamped():
    short = dataclasses.replace(RELEASED_YARN, original_max_position_embeddings=128.0)
    found = yarn.inverse_frequencies(64, short)
    plain = 50000.0 ** (-np.arange(32) / 32)
    corner = 64 * math.log(128 / (2 * math.pi)) / (2 * math.log(50000))
    ramp = np.clip(np.arange(32) / math.ceil(corner), 0, 1)  # low corner at -2, clamped to 0
    np.testing.assert_allclose(found, plain / 32 * ramp + plain * (1 - ramp), rtol=1e-12)
    same = dataclasses.replace(short, original_max_position_embeddings=2 * math.pi)
    found = yarn.inverse_frequencies(64, dataclasses.replace(same, beta_fast=1.0))
    assert np.isfinite(found).all()  # both corners at 0


def test_rotation_turns_interleaved_pairs():
    nx = Numerics("float32")
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(9, 8)).astype(np.float32) for _ in range(2))
    position = np.arange(9) * 37 + 5
    angle = position[:, None] * yarn.inverse_frequencies(8, RELEASED_YARN)
    turned = (q[:, 0::2] + 1j * q[:, 1::2]) * np.exp(1j * angle)
    found = np.asarray(yarn.rotate(nx, jnp.asarray(q), jnp.asarray(position), RELEASED_YARN))
    np.testing.assert_allclose(found[:, 0::2], turned.real, atol=1e-4)
    np.testing.assert_allclose(found[:, 1::2], turned.imag, atol=1e-4)
    # the product depends on the distance only
    at = lambda x, p: np.asarray(  # noqa: E731
        yarn.rotate(nx, jnp.asarray(x), jnp.full(9, p), RELEASED_YARN), np.float64
    )
    np.testing.assert_allclose(
        (at(q, 300) * at(k, 290)).sum(-1), (at(q, 40) * at(k, 30)).sum(-1), atol=1e-3
    )


# ---- recorded outputs ----

PAGES = [3, 9, 1, 5, 7]  # scattered; a sixth page is not there
DRAFTS = 7


@dataclasses.dataclass(frozen=True)
class Pair:
    """The recorded target and drafter."""

    config: ModelConfig
    weights: Weights
    draft: DraftConfig
    draft_weights: DraftWeights

    def statics(self, compute: str, profile: str, **draft) -> tuple[Static, DraftStatic]:
        """Settings of both; `draft` are changes to the drafter's configuration."""
        run = RunConfig(
            compute=compute, profile=profile, mla_norm_eps=1e-6, slots=3, pages=24, page_size=8
        )  # type: ignore[arg-type]
        return Static(self.config, run), DraftStatic(dataclasses.replace(self.draft, **draft), run)

    def poisoned(self, static: Static) -> Cache:
        """A cache full of NaN."""
        empty = make_cache(self.config, static.run, draft=self.draft)
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), empty)


@pytest.fixture(scope="module")
def pair(golden_dir) -> Pair:
    """Target and drafter of the recording."""
    config, weights = load((golden_dir / "model_tiny16").resolve())
    checkpoint = open_draft(golden_dir / "dspark_tiny16")
    return Pair(config, weights, checkpoint.config, load_draft(checkpoint))


@pytest.fixture(scope="module")
def recorded(golden_dir) -> dict[str, np.ndarray]:
    """All recorded tensors of the drafter."""
    with safe_open(golden_dir / "dspark_tiny16" / "golden.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def inputs_of(length: int, batch: int = 1) -> StepInputs:
    """A step over the first `length` positions of each sequence."""
    table = np.array([[*PAGES, -1], [11, 2, 4, 6, 8, -1]], np.int32)[:batch]
    return StepInputs(
        tokens=jnp.zeros((batch, length), jnp.int32), count=jnp.full(batch, length),
        position=jnp.zeros(batch, jnp.int32), slot=jnp.arange(batch), page_table=jnp.asarray(table),
        temperature=jnp.zeros(batch), seed=jnp.zeros(batch, jnp.uint32),
    )  # fmt: skip


def drafted(pair: Pair, static: Static, draft: DraftStatic, taps: np.ndarray, anchor: int):
    """Context vectors, cache, base logits and next inputs, all from recorded taps."""

    @jax.jit
    def run(cache, taps):
        inputs = inputs_of(taps.shape[0])
        dw = pair.draft_weights
        cache = drafter.write_context(draft, AUTO, dw, cache, inputs, taps, inputs.count)
        following = inputs.replace(position=inputs.position + inputs.count)
        ids = jnp.array([anchor])
        block = drafter.block_inputs(draft, following, ids, DRAFTS)
        base, _ = drafter.base_logits(static, draft, AUTO, pair.weights, dw, cache, block)
        after, following = drafter.propose(
            static,
            draft,
            AUTO,
            pair.weights,
            dw,
            cache,
            following,
            ids,
            drafts=DRAFTS,
            sample=False,
        )
        return combine(draft, dw.root, taps), after, base[0], following

    return run(pair.poisoned(static), jnp.asarray(taps, static.nx.dtype))


ANCHORS = {"case0": 126, "case1": 496}


@pytest.mark.parametrize(
    ("compute", "profile"), [("float32", "V"), ("bfloat16", "V"), ("bfloat16", "H")]
)
@pytest.mark.parametrize("case", ["case0", "case1"])
def test_recorded_drafts(pair, recorded, compute, profile, case):
    static, draft = pair.statics(compute, profile)
    taps = recorded[f"{case}.taps"]
    context, cache, base, following = drafted(pair, static, draft, taps, ANCHORS[case])
    f64 = lambda a: np.asarray(a.astype(jnp.float32), np.float64)  # noqa: E731
    limit = 1e-5 if compute == "float32" else 0.03  # bf16: values up to 4, one unit is 2^-6
    assert np.abs(f64(context) - recorded[f"{case}.context"]).max() < limit
    rows = f64(cache.draft_kv)[:, PAGES].reshape(
        pair.draft.num_hidden_layers, -1, pair.draft.kv_row
    )
    for layer, row in enumerate(rows[:, : len(taps)]):
        want = [recorded[f"{case}.layers.{layer}.context_{n}"] for n in ("latent", "k_pe")]
        assert np.abs(row - np.concatenate(want, -1)).max() < limit
    difference = f64(base) - recorded[f"{case}.base_logits_f64"]
    if compute == "float32":
        assert np.abs(difference).max() < 1e-4
    else:
        assert np.sqrt((difference**2).mean()) <= 0.15
    assert np.array_equal(following.tokens[0, 1:], recorded[f"{case}.draft_ids"])
    assert int(following.tokens[0, 0]) == ANCHORS[case]
    untouched = np.delete(f64(cache.draft_kv), PAGES, axis=1)
    assert np.isnan(untouched).all()


def test_prefill_taps_context_and_drafts_end_to_end(pair, recorded, golden_dir):
    """From prompt ids alone: the target's anchor and the recorded drafts, in both cases at once."""
    static, draft = pair.statics("float32", "H")
    with safe_open(golden_dir / "model_tiny16" / "golden.safetensors", "numpy") as file:
        ids = file.get_tensor("seq_ids")[:28]
    inputs = inputs_of(28, batch=2).replace(
        tokens=jnp.asarray(np.tile(ids, (2, 1)), jnp.int32), count=jnp.array([24, 28])
    )
    step = build_speculative_prefill(static, draft, drafts=DRAFTS)
    cache, out, following = step(pair.weights, pair.draft_weights, pair.poisoned(static), inputs)
    want = [[ANCHORS[c], *recorded[f"{c}.draft_ids"]] for c in ("case0", "case1")]
    assert np.array_equal(following.tokens, want)
    assert np.array_equal(out.token, [ANCHORS["case0"], ANCHORS["case1"]])
    assert np.array_equal(following.position, [24, 28])
    assert np.array_equal(following.count, [8, 8])
    rows = np.asarray(cache.draft_kv, np.float64)[1, [11, 2, 4, 6, 8]].reshape(
        -1, pair.draft.kv_row
    )
    want = recorded["case1.layers.1.context_latent"]
    assert (
        np.abs(rows[:28, : pair.draft.kv_lora_rank] - want).max() < 2e-4
    )  # the target's f32 noise


@pytest.mark.parametrize("non_causal", [True, False])
def test_what_a_block_row_sees(pair, recorded, non_causal):
    """Row 0 depends on a later row iff the block is non-causal; a window hides old context."""
    static, draft = pair.statics("float32", "V", non_causal=non_causal, sliding_window=9)
    taps = jnp.asarray(recorded["case0.taps"])

    @jax.jit
    def run(cache, taps, ids):
        inputs = inputs_of(taps.shape[0])
        cache = drafter.write_context(
            draft, AUTO, pair.draft_weights, cache, inputs, taps, inputs.count
        )
        block = inputs.replace(
            tokens=ids[None], position=inputs.count, count=jnp.array([ids.shape[0]])
        )
        base, _ = drafter.base_logits(
            static, draft, AUTO, pair.weights, pair.draft_weights, cache, block
        )
        return base[0]

    ids = jnp.array([126, 509, 509, 509])
    first = run(pair.poisoned(static), taps, ids)
    last = run(pair.poisoned(static), taps, ids.at[3].set(17))
    same = np.array([np.array_equal(a, b) for a, b in zip(first, last, strict=True)])
    assert np.array_equal(same, [False] * 4 if non_causal else [True] * 3 + [False])
    hidden = run(pair.poisoned(static), taps.at[: 24 - 9].set(3.0), ids)
    assert np.array_equal(first, hidden)
    seen = run(pair.poisoned(static), taps.at[24 - 9].set(3.0), ids)
    assert not np.array_equal(first, seen)


def test_confidence_head(pair):
    rng = np.random.default_rng(3)
    root = pair.draft_weights.root
    hidden, previous = rng.normal(size=(5, 128)), rng.normal(size=(5, 16))
    proj, bias = (np.asarray(a, np.float64) for a in (root.confidence_proj, root.confidence_bias))
    want = 1 / (1 + np.exp(-(np.concatenate([hidden, previous], -1) @ proj[0] + bias[0])))
    got = confidence(
        jnp.asarray(hidden), jnp.asarray(previous), root.confidence_proj, root.confidence_bias
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    plain = confidence(
        jnp.asarray(hidden), None, root.confidence_proj[:, :128], root.confidence_bias
    )
    np.testing.assert_allclose(
        plain, 1 / (1 + np.exp(-(hidden @ proj[0, :128] + bias[0]))), atol=1e-5
    )

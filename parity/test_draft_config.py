"""The drafter's configuration, its checkpoint and its rotation."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_impl.checkpoint import CheckpointError
from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig
from jax_impl.draft_config import DraftConfig, Yarn
from jax_impl.draft_weights import (
    abstract_draft_weights,
    draft_table,
    open_draft,
)
from jax_impl.loader import load_draft
from jax_impl.make_tiny import plan
from jax_impl.numerics import Numerics
from jax_impl.ops import yarn
from jax_impl.weights import checkpoint_tensors

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
    c.require_target(ModelConfig.load(RELEASED_CONFIG))
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
    with pytest.raises(ConfigError, match="hidden_size: draft 112, expected the target's 256"):
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

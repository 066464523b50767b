"""What stands in a `config.json` beside `text_config`, for both readers of the file."""

import copy
import json
from pathlib import Path

import pytest

from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig
from jax_impl.tiny_presets import PRESETS, release_config, text_config
from torch_ref.config import Config

GOLDEN = Path(__file__).parent / "golden"
RELEASED = json.loads(RELEASED_CONFIG.read_text())
TEXT = RELEASED["text_config"]
QUANTIZATION = TEXT["quantization_config"]
WEIGHTS = QUANTIZATION["config_groups"]["group_0"]["weights"]
READERS = {"jax": ModelConfig, "torch": Config}


def regrouped(**changes):
    """The released `quantization_config` with other weight settings."""
    group = {"weights": WEIGHTS | changes}
    whole = QUANTIZATION["config_groups"]["group_0"] | group
    return QUANTIZATION | {"config_groups": {"group_0": whole}}


# (name in the message, setting beside text_config, value, words of the message)
REFUSED = [
    ("tie_word_embeddings", "tie_word_embeddings", True, ("True", "False")),
    ("eos_token_id", "eos_token_id", 1, ("1", "163586")),
    ("eos_token_id", "eos_token_id", [163586, 1], ("[163586, 1]", "163586")),
    ("vocab_size", "vocab_size", 163841, ("163841", "163840")),
    ("dtype", "dtype", "float16", ("'float16'", "'bfloat16'")),
    ("torch_dtype", "torch_dtype", "float16", ("'float16'", "'bfloat16'")),
    ("rope_scaling", "rope_scaling", {"type": "yarn"}, ("yarn",)),
    ("quantization_config", "quantization_config", None, ("None",)),
    ("quantization_config", "quantization_config", {}, ()),
    ("quant_method", "quantization_config", QUANTIZATION | {"quant_method": "fp8"}, ("'fp8'",)),
    ("num_bits", "quantization_config", regrouped(num_bits=8), ("8", "4")),
    ("quant_method", "quantization_config", {"format": "mxfp4-pack-quantized"}, ("missing",)),
    ("logit_scale", "logit_scale", 0.5, ("0.5", "unknown")),
]
ACCEPTED = [
    ("vision_config", {"num_hidden_layers": 27, "hidden_size": 1024}),
    ("media_placeholder_token_id", 7),
    ("video_placeholder", "<|video|>"),
    ("use_unified_vision_chunk", True),
    ("ignore_index", -1),
    ("auto_map", {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}),
    ("transformers_version", "5.0.0"),
    ("tie_word_embeddings", False),
    ("quantization_config", QUANTIZATION),
    ("eos_token_id", 163586),
    ("rope_scaling", None),
]


def message(reader, config):
    with pytest.raises(ValueError) as error:
        READERS[reader].from_dict(config)
    assert reader == "torch" or isinstance(error.value, ConfigError)
    return str(error.value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("name", "setting", "value", "words"), REFUSED)
def test_what_differs_beside_the_text_config_is_refused(reader, name, setting, value, words):
    text = message(reader, RELEASED | {setting: value})
    assert "beside text_config" in text
    assert all(word in text for word in (name, *words))


@pytest.mark.parametrize("reader", READERS)
def test_everything_is_named_at_once(reader):
    outer = {"tie_word_embeddings": True, "eos_token_id": 1, "rope_scaling": 2.0, "surprise": 5}
    config = copy.deepcopy(RELEASED) | outer
    config["text_config"]["hidden_act"] = "silu"
    text = message(reader, config)
    assert all(name in text for name in (*outer, "hidden_act"))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("setting", "value"), ACCEPTED)
def test_what_says_nothing_new_is_accepted(reader, setting, value):
    config = READERS[reader].from_dict(RELEASED | {setting: value})
    assert config == READERS[reader].from_dict(RELEASED)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_accepted(reader, preset):
    whole = release_config(text_config(PRESETS[preset].target))
    assert READERS[reader].from_dict(whole).vocab_size == PRESETS[preset].target.vocab


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("folder", ["model_tiny3", "model_tiny16", "model_realdims"])
def test_every_recorded_model_is_accepted(reader, folder):
    assert READERS[reader].load(GOLDEN / folder).num_hidden_layers in (5, 9)


# (setting of the text model, value) that only a complete reader of the file notices
INNER = [
    ("num_bits", regrouped(num_bits=8)),
    ("actorder", regrouped(actorder="group")),
    ("scale_dtype", regrouped(scale_dtype="torch.float16")),
    ("group_size", regrouped(group_size=16)),
    ("made_up", regrouped(made_up=5)),
    ("kv_cache_scheme", QUANTIZATION | {"kv_cache_scheme": {"num_bits": 8}}),
    ("group_1", QUANTIZATION | {"config_groups": QUANTIZATION["config_groups"] | {"group_1": {}}}),
    ("transform_config", QUANTIZATION | {"transform_config": {"a": 1}}),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("name", "value"), INNER)
def test_another_quantisation_is_refused(reader, name, value):
    assert name in message(
        reader, RELEASED | {"text_config": TEXT | {"quantization_config": value}}
    )


@pytest.mark.parametrize("reader", READERS)
def test_unknown_settings_of_the_text_model_are_refused(reader):
    linear = TEXT["linear_attn_config"] | {"chunk_size": 64}
    text = TEXT | {"sliding_window": 4096, "linear_attn_config": linear}
    text = message(reader, RELEASED | {"text_config": text})
    assert "sliding_window" in text and "linear_attn_config.chunk_size" in text


def test_an_overridden_token_id_is_the_same_everywhere():
    preset = PRESETS["tiny"].target
    whole = release_config(text_config(preset, {"eos_token_id": 5}))
    assert whole["eos_token_id"] == 5 == ModelConfig.from_dict(whole).eos_token_id

import copy
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig, RunConfig

GOLDEN = Path(__file__).parent / "golden"
RELEASED = json.loads(RELEASED_CONFIG.read_text())
GROUP0 = "quantization_config.config_groups.group_0"
# (setting, a value that is not implemented)
REFUSED = [
    ("hidden_act", "silu"),
    ("mla_use_nope", False),
    ("mla_use_output_gate", False),
    ("latent_moe_use_norm", False),
    ("moe_layer_freq", 2),
    ("moe_renormalize", False),
    ("moe_router_activation_func", "softmax"),
    ("topk_method", "greedy"),
    ("tie_word_embeddings", True),
    ("num_nextn_predict_layers", 1),
    ("linear_attn_config.use_full_rank_gate", False),
    ("quantization_config.quant_method", "gptq"),
    ("quantization_config.format", "nvfp4-pack-quantized"),
    ("quantization_config.kv_cache_scheme", "fp8"),
    (f"{GROUP0}.input_activations", "fp8"),
    (f"{GROUP0}.output_activations", "fp8"),
    (f"{GROUP0}.weights.num_bits", 8),
    (f"{GROUP0}.weights.type", "int"),
    (f"{GROUP0}.weights.strategy", "channel"),
    (f"{GROUP0}.weights.group_size", 16),
    (f"{GROUP0}.weights.symmetric", False),
    (f"{GROUP0}.weights.dynamic", True),
    (f"{GROUP0}.targets", ["Embedding"]),
]
# may be absent, but not differ
OPTIONAL = [
    ("dtype", "float16"),
    ("torch_dtype", "float32"),
    ("rope_scaling", {"type": "yarn"}),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("quantization_config.quantization_status", "frozen"),
    ("quantization_config.global_compression_ratio", 0.5),
    (f"{GROUP0}.format", "int-quantized"),
    (f"{GROUP0}.weights.scale_dtype", "torch.float16"),
    (f"{GROUP0}.weights.zp_dtype", "torch.int8"),
    (f"{GROUP0}.weights.actorder", "group"),
    (f"{GROUP0}.weights.block_structure", "2x4"),
    (f"{GROUP0}.weights.observer", "mse"),
    (f"{GROUP0}.weights.observer_kwargs", 7),
]


def place(config, dotted):
    """The mapping that holds a dotted setting of the text config, and its last name."""
    *path, last = dotted.split(".")
    at = config["text_config"]
    for name in path:
        at = at[name]
    return at, last


def changed(*changes):
    config = copy.deepcopy(RELEASED)
    for dotted, value in changes:
        at, last = place(config, dotted)
        at[last] = value
    return config


def message(config):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(config)
    return str(error.value)


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.load(RELEASED_CONFIG)


def test_released_config(k3):
    assert (k3.hidden_size, k3.vocab_size, k3.num_experts) == (7168, 163_840, 896)
    assert (k3.kda_width, k3.kv_row, k3.qk_head_dim) == (12_288, 576, 192)
    assert k3.shared_intermediate_size == 6144
    assert k3.weights_prefix == "language_model."
    assert hash(k3) == hash(ModelConfig.from_dict(RELEASED))


def test_layer_pattern(k3):
    assert k3.num_hidden_layers == 93
    mla = [*range(3, 92, 4), 92]
    assert list(k3.mla_layers) == mla and len(mla) == 24 and {91, 92} <= set(mla)
    assert len(k3.kda_layers) == 69 and sorted([*k3.kda_layers, *mla]) == list(range(93))
    assert [i for i in range(93) if k3.is_dense(i)] == [0] and k3.num_moe_layers == 92
    starts = [i for i in range(93) if k3.starts_block(i)]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84] and k3.num_snapshots == 8


def test_ordinals_count_within_a_kind(k3):
    assert [k3.attn_ordinal(i) for i in k3.mla_layers] == list(range(24))
    assert [k3.attn_ordinal(i) for i in k3.kda_layers] == list(range(69))
    assert [k3.mlp_ordinal(i) for i in range(1, 93)] == list(range(92))
    assert k3.mlp_ordinal(0) == 0


def test_snapshots_before_a_layer(k3):
    counts = [k3.snapshots_before(i) for i in range(94)]
    assert counts[:2] == [0, 1] and counts[12:14] == [1, 2] and counts[84:] == [7] + [8] * 9
    assert counts == [sum(k3.starts_block(j) for j in range(i)) for i in range(93)] + [8]


@pytest.mark.parametrize(("setting", "value"), REFUSED + OPTIONAL)
def test_each_refused_setting_is_named(setting, value):
    text = message(changed((setting, value)))
    assert setting in text and "implemented" in text and "\n  - " in text


@pytest.mark.parametrize(("setting", "_"), REFUSED)
def test_a_missing_setting_is_refused(setting, _):
    config = copy.deepcopy(RELEASED)
    at, last = place(config, setting)
    del at[last]
    assert f"{setting}: missing" in message(config)


def test_all_refusals_at_once():
    text = message(changed(*REFUSED, *OPTIONAL, ("vocab_size", "many"), ("surprise", 1)))
    for setting in [*(name for name, _ in REFUSED + OPTIONAL), "vocab_size", "surprise"]:
        assert f"\n  - {setting}" in text


def test_unknown_settings_are_refused():
    extra = ("sliding_window", "linear_attn_config.chunk", "quantization_config.new")
    extra += (f"{GROUP0}.new", f"{GROUP0}.weights.new")
    text = message(changed(*((name, 1) for name in extra)))
    assert all(f"{name}: unknown setting (1)" in text for name in extra)


def test_a_dot_in_a_name_does_not_pass_for_nesting():
    config = copy.deepcopy(RELEASED)
    heads = config["text_config"]["linear_attn_config"].pop("num_heads")
    config["text_config"]["linear_attn_config.num_heads"] = heads
    text = message(config)
    assert "'linear_attn_config.num_heads': unknown setting" in text
    assert "linear_attn_config.num_heads: expected a number" in text


def test_a_flat_text_config_has_no_prefix():
    flat = ModelConfig.from_dict(RELEASED["text_config"])
    assert flat.weights_prefix == "" and flat.num_experts == 896


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("num_key_value_heads", 8), "num_key_value_heads: found 8"),
        (("moe_intermediate_size", 3080), "not a multiple of 32"),
        (("routed_expert_hidden_size", 3585), "not a multiple of 32"),
        (("num_expert_group", 5), "not divisible into 5 groups"),
        (("num_expert_group", 896), "at least two experts"),
        (("topk_group", 2), "topk_group 2 > num_expert_group 1"),
        (("num_experts_per_token", 897), "num_experts_per_token 897"),
        (("first_k_dense_replace", 94), "first_k_dense_replace"),
        (("first_k_dense_replace", -1), "first_k_dense_replace"),
        (("linear_attn_config.gate_lower_bound", 0.0), "gate_lower_bound"),
        (("hidden_size", 0), "hidden_size: found 0"),
        (("rms_norm_eps", -1e-5), "rms_norm_eps"),
        (("use_grouped_topk", None), "use_grouped_topk"),
        (("pad_token_id", 163_840), "pad_token_id"),
        (("eos_token_id", -1), "eos_token_id"),
        (("linear_attn_config.full_attn_layers", [4, 4]), "each of the layers"),
    ],
)
def test_inconsistent_values(change, words):
    assert words in message(changed(change))


def test_grouping_switched_off_needs_one_group():
    groups = [("num_expert_group", 8), ("topk_group", 4)]
    assert ModelConfig.from_dict(changed(*groups)).num_expert_group == 8
    assert "use_grouped_topk" in message(changed(*groups, ("use_grouped_topk", False)))


@pytest.mark.parametrize(
    "value",
    [
        None, "3", [3], {}, {"a": 1}, True, 3.5, math.nan, math.inf, -math.inf, 10**400, 1 << 31,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "linear_attn_config.head_dim"]
)
def test_not_a_whole_number(name, value):
    assert name in message(changed((name, value)))


@pytest.mark.parametrize("value", [None, "1e-5", [1e-5], True, math.nan, math.inf, 10**400])
def test_not_a_number(value):
    assert "rms_norm_eps" in message(changed(("rms_norm_eps", value)))


@pytest.mark.parametrize(
    "layers",
    [
        None, "4", {}, 4, [], [[4]], ["4"], [None], [4.0], [True], [0], [94],
        RELEASED["text_config"]["linear_attn_config"]["full_attn_layers"] + [4],
        [str(i) for i in RELEASED["text_config"]["linear_attn_config"]["full_attn_layers"]],
    ],
)  # fmt: skip
def test_layer_lists_of_other_contents(layers):
    text = message(changed(("linear_attn_config.full_attn_layers", layers)))
    assert "full_attn_layers" in text


def test_true_is_no_layer_number():
    kda = RELEASED["text_config"]["linear_attn_config"]["kda_layers"]
    assert "from 1" in message(changed(("linear_attn_config.kda_layers", [True, *kda[1:]])))


@pytest.mark.parametrize("raw", [None, [], "x", 3, {}, {"text_config": None}, {"text_config": {}}])
def test_not_a_config_at_all(raw):
    message(raw)
    if isinstance(raw, dict):
        assert "expected" in message({"model_type": "kimi_k3", **raw})


def test_a_draft_is_told_where_it_goes():
    draft = json.loads((GOLDEN / "dspark_tiny16" / "config.json").read_text())
    assert "--draft" in message(draft)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="not found"):
        ModelConfig.load(tmp_path)
    file = tmp_path / "config.json"
    bad = [b"{", b"\xff\xfe", b"", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"null"]
    for content in bad:
        file.write_bytes(content)
        with pytest.raises(ConfigError):
            ModelConfig.load(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError):
        ModelConfig.load(tmp_path)


LEAVES = [
    (*path, key)
    for path, keys in (
        ((), ("text_config", "model_type", "dtype", "quantization_config", "vocab_size")),
        (("text_config",), tuple(RELEASED["text_config"])),
        (
            ("text_config", "linear_attn_config"),
            tuple(RELEASED["text_config"]["linear_attn_config"]),
        ),
        (
            ("text_config", "quantization_config"),
            tuple(RELEASED["text_config"]["quantization_config"]),
        ),
    )
    for key in keys
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 93, 1 << 40, 10**400])
    | st.floats()
    | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)
VALUES = JSON | st.lists(st.integers(-2, 95) | JSON, max_size=100)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.lists(st.tuples(st.sampled_from(LEAVES), VALUES), min_size=1, max_size=3))
def test_any_value_gives_a_config_or_a_config_error(changes):
    config = copy.deepcopy(RELEASED)
    for (*path, last), value in changes:
        at = config
        for name in path:
            at = at.get(name) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[last] = value
    try:
        found = ModelConfig.from_dict(config)
    except ConfigError as error:
        assert len(str(error)) < 20_000
        return
    assert all(0 <= i < found.num_hidden_layers for i in found.mla_layers)
    assert math.isfinite(found.rms_norm_eps) and type(found.hidden_size) is int


def test_run_settings():
    run = RunConfig(kv_dtype="float8_e4m3fn", kv_scale=1.0)
    assert run.fp8 and run.kv_cache_dtype == "float8_e4m3fn"
    assert RunConfig().kv_cache_dtype == "bfloat16"
    assert RunConfig(compute="float32").kv_cache_dtype == "float32"
    assert (RunConfig(profile="H").latent_eps, RunConfig().latent_eps) == (1e-6, 1e-5)
    assert RunConfig(mla_norm_eps=1e-3).latent_eps == 1e-3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"kv_dtype": "float8_e4m3fn"}, "explicit positive"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": 0.0}, "explicit positive"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": math.nan}, "explicit positive"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": math.inf}, "explicit positive"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": "1"}, "explicit positive"),
        ({"kv_scale": 1.0}, "kv_dtype is not float8_e4m3fn"),
        ({"kv_dtype": "int8"}, "kv_dtype"),
        ({"kv_dtype": ["bfloat16"]}, "kv_dtype"),
        ({"profile": "X"}, "profile"),
        ({"compute": "float16"}, "compute"),
        ({"decode_backend": "fast"}, "decode_backend"),
        ({"slots": 0}, "slots"),
        ({"slots": True}, "slots"),
        ({"pages": -1}, "pages"),
        ({"pages": "64"}, "pages"),
        ({"page_size": 1.5}, "page_size"),
        ({"mla_norm_eps": 0.0}, "mla_norm_eps"),
        ({"mla_norm_eps": math.nan}, "mla_norm_eps"),
        ({"mla_norm_eps": "x"}, "mla_norm_eps"),
    ],
)
def test_refused_run_settings(bad, words):
    with pytest.raises(ConfigError, match=words):
        RunConfig(**bad)


def test_run_settings_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        RunConfig(profile="X", slots=0, pages=None, kv_scale=2.0)
    assert str(error.value).count("\n  - ") == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_hold_the_rows_of_the_fullest_rank(ranks, interleave, page_size):
    """Against counting positions rank by rank; also where a page ends within a turn."""
    run = RunConfig(page_size=page_size, dcp=ranks, dcp_interleave=interleave)
    held = [0] * ranks
    for tokens in range(1, 100):
        held[(tokens - 1) // interleave % ranks] += 1
        assert run.pages_for(tokens) == -(-max(held) // page_size)
    for pages in range(1, 6):
        most = run.tokens_in(pages)
        assert run.pages_for(most) <= pages < run.pages_for(most + 1)

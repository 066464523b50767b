"""The rules by which a `config.json` is accepted, refused or found inconsistent; no JAX import."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_impl.config import ModelConfig

GROUP = 32  # input columns that share one MXFP4 scale byte
_LIMIT = 1 << 31  # no size in a configuration reaches this

_GROUP_0 = "quantization_config.config_groups.group_0"

# Settings with exactly one implemented value. A missing key is refused too: the published code
# replaces some missing keys by values that change the model without a word.
_REQUIRED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "linear_attn_config.use_full_rank_gate": True,
    "quantization_config.quant_method": "compressed-tensors",
    "quantization_config.format": "mxfp4-pack-quantized",
    "quantization_config.kv_cache_scheme": None,
    f"{_GROUP_0}.targets": ["Linear"],
    f"{_GROUP_0}.input_activations": None,
    f"{_GROUP_0}.output_activations": None,
    f"{_GROUP_0}.weights.num_bits": 4,
    f"{_GROUP_0}.weights.type": "float",
    f"{_GROUP_0}.weights.strategy": "group",
    f"{_GROUP_0}.weights.group_size": GROUP,
    f"{_GROUP_0}.weights.symmetric": True,
    f"{_GROUP_0}.weights.dynamic": False,
}
# Settings that may be absent, but not differ.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "quantization_config.quantization_status": ("compressed",),
    "quantization_config.global_compression_ratio": (None,),
    # null stands for the value that the format implies, as if the key were absent
    f"{_GROUP_0}.format": ("mxfp4-pack-quantized", None),
    f"{_GROUP_0}.weights.scale_dtype": ("torch.uint8", None),
    f"{_GROUP_0}.weights.zp_dtype": (None,),
    f"{_GROUP_0}.weights.actorder": (None, False),
    f"{_GROUP_0}.weights.block_structure": (None,),
    f"{_GROUP_0}.weights.observer": ("minmax", None),
    f"{_GROUP_0}.weights.observer_kwargs": ({}, None),
}
# Keys of the file that say nothing about the forward pass (generation defaults, bookkeeping).
_IGNORED = frozenset(
    """architectures transformers_version auto_map initializer_range use_cache head_dim rope_theta
    _name_or_path _attn_implementation attn_implementation return_dict output_hidden_states
    output_attentions torchscript pruned_heads chunk_size_feed_forward is_encoder_decoder is_decoder
    cross_attention_hidden_size add_cross_attention tie_encoder_decoder finetuning_task id2label
    label2id task_specific_params problem_type tokenizer_class prefix sep_token_id
    decoder_start_token_id max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    tf_legacy_loss use_bfloat16 use_return_dict""".split()  # noqa: SIM905  (as a list, sixty lines)
)
_BOOKKEEPING = ("id2label.", "label2id.", "auto_map.")
# Beside `text_config`: what belongs to the vision tower, which a text step never runs.
_VISION = frozenset({"ignore_index", "use_unified_vision_chunk"})
_VISION_PREFIXES = ("vision_", "media_", "image_", "video_", "mm_")
_LINEAR = {
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, with dots between the names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        # a dot in a name would pass for a nested setting
        key = name if isinstance(name, str) and "." not in name else repr(name)
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _same(found: Any, wanted: Any) -> bool:
    # True == 1 in Python, but a flag stored as a number (or the reverse) is a different file
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def _short(value: Any) -> str:
    # Python refuses to print integers of very many digits
    huge = isinstance(value, int) and abs(value) >= 1 << 128
    text = f"an integer of {value.bit_length()} bits" if huge else reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refusals(flat: Mapping[str, Any], names: set[str]) -> list[str]:
    """Settings that are missing, unknown or not implemented; `names` are the model's own fields."""
    known = set(_REQUIRED) | set(_OPTIONAL) | _IGNORED | names
    known |= {f"linear_attn_config.{k}" for k in (*_LINEAR, "full_attn_layers", "kda_layers")}
    known |= {"num_key_value_heads", "use_grouped_topk", "quantization_config.ignore"}
    return fixed_settings(flat, _REQUIRED, _OPTIONAL) + unknown_settings(flat, known, _BOOKKEEPING)


def outer_refusals(raw: Mapping[str, Any]) -> list[str]:
    """What stands beside `text_config` and contradicts it, is unknown or not implemented.

    A setting of the text model may be repeated there, as other readers of the file expect it, but
    only with the same value; a repeated `quantization_config` has to be the whole of it.
    """
    own = {k: v for k, v in raw.items() if k not in ("text_config", "model_type")}
    outer, text = flatten(own), flatten(raw["text_config"])
    implemented = {k: (v,) for k, v in _REQUIRED.items()} | _OPTIONAL
    free = (*_BOOKKEEPING, *_VISION_PREFIXES)
    names = {k for k in outer if k not in _IGNORED | _VISION and not k.startswith(free)}
    if "quantization_config" in own:
        names |= {k for k in text if k.startswith("quantization_config.")}
    problems = []
    for key in sorted(names):
        name, found = f"{key} (beside text_config)", _short(outer.get(key))
        if key == "quantization_config":  # no mapping, or an empty one
            problems.append(f"{name}: found {found}, expected that of text_config, or none")
        elif key not in outer and "quantization_config" in outer:
            continue  # said once for all of them
        elif key not in outer:
            problems.append(f"{name}: missing, expected {_short(text[key])}, as in text_config")
        elif key in text:
            if not _same(outer[key], text[key]):
                wanted = _short(text[key])
                problems.append(f"{name}: found {found}, expected {wanted}, as in text_config")
        elif key not in implemented:
            problems.append(f"{name}: unknown setting ({found}); not implemented")
        elif not any(_same(outer[key], value) for value in implemented[key]):
            wanted = repr(implemented[key][0])
            problems.append(f"{name}: found {found}, only {wanted} is implemented")
    return problems


def fixed_settings(
    flat: Mapping[str, Any], required: Mapping[str, Any], optional: Mapping[str, tuple[Any, ...]]
) -> list[str]:
    """Settings without their one implemented value: `required` by name, `optional` if present."""
    problems = []
    for key, wanted in required.items():
        if key not in flat:
            problems.append(f"{key}: missing, expected {wanted!r}")
        elif not _same(flat[key], wanted):
            problems.append(f"{key}: found {_short(flat[key])}, only {wanted!r} is implemented")
    for key, allowed in optional.items():
        if key in flat and not any(_same(flat[key], a) for a in allowed):
            problems.append(f"{key}: found {_short(flat[key])}, only {allowed[0]!r} is implemented")
    return problems


def unknown_settings(
    flat: Mapping[str, Any], known: set[str], free: tuple[str, ...] = ()
) -> list[str]:
    """Settings that are neither in `known` nor start with one of `free`."""
    return [
        f"{key}: unknown setting ({_short(flat[key])}); not implemented"
        for key in sorted(set(flat) - known)
        if not (free and key.startswith(free))
    ]


def number(flat: Mapping[str, Any], key: str, kind: str, problems: list[str]) -> Any:
    """The setting as `int` or `float` (by `kind`); None, and one problem more, if it is not one."""
    value = flat.get(key)
    whole = isinstance(value, int) and not isinstance(value, bool)
    real = whole or (isinstance(value, float) and math.isfinite(value))
    if (whole if kind == "int" else real) and abs(value) < _LIMIT:  # type: ignore[arg-type]
        return float(value) if kind == "float" else value  # type: ignore[arg-type]
    found = _short(value) if key in flat else "nothing"
    problems.append(f"{key}: expected a number ({kind}, below 2^31), found {found}")
    return None


def collect(flat: Mapping[str, Any], types: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """(values by field name, problems) for the fields in `types`, which maps to int or float."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    sources = {name: f"linear_attn_config.{key}" for key, name in _LINEAR.items()}
    for name, kind in types.items():
        if kind in ("int", "float"):
            values[name] = number(flat, sources.get(name, name), kind, problems)
    return values | {"mla_layers": _mla_layers(flat, problems)}, problems


def _mla_layers(flat: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    full = flat.get("linear_attn_config.full_attn_layers")
    kda = flat.get("linear_attn_config.kda_layers")
    layers = flat.get("num_hidden_layers")
    if not isinstance(full, list) or not isinstance(kda, list):
        problems.append("linear_attn_config.full_attn_layers, kda_layers: two lists are needed")
        return ()
    if type(layers) is not int:
        return ()  # reported with the other numbers
    listed = [*full, *kda]
    whole = all(type(i) is int for i in listed) and len(listed) == layers
    if not whole or sorted(listed) != list(range(1, layers + 1)):
        problems.append(
            "linear_attn_config: full_attn_layers and kda_layers must together name each of the "
            f"layers 1..{layers} once (they count from 1); found {len(full)} + {len(kda)} entries"
        )
        return ()
    return tuple(sorted(i - 1 for i in full))


def change_problems(c: ModelConfig, changes: Mapping[str, Any]) -> list[str]:
    """Why there is no model with these values in place of some of `c`'s; the names are its own."""
    problems: list[str] = []
    for field in fields(c):
        if field.name not in changes:
            continue
        value = changes[field.name]
        if field.type in ("int", "float"):
            number(changes, field.name, str(field.type), problems)
        elif field.type == "str" and not isinstance(value, str):
            problems.append(f"{field.name}: found {_short(value)}, expected a text")
    layers = changes.get("num_hidden_layers", c.num_hidden_layers)
    mla = changes.get("mla_layers", c.mla_layers)
    if type(layers) is int:
        whole = isinstance(mla, tuple) and all(type(i) is int and 0 <= i < layers for i in mla)
        if not whole or list(mla) != sorted(set(mla)):
            problems.append(
                f"mla_layers: found {_short(mla)}, expected a rising tuple of layers "
                f"0..{layers - 1}, which count from 0"
            )
    if problems:
        return problems
    changed = replace(c, **changes)
    return inconsistencies(changed, {"num_key_value_heads": changed.num_attention_heads})


def inconsistencies(c: ModelConfig, flat: Mapping[str, Any]) -> list[str]:
    """What is wrong between values that are each of the right type."""
    problems = []
    free = ("gate_lower_bound", "first_k_dense_replace")
    for field in fields(c):
        value = getattr(c, field.name)
        if field.type not in ("int", "float") or field.name.endswith("_token_id"):
            continue
        if field.name not in free and value <= 0:
            problems.append(f"{field.name}: found {value}, expected a positive number")
    if problems:
        return problems
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            problems.append(f"{name}: found {getattr(c, name)}, expected 0..{c.vocab_size - 1}")
    if not _same(flat.get("num_key_value_heads"), c.num_attention_heads):
        problems.append(
            f"num_key_value_heads: found {flat.get('num_key_value_heads')}, only "
            f"num_attention_heads ({c.num_attention_heads}) is implemented"
        )
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(c, name) % GROUP:
            found = getattr(c, name)
            problems.append(f"{name}: {found} is not a multiple of {GROUP} (MXFP4 group)")
    if c.num_experts % c.num_expert_group:
        problems.append(
            f"num_experts {c.num_experts} not divisible into {c.num_expert_group} groups"
        )
    elif c.num_expert_group > 1 and c.num_experts // c.num_expert_group < 2:
        problems.append("num_expert_group: a group needs at least two experts")
    grouped = flat.get("use_grouped_topk", True)
    if not isinstance(grouped, bool):
        problems.append(f"use_grouped_topk: found {grouped!r}, expected true or false")
    elif not grouped and c.num_expert_group > 1:
        problems.append("use_grouped_topk is false, but num_expert_group is above 1")
    if c.topk_group > c.num_expert_group:
        problems.append(f"topk_group {c.topk_group} > num_expert_group {c.num_expert_group}")
    elif c.num_experts_per_token > c.topk_group * (c.num_experts // c.num_expert_group):
        problems.append(
            f"num_experts_per_token {c.num_experts_per_token} > experts in {c.topk_group} group(s)"
        )
    if not 0 <= c.first_k_dense_replace <= c.num_hidden_layers:
        problems.append(f"first_k_dense_replace: {c.first_k_dense_replace} is not a layer count")
    if c.gate_lower_bound >= 0:
        problems.append(f"linear_attn_config.gate_lower_bound: {c.gate_lower_bound}, expected < 0")
    return problems


# Settings of `RunConfig` with few values.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "profile": ("H", "V"),
    "compute": ("bfloat16", "float32"),
    "kv_dtype": (None, "bfloat16", "float32", "float8_e4m3fn"),
    "decode_backend": ("auto", "latency_specialized"),
    "commit": ("replay", "snapshots"),
    "experts": ("tp", "ep"),
}


def run_problems(values: Mapping[str, Any], called: Callable[[str], str] = str) -> list[str]:
    """What is wrong with the settings of a `RunConfig`, each as found and expected.

    Args:
        values: all settings by name.
        called: what the user calls a setting, by its name here.
    """
    problems = [
        f"{called(name)}: found {values[name]!r}, expected one of {allowed}"
        for name, allowed in _CHOICES.items()
        if values[name] not in allowed
    ]
    for name in ("slots", "pages", "page_size", "dcp", "dcp_interleave"):
        if type(found := values[name]) is not int or found < 1:
            problems.append(
                f"{called(name)}: found {found!r}, expected a whole number of at least 1"
            )
    scale, fp8 = values["kv_scale"], values["kv_dtype"] == "float8_e4m3fn"
    if fp8 and not _positive(scale):
        problems.append(
            f"{called('kv_scale')}: found {scale}; an FP8 latent cache needs an explicit positive "
            "scale (1.0 where the checkpoint gives none)"
        )
    if not fp8 and scale is not None:
        problems.append(
            f"{called('kv_scale')}: found {scale}, but {called('kv_dtype')} is not float8_e4m3fn; "
            "expected none"
        )
    if (eps := values["mla_norm_eps"]) is not None and not _positive(eps):
        problems.append(f"{called('mla_norm_eps')}: found {eps}, expected a positive number")
    if values["dcp"] != 1 and values["profile"] == "H":
        dcp, profile = called("dcp"), called("profile")
        problems.append(
            f"{dcp}: found {values['dcp']} with {profile} 'H', which rounds the shares of the "
            f"whole context; expected {profile} 'V' (context parallelism merges partial results "
            f"as it rounds them), or {dcp} 1"
        )
    return problems


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf

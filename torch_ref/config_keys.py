"""Keys of a target's `config.json` that are no size: the one implemented reading, or a refusal.

A tree of settings is held against a tree of the same form, whose leaves are the values allowed. A
key that the form lacks is refused, because nobody can say that it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A leaf: the values a key may have. `ANY`: whatever it is.
ANY = object()
Form = Mapping[str, Any]

# Beside the numbers, scales are one byte per 32 columns (the exponent alone) and there are no zero
# points. Null is what the library that wrote the file makes of an absent key.
_WEIGHTS: Form = {
    "num_bits": (4,),
    "type": ("float",),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True,),
    "dynamic": (False,),
    "scale_dtype": ("torch.uint8", None),
    "zp_dtype": (None,),
    "actorder": (None, False),
    "block_structure": (None,),
    "observer": ("minmax", None),
    "observer_kwargs": ({}, None),
}
_PACKED = "mxfp4-pack-quantized"
# Which modules are packed is decided by the stored form, so `ignore` is not read.
QUANTISATION: Form = {
    "quant_method": ("compressed-tensors",),
    "format": (_PACKED,),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "global_compression_ratio": (None,),
    "ignore": ANY,
    "config_groups": {
        "group_0": {
            "targets": (["Linear"],),
            "format": (_PACKED, None),
            "input_activations": (None,),
            "output_activations": (None,),
            "weights": _WEIGHTS,
        }
    },
}
# Values of the text model with a single reading. The released file carries nearly all of them; one
# that is left out means the same model, so only a different value is refused.
FIXED: Form = {
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "hidden_act": ("situ",),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "latent_moe_use_norm": (True,),
    "moe_layer_freq": (1,),
    "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "num_nextn_predict_layers": (0,),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": QUANTISATION,
}
# What the file's base class writes about training, generation and bookkeeping.
_GENERATION = """
    do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences
    temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty
    bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    remove_invalid_values decoder_start_token_id sep_token_id output_scores
    return_dict_in_generate
"""
_BASE_CLASS = """
    architectures auto_map transformers_version _name_or_path attn_implementation
    _attn_implementation initializer_range use_cache use_return_dict return_dict
    output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder finetuning_task task_specific_params
    problem_type id2label label2id prefix tokenizer_class
"""
# Derived by the base class: a width and a base of rotation that no layer has.
_DERIVED = ("head_dim", "rope_theta")
_SILENT: Form = dict.fromkeys((*_GENERATION.split(), *_BASE_CLASS.split(), *_DERIVED), ANY)
# No formula reads these either, but whoever drives the model does.
_OWN: Form = dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"), ANY
)
# The vision tower is not run, nor are its tokens fed.
_VISION: Form = dict.fromkeys(("ignore_index", "use_unified_vision_chunk"), ANY)
_VISION_WORDS = ("vision", "media", "image", "video", "mm")


def text_problems(text: Mapping[str, Any], sizes: Form) -> list[str]:
    """Keys of the text model that are unknown or have a value that is not implemented.

    Args:
        text: the parsed part of the file that describes the text model.
        sizes: the form of what is read elsewhere.
    """
    return differences(text, _SILENT | _OWN | FIXED | {"model_type": ("kimi_linear",)} | sizes)


def outer_problems(data: Mapping[str, Any]) -> list[str]:
    """The same for what stands beside `text_config`, where its keys may be repeated as they are."""
    text: Mapping[str, Any] = data["text_config"]
    form = dict(FIXED | _OWN) | {k: _exactly(v) for k, v in text.items()} | _SILENT | _VISION
    form |= {"model_type": ("kimi_k3",), "text_config": ANY}
    form |= {k: ANY for k in data if k.split("_")[0] in _VISION_WORDS}
    problems = differences(data, form)
    again, own = data.get("quantization_config"), text.get("quantization_config")
    if isinstance(again, Mapping) and isinstance(own, Mapping):
        problems += _lacking(again, own, "quantization_config.")
    return [f"beside text_config: {problem}" for problem in problems]


def _lacking(tree: Mapping[str, Any], whole: Mapping[str, Any], path: str) -> list[str]:
    """Keys of `whole` that are missing in `tree`, at every depth."""
    problems = []
    for key, value in whole.items():
        if key not in tree:
            problems.append(f"{path}{key} is missing")
        elif isinstance(value, Mapping) and isinstance(tree[key], Mapping):
            problems += _lacking(tree[key], value, f"{path}{key}.")
    return problems


def _exactly(value: Any) -> Any:
    """The form that only this value has."""
    if isinstance(value, Mapping) and value:
        return {k: _exactly(v) for k, v in value.items()}
    return (value,)


def differences(tree: Mapping[str, Any], form: Form, path: str = "") -> list[str]:
    """Where `tree` has a key that `form` lacks, or another value, in words and in its order."""
    problems = []
    for key, value in tree.items():
        name, allowed = path + str(key), form.get(key)
        if allowed is ANY:
            continue
        if allowed is None:
            problems.append(f"{name} = {value!r} is unknown")
        elif isinstance(allowed, Mapping):
            if isinstance(value, Mapping):
                problems += differences(value, allowed, f"{name}.")
            else:
                problems.append(f"{name} = {value!r}, expected {', '.join(allowed)} in it")
        elif not any(_equal(value, one) for one in allowed):
            problems.append(f"{name} = {value!r}, implemented is {allowed[0]!r}")
    return problems


def _equal(found: Any, wanted: Any) -> bool:
    # a flag is not a number, though True == 1
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)

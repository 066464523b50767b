"""Sizes and configurations of the small checkpoints that `make_tiny` writes: plain data."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target model; the names are those of the architecture, not of config.json."""

    layers: int
    hidden: int
    vocab: int
    dense: int  # width of the dense MLP of layer 0
    block: int  # AttnRes block length in layers
    kda_heads: int
    kda_dim: int  # key and value width of a KDA head
    mla_heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int  # value width of an MLA head
    experts: int
    top_k: int
    latent: int  # width the routed experts work in
    moe: int  # width of one routed expert
    shared: int = 2  # shared experts, stored as one MLP of width shared * moe
    bigram: float = 4.0  # weight of the bigram in lm_head
    embed: float = 1.5  # range of the embedding: how much of a token survives the layers
    mix: float = 2.0  # gain of the AttnRes projections: how unequal the mixtures are


@dataclasses.dataclass(frozen=True)
class DraftSizes:
    """Sizes of a drafter; hidden size and vocabulary are the target's."""

    layers: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    dense: int
    taps: tuple[int, ...]  # 0-based target layers whose output is read
    rank: int  # of the Markov head
    markov: float = 12.0  # logit that the Markov head gives to the bigram's successor
    final_norm: float = 1.0  # scale of final_norm: how loud the drafter's own logits are
    embed_copy: bool = True  # the released file holds an unused copy of the target's embedding


@dataclasses.dataclass(frozen=True)
class Preset:
    """A target with its drafter and the number of shard files."""

    purpose: str
    target: TargetSizes
    draft: DraftSizes
    shards: int = 2


# fmt: off
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        "demos and quick tests; cuts over 2 ranks; sizes that could be confused differ",
        TargetSizes(
            layers=8, hidden=112, vocab=384, dense=176, block=3, kda_heads=6, kda_dim=32,
            mla_heads=4, q_lora=56, kv_lora=48, nope=24, rope=8, v=40,
            experts=12, top_k=3, latent=96, moe=64, bigram=1.5, embed=6.0, mix=0.5),
        DraftSizes(
            layers=2, heads=4, q_lora=40, kv_lora=48, nope=24, rope=8, v=20, dense=144,
            taps=(1, 4, 6), rank=12, final_norm=0.1),
        shards=3),
    "synthetic": Preset(
        "real head widths at a small hidden size; the fixed reference of the recipe",
        TargetSizes(
            layers=6, hidden=512, vocab=2048, dense=1024, block=3, kda_heads=16, kda_dim=128,
            mla_heads=16, q_lora=256, kv_lora=512, nope=128, rope=64, v=128,
            experts=32, top_k=4, latent=256, moe=256),
        DraftSizes(
            layers=2, heads=16, q_lora=256, kv_lora=512, nope=128, rope=64, v=128, dense=512,
            taps=(1, 3, 4), rank=256, embed_copy=False)),
    "tp16": Preset(
        "every cut over 8 or 16 ranks is whole, down to the scale groups of the experts",
        TargetSizes(
            layers=5, hidden=256, vocab=4096, dense=1024, block=2, kda_heads=48, kda_dim=32,
            mla_heads=48, q_lora=96, kv_lora=64, nope=32, rope=16, v=24,
            experts=32, top_k=4, latent=128, moe=1536, bigram=2.0, embed=3.0, mix=0.5),
        DraftSizes(
            layers=2, heads=32, q_lora=96, kv_lora=64, nope=32, rope=16, v=24, dense=512,
            taps=(0, 2, 3), rank=32, final_norm=0.15),
        shards=4),
    "deep": Preset(
        "all 93 layers in their real pattern at a very small width",
        TargetSizes(
            layers=93, hidden=32, vocab=192, dense=80, block=12, kda_heads=2, kda_dim=24,
            mla_heads=2, q_lora=20, kv_lora=40, nope=16, rope=8, v=12,
            experts=4, top_k=2, latent=96, moe=64, bigram=0.5, embed=24.0, mix=0.25),
        DraftSizes(
            layers=2, heads=2, q_lora=20, kv_lora=40, nope=16, rope=8, v=12, dense=72,
            taps=(2, 23, 47, 71, 89), rank=16, final_norm=0.15),
        shards=4),
    "big": Preset(
        "more than 2 GB in many shards, for measuring the loader's memory",
        TargetSizes(
            layers=9, hidden=2048, vocab=16384, dense=8192, block=4, kda_heads=16, kda_dim=128,
            mla_heads=16, q_lora=512, kv_lora=512, nope=128, rope=64, v=128,
            experts=128, top_k=8, latent=1024, moe=1024),
        DraftSizes(
            layers=2, heads=16, q_lora=512, kv_lora=512, nope=128, rope=64, v=128, dense=2048,
            taps=(1, 4, 7), rank=256, final_norm=0.1),
        shards=12),
}
# fmt: on


SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MASK_TOKEN = MEDIA_TOKEN = 3
# fmt: off
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
            "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8",
            "observer": "minmax", "actorder": None, "block_structure": None}}},
}
FIXED_TEXT = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5, "initializer_range": 0.02, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "use_cache": True, "mla_use_nope": True,
    "mla_use_output_gate": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
    "routed_scaling_factor": 1.0, "use_grouped_topk": True, "num_expert_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    **SPECIAL_TOKENS, "quantization_config": QUANTIZATION,
}
FIXED_DRAFT = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "mla_use_nope": False,
    "mla_use_output_gate": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128,
        "rope_theta": 50000, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "mask_token_id": MASK_TOKEN, **SPECIAL_TOKENS, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
# fmt: on


def text_config(sizes: TargetSizes, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `text_config` of config.json for these sizes, with the overrides put over it.

    What follows from an overridden field follows: the lists of layer kinds from the depth, the
    number of key-value heads from the number of heads, unless they are overridden themselves.
    """
    _require_kinds(sizes, overrides or {})
    over = dict(overrides or {})
    linear_over = dict(over.pop("linear_attn_config", {}))
    layers = over.get("num_hidden_layers", sizes.layers)
    full = [n for n in range(1, layers + 1) if n % 4 == 0 or n == layers]
    full = linear_over.get("full_attn_layers", full)
    heads = over.get("num_attention_heads", sizes.mla_heads)
    # fmt: off
    linear = {
        "num_heads": sizes.kda_heads, "head_dim": sizes.kda_dim, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": True, "full_attn_layers": full,
        "kda_layers": [n for n in range(1, layers + 1) if n not in full],
    }
    config = FIXED_TEXT | {
        "vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "num_hidden_layers": layers,
        "intermediate_size": sizes.dense, "attn_res_block_size": sizes.block,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora, "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope, "v_head_dim": sizes.v, "num_experts": sizes.experts,
        "num_experts_per_token": sizes.top_k, "num_shared_experts": sizes.shared,
        "moe_intermediate_size": sizes.moe, "routed_expert_hidden_size": sizes.latent,
    }
    # fmt: on
    unknown = sorted(set(over) - set(config)) + sorted(set(linear_over) - set(linear))
    config = config | over | {"linear_attn_config": linear | linear_over}
    problems = [f"unknown field {name!r}; expected a field of text_config" for name in unknown]
    problems += [] if unknown else _problems(config)
    if problems:
        raise ValueError("cannot make this checkpoint: " + "; ".join(problems))
    return config


def _require_kinds(sizes: TargetSizes, overrides: Any) -> None:
    """Refuse overrides that are no mapping, or values of another type than the field's.

    Raises:
        ValueError: listing all.
    """
    if not overrides:
        return
    if not isinstance(overrides, dict):
        found = type(overrides).__name__
        raise ValueError(f"overrides: found {found}, expected a dict of fields; give one")
    usual = text_config(sizes)
    linear = overrides.get("linear_attn_config", {})
    problems = _other_kinds(usual, overrides)
    if isinstance(linear, dict):
        problems += _other_kinds(usual["linear_attn_config"], linear)
    if problems:
        raise ValueError("cannot make this checkpoint: " + "; ".join(problems) + "; change these")


_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_experts", "hidden_size", "vocab_size")


def _other_kinds(usual: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
    words |= {list: "a list", dict: "a dict"}
    problems = []
    for name, value in overrides.items():
        kind = type(usual.get(name))
        same = type(value) is kind or (kind is float and type(value) is int)
        if kind in words and not same:
            problems.append(f"{name}: found {value!r:.60}, expected {words[kind]}")
        elif kind is int and value < 1 and name in _COUNTS:
            problems.append(f"{name}: found {value}, expected at least 1")
    return problems


def release_config(text: dict[str, Any]) -> dict[str, Any]:
    """The whole config.json of a target around its `text_config`."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": text,
        "media_placeholder_token_id": MEDIA_TOKEN,
        "ignore_index": -100,
        **{name: text[name] for name in SPECIAL_TOKENS},
    }


def _problems(config: dict[str, Any]) -> list[str]:
    """What keeps a checkpoint of this configuration from existing or from being predictable."""
    found = []
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if config[name] % 32:
            found.append(f"{name} = {config[name]}; expected a multiple of 32, the scale group")
    if config["vocab_size"] % 5 == 0 or config["vocab_size"] <= MASK_TOKEN:
        text = f"above {MASK_TOKEN} and not a multiple of 5, for the bigram to be a permutation"
        found.append(f"vocab_size = {config['vocab_size']}; expected one {text}")
    if config["num_experts_per_token"] > config["num_experts"]:
        text = f"num_experts_per_token = {config['num_experts_per_token']}"
        found.append(f"{text}; expected at most num_experts = {config['num_experts']}")
    linear = config["linear_attn_config"]
    listed = sorted(linear["kda_layers"] + linear["full_attn_layers"])
    if listed != list(range(1, config["num_hidden_layers"] + 1)):
        text = f"1 ... {config['num_hidden_layers']}, each once (counted from 1)"
        found.append(f"kda_layers and full_attn_layers hold {listed}; expected {text}")
    return found


def draft_config(sizes: DraftSizes, target: dict[str, Any]) -> dict[str, Any]:
    """The drafter's config.json; taps beyond the last target layer are left out."""
    layers, hidden, vocab = (target[n] for n in ("num_hidden_layers", "hidden_size", "vocab_size"))
    taps = [layer for layer in sizes.taps if layer < layers] or [layers - 1]
    # fmt: off
    return FIXED_DRAFT | {
        "hidden_size": hidden, "intermediate_size": sizes.dense, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora, "kv_lora_rank": sizes.kv_lora, "v_head_dim": sizes.v,
        "qk_nope_head_dim": sizes.nope, "qk_rope_head_dim": sizes.rope, "vocab_size": vocab,
        "draft_vocab_size": vocab, "num_target_layers": len(taps), "target_layer_ids": taps,
        "target_hidden_size": hidden, "target_num_hidden_layers": layers,
        "markov_rank": sizes.rank,
    }
    # fmt: on

"""Device memory of the drafter, and of both forms of commit, for `k3 memory`."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from jax_impl.config import ConfigError, ModelConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.memory import MemorySettings
from jax_impl.problems import listed
from jax_impl.step_memory import ITEM, commit_buffer_bytes, commit_traffic_bytes
from jax_impl.weights import BYTES, indivisible

FORMS = ("replay", "snapshots")
# fmt: off
RELEASED = {
    "model_type": "k3_dspark", "hidden_size": 7168, "intermediate_size": 14336,
    "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "mla_use_nope": False, "mla_use_output_gate": False, "vocab_size": 163840,
    "draft_vocab_size": 163840, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
    "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 32768,
        "rope_theta": 50000, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_target_layers": 5, "target_layer_ids": [2, 23, 47, 71, 89], "target_hidden_size": 7168,
    "target_num_hidden_layers": 93, "mask_token_id": 163837, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# fmt: on


def draft_config(draft: str) -> DraftConfig:
    """The drafter that `draft` names: `released`, a config.json, or a directory with one.

    Raises:
        ConfigError: it is missing or not implemented.
    """
    if draft == "released":
        return DraftConfig.from_dict(RELEASED, source="the released drafter")
    return DraftConfig.load(draft)


def draft_weight_bytes(config: DraftConfig, ranks: int) -> int:
    """Bytes of the drafter's weights on one rank; what is not cut stands on every rank.

    Raises:
        ConfigError: listing every weight that does not divide by the ranks.
    """
    from jax_impl.draft_weights import draft_table  # imports JAX

    table = draft_table(config, ranks)
    problems = indivisible(config, table, ranks)
    if problems:
        do = "Choose another number of ranks, such as 1."
        raise ConfigError(listed(f"{ranks} ranks do not divide this drafter", problems, do))
    return sum(prod(array.shape(config, ranks)) * BYTES[array.dtype] for array in table)


def draft_token_bytes(config: DraftConfig, kv_dtype: str) -> int:
    """The drafter's cache of one token, in bytes; the same on every rank."""
    return config.num_hidden_layers * config.kv_row * ITEM[kv_dtype]


def with_draft(target: ModelConfig, settings: MemorySettings, draft: str | None) -> MemorySettings:
    """`settings` with the drafter's sizes; None leaves them at none.

    Raises:
        ConfigError: the drafter is missing, not implemented, or made for another target.
    """
    if draft is None:
        return settings
    config = draft_config(draft)
    config.require_target(target)
    return replace(
        settings,
        draft_weights=draft_weight_bytes(config, settings.ranks),
        draft_token_bytes=draft_token_bytes(config, settings.kv_dtype),
    )


def commit_forms(target: ModelConfig, settings: MemorySettings) -> dict[str, dict[str, int]]:
    """For each form of commit the bytes kept and moved by one step on one rank."""
    forms = {form: replace(settings, commit=form) for form in FORMS}
    return {
        form: {
            "memory": commit_buffer_bytes(target, asked),
            "traffic": commit_traffic_bytes(target, asked),
        }
        for form, asked in forms.items()
    }

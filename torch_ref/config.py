"""The architecture, read from a `config.json`; settings that are not implemented are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ref.config_keys import ANY, outer_problems, text_problems

_PLAIN = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "rms_norm_eps",
    "attn_res_block_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "routed_scaling_factor",
)
_LINEAR_ATTN = ("num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound")
_LISTS = ("kda_layers", "full_attn_layers")
_CHECKED = ("num_key_value_heads", "use_grouped_topk", "num_expert_group", "topk_group")
_SIZES: dict[str, Any] = dict.fromkeys(_PLAIN + _CHECKED, ANY) | {
    "linear_attn_config": dict.fromkeys(_LINEAR_ATTN + _LISTS, ANY)
    | {"use_full_rank_gate": (True,)}
}


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model, under the names of `config.json`.

    Attributes:
        kda_layers: 0-based indices of the KDA layers, ascending (the file counts from 1).
        mla_layers: 0-based indices of the MLA layers, ascending.
        kda_num_heads: heads of a KDA layer; not tied to `num_attention_heads`.
        kda_head_dim: key width and value width of a KDA head.
        short_conv_kernel_size: taps of the short convolution; one fewer raw columns are cached.
        gate_lower_bound: lower bound of the log decay per step (negative).
        prefix: what checkpoint names start with: `language_model.` in the released nested form,
            empty in the flat text-only form.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    attn_res_block_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    num_expert_group: int = 1
    topk_group: int = 1
    prefix: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Reads `config.json`; `path` is the file or the checkpoint folder that holds it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: see `from_dict`.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Builds the configuration from a parsed `config.json`, nested (`text_config`) or flat.

        Raises:
            ValueError: keys are missing, unknown or have values that are not implemented; all are
                named at once.
        """
        nested = "text_config" in data
        text = data["text_config"] if nested else data
        if not isinstance(text, Mapping):
            raise ValueError(f"config.json: text_config = {text!r}, expected an object")
        linear = text.get("linear_attn_config")
        linear = linear if isinstance(linear, Mapping) else {}
        missing = [k for k in _PLAIN if text.get(k) is None]
        missing += [
            f"linear_attn_config.{k}" for k in _LINEAR_ATTN + _LISTS if linear.get(k) is None
        ]
        problems = [f"it lacks {', '.join(missing)}"] if missing else []
        problems += text_problems(text, _SIZES) + (outer_problems(data) if nested else [])
        if missing:
            raise ValueError("config.json is not supported: " + "; ".join(problems))
        grouped = bool(text.get("use_grouped_topk", True))
        config = cls(
            **{k: text[k] for k in _PLAIN},
            kda_layers=tuple(sorted(i - 1 for i in linear["kda_layers"])),
            mla_layers=tuple(sorted(i - 1 for i in linear["full_attn_layers"])),
            kda_num_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            short_conv_kernel_size=linear["short_conv_kernel_size"],
            gate_lower_bound=linear["gate_lower_bound"],
            num_expert_group=text.get("num_expert_group", 1) if grouped else 1,
            topk_group=text.get("topk_group", 1) if grouped else 1,
            prefix="language_model." if nested else "",
        )
        heads = config.num_attention_heads
        if text.get("num_key_value_heads", heads) != heads:
            problems.append(f"num_key_value_heads must equal num_attention_heads = {heads}")
        problems += config._violations()
        if problems:
            raise ValueError("config.json is not supported: " + "; ".join(problems))
        return config

    def _violations(self) -> list[str]:
        """Contradictions between fields, in words."""
        problems = []
        if sorted(self.kda_layers + self.mla_layers) != list(range(self.num_hidden_layers)):
            problems.append(
                "kda_layers and full_attn_layers must name every layer exactly once, from 1"
            )
        if self.num_experts % self.num_expert_group:
            problems.append(
                f"num_experts = {self.num_experts} must be a multiple of num_expert_group = "
                f"{self.num_expert_group}"
            )
        kept = self.num_experts // self.num_expert_group * self.topk_group
        if self.topk_group > self.num_expert_group or self.num_experts_per_token > kept:
            problems.append(
                f"num_experts_per_token = {self.num_experts_per_token} does not fit into "
                f"topk_group = {self.topk_group} of {self.num_expert_group} expert groups"
            )
        return problems

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` is a KDA layer; every other layer is an MLA layer."""
        return layer in self.kda_layers

    def is_dense(self, layer: int) -> bool:
        """Whether 0-based `layer` has the dense MLP instead of the LatentMoE."""
        return layer < self.first_k_dense_replace

    def starts_block(self, layer: int) -> bool:
        """Whether 0-based `layer` takes an AttnRes snapshot and restarts the running prefix."""
        return layer % self.attn_res_block_size == 0

    @property
    def kda_width(self) -> int:
        """Channels of one of q, k, v of a KDA layer: heads times head width."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_width(self) -> int:
        """Width of the single MLP that realises all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

"""The architecture of a DSpark draft, read from its `config.json`, and its tensors by name.

Everything that differs between published drafts comes from the file: heads, tapped target layers
and which of their streams is read, norm per tap, causality of the block, window, rotation, epsilon.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_ref.config import Config
from torch_ref.loader import Spec

# Keys with a single implemented value. Without the first ones a file is refused, because code that
# reads it may put another value in their place.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "model_type": ("k3_dspark",),
    "mla_use_nope": (False,),
    "mla_use_output_gate": (False,),
    "markov_head_type": ("vanilla",),
}
# These may be absent. What a norm per tap and the mixture stream do is implemented below and
# tested, but not in the implementation that is compared with this one, so no file may ask for it.
_FIXED: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "fc_norm": (False, None),
    "aux_hidden_stream": ("prefix", None),
    "sample_from_anchor": (True, None),
    "dspark_bonus_anchor": (False, None),
    "dspark_draft_topk": (None,),
    "n_predict": (None,),
    "rope_interleave": (True, None),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
}
_WHOLE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
    "max_position_embeddings",
    "target_num_hidden_layers",
    "mask_token_id",
    "markov_rank",
)
_FLAGS = ("enable_confidence_head", "confidence_head_with_markov", "non_causal")
# These must agree with another key, see `DraftConfig._violations`.
_CHECKED = (
    "num_target_layers",
    "num_key_value_heads",
    "draft_vocab_size",
    "target_hidden_size",
    "rope_theta",
)
# Facts about the file or its training that no formula here uses; the block is as long as the number
# of tokens asked for, whatever `block_size` the draft was trained with.
_IGNORED = (
    "architectures",
    "transformers_version",
    "_torchspec_version",
    "_name_or_path",
    "auto_map",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "block_size",
)
_YARN = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_LIMIT = 2**31  # no number of a configuration reaches this
STREAMS = ("prefix", "attn_res")
# Tensors that a file may hold and that nothing here reads: the table is the target's.
SKIPPED = ("embed_tokens.weight",)


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and constants of one draft, under the names of `config.json`.

    Attributes:
        target_layer_ids: 0-based target layers after which a stream is read, ascending.
        rope: `rope_parameters` of the file.
        fc_norm: whether every tap has an RMSNorm of its own before the projection.
        aux_hidden_stream: "prefix" (running sum) or "attn_res" (mixture of the next consumer).
        non_causal: whether a block row sees the whole block; else the rows up to itself.
        sliding_window: how many context rows before the anchor are visible; None means all.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_hidden_size: int
    target_num_hidden_layers: int
    mask_token_id: int
    markov_rank: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    target_layer_ids: tuple[int, ...]
    rope: Mapping[str, Any] = field(hash=False)
    fc_norm: bool = False
    aux_hidden_stream: str = "prefix"
    non_causal: bool = True
    sliding_window: int | None = None

    @classmethod
    def load(cls, path: str | Path, target: Config) -> DraftConfig:
        """Reads the `config.json` of a draft; `path` is the file or the folder that holds it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: see `from_dict`.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")), target)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], target: Config) -> DraftConfig:
        """Builds the configuration for use with `target`.

        Raises:
            ValueError: fields are unknown, missing, not implemented or do not fit the target; all
                are named at once.
        """
        rope = data.get("rope_parameters")
        rope = dict(rope) if isinstance(rope, Mapping) else {}
        problems = _key_problems(data, rope) + _value_problems(data, rope)
        if not problems:
            config = cls(
                **{k: data[k] for k in (*_WHOLE, "rms_norm_eps", "target_hidden_size")},
                **{k: data[k] for k in _FLAGS if k in data},
                target_layer_ids=tuple(data["target_layer_ids"]),
                rope=rope,
                sliding_window=data.get("sliding_window"),
            )
            problems = config._violations(data, target)
        if problems:
            raise ValueError("config.json of the draft is not supported: " + "; ".join(problems))
        return config

    def _violations(self, data: Mapping[str, Any], target: Config) -> list[str]:
        """Contradictions between fields and against the target, in words."""
        taps = self.target_layer_ids
        must_equal = {
            "num_target_layers": (data["num_target_layers"], "the number of taps", len(taps)),
            "num_key_value_heads": (
                data["num_key_value_heads"],
                "num_attention_heads",
                self.num_attention_heads,
            ),
            "draft_vocab_size": (data["draft_vocab_size"], "vocab_size", self.vocab_size),
            "hidden_size": (self.hidden_size, "the target's", target.hidden_size),
            "vocab_size": (self.vocab_size, "the target's", target.vocab_size),
            "target_hidden_size": (self.target_hidden_size, "the target's", target.hidden_size),
            "target_num_hidden_layers": (
                self.target_num_hidden_layers,
                "the target's",
                target.num_hidden_layers,
            ),
            "rope_theta": (
                data["rope_theta"],
                "rope_parameters.rope_theta",
                self.rope["rope_theta"],
            ),
        }
        problems = [
            f"{k} = {found!r} must equal {what} {wanted!r}"
            for k, (found, what, wanted) in must_equal.items()
            if isinstance(found, bool) or found != wanted
        ]
        layers = target.num_hidden_layers
        checks = {
            f"target_layer_ids {list(taps)} must ascend within 0..{layers - 1}": bool(taps)
            and list(taps) == sorted(set(taps) & set(range(layers))),
            f"mask_token_id = {self.mask_token_id} is outside the vocabulary": (
                0 <= self.mask_token_id < self.vocab_size
            ),
            f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even": (
                self.qk_rope_head_dim % 2 == 0
            ),
        }
        return problems + [text for text, fine in checks.items() if not fine]

    def specs(self) -> dict[str, Spec]:
        """What every tensor that is used must look like, by name."""
        d, inner, h, rope = (
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.qk_rope_head_dim,
        )
        nope, value, q_rank, rank = (
            self.qk_nope_head_dim,
            self.v_head_dim,
            self.q_lora_rank,
            self.kv_lora_rank,
        )
        taps, tap = len(self.target_layer_ids), self.target_hidden_size
        layer = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_a_proj": (q_rank, d),
            "self_attn.q_a_layernorm": (q_rank,),
            "self_attn.q_b_proj": (h * (nope + rope), q_rank),
            "self_attn.kv_a_proj_with_mqa": (rank + rope, d),
            "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (h * (nope + value), rank),
            "self_attn.o_proj": (d, h * value),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }
        shapes = {"context_proj": (d, taps * tap), "context_norm": (d,), "final_norm": (d,)}
        shapes |= {f"markov_head.markov_w{i}": (self.vocab_size, self.markov_rank) for i in (1, 2)}
        shapes |= {f"fc_norm.{i}": (tap,) for i in range(taps) if self.fc_norm}
        for i in range(self.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        specs = {f"{name}.weight": Spec(shape) for name, shape in shapes.items()}
        if self.enable_confidence_head:
            width = d + (self.markov_rank if self.confidence_head_with_markov else 0)
            specs["confidence_head.proj.weight"] = Spec((1, width))
            specs["confidence_head.proj.bias"] = Spec((1,))
        return specs


def _same(found: Any, wanted: Any) -> bool:
    """Equal, where a flag is no number."""
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def _key_problems(data: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Missing and unknown keys, and values that are not implemented."""
    optional = (*_FIXED, "non_causal", "sliding_window")
    numbers = (*_WHOLE, *_FLAGS[:2], *_CHECKED)
    needed = (*_NEEDED, *numbers, "rms_norm_eps", "target_layer_ids", "rope_parameters")
    missing = [k for k in needed if k not in data or (k not in _NEEDED and data[k] is None)]
    missing += [f"rope_parameters.{k}" for k in ("rope_type", *_YARN) if rope.get(k) is None]
    unknown = sorted(set(data) - {*needed, *optional, *_IGNORED})
    unknown += [f"rope_parameters.{k}" for k in sorted(set(rope) - {"rope_type", *_YARN})]
    problems = [f"lacks {', '.join(missing)}"] if missing else []
    problems += [f"has unknown {', '.join(unknown)}"] if unknown else []
    fixed = [(k, data[k], v) for k, v in (_NEEDED | _FIXED).items() if k in data]
    if "rope_type" in rope:
        fixed.append(("rope_parameters.rope_type", rope["rope_type"], ("yarn",)))
    return problems + [
        f"{name} = {found!r}, implemented is {allowed[0]!r}"
        for name, found, allowed in fixed
        if not any(_same(found, value) for value in allowed)
    ]


def _value_problems(data: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Values of the wrong type, or out of range; what is missing is said elsewhere."""
    problems = []
    for name in _WHOLE:
        value, least = data.get(name), 0 if name == "mask_token_id" else 1
        if value is not None and not (type(value) is int and least <= value < _LIMIT):
            problems.append(f"{name} = {value!r} is not a whole number from {least} to 2^31")
    real = {"rms_norm_eps": data.get("rms_norm_eps")}
    real |= {f"rope_parameters.{k}": rope.get(k) for k in _YARN}
    for name, value in real.items():
        positive = False
        if isinstance(value, int | float) and not isinstance(value, bool):
            bounded = math.isfinite(value) and abs(value) < _LIMIT
            positive = bounded and (value > 0 or ".mscale" in name)
        if value is not None and not positive:
            problems.append(f"{name} = {value!r} is not a positive number below 2^31")
    if rope.get("rope_theta") == 1:
        problems.append("rope_parameters.rope_theta = 1 turns every pair by the same angle")
    for name in _FLAGS:
        if name in data and not isinstance(data[name], bool) and data[name] is not None:
            problems.append(f"{name} = {data[name]!r} is not true or false")
    if "non_causal" in data and data["non_causal"] is None:
        problems.append("non_causal = None is not true or false")
    taps, window = data.get("target_layer_ids"), data.get("sliding_window")
    if taps is not None and not (
        isinstance(taps, list) and taps and all(type(i) is int for i in taps)
    ):
        problems.append(f"target_layer_ids = {taps!r} is not a list of layer numbers")
    if window is not None and not (type(window) is int and window > 0):
        problems.append(f"sliding_window = {window!r} must be a positive number or absent")
    return problems


def rope_frequencies(rope: Mapping[str, Any], width: int) -> Tensor:
    """Angle per position of every rotated pair, [width / 2] float64, plain or YaRN.

    Args:
        rope: `rope_parameters`.
        width: rotated width, `qk_rope_head_dim`.

    Returns:
        The frequencies; pair j is the two neighbouring channels 2j and 2j + 1.
    """
    theta = float(rope["rope_theta"])
    j = torch.arange(width // 2, dtype=torch.float64)
    extra = theta ** (-2 * j / width)
    if rope["rope_type"] == "default":
        return extra

    def correction(turns: float) -> float:
        length = rope["original_max_position_embeddings"]
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(correction(rope["beta_fast"])), 0)
    high = min(math.ceil(correction(rope["beta_slow"])), width - 1)
    span = high - low if high != low else 0.001
    ramp = ((j - low) / span).clamp(0, 1)
    return extra / rope["factor"] * ramp + extra * (1 - ramp)


def rope_multipliers(rope: Mapping[str, Any]) -> tuple[float, float]:
    """The factor on cosine and sine, and the factor on the scores; 1 and 1 without YaRN."""
    if rope["rope_type"] == "default":
        return 1.0, 1.0

    def mscale(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    everywhere = mscale(rope["mscale_all_dim"])
    return mscale(rope["mscale"]) / everywhere, everywhere**2

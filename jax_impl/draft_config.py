"""What the DSpark drafter is (`DraftConfig`), read from its `config.json`; no JAX import.

As for the model, every setting whose other values are not implemented is checked, unknown settings
are refused by name, and all refusals are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from jax_impl.config import ConfigError, ModelConfig, read_config, refused
from jax_impl.config_rules import fixed_settings, flatten, number, unknown_settings
from jax_impl.problems import listed

MODEL_TYPE = "k3_dspark"
MAX_DRAFTS = 7  # the released drafter was trained with blocks of this length

_REQUIRED: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "markov_head_type": "vanilla",
    "rope_parameters.rope_type": "yarn",
}
# Settings that may be absent, but not differ. What stands for absence in the released file is the
# value here: prefix stream, no norm per tap, drafts from the anchor's own row.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "fc_norm": (False, None),
    "aux_hidden_stream": ("prefix", None),
    "dspark_bonus_anchor": (False, None),
    "sample_from_anchor": (True, None),
    "dspark_draft_topk": (None,),
    "n_predict": (None,),
    "rope_interleave": (True, None),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
}
# Says nothing about the forward pass; special tokens are the target's, the block length is the
# number of drafts of the run.
_IGNORED = {
    "architectures", "transformers_version", "_torchspec_version", "_name_or_path", "auto_map",
    "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "block_size",
}  # fmt: skip
_FLAGS = ("enable_confidence_head", "confidence_head_with_markov")
_DERIVED = {
    "num_key_value_heads", "draft_vocab_size", "num_target_layers", "target_hidden_size",
    "rope_theta",
}  # fmt: skip


@dataclass(frozen=True)
class Yarn:
    """Rotation settings (`rope_parameters`): YaRN over interleaved pairs."""

    rope_theta: float
    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class DraftConfig:
    """The drafter, with the field names of the released `config.json`.

    `target_layer_ids` are the 0-based target layers after which the stream is tapped. With
    `non_causal` each row of a block sees the whole block. A `sliding_window` of w hides context
    rows more than w positions before the block.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    target_num_hidden_layers: int
    mask_token_id: int
    markov_rank: int
    rope: Yarn
    target_layer_ids: tuple[int, ...]
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    non_causal: bool = True
    sliding_window: int | None = None
    weights_prefix: ClassVar[str] = ""
    layers_prefix: ClassVar[str] = "layers."

    @property
    def kv_row(self) -> int:
        """Numbers per token in one layer's draft cache: latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def confidence_width(self) -> int:
        """Input width of the confidence head."""
        return self.hidden_size + self.confidence_head_with_markov * self.markov_rank

    @classmethod
    def load(cls, path: str | Path) -> DraftConfig:
        """Read `config.json` (a file, or a checkpoint directory that holds one).

        Raises:
            ConfigError: the file is missing or unreadable, or a setting is not implemented.
        """
        raw, file = read_config(path, "a DSpark draft checkpoint")
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> DraftConfig:
        """Build from the parsed `config.json`.

        Raises:
            ConfigError: listing every unsupported, missing, unknown or inconsistent setting.
        """
        if not isinstance(raw, Mapping) or raw.get("model_type") != MODEL_TYPE:
            found = raw.get("model_type") if isinstance(raw, Mapping) else type(raw).__name__
            raise ConfigError(
                f"{source}: model_type is {found!r}, expected 'k3_dspark' (a target checkpoint in "
                "place of the draft?). Give the directory of a DSpark drafter."
            )
        flat = flatten(raw)
        types = {f.name: str(f.type) for f in fields(cls)}
        known = set(_REQUIRED) | set(_OPTIONAL) | _IGNORED | _DERIVED | (set(types) - {"rope"})
        known |= {f"rope_parameters.{f.name}" for f in fields(Yarn)}
        problems = fixed_settings(flat, _REQUIRED, _OPTIONAL)
        problems += unknown_settings(flat, known, ("auto_map.",))
        values = _collect(flat, types, problems)
        if not problems:
            config = cls(**values)
            problems = _inconsistencies(config, flat)
        if problems:
            raise ConfigError(refused(source, problems))
        return config

    def require_target(self, target: ModelConfig) -> None:
        """Check that the drafter was made for a model of this shape.

        Raises:
            ConfigError: listing every size that differs.
        """
        pairs = (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_num_hidden_layers", self.target_num_hidden_layers, target.num_hidden_layers),
        )
        problems = [
            f"{n}: draft {own}, expected the target's {other}"
            for n, own, other in pairs
            if own != other
        ]
        if problems:
            do = "Give the drafter that was made for this target."
            raise ConfigError(listed("this drafter belongs to another target", problems, do))


def _collect(
    flat: Mapping[str, Any], types: Mapping[str, str], problems: list[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: number(flat, name, kind, problems)
        for name, kind in types.items()
        if kind in ("int", "float")
    }
    yarn = {
        f.name: number(flat, f"rope_parameters.{f.name}", "float", problems) for f in fields(Yarn)
    }
    values["rope"] = Yarn(**yarn)
    taps = flat.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        problems.append(f"target_layer_ids: expected a list of layer numbers, found {taps!r}")
    else:
        values["target_layer_ids"] = tuple(taps)
    for name in (*_FLAGS, "non_causal"):
        value = flat.get(name, True if name == "non_causal" else None)
        if not isinstance(value, bool):
            problems.append(f"{name}: expected true or false, found {value!r}")
        values[name] = value
    window = flat.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        problems.append(f"sliding_window: expected null or a positive number, found {window!r}")
    values["sliding_window"] = window
    return values


def _inconsistencies(c: DraftConfig, flat: Mapping[str, Any]) -> list[str]:
    problems = []
    for field in fields(c):
        value = getattr(c, field.name)
        if field.type in ("int", "float") and field.name != "mask_token_id" and value <= 0:
            problems.append(f"{field.name}: found {value}, expected a positive number")
    for field in fields(Yarn):
        value = getattr(c.rope, field.name)
        if value <= 0 and not field.name.startswith("mscale"):
            problems.append(f"rope_parameters.{field.name}: found {value}, expected above 0")
    if c.rope.rope_theta == 1:
        problems.append("rope_parameters.rope_theta: found 1, expected another number")
    wanted = {
        "num_key_value_heads": c.num_attention_heads,
        "draft_vocab_size": c.vocab_size,
        "num_target_layers": len(c.target_layer_ids),
        "target_hidden_size": c.hidden_size,
        "rope_theta": c.rope.rope_theta,
    }
    for name, value in wanted.items():
        if isinstance(flat.get(name), bool) or flat.get(name) != value:
            problems.append(f"{name}: found {flat.get(name)!r}, only {value} is implemented here")
    taps = c.target_layer_ids
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < c.target_num_hidden_layers:
        problems.append(
            f"target_layer_ids: found {list(taps)}, expected ascending layers within "
            f"0..{c.target_num_hidden_layers - 1}"
        )
    if not 0 <= c.mask_token_id < c.vocab_size:
        problems.append(f"mask_token_id: found {c.mask_token_id}, expected 0..{c.vocab_size - 1}")
    if c.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim: {c.qk_rope_head_dim} is odd; rotation turns pairs")
    return problems


def is_draft(path: str | Path) -> bool:
    """Whether a directory's config.json is a drafter's; False where it cannot be read."""
    try:
        raw, _ = read_config(path, "a checkpoint")
    except ConfigError:
        return False
    return isinstance(raw, dict) and raw.get("model_type") == MODEL_TYPE


def exchanged(target: str | Path, draft: str | Path) -> str:
    """What to say of a drafter given as the target, with something else in `--draft`."""
    return (
        f"found a drafter in {target} and none in --draft {draft}, expected the target first and "
        "its drafter in --draft; exchange the two"
    )

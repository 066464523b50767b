"""What the model is (`ModelConfig`) and how it is run (`RunConfig`); no JAX import.

`ModelConfig.load` reads the `config.json` of a released checkpoint. Every setting whose other
values are not implemented is checked, and all refusals are reported at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from jax_impl.config_rules import (
    GROUP,
    collect,
    flatten,
    inconsistencies,
    outer_refusals,
    refusals,
)
from jax_impl.problems import listed, refused_by_system

__all__ = ["GROUP", "RELEASED_CONFIG", "ConfigError", "ModelConfig", "RunConfig"]

RELEASED_CONFIG = Path(__file__).with_name("k3_config.json")  # the published config.json


class ConfigError(ValueError):
    """A configuration that this project does not implement; the message lists every reason."""


def read_config(path: str | Path, what: str) -> tuple[Any, Path]:
    """The parsed `config.json` (a file, or in a directory) of `what`, and the file's path.

    Raises:
        ConfigError: the file is missing or unreadable.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() or not path.suffix else path
    try:
        return json.loads(file.read_text()), file
    except FileNotFoundError:
        below = ", ".join(sorted(p.parent.name for p in file.parent.glob("*/config.json"))[:8])
        raise ConfigError(
            f"{file}: not found. Expected the config.json of {what}; give the directory that "
            "holds it" + (f" (found one in: {below})." if below else ".")
        ) from None
    except OSError as error:
        raise ConfigError(refused_by_system(error)) from None
    except (ValueError, RecursionError) as error:  # ValueError: also undecodable text
        raise ConfigError(
            f"{file}: not readable as JSON: {error}. Expected the config.json of {what}; fetch the "
            "file again."
        ) from None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, with the field names of the released `config.json` (`text_config`).

    Layer numbers are 0-based here (the file counts from 1). `weights_prefix` is what every tensor
    name starts with: `language_model.` in the released layout, empty in the text-only one.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    attn_res_block_size: int
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    mla_layers: tuple[int, ...]
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
    num_expert_group: int
    topk_group: int
    weights_prefix: str = "language_model."
    layers_prefix: ClassVar[str] = "model.layers."

    # ---- layer pattern: the only place that computes it ----
    def is_mla(self, layer: int) -> bool:
        """Whether `layer` (0-based) is an MLA layer; the others are KDA layers."""
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        """Whether `layer` has the dense MLP instead of the mixture of experts."""
        return layer < self.first_k_dense_replace

    def starts_block(self, layer: int) -> bool:
        """Whether an AttnRes block starts at `layer` (a snapshot is taken, the prefix restarts)."""
        return layer % self.attn_res_block_size == 0

    def attn_ordinal(self, layer: int) -> int:
        """Rank of `layer` among the layers with the same attention kind (its cache index)."""
        return sum(self.is_mla(i) == self.is_mla(layer) for i in range(layer))

    def mlp_ordinal(self, layer: int) -> int:
        """Rank of `layer` among the layers with the same feed-forward kind."""
        return layer if self.is_dense(layer) else layer - self.first_k_dense_replace

    def snapshots_before(self, layer: int) -> int:
        """Number of AttnRes snapshots taken before `layer` (all of them for layer = L)."""
        return -(-layer // self.attn_res_block_size)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layer numbers of the KDA layers."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_mla(i))

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_snapshots(self) -> int:
        """Rows of the snapshot bank."""
        return self.snapshots_before(self.num_hidden_layers)

    # ---- derived widths ----
    @property
    def kda_width(self) -> int:
        """KDA channels per projection: heads x head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def kv_row(self) -> int:
        """Numbers per token in the MLA latent cache: latent and the shared un-rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query head; its inverse square root is the softmax scale."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that holds all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (a file, or a checkpoint directory that holds one).

        Raises:
            ConfigError: the file is missing or unreadable, or a setting is not implemented.
        """
        raw, file = read_config(path, "a Kimi K3 checkpoint")
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Build from the parsed `config.json`: nested `text_config` (released) or flat (text only).

        Raises:
            ConfigError: listing every unsupported, missing, unknown or inconsistent setting.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"{source}: expected a JSON object, found {type(raw).__name__}. Fetch the file "
                "again."
            )
        nested = "text_config" in raw
        if nested and raw.get("model_type") != "kimi_k3":
            raise ConfigError(
                f"{source}: model_type is {raw.get('model_type')!r}, expected 'kimi_k3'. Give the "
                "directory of a Kimi K3 checkpoint; other architectures are not implemented."
            )
        text = raw["text_config"] if nested else raw
        if not isinstance(text, Mapping) or text.get("model_type") != "kimi_linear":
            found = text.get("model_type") if isinstance(text, Mapping) else text
            raise ConfigError(
                f"{source}: the text model_type is {found!r}, expected 'kimi_linear' (a draft or "
                "another architecture? a draft goes to --draft)"
            )
        flat = flatten(text)
        types = {f.name: str(f.type) for f in fields(cls)}
        problems = refusals(flat, set(types)) + (outer_refusals(raw) if nested else [])
        values, more = collect(flat, types)
        problems += more
        if not problems:
            config = cls(**values, weights_prefix="language_model." if nested else "")
            problems = inconsistencies(config, flat)
        if problems:
            raise ConfigError(refused(source, problems))
        return config


def refused(source: str, problems: list[str]) -> str:
    """The message of a `config.json` that is not taken."""
    title = f"{source}: {len(problems)} setting(s) that are not implemented or not consistent"
    do = "Use the config.json as it was released; other settings would need an implementation."
    return listed(title, problems, do)


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


@dataclass(frozen=True)
class RunConfig:
    """How to run a model.

    Attributes:
        profile: rounding schedule. `V` is vLLM's NVIDIA path, `H` the published remote code.
        compute: dtype of activations; `float32` rounds nowhere and multiplies at full precision.
        mla_norm_eps: epsilon of the two MLA latent norms; None takes the profile's (H 1e-6,
            V 1e-5).
        kv_dtype: dtype of the MLA latent cache; None takes `compute`.
        kv_scale: the one FP8 scale, for writing and reading; needed with FP8, refused without.
        slots: sequences with recurrent state at the same time.
        pages: pages of the token cache.
        page_size: tokens per page.
        decode_backend: `auto` is the standard XLA path; `latency_specialized` asks for kernels.
        commit: how a verification keeps accepted tokens only: `replay` of recorded updates, or
            `snapshots` of the state after each token (T times the memory, no second pass).
        experts: how routed experts lie on the ranks: `tp` cuts the width of each, `ep` gives whole
            experts to ranks.
        dcp: decode context parallelism, the ranks over which the rows of the MLA latent cache are
            spread: 1 (every rank holds all) or the number of ranks. `page_size` counts rows on one
            rank, so a page holds `dcp` times as many tokens.
        dcp_interleave: consecutive tokens that one rank holds before the next rank's turn.
    """

    profile: Literal["H", "V"] = "V"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    mla_norm_eps: float | None = None
    kv_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] | None = None
    kv_scale: float | None = None
    slots: int = 4
    pages: int = 64
    page_size: int = 16
    decode_backend: Literal["auto", "latency_specialized"] = "auto"
    commit: Literal["replay", "snapshots"] = "replay"
    experts: Literal["tp", "ep"] = "tp"
    dcp: int = 1
    dcp_interleave: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: listing every value that is out of range.
        """
        problems = []
        choices = {
            "profile": ("H", "V"),
            "compute": ("bfloat16", "float32"),
            "kv_dtype": (None, "bfloat16", "float32", "float8_e4m3fn"),
            "decode_backend": ("auto", "latency_specialized"),
            "commit": ("replay", "snapshots"),
            "experts": ("tp", "ep"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name}: found {getattr(self, name)!r}, expected one of {allowed}")
        for name in ("slots", "pages", "page_size", "dcp", "dcp_interleave"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                found = getattr(self, name)
                problems.append(f"{name}: found {found!r}, expected a whole number of at least 1")
        if self.fp8 and not _positive(self.kv_scale):
            problems.append(
                f"kv_scale: found {self.kv_scale}; an FP8 latent cache needs an explicit positive "
                "scale (1.0 where the checkpoint gives none)"
            )
        if not self.fp8 and self.kv_scale is not None:
            problems.append(
                f"kv_scale: found {self.kv_scale}, but kv_dtype is not float8_e4m3fn; expected none"
            )
        if self.mla_norm_eps is not None and not _positive(self.mla_norm_eps):
            problems.append(f"mla_norm_eps: found {self.mla_norm_eps}, expected a positive number")
        if self.dcp != 1 and self.profile == "H":
            problems.append(
                f"dcp: found {self.dcp} with profile 'H', which rounds the shares of the whole "
                "context; expected profile 'V' (context parallelism merges partial results as it "
                "rounds them), or dcp 1"
            )
        if problems:
            raise ConfigError(listed("run settings", problems, "Change these settings."))

    @property
    def page_tokens(self) -> int:
        """Rows of one page on all ranks together."""
        return self.page_size * self.dcp

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens needs: those that its fullest rank fills."""
        turn = self.dcp_interleave * self.dcp
        rows = tokens // turn * self.dcp_interleave + min(tokens % turn, self.dcp_interleave)
        return -(-rows // self.page_size)

    def tokens_in(self, pages: Any) -> Any:
        """Tokens that so many pages hold before a rank's rows need one more; also of an array."""
        rows = pages * self.page_size
        turn = self.dcp_interleave * self.dcp
        return rows // self.dcp_interleave * turn + rows % self.dcp_interleave

    @property
    def fp8(self) -> bool:
        """Whether the MLA latent cache is FP8."""
        return self.kv_dtype == "float8_e4m3fn"

    @property
    def latent_eps(self) -> float:
        """Epsilon of the MLA latent norms."""
        return self.mla_norm_eps or {"H": 1e-6, "V": 1e-5}[self.profile]

    @property
    def kv_cache_dtype(self) -> str:
        """Dtype name of the MLA latent cache."""
        return self.kv_dtype or self.compute

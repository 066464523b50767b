"""Checkpoint tensors: names, shapes and kinds of the released layout, read from a folder or a dict.

A folder is read lazily through memory-mapped safetensors shards: opening it touches headers only,
and a tensor is cast when a layer first asks for it. Packed experts stay packed and are decoded per
use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import Tensor

from torch_ref.config import Config
from torch_ref.mxfp4 import MXFP4_GROUP, mxfp4_decode
from torch_ref.numerics import Numerics

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXPERT = ("w1", "w3", "w2")  # gate, up, down


class Spec(NamedTuple):
    """What one stored tensor must look like.

    Attributes:
        shape: stored shape; the length of `A_log` is a lower bound, as it is padded in the release.
        kind: "compute" (cast to the compute dtype), "wide" (stored F32, never narrowed) or "packed"
            (the shape is that of the decoded matrix; stored as codes and scales, or plainly as
            `.weight`).
    """

    shape: tuple[int, ...]
    kind: str = "compute"


def root_specs(c: Config) -> dict[str, Spec]:
    """Tensors outside the layers, by name without the checkpoint prefix."""
    d = c.hidden_size
    return {
        "model.embed_tokens.weight": Spec((c.vocab_size, d)),
        "model.norm.weight": Spec((d,)),
        "model.output_attn_res_norm.weight": Spec((d,)),
        "model.output_attn_res_proj.weight": Spec((1, d)),
        "lm_head.weight": Spec((c.vocab_size, d)),
    }


def layer_specs(c: Config, layer: int) -> dict[str, Spec]:
    """Tensors of 0-based `layer` except its routed experts, by name below the layer."""
    d, z = c.hidden_size, c.routed_expert_hidden_size
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
    )
    specs = {f"{n}.weight": Spec((d,)) for n in norms}
    specs |= {f"{n}_res_proj.weight": Spec((1, d)) for n in ("self_attention", "mlp")}
    attention = _kda_specs(c) if c.is_kda(layer) else _mla_specs(c)
    specs |= {f"self_attn.{n}": spec for n, spec in attention.items()}
    width = c.intermediate_size if c.is_dense(layer) else c.shared_width
    where = "mlp" if c.is_dense(layer) else "block_sparse_moe.shared_experts"
    specs |= {f"{where}.{n}_proj.weight": Spec((width, d)) for n in ("gate", "up")}
    specs[f"{where}.down_proj.weight"] = Spec((d, width))
    if not c.is_dense(layer):
        moe = {
            "gate.weight": Spec((c.num_experts, d)),
            "gate.e_score_correction_bias": Spec((c.num_experts,), "wide"),
            "routed_expert_down_proj.weight": Spec((z, d)),
            "routed_expert_norm.weight": Spec((z,)),
            "routed_expert_up_proj.weight": Spec((d, z)),
        }
        specs |= {f"block_sparse_moe.{n}": spec for n, spec in moe.items()}
    return specs


def _kda_specs(c: Config) -> dict[str, Spec]:
    d, p, k = c.hidden_size, c.kda_width, c.kda_head_dim
    specs = {f"{n}_proj.weight": Spec((p, d)) for n in "qkvg"}
    specs |= {f"{n}_conv1d.weight": Spec((p, 1, c.short_conv_kernel_size), "wide") for n in "qkv"}
    return specs | {
        "o_proj.weight": Spec((d, p)),
        "f_a_proj.weight": Spec((k, d)),
        "f_b_proj.weight": Spec((p, k)),
        "b_proj.weight": Spec((c.kda_num_heads, d)),
        "A_log": Spec((c.kda_num_heads,), "wide"),
        "dt_bias": Spec((p,), "wide"),
        "o_norm.weight": Spec((k,), "wide"),
    }


def _mla_specs(c: Config) -> dict[str, Spec]:
    d, h, r, rope = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    nope, v = c.qk_nope_head_dim, c.v_head_dim
    return {
        "q_a_proj.weight": Spec((c.q_lora_rank, d)),
        "q_a_layernorm.weight": Spec((c.q_lora_rank,)),
        "q_b_proj.weight": Spec((h * (nope + rope), c.q_lora_rank)),
        "kv_a_proj_with_mqa.weight": Spec((r + rope, d)),
        "kv_a_layernorm.weight": Spec((r,)),
        "kv_b_proj.weight": Spec((h * (nope + v), r)),
        "g_proj.weight": Spec((h * v, d)),
        "o_proj.weight": Spec((d, h * v)),
    }


def expert_specs(c: Config) -> dict[str, Spec]:
    """Matrices of one routed expert by name below it: w1 gate, w3 up, w2 down."""
    z, m = c.routed_expert_hidden_size, c.moe_intermediate_size
    return {
        "w1": Spec((m, z), "packed"),
        "w3": Spec((m, z), "packed"),
        "w2": Spec((z, m), "packed"),
    }


def expected_tensors(c: Config) -> dict[str, Spec]:
    """All tensors by full name with prefix; packed matrices by the name of the matrix."""
    specs = dict(root_specs(c))
    for layer in range(c.num_hidden_layers):
        base = f"model.layers.{layer}"
        specs |= {f"{base}.{n}": spec for n, spec in layer_specs(c, layer).items()}
        if not c.is_dense(layer):
            for e in range(c.num_experts):
                expert = f"{base}.block_sparse_moe.experts.{e}"
                specs |= {f"{expert}.{n}": spec for n, spec in expert_specs(c).items()}
    return {c.prefix + n: spec for n, spec in specs.items()}


class Shards(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder as a mapping from name to tensor, read on access.

    With an index file its `weight_map` decides; without one, `model.safetensors` alone counts, or
    every `*.safetensors` file if none has that name.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the folder.

        Raises:
            FileNotFoundError: there are no shards, or the index names files that do not exist.
        """
        self.path = Path(path)
        index = self.path / _INDEX
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            absent = sorted(f for f in set(names.values()) if not (self.path / f).is_file())
            if absent:
                raise FileNotFoundError(f"{index} names missing files: {', '.join(absent)}")
            self._file_of = dict(names)
            self._open = {f: safe_open(self.path / f, "pt") for f in set(names.values())}
        else:
            files = sorted(f.name for f in self.path.glob("*.safetensors"))
            files = [_SINGLE] if _SINGLE in files else files
            if not files:
                raise FileNotFoundError(f"{self.path} holds neither {_INDEX} nor {_SINGLE}")
            self._open = {f: safe_open(self.path / f, "pt") for f in files}
            # A shard handle is no mapping and cannot be iterated, hence the explicit keys().
            names = {f: list(shard.keys()) for f, shard in self._open.items()}
            self._file_of = {n: f for f, listed in names.items() for n in listed}

    def __getitem__(self, name: str) -> Tensor:
        """The stored tensor; KeyError for a name that the folder does not list."""
        file = self._file_of[name]
        return self._open[file].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        """Whether the folder lists `name`, without reading the tensor."""
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(self._file_of)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._file_of)


class Weights:
    """Tensors of one model, checked for shape and cast for one `Numerics`.

    Attributes:
        config: the architecture.
        numerics: decides the dtypes.
        source: stored tensors by full name.
        keep: whether the cast tensors of a layer stay in memory (experts and the embedding never
            do).
    """

    def __init__(
        self, config: Config, source: Mapping[str, Tensor], numerics: Numerics, *, keep: bool = True
    ) -> None:
        """Wraps `source` without reading it: a dict may hold just the layers to be run."""
        self.config, self.source, self.numerics, self.keep = config, source, numerics, keep
        self._kept: dict[str, Tensor] = {}

    def missing(self) -> list[str]:
        """Names that a whole model needs and that `source` does not have, in any stored form."""
        return [n for n, spec in expected_tensors(self.config).items() if not self._has(n, spec)]

    def _has(self, name: str, spec: Spec) -> bool:
        if spec.kind != "packed":
            return name in self.source
        packed = all(f"{name}.{part}" in self.source for part in ("weight_packed", "weight_scale"))
        return packed or f"{name}.weight" in self.source

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding table, [T, D], compute; only the rows are cast."""
        table = self._stored("model.embed_tokens.weight", root_specs(self.config))
        bad = token_ids[(token_ids < 0) | (token_ids >= table.shape[0])]
        if bad.numel():
            raise ValueError(f"token ids {bad.tolist()} are outside 0..{table.shape[0] - 1}")
        return self.numerics.round(table[token_ids.to(table.device)])

    def root(self, name: str) -> Tensor:
        """A tensor outside the layers, by name without prefix."""
        return self._get(name, root_specs(self.config)[name])

    def layer(self, layer: int) -> dict[str, Tensor]:
        """Cast tensors of 0-based `layer` except its routed experts, by name below the layer."""
        base = f"model.layers.{layer}."
        return {n: self._get(base + n, s) for n, s in layer_specs(self.config, layer).items()}

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down matrix of one routed expert, [m, Z], [m, Z], [Z, m], compute."""
        specs = expert_specs(self.config)
        base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
        gate, up, down = (self._matrix(base + n, specs[n]) for n in _EXPERT)
        return gate, up, down

    def _matrix(self, name: str, spec: Spec) -> Tensor:
        # The ignore list of the quantisation config is incomplete: the stored form decides.
        if self.config.prefix + f"{name}.weight" in self.source:
            return self.numerics.round(self._stored(f"{name}.weight", {f"{name}.weight": spec}))
        out, columns = spec.shape
        parts = {
            f"{name}.weight_packed": Spec((out, columns // 2)),
            f"{name}.weight_scale": Spec((out, columns // MXFP4_GROUP)),
        }
        packed, scale = (self._stored(n, parts) for n in parts)
        return mxfp4_decode(packed, scale, self.numerics)

    def _get(self, name: str, spec: Spec) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        stored = self._stored(name, {name: spec})
        if name.endswith("A_log"):
            stored = stored[: spec.shape[0]]
        value = self.numerics.wide(stored) if spec.kind == "wide" else self.numerics.round(stored)
        if self.keep:
            self._kept[name] = value
        return value

    def _stored(self, name: str, specs: Mapping[str, Spec]) -> Tensor:
        full = self.config.prefix + name
        if full not in self.source:
            raise ValueError(f"tensor {full!r} is missing from the checkpoint")
        stored, shape = self.source[full], specs[name].shape
        found = tuple(stored.shape)
        padded = name.endswith("A_log") and stored.dim() == 1 and found[0] >= shape[0]
        if found != shape and not padded:
            raise ValueError(f"tensor {full!r} has shape {found}, expected {shape}")
        return stored


def load_weights(path: str | Path, numerics: Numerics, *, keep: bool = True) -> Weights:
    """Opens a checkpoint folder with its `config.json`.

    Args:
        path: the folder.
        numerics: decides the dtypes.
        keep: see `Weights`; False re-reads every layer on every pass, for checkpoints near memory
            size.

    Returns:
        The weights, complete by name; shapes are checked on first use.

    Raises:
        FileNotFoundError: a file is absent.
        ValueError: the configuration is not supported, or tensors are missing.
    """
    weights = Weights(Config.load(path), Shards(path), numerics, keep=keep)
    missing = weights.missing()
    if missing:
        shown = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise ValueError(f"{path} lacks {len(missing)} tensors: {shown}")
    return weights

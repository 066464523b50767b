"""The weights as a pytree of stacked device arrays (the rows of `weights.weight_table`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import struct

from jax_impl.config import ModelConfig
from jax_impl.weights import weight_table


@struct.dataclass
class Root:
    """Weights outside the layers. D hidden, X vocabulary rows on this rank."""

    embed_tokens: jax.Array  # bf16 [X, D]
    norm: jax.Array  # bf16 [D]
    output_attn_res_norm: jax.Array  # bf16 [D]
    output_attn_res_proj: jax.Array  # bf16 [1, D]
    lm_head: jax.Array  # bf16 [X, D]


@struct.dataclass
class LayerNorms:
    """What every layer has. Leading axis: all layers."""

    input_layernorm: jax.Array  # bf16 [L, D]
    post_attention_layernorm: jax.Array  # bf16 [L, D]
    self_attention_res_norm: jax.Array  # bf16 [L, D]
    self_attention_res_proj: jax.Array  # bf16 [L, 1, D]
    mlp_res_norm: jax.Array  # bf16 [L, D]
    mlp_res_proj: jax.Array  # bf16 [L, 1, D]


@struct.dataclass
class Kda:
    """KDA attention. H heads on this rank, K head width, P = H K."""

    in_proj: jax.Array  # bf16 [L, 4P + K + H, D]   rows q | k | v | g | f_a | b
    f_b_proj: jax.Array  # bf16 [L, P, K]
    conv1d: jax.Array  # f32 [L, 3P, taps]   channels q | k | v
    A_log: jax.Array  # f32 [L, H]
    dt_bias: jax.Array  # f32 [L, P]
    o_norm: jax.Array  # f32 [L, K]
    o_proj: jax.Array  # bf16 [L, D, P]


@struct.dataclass
class Mla:
    """MLA attention. H heads on this rank, R kv latent, n/r/v head widths."""

    a_proj: jax.Array  # bf16 [L, q_lora + R + r, D]   rows q_a | kv_a, equal on all ranks
    g_proj: jax.Array  # bf16 [L, H v, D]
    q_a_layernorm: jax.Array  # bf16 [L, q_lora]
    q_b_proj: jax.Array  # bf16 [L, H (n + r), q_lora]
    kv_a_layernorm: jax.Array  # bf16 [L, R]
    kv_b_proj: jax.Array  # bf16 [L, H (n + v), R]
    o_proj: jax.Array  # bf16 [L, D, H v]


@struct.dataclass
class Dense:
    """The dense feed-forward part. F width on this rank."""

    gate_up_proj: jax.Array  # bf16 [L, 2F, D]
    down_proj: jax.Array  # bf16 [L, D, F]


@struct.dataclass
class Moe:
    """The mixture of experts. E experts, Z latent, m and M expert and shared width on this rank.

    Rows of `gate`, `routed_expert_down_proj` and `routed_expert_up_proj` are cut over the ranks.
    The routed experts are there once: as the checkpoint has them, or packed (`jax_impl.binding`).
    """

    gate: jax.Array  # bf16 [L, E / R, D]
    e_score_correction_bias: jax.Array  # f32 [L, E]
    routed_expert_down_proj: jax.Array  # bf16 [L, Z / R, D]
    routed_expert_norm: jax.Array  # bf16 [L, Z]
    routed_expert_up_proj: jax.Array  # bf16 [L, D / R, Z]
    shared_gate_up_proj: jax.Array  # bf16 [L, 2M, D]
    shared_down_proj: jax.Array  # bf16 [L, D, M]
    w13_packed: jax.Array | None = None  # u8 [L, E, 2m, Z/2]   gate rows, then up rows
    w13_scale: jax.Array | None = None  # u8 [L, E, 2m, Z/32]
    w2_packed: jax.Array | None = None  # u8 [L, E, Z, m/2]
    w2_scale: jax.Array | None = None  # u8 [L, E, Z, m/32]
    w13_tiles: jax.Array | None = None  # u32 [L, E 2m/64, lines, 32]
    w2_tiles: jax.Array | None = None  # u32 [L, E Z/64, lines, 32]


KINDS = {"root": Root, "layer": LayerNorms, "kda": Kda, "mla": Mla, "dense": Dense, "moe": Moe}


@struct.dataclass
class Weights:
    """All weights: few, stacked leaves (a jitted call costs host time per leaf)."""

    root: Root
    layer: LayerNorms
    kda: Kda
    mla: Mla
    dense: Dense
    moe: Moe


class Layer(NamedTuple):
    """One layer's weights where they lie: the stacks of its kind, and its place in them."""

    stacks: Any
    index: int | jax.Array

    def sliced(self) -> Any:
        """This layer's weights alone."""
        return jax.tree.map(lambda a: a[self.index], self.stacks)


class LayerWeights(NamedTuple):
    """One layer's weights: slices of the stacks, or the stacks and a place (`Layer`)."""

    norms: LayerNorms | Layer
    attention: Kda | Mla | Layer
    mlp: Dense | Moe | Layer


def from_arrays(arrays: dict[tuple[str, str], jax.Array]) -> Weights:
    """Assemble the pytree from (kind, name) -> array."""
    kinds: dict[str, dict[str, jax.Array]] = {kind: {} for kind in KINDS}
    for (kind, name), array in arrays.items():
        kinds[kind][name] = array
    return Weights(**{kind: cls(**kinds[kind]) for kind, cls in KINDS.items()})


def abstract_weights(config: ModelConfig, ranks: int = 1) -> Weights:
    """Shapes and dtypes of one rank's weights, experts cut by width; nothing allocated."""
    return from_arrays(
        {
            (a.kind, a.name): jax.ShapeDtypeStruct(a.shape(config, ranks), a.dtype)
            for a in weight_table(config)
        }
    )

"""The drafter's weights: their table, the pytree of stacked arrays, and opening it."""

from __future__ import annotations

from pathlib import Path

import jax
from flax import struct

from jax_impl.checkpoint import Checkpoint
from jax_impl.draft_config import DraftConfig
from jax_impl.weights import BF16, Part, WeightArray, gated_mlp, joined, one

UNUSED = ("embed_tokens.",)  # a copy of the target's table, which serves both


@struct.dataclass
class DraftRoot:
    """Weights outside the layers. D hidden, G taps, X vocabulary rows on a rank, r Markov rank."""

    context_proj: jax.Array  # bf16 [D / R, G D]
    context_norm: jax.Array  # bf16 [D]
    final_norm: jax.Array  # bf16 [D]
    markov_w1: jax.Array  # bf16 [vocabulary, r], rows of the previous token
    markov_w2: jax.Array  # bf16 [X, r]
    confidence_proj: jax.Array | None = (
        None  # bf16 [1, D + r or D]; None where the file has no head
    )
    confidence_bias: jax.Array | None = None  # bf16 [1]


@struct.dataclass
class DraftLayer:
    """What every layer has. H heads on this rank, q query latent, n/r/v head widths, F width."""

    input_layernorm: jax.Array  # bf16 [L, D]
    post_attention_layernorm: jax.Array  # bf16 [L, D]
    a_proj: jax.Array  # bf16 [L, q + latent + r, D]   rows q_a | kv_a, equal on all ranks
    q_a_layernorm: jax.Array  # bf16 [L, q]
    q_b_proj: jax.Array  # bf16 [L, H (n + r), q]
    kv_a_layernorm: jax.Array  # bf16 [L, latent]
    kv_b_proj: jax.Array  # bf16 [L, H (n + v), latent]
    o_proj: jax.Array  # bf16 [L, D, H v]
    gate_up_proj: jax.Array  # bf16 [L, 2F, D]
    down_proj: jax.Array  # bf16 [L, D, F]


@struct.dataclass
class DraftWeights:
    """All weights of the drafter; embedding and head are the target's."""

    root: DraftRoot
    layer: DraftLayer


def draft_table(c: DraftConfig, ranks: int = 1) -> tuple[WeightArray, ...]:
    """All weight arrays of a drafter, one row per array.

    A drafter may have fewer heads than there are ranks: where they do not divide, every rank holds
    the whole attention, which is then computed alike everywhere and not summed.
    """
    d, v, r, n = c.hidden_size, c.vocab_size, c.markov_rank, c.num_attention_heads
    rq, rkv = c.q_lora_rank, c.kv_lora_rank
    kv = n * (c.qk_nope_head_dim + c.v_head_dim)
    rows, columns = (0, 1) if n % ranks == 0 else (None, None)
    latents = [("q_a_proj", rq, None), ("kv_a_proj_with_mqa", c.kv_row, None)]
    confidence = (
        one("root", "confidence_proj", "confidence_head.proj.weight", (1, c.confidence_width)),
        WeightArray("root", "confidence_bias", BF16, (Part("confidence_head.proj.bias", (1,)),)),
    )
    return (
        one("root", "context_proj", "context_proj.weight", (d, len(c.target_layer_ids) * d), 0),
        one("root", "context_norm", "context_norm.weight", (d,)),
        one("root", "final_norm", "final_norm.weight", (d,)),
        one("root", "markov_w1", "markov_head.markov_w1.weight", (v, r)),
        one("root", "markov_w2", "markov_head.markov_w2.weight", (v, r), 0),
        *(confidence if c.enable_confidence_head else ()),
        one("layer", "input_layernorm", "input_layernorm.weight", (d,)),
        one("layer", "post_attention_layernorm", "post_attention_layernorm.weight", (d,)),
        joined("layer", "a_proj", "self_attn", latents, d),
        one("layer", "q_a_layernorm", "self_attn.q_a_layernorm.weight", (rq,)),
        one("layer", "q_b_proj", "self_attn.q_b_proj.weight", (n * c.qk_head_dim, rq), rows),
        one("layer", "kv_a_layernorm", "self_attn.kv_a_layernorm.weight", (rkv,)),
        one("layer", "kv_b_proj", "self_attn.kv_b_proj.weight", (kv, rkv), rows),
        one("layer", "o_proj", "self_attn.o_proj.weight", (d, n * c.v_head_dim), columns),
        *gated_mlp("layer", "", "mlp", d, c.intermediate_size),
    )


def draft_from_arrays(arrays: dict[tuple[str, str], jax.Array]) -> DraftWeights:
    """Assemble the pytree from (kind, name) -> array."""
    kinds: dict[str, dict[str, jax.Array]] = {"root": {}, "layer": {}}
    for (kind, name), array in arrays.items():
        kinds[kind][name] = array
    return DraftWeights(DraftRoot(**kinds["root"]), DraftLayer(**kinds["layer"]))


def abstract_draft_weights(c: DraftConfig, ranks: int = 1) -> DraftWeights:
    """Shapes and dtypes of one rank's weights, nothing allocated."""
    return draft_from_arrays(
        {
            (a.kind, a.name): jax.ShapeDtypeStruct(a.shape(c, ranks), a.dtype)
            for a in draft_table(c, ranks)
        }
    )


def open_draft(path: str | Path) -> Checkpoint:
    """Check a draft checkpoint from its configuration and headers; every tensor is accounted for.

    Raises:
        ConfigError: `config.json` is missing or not implemented.
        CheckpointError: anything missing, renamed, of another shape or dtype, or left over.
    """
    config = DraftConfig.load(path)
    return Checkpoint.open(path, config, draft_table(config), UNUSED)

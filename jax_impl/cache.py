"""Caches, step inputs and step outputs; the one legend of shape letters.

B sequences in a step; T tokens per sequence; N = B T rows; D hidden; H heads on this rank;
V, K value and key width of a KDA head; C = 3 H K convolution channels; E experts; k chosen experts;
Z MoE latent; R ranks; L layers of one kind; S slots; P pages; J snapshots; X vocabulary rows.
In speculation K is the number of drafts, T = 1 + K, and G the number of tapped layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jax_impl.collectives import ONE_RANK, Ranks
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.sampling import Filters

PAD = -1  # slot of a row that only fills up the batch


@struct.dataclass
class Cache:
    """Everything that outlives a step. Donated to every step; never use one again after that."""

    kda_state: jax.Array  # f32 [L_kda, S, H, V, K]
    conv_window: (
        jax.Array
    )  # compute dtype [L_kda, S, taps - 1, C], oldest first, channels q | k | v
    kv_latent: jax.Array  # kv dtype [L_mla, P, page, latent + rope]; with dcp this rank's rows
    kv_scale: jax.Array | None  # f32 [], the one scale for writing and reading; None unless FP8
    draft_kv: jax.Array | None = None  # kv dtype [L_draft, P, page dcp, latent + rope], same pages


@struct.dataclass
class StepInputs:
    """Inputs of one step, T tokens for each of B sequences.

    The first `count` tokens of a row of `tokens` are real; a pad row has slot PAD and count 0.
    """

    tokens: jax.Array  # i32 [B, T]
    count: jax.Array  # i32 [B], 1..T for real rows
    position: jax.Array  # i32 [B], tokens already processed; 0 means that the slot's state is stale
    slot: jax.Array  # i32 [B]
    page_table: jax.Array  # i32 [B, pages of one sequence]; entries beyond the length are not read
    temperature: jax.Array  # f32 [B], 0 is greedy
    seed: jax.Array  # u32 [B]
    filters: Filters | None = None  # None: no row restricts its distribution
    draft_logits: jax.Array | None = None  # f32 [B, K, X], of sampled drafts; else None

    @property
    def live(self) -> jax.Array:
        """Bool [B]: rows that are not pad."""
        return self.slot >= 0

    def row_live(self) -> jax.Array:
        """Bool [B, T]: tokens that are real."""
        real = jnp.arange(self.tokens.shape[1]) < self.count[:, None]
        return real & self.live[:, None]


@struct.dataclass
class StepOutputs:
    """What a step found out."""

    token: jax.Array  # i32 [B], the token after the last real one; the pad id in pad rows
    finite: jax.Array  # bool [B], whether all logits of the row's real tokens are finite
    logits: jax.Array  # f32 [B, T or 1, X], zeros in rows that are not real; not gathered
    top: jax.Array  # f32 [B, T or 1], largest logit
    argmax: jax.Array  # i32 [B, T or 1]


@struct.dataclass
class SpeculativeOutputs:
    """What a verification emitted."""

    tokens: jax.Array  # i32 [B, T], the first `count` are new; the pad id behind them
    count: jax.Array  # i32 [B], 1..T: accepted drafts and one more; 0 in pad rows and without room
    finite: jax.Array  # bool [B], whether all logits of the row's real tokens are finite


def cache_cuts(run: RunConfig) -> dict[str, int | None]:
    """Axis of each array of `Cache` that is cut over the ranks; None: equal on all of them."""
    return {
        "kda_state": 2,
        "conv_window": 3,
        "kv_latent": 2 if run.dcp > 1 else None,
        "kv_scale": None,
        "draft_kv": None,
    }


def cache_shapes(
    config: ModelConfig, run: RunConfig, ranks: Ranks = ONE_RANK, draft: DraftConfig | None = None
) -> Cache:
    """Shapes and dtypes of one rank's cache, nothing allocated; `draft` adds the drafter's."""
    heads = config.kda_num_heads // ranks.size
    layers, width = len(config.kda_layers), config.kda_head_dim
    taps = config.short_conv_kernel_size
    shape = jax.ShapeDtypeStruct
    return Cache(
        kda_state=shape((layers, run.slots, heads, width, width), jnp.float32),
        conv_window=shape((layers, run.slots, taps - 1, 3 * heads * width), jnp.dtype(run.compute)),
        kv_latent=shape(
            (len(config.mla_layers), run.pages, run.page_size, config.kv_row),
            jnp.dtype(run.kv_cache_dtype),
        ),
        kv_scale=shape((), jnp.float32) if run.fp8 else None,
        draft_kv=None
        if draft is None
        else shape(
            (draft.num_hidden_layers, run.pages, run.page_tokens, draft.kv_row),
            jnp.dtype(run.kv_cache_dtype),
        ),
    )


def make_cache(
    config: ModelConfig, run: RunConfig, ranks: Ranks = ONE_RANK, draft: DraftConfig | None = None
) -> Cache:
    """A zeroed cache. Slots need no clearing between sequences: position 0 hides old contents."""
    shapes = cache_shapes(config, run, ranks, draft)
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return empty.replace(kv_scale=jnp.float32(run.kv_scale)) if run.fp8 else empty

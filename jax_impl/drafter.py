"""DSpark drafting: taps to context rows, then a block of drafts, from one position to the next.

The drafter reads the target's streams of accepted tokens only; the newest token, not yet processed
by the target, is the anchor of the block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_impl.backend import Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.draft_weights import DraftWeights
from jax_impl.params import Weights
from jax_impl.static import DraftStatic, Static


def write_context(
    draft: DraftStatic,
    backend: Backend,
    draft_weights: DraftWeights,
    cache: Cache,
    inputs: StepInputs,
    taps: jax.Array,
    count: jax.Array,
) -> Cache:
    """Context rows of each sequence's first `count` i32 [B] tokens of a step; taps [N, G D]."""
    kv = backend.draft_context(
        draft, draft_weights, taps, inputs.replace(count=count), cache.draft_kv, cache.kv_scale
    )
    return cache.replace(draft_kv=kv)


def block_inputs(
    draft: DraftStatic, inputs: StepInputs, anchor: jax.Array, drafts: int
) -> StepInputs:
    """Inputs of a block: the anchor i32 [B] at `inputs.position`, then mask tokens."""
    masks = jnp.full((anchor.shape[0], drafts - 1), draft.config.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([anchor[:, None], masks], axis=1)
    return inputs.replace(tokens=tokens, count=jnp.where(inputs.live, drafts, 0))


def base_logits(
    static: Static,
    draft: DraftStatic,
    backend: Backend,
    weights: Weights,
    draft_weights: DraftWeights,
    cache: Cache,
    block: StepInputs,
) -> tuple[jax.Array, Cache]:
    """Logits of a block before the Markov bias, f32 [B, K, X] on this rank."""
    x = backend.embed(static, weights.root, block)
    hidden, kv = backend.draft_block(draft, draft_weights, x, block, cache.draft_kv, cache.kv_scale)
    base, _, _ = backend.logits(static, weights.root, hidden)
    return base.reshape(*block.tokens.shape, -1), cache.replace(draft_kv=kv)


def propose(
    static: Static,
    draft: DraftStatic,
    backend: Backend,
    weights: Weights,
    draft_weights: DraftWeights,
    cache: Cache,
    inputs: StepInputs,
    anchor: jax.Array,
    *,
    drafts: int,
    sample: bool,
) -> tuple[Cache, StepInputs]:
    """Draft after `anchor` i32 [B]; `inputs.position` is the anchor's, its context is written.

    Returns the cache and the inputs of the verification: anchor and drafts [B, 1 + K], `count` as
    many of them as the sequence's pages have room for.
    """
    block = block_inputs(draft, inputs, anchor, drafts)
    base, cache = base_logits(static, draft, backend, weights, draft_weights, cache, block)
    found, logits = backend.draft_markov(draft, draft_weights.root, base, block, sample=sample)
    room = static.run.tokens_in(jnp.sum(inputs.page_table >= 0, axis=1))
    room = jnp.minimum(room, static.config.max_position_embeddings) - inputs.position
    count = jnp.where(inputs.live, jnp.clip(room, 0, drafts + 1), 0)
    tokens = jnp.concatenate([anchor[:, None], found], axis=1)
    return cache, inputs.replace(
        tokens=tokens,
        count=count.astype(jnp.int32),
        draft_logits=logits if sample else None,
    )

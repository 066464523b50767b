"""Reading and writing paged latent rows; the target's cache and the drafter's share pages.

Rows are those that this rank holds (`ContextSplit`); a page is a number of consecutive ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_impl.cache import StepInputs
from jax_impl.collectives import WHOLE_CONTEXT, ContextSplit
from jax_impl.numerics import Numerics
from jax_impl.ops import mla as mla_ops


def positions(inputs: StepInputs) -> jax.Array:
    """i32 [B, T]: position of each token of the step."""
    return inputs.position[:, None] + jnp.arange(inputs.tokens.shape[1])


def write_rows(
    inputs: StepInputs,
    layer,
    rows: jax.Array,
    cache: jax.Array,
    scale: jax.Array | None,
    split: ContextSplit = WHOLE_CONTEXT,
) -> jax.Array:
    """Store the rows of real tokens that this rank holds; in place.

    Args: rows [B, T, row] for one `layer`, or [L, B, T, row] with `layer` slice(None); cache
    [L, P, page, row]. Tokens beyond the page table or without a page are dropped.
    """
    pages, page_size = cache.shape[1:3]
    row, mine = split.row_of(positions(inputs))
    index = row // page_size
    page = jnp.take_along_axis(inputs.page_table, index, axis=1, mode="clip")
    here = inputs.row_live() & mine & (page >= 0) & (index < inputs.page_table.shape[1])
    page = jnp.where(here, page, pages)  # beyond the end: dropped
    stored = mla_ops.to_cache(rows, cache.dtype, scale)
    return cache.at[layer, page, row % page_size].set(stored, mode="drop")


def read_rows(
    nx: Numerics,
    inputs: StepInputs,
    layer,
    cache: jax.Array,
    scale: jax.Array | None,
    split: ContextSplit = WHOLE_CONTEXT,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of each sequence up to this step's last token, as far as this rank holds them.

    Returns: rows [B, S, row], which of them exist [B, S], their positions [S] in the sequence.

    Rows beyond a sequence's end are replaced, not multiplied by zero: their pages may hold NaN.
    """
    pages, page_size = cache.shape[1:3]
    table = jnp.clip(inputs.page_table, 0, pages - 1)
    kv = cache[layer, table].reshape(inputs.tokens.shape[0], -1, cache.shape[-1])
    end = jnp.where(inputs.live, inputs.position + inputs.count, 0)
    where = split.position_of(jnp.arange(kv.shape[1]))
    stored = where < end[:, None]
    stored &= jnp.repeat(inputs.page_table >= 0, page_size, axis=1)
    return jnp.where(stored[..., None], mla_ops.from_cache(nx, kv, scale), 0), stored, where

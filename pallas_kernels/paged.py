"""Which cache rows the tokens of a step see and write; once per step, in plain jnp.

For a rank that holds the whole context. Where the context is spread over ranks, `ends` and `place`
count the rows that lie on this rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ends(position: jax.Array, count: jax.Array, tokens: int) -> jax.Array:
    """How many cache rows each token sees, itself included: i32 [B, T], 0 for pad tokens.

    `position` i32 [B]: tokens before this step; `count` i32 [B]: real ones in it, 0 in pad rows.
    """
    number = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.where(number < count[:, None], position[:, None] + number + 1, 0)


def place(seen: jax.Array, table: jax.Array, page: int) -> jax.Array:
    """Where each token's row goes: i32 [N], page id * `page` + row; -1 for pad tokens.

    `seen` is what `ends` gives; a token whose page is missing from `table` i32 [B, W] is a pad.
    """
    row = jnp.maximum(seen - 1, 0)
    which = jnp.take_along_axis(table, row // page, axis=1, mode="clip")
    ok = (seen > 0) & (which >= 0) & (row // page < table.shape[1])
    return jnp.where(ok, which * page + row % page, -1).reshape(-1)

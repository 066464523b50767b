"""Acceptance rules: pure functions of target rows, drafts, draft distributions and uniforms.

Drafts count from 0 here: draft i is judged by target row i with uniform i, and row K gives the
bonus token. A draft of -1 is a placeholder; it and everything behind it is never accepted. Without
draft distributions the drafts count as certain (one-hot). The dtype of the inputs is kept. Over
several ranks X is a rank's part of the vocabulary; what has no X is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jax_impl.acceptance_config import Acceptance
from jax_impl.collectives import ONE_RANK, Ranks
from jax_impl.sampling import Filters, argmax, first_id, log_probabilities, take, total

Noise = Callable[[jax.Array], jax.Array]  # row i32 [B] -> Gumbel noise [B, X] of its next token


@struct.dataclass
class Rows:
    """What the rules see: natural logarithms of probabilities."""

    target: Float[Array, "B T X"]
    drafts: Int[Array, "B K"]
    draft: Float[Array, "B K X"] | None  # None: one-hot
    ranks: Ranks = struct.field(pytree_node=False, default=ONE_RANK)

    @property
    def valid(self) -> Bool[Array, "B K"]:
        """Drafts before the first placeholder."""
        return jnp.cumsum(self.drafts < 0, axis=1) == 0

    @property
    def log_ratio(self) -> Float[Array, "B K"]:
        """Logarithm of target over draft probability of each draft."""
        ids = jnp.maximum(self.drafts, 0)
        target = take(self.target[:, :-1], ids, self.ranks)
        return target if self.draft is None else target - take(self.draft, ids, self.ranks)


def accepted_in_a_row(accept: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of accepted drafts where the first rejection ends the walk."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1)


def greedy(best: Int[Array, "B T"], drafts: Int[Array, "B K"]) -> Int[Array, " B"]:
    """Accepted while the draft is the target's best token."""
    return accepted_in_a_row(best[:, :-1] == drafts)


def standard(rows: Rows, uniforms: Float[Array, "B K"]) -> Int[Array, " B"]:
    """Token by token: accepted iff ln p > ln u + ln q, strictly."""
    return accepted_in_a_row(rows.valid & (jnp.log(uniforms) < rows.log_ratio))


def carried(rows: Rows) -> Float[Array, "B T"]:
    """Logarithms of c_0..c_K of block verification: c_0 = 1, c_{i+1} = min(c_i p_i / q_i, 1)."""
    ratio = rows.log_ratio
    found = [jnp.zeros_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        found.append(jnp.minimum(found[-1] + ratio[:, i], 0.0))
    return jnp.stack(found, axis=1)


def block_thresholds(rows: Rows) -> Float[Array, "B K"]:
    """h_i: the block may end behind draft i if u_i <= h_i."""
    c = carried(rows)[:, 1:]
    # what is left of c p over q at the next row, for all drafts but the last
    lead = jnp.exp(c[:, :-1, None] + rows.target[:, 1:-1])
    if rows.draft is None:
        following = jnp.maximum(rows.drafts[:, 1:], 0)
        left = jnp.exp(c[:, :-1]) - take(lead, following, rows.ranks)
        left = jnp.where(left < 0, 0.0, left)
    else:
        left = total(jnp.maximum(lead - jnp.exp(rows.draft[:, 1:]), 0.0), rows.ranks)
    all_ = left - jnp.expm1(c[:, :-1])
    ahead = jnp.where(all_ <= 0, 1.0, left / jnp.where(all_ == 0, 1.0, all_))  # NaN stays
    # where the draft behind is a placeholder the block ends as at its last draft
    ahead = jnp.where(rows.valid[:, 1:], ahead, jnp.exp(c[:, :-1]))
    return jnp.concatenate([ahead, jnp.exp(c[:, -1:])], axis=1)


def block(rows: Rows, uniforms: Float[Array, "B K"]) -> Int[Array, " B"]:
    """All drafts together: the largest i + 1 with u_i <= h_i; failures before it do not count."""
    holds = rows.valid & (uniforms <= block_thresholds(rows))
    return jnp.max(jnp.where(holds, jnp.arange(1, holds.shape[1] + 1), 0), axis=1)


def synthetic(
    rows: Rows, uniforms: Float[Array, "B K"], rates: tuple[float, ...]
) -> Int[Array, " B"]:
    """Forced: accepted iff u_i < rates_i (conditional), whatever the tokens are."""
    return accepted_in_a_row(rows.valid & (uniforms < jnp.asarray(rates, uniforms.dtype)))


def last_weights(rows: Rows, accepted: Int[Array, " B"], *, block: bool) -> Float[Array, "B X"]:
    """What the token behind `accepted` drafts is drawn from, not normalised.

    The target's row after a full block or at a placeholder; else what the target has over the
    draft, with the carried product in front under the block rule. Where rounding (or forced
    acceptance) leaves nothing of it, the target's row.
    """
    drafts = rows.drafts.shape[1]
    row = accepted[:, None, None]
    p = jnp.exp(jnp.take_along_axis(rows.target, row, axis=1)[:, 0])
    at = jnp.minimum(accepted, drafts - 1)[:, None]
    judged = (accepted < drafts) & jnp.take_along_axis(rows.valid, at, axis=1)[:, 0]
    if rows.draft is None:
        rejected = jnp.take_along_axis(rows.drafts, at, axis=1)
        left = jnp.where(first_id(p, rows.ranks) + jnp.arange(p.shape[-1]) == rejected, 0.0, p)
    else:
        q = jnp.exp(jnp.take_along_axis(rows.draft, at[..., None], axis=1)[:, 0])
        front = (
            jnp.exp(jnp.take_along_axis(carried(rows), accepted[:, None], axis=1)) if block else 1.0
        )
        left = jnp.maximum(front * p - q, 0.0)
    usable = judged & (total(left, rows.ranks) > 0)
    return jnp.where(usable[:, None], left, p)


def accept(
    method: Acceptance,
    logits: Float[Array, "B T X"],
    drafts: Int[Array, "B K"],
    draft_logits: Float[Array, "B K X"] | None,
    temperature: Float[Array, " B"],
    uniforms: Float[Array, "B K"],
    noise: Noise,
    filters: Filters | None = None,
    ranks: Ranks = ONE_RANK,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Judge the drafts and draw the token behind the accepted ones.

    Args:
        method: the rule.
        logits: of the target.
        drafts: -1 is a placeholder.
        draft_logits: what the drafts were drawn from, before the temperature; None: one-hot.
        temperature: 0 is greedy; then drafts must be the best tokens (or forced).
        uniforms: in (0, 1).
        noise: Gumbel noise for the token behind each sequence's row.
        filters: restrictions of the target's distribution; a draft's is never restricted.
        ranks: whose parts of the vocabulary logits, draft_logits and noise are.

    Returns:
        tokens, of which the first `count` are emitted (-1 behind them), and count in 1..T.
    """
    draft = (
        None if draft_logits is None else log_probabilities(draft_logits, temperature, ranks=ranks)
    )
    target = log_probabilities(logits, temperature, filters, ranks)
    rows = Rows(target, drafts, draft, ranks)
    best, random = argmax(logits, ranks), temperature > 0
    if method.rule == "synthetic":
        accepted = synthetic(rows, uniforms, method.conditional(drafts.shape[1]))
    else:
        rule = {"standard": standard, "block": block}[method.rule]
        accepted = jnp.where(random, rule(rows, uniforms), greedy(best, drafts))
    weights = last_weights(rows, accepted, block=method.rule == "block")
    drawn = argmax(jnp.log(weights) + noise(accepted), ranks)
    last = jnp.where(random, drawn, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0])
    index = jnp.arange(logits.shape[1])
    padded = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)
    tokens = jnp.where(index < accepted[:, None], padded, -1)
    return jnp.where(index == accepted[:, None], last[:, None], tokens), accepted + 1

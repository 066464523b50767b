"""The stages in plain JAX: the `auto` path, and the reference of every kernel.

Each stage takes the static settings, this layer's weights, then arrays. Activations are rows
[N, D], N = B T; what crosses ranks is reduced or gathered inside the stage, so that every value
between stages is either equal on all ranks or this rank's part as the docstring says.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_impl.cache import StepInputs
from jax_impl.collectives import (
    all_gather,
    all_gather_packed,
    all_reduce,
    all_reduce_packed,
    all_to_all,
    rank_index,
)
from jax_impl.draft_config import MAX_DRAFTS
from jax_impl.numerics import f32
from jax_impl.ops import kda as kda_ops
from jax_impl.ops import mla as mla_ops
from jax_impl.ops.attn_res import attn_res
from jax_impl.ops.experts import ExpertWeights, PackedExperts, routed_experts
from jax_impl.ops.norm import gated_rmsnorm, l2norm, rmsnorm
from jax_impl.ops.router import choose_experts
from jax_impl.ops.situ import situ_hidden, situ_mlp
from jax_impl.params import Dense, Kda, LayerWeights, Mla, Moe, Root
from jax_impl.stages.contract import Routed, Shares
from jax_impl.stages.draft import draft_block, draft_context, draft_markov  # noqa: F401  (stages)
from jax_impl.stages.paged import positions, read_rows, write_rows
from jax_impl.static import Static


def embed(static: Static, w: Root, inputs: StepInputs) -> jax.Array:
    """Rows of the embedding table [N, D]; zeros where a token is not real. Crosses ranks."""
    rows = w.embed_tokens.shape[0]
    local = inputs.tokens.reshape(-1) - rank_index(static.ranks) * rows
    here = (local >= 0) & (local < rows) & inputs.row_live().reshape(-1)
    found = w.embed_tokens[jnp.clip(local, 0, rows - 1)].astype(static.nx.dtype)
    return all_reduce(jnp.where(here[:, None], found, 0), static.ranks)


def _mix_and_norm(static: Static, prefix, snapshots, count, res_norm, res_proj, norm) -> jax.Array:
    nx, eps = static.nx, static.config.rms_norm_eps
    mixed = attn_res(nx, prefix, snapshots, count, res_norm, res_proj, eps)
    if nx.profile == "H":  # V hands the f32 mixture to the norm that follows
        mixed = nx.round(mixed)
    return rmsnorm(nx, mixed, norm, eps)


def attn_in(
    static: Static,
    layer: LayerWeights,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    *,
    starts_block: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add the pending `delta`, mix, take the snapshot after the mix, norm.

    Args: prefix, delta [N, D]; snapshots [N, J, D] of which `count` are valid.
    Returns: x [N, D], the prefix with delta, the snapshots (one more when a block starts).
    """
    w = layer.norms
    prefix = static.nx.round(f32(prefix) + f32(delta))
    x = _mix_and_norm(
        static,
        prefix,
        snapshots,
        count,
        w.self_attention_res_norm,
        w.self_attention_res_proj,
        w.input_layernorm,
    )
    if starts_block:
        snapshots = snapshots.at[:, count].set(prefix)
    return x, prefix, snapshots


def kda(
    static: Static,
    w: Kda,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, tuple[kda_ops.Records | kda_ops.Snapshots, jax.Array]]:
    """KDA up to its gated norm; reads slot state and window, writes nothing.

    Args: x [N, D]; `layer` counts KDA layers; state [L, S, H, V, K], window [L, S, W, C].
    Returns: heads [N, P] on this rank, and what `kda_commit` needs: records (or the state after
    each token, with `commit` "snapshots" and a step as short as a verification), raw projections.
    """
    return kda_with(kda_ops.log_decay, static, w, layer, x, inputs, state, window)


def kda_with(
    gate_of: Callable[..., jax.Array],
    static: Static,
    w: Kda,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, tuple[kda_ops.Records | kda_ops.Snapshots, jax.Array]]:
    """`kda` with any log decay: `gate_of` takes and returns what `ops.kda.log_decay` does."""
    c, nx = static.config, static.nx
    batch, tokens = inputs.tokens.shape
    heads, width = c.kda_num_heads // static.ranks.size, c.kda_head_dim
    p = heads * width
    fused = nx.linear(x, w.in_proj).reshape(batch, tokens, -1)
    # a bound in_proj may have rows of zeros behind the last
    fused = fused[..., : 4 * p + width + heads]
    raw, gate, low_rank, strength = jnp.split(fused, [3 * p, 4 * p, 4 * p + width], axis=-1)
    z = nx.linear(low_rank, w.f_b_proj)
    old_state, old_window = _slot_contents(inputs, layer, state, window)
    mixed = kda_ops.short_conv(nx, raw, old_window, w.conv1d)
    q, k, v = (part.reshape(batch, tokens, heads, width) for part in jnp.split(mixed, 3, axis=-1))
    g = gate_of(
        z.reshape(batch, tokens, heads, width),
        w.dt_bias.reshape(heads, width),
        w.A_log,
        c.gate_lower_bound,
    )
    _, o, records = kda_ops.recurrence(
        old_state,
        l2norm(q) * width**-0.5,
        l2norm(k),
        f32(v),
        g,
        jax.nn.sigmoid(f32(strength)),
        inputs.count,
        snapshots=static.run.commit == "snapshots" and tokens <= MAX_DRAFTS + 1,
    )
    gate = gate.reshape(batch, tokens, heads, width)
    y = gated_rmsnorm(nx, nx.round(o), gate, w.o_norm, c.rms_norm_eps)
    return y.reshape(batch * tokens, p), (records, raw)


def _slot_contents(inputs: StepInputs, layer, state, window) -> tuple[jax.Array, jax.Array]:
    """State [B, H, V, K] and window [B, W, C] of each row; zeros without history (and for pads)."""
    slot = jnp.maximum(inputs.slot, 0)
    has_history = inputs.live & (inputs.position > 0)
    old_state, old_window = state[layer, slot], window[layer, slot]
    return (
        jnp.where(has_history[:, None, None, None], old_state, 0),
        jnp.where(has_history[:, None, None], old_window, 0),
    )


def kda_step(
    static: Static,
    w: Kda,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kda`, and state and window take in all real tokens at once; nothing can be rejected.

    Returns: heads [N, P] on this rank, state, window (in place).
    """
    heads, pending = kda(static, w, layer, x, inputs, state, window)
    return heads, *_commit_layer(layer, pending, inputs.count, inputs, state, window)


def kda_commit(
    static: Static,
    pending: list[tuple[kda_ops.Records | kda_ops.Snapshots, jax.Array]],
    count: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Make state and window of each live slot those of its first `count` rows. In place.

    Args: what `kda` left, per KDA layer; count i32 [B], 0..T; state [L, S, H, V, K], window
    [L, S, W, C]. Pad rows change nothing.
    """
    for layer, kept in enumerate(pending):
        state, window = _commit_layer(layer, kept, count, inputs, state, window)
    return state, window


def _commit_layer(
    layer: int | jax.Array,
    pending: tuple[kda_ops.Records | kda_ops.Snapshots, jax.Array],
    count: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    records, raw = pending
    old_state, old_window = _slot_contents(inputs, layer, state, window)
    new_state = kda_ops.kept_state(old_state, records, count)
    new_window = kda_ops.next_window(raw, old_window, count)
    # -1 would wrap to the last slot before the bounds check; an index beyond the end is dropped
    target = jnp.where(inputs.live, inputs.slot, state.shape[1])
    return (
        state.at[layer, target].set(new_state, mode="drop"),
        window.at[layer, target].set(new_window, mode="drop"),
    )


def mla(
    static: Static,
    w: Mla,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    kv_latent: jax.Array,
    kv_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """MLA up to its output gate: write the new latent rows, then attend over the whole sequence.

    Crosses ranks only where the context is spread over them.

    Args: x [N, D]; `layer` counts MLA layers; kv_latent [L, P, page, latent + rope].
    Returns: heads [N, H v] on this rank, kv_latent (in place).
    """
    q, gate, rows = mla_inputs(static, w, x, inputs)
    kv_latent = write_rows(inputs, layer, rows, kv_latent, kv_scale, static.context)
    return mla_attend(static, w, layer, q, gate, inputs, kv_latent, kv_scale), kv_latent


def mla_inputs(
    static: Static, w: Mla, x: jax.Array, inputs: StepInputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, H, qk], gate [N, H v] and new latent rows [B, T, row] of x [N, D]."""
    c, nx = static.config, static.nx
    rank, eps = c.kv_lora_rank, static.run.latent_eps
    q_a, kv_a = jnp.split(nx.linear(x, w.a_proj), [c.q_lora_rank], axis=-1)
    gate = nx.linear(x, w.g_proj)
    q = nx.linear(rmsnorm(nx, q_a, w.q_a_layernorm, eps), w.q_b_proj)
    latent = rmsnorm(nx, kv_a[:, :rank], w.kv_a_layernorm, eps)
    rows = jnp.concatenate([latent, kv_a[:, rank:]], axis=-1)
    lead = inputs.tokens.shape
    return q.reshape(*lead, -1, c.qk_head_dim), gate, rows.reshape(*lead, -1)


def mla_attend(
    static: Static,
    w: Mla,
    layer: int | jax.Array,
    q: jax.Array,
    gate: jax.Array,
    inputs: StepInputs,
    kv_latent: jax.Array,
    kv_scale: jax.Array | None,
) -> jax.Array:
    """Gated heads [N, H v] of queries and gate of `mla_inputs` over the rows in the cache."""
    c, nx = static.config, static.nx
    kv, stored, where = read_rows(nx, inputs, layer, kv_latent, kv_scale, static.context)
    visible = stored[:, None] & (where <= positions(inputs)[..., None])  # itself and before
    w_uk, w_uv = mla_ops.split_kv_b(w.kv_b_proj, c.qk_nope_head_dim, c.v_head_dim)
    if static.run.dcp > 1:
        o = _attend_spread(static, q, kv, w_uk, w_uv, visible)
    else:
        attend = mla_ops.explicit_attention if nx.profile == "H" else mla_ops.absorbed_attention
        o = attend(nx, q, kv, w_uk, w_uv, visible)
    return mla_ops.output_gate(nx, o.reshape(gate.shape), gate)


def _attend_spread(static: Static, q, kv, w_uk, w_uv, visible) -> jax.Array:
    """Absorbed attention of this rank's heads over the rows of all ranks [B, T, H, v].

    Two exchanges: the queries of all heads come here; the heads' results over the rows here go home
    with their log-sum-exp.
    """
    nx, ranks = static.nx, static.ranks
    mine = mla_ops.absorb_query(nx, q, w_uk)
    batch, tokens, heads, row = mine.shape
    gathered = all_gather(mine.reshape(batch, tokens, heads * row), ranks)
    everyone = gathered.reshape(batch, tokens, ranks.size * heads, row)
    latent, lse = mla_ops.latent_attention(
        nx, everyone, kv, visible, w_uv.shape[2], q.shape[-1] ** -0.5
    )
    packed = jnp.concatenate([latent, lse[..., None]], axis=-1)
    packed = packed.reshape(batch, tokens, ranks.size, heads, -1)
    home = all_to_all(jnp.moveaxis(packed, 2, 0), ranks)
    return mla_ops.expand_value(nx, mla_ops.merge_attention(home[..., :-1], home[..., -1]), w_uv)


def attn_out(
    static: Static,
    layer: LayerWeights,
    heads: jax.Array,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    *,
    starts_block: bool,
) -> tuple[jax.Array, jax.Array]:
    """o_proj, sum over ranks, reset or add to the prefix, mix, norm. Crosses ranks.

    Args: heads [N, P] on this rank; snapshots [N, J, D], `count` valid.
    Returns: y [N, D], the new prefix [N, D].
    """
    nx, w = static.nx, layer.norms
    a = nx.round(all_reduce(nx.project(heads, layer.attention.o_proj), static.ranks))
    prefix = a if starts_block else nx.round(f32(prefix) + f32(a))
    y = _mix_and_norm(
        static,
        prefix,
        snapshots,
        count,
        w.mlp_res_norm,
        w.mlp_res_proj,
        w.post_attention_layernorm,
    )
    return y, prefix


def dense(static: Static, w: Dense, y: jax.Array) -> jax.Array:
    """Dense feed-forward part, y [N, D] -> delta [N, D]. Crosses ranks."""
    partial = situ_mlp(static.nx, y, w.gate_up_proj, w.down_proj, *static.betas)
    return static.nx.round(all_reduce(partial, static.ranks))


def route(static: Static, w: Moe, y: jax.Array) -> Routed:
    """Everything that reads y: the choice of experts, their input, the shared experts.

    Crosses ranks.
    """
    c, nx = static.config, static.nx
    logits, latent = all_gather_packed(
        (nx.project(y, w.gate), nx.linear(y, w.routed_expert_down_proj)), static.ranks
    )
    ids, weights = choose_experts(
        logits,
        w.e_score_correction_bias,
        c.num_experts_per_token,
        c.num_expert_group,
        c.topk_group,
        c.routed_scaling_factor,
    )
    hidden = situ_hidden(nx, y, w.shared_gate_up_proj, *static.betas)
    return Routed(latent, ids, weights, nx.project(hidden, w.shared_down_proj))


def experts(static: Static, w: Moe, routed: Routed) -> Shares:
    """This rank's share of the routed sum, f32 [N, Z]; behind it what `route` has given."""
    latent, ids, weights, shared, *_ = routed
    if static.run.experts == "ep":  # ids of this rank's experts; others are out of range
        ids = ids - rank_index(static.ranks) * w.w13_packed.shape[0]
    mine = ExpertWeights(w.w13_packed, w.w13_scale, w.w2_packed, w.w2_scale)
    if w.w13_tiles is not None:
        width = static.config.moe_intermediate_size // static.ranks.size
        mine = PackedExperts(w.w13_tiles, w.w2_tiles, width, latent.shape[-1])
    total = routed_experts(static.nx, latent, ids, weights, mine, static.betas)
    return Shares(total, shared, routed.ids, weights)


def moe_out(static: Static, w: Moe, routed: jax.Array, shared: jax.Array) -> jax.Array:
    """Sum the ranks' shares, norm the complete latent sum, project up, add. Crosses ranks.

    The norm is not linear: it must see the sum over all experts and all ranks.
    """
    nx = static.nx
    total, shared = (nx.round(x) for x in all_reduce_packed((routed, shared), static.ranks))
    normed = rmsnorm(nx, total, w.routed_expert_norm, static.config.rms_norm_eps)
    up = all_gather(nx.linear(normed, w.routed_expert_up_proj), static.ranks)
    return nx.round(f32(up) + f32(shared))


def head_in(
    static: Static,
    w: Root,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Add the last delta, mix over all snapshots, final norm.

    Returns: hidden [N, D], and the prefix [N, D] that the last layer leaves.
    """
    nx, eps = static.nx, static.config.rms_norm_eps
    prefix = nx.round(f32(prefix) + f32(delta))
    mixed = attn_res(
        nx, prefix, snapshots, count, w.output_attn_res_norm, w.output_attn_res_proj, eps
    )
    return rmsnorm(nx, nx.round(mixed), w.norm, eps), prefix


def logits(static: Static, w: Root, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Vocabulary shard of the logits f32 [N, X], and per row their (max, argmax)."""
    values = f32(static.nx.linear(hidden, w.lm_head))
    return values, jnp.max(values, -1), jnp.argmax(values, -1).astype(jnp.int32)

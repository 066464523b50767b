"""The drafter's three stages in plain JAX; `standard` hands them on.

Context rows come from the target's taps, block rows from the drafter's own layers; both live in one
paged cache, the rows of a block only until the next context overwrites them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_impl.cache import StepInputs
from jax_impl.collectives import all_gather, all_reduce
from jax_impl.draft_weights import DraftLayer, DraftRoot, DraftWeights
from jax_impl.numerics import f32
from jax_impl.ops import mla as mla_ops
from jax_impl.ops.draft import markov_bias, swiglu_mlp
from jax_impl.ops.norm import rmsnorm
from jax_impl.ops.yarn import rotate, softmax_scale
from jax_impl.sampling import draft_noise, pick
from jax_impl.stages.paged import positions, read_rows, write_rows
from jax_impl.static import DraftStatic


def combine(static: DraftStatic, w: DraftRoot, taps: jax.Array) -> jax.Array:
    """Tapped streams side by side [N, G D] -> context vectors [N, D]. Crosses ranks."""
    projected = all_gather(static.nx.linear(taps, w.context_proj), static.ranks)
    return rmsnorm(static.nx, projected, w.context_norm, static.config.rms_norm_eps)


def draft_context(
    static: DraftStatic,
    w: DraftWeights,
    taps: jax.Array,
    inputs: StepInputs,
    draft_kv: jax.Array,
    kv_scale: jax.Array | None,
) -> jax.Array:
    """Write the context rows of all layers for the first `count` tokens of each sequence. In place.

    The layers' own `input_layernorm` takes no part. Crosses ranks.

    Args: taps [N, G D]; draft_kv [L, P, page, latent + rope]; inputs as of the step that gave the
    taps, with `count` the tokens that stay. All other rows are dropped.
    """
    c, nx = static.config, static.nx
    batch, tokens = inputs.tokens.shape
    context = combine(static, w.root, taps)
    kv_a = nx.round(nx.einsum("nd,lrd->lnr", context, w.layer.a_proj[:, c.q_lora_rank :]))
    kv_a = kv_a.reshape(-1, batch, tokens, c.kv_row)
    norm = w.layer.kv_a_layernorm[:, None, None]
    rows = _latent_rows(static, kv_a, norm, positions(inputs))
    return write_rows(inputs, slice(None), rows, draft_kv, kv_scale)


def _latent_rows(static: DraftStatic, kv_a, norm, position) -> jax.Array:
    """Cache rows [normalised latent | rotated key] of kv_a [..., latent + rope]."""
    c, nx = static.config, static.nx
    latent = rmsnorm(nx, kv_a[..., : c.kv_lora_rank], norm, c.rms_norm_eps)
    key = rotate(nx, kv_a[..., c.kv_lora_rank :], position, c.rope)
    return jnp.concatenate([latent, key], axis=-1)


def draft_block(
    static: DraftStatic,
    w: DraftWeights,
    x: jax.Array,
    inputs: StepInputs,
    draft_kv: jax.Array,
    kv_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The layers over a block of anchor and mask rows, and the final norm. Crosses ranks.

    Args: x [N, D] embedded rows, N = B K; inputs with `position` that of the anchor and `count`
    the K rows of a live sequence; draft_kv [L, P, page, latent + rope] with context rows before it.
    Returns: hidden [N, D] (row k is for draft k + 1), draft_kv (in place; the block's rows are
    scratch).
    """
    for layer in range(static.config.num_hidden_layers):
        sliced = jax.tree.map(lambda a, i=layer: a[i], w.layer)
        x, draft_kv = draft_layer(static, sliced, layer, x, inputs, draft_kv, kv_scale)
    return rmsnorm(static.nx, x, w.root.final_norm, static.config.rms_norm_eps), draft_kv


def draft_layer(
    static: DraftStatic,
    w: DraftLayer,
    layer: int,
    x: jax.Array,
    inputs: StepInputs,
    draft_kv: jax.Array,
    kv_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One layer of the block: x [N, D] -> x [N, D], draft_kv. Crosses ranks."""
    c, nx, eps = static.config, static.nx, static.config.rms_norm_eps
    batch, tokens = inputs.tokens.shape
    position = positions(inputs)
    y = rmsnorm(nx, x, w.input_layernorm, eps)
    q_a, kv_a = jnp.split(nx.linear(y, w.a_proj), [c.q_lora_rank], axis=-1)
    q = nx.linear(rmsnorm(nx, q_a, w.q_a_layernorm, eps), w.q_b_proj)
    q = q.reshape(batch, tokens, -1, c.qk_head_dim)
    turned = rotate(nx, q[..., c.qk_nope_head_dim :], position[..., None], c.rope)
    q = jnp.concatenate([q[..., : c.qk_nope_head_dim], turned], axis=-1)
    kv_a = kv_a.reshape(batch, tokens, -1)
    rows = _latent_rows(static, kv_a, w.kv_a_layernorm, position)
    draft_kv = write_rows(inputs, layer, rows, draft_kv, kv_scale)
    kv, stored, _ = read_rows(nx, inputs, layer, draft_kv, kv_scale)
    visible = _visible(static, inputs, stored)
    w_uk, w_uv = mla_ops.split_kv_b(w.kv_b_proj, c.qk_nope_head_dim, c.v_head_dim)
    scale = softmax_scale(c.qk_head_dim, c.rope)
    # a drafter is known from serving code only, which absorbs: both profiles do
    o = mla_ops.absorbed_attention(nx, q, kv, w_uk, w_uv, visible, scale=scale)
    o = o.reshape(batch * tokens, -1)
    attended = nx.project(o, w.o_proj)
    if q.shape[2] < c.num_attention_heads:  # else every rank has them all, see `draft_table`
        attended = all_reduce(attended, static.ranks)
    x = nx.round(f32(x) + f32(nx.round(attended)))
    y = rmsnorm(nx, x, w.post_attention_layernorm, eps)
    mlp = all_reduce(swiglu_mlp(nx, y, w.gate_up_proj, w.down_proj), static.ranks)
    return nx.round(f32(x) + f32(nx.round(mlp))), draft_kv


def _visible(static: DraftStatic, inputs: StepInputs, stored: jax.Array) -> jax.Array:
    """Rows that each block row sees, bool [B, K, S]: context, and the whole block if non-causal."""
    c = static.config
    where = jnp.arange(stored.shape[1])
    if c.sliding_window is not None:
        stored &= where >= inputs.position[:, None] - c.sliding_window
    if c.non_causal:
        return jnp.broadcast_to(stored[:, None], (*inputs.tokens.shape, stored.shape[1]))
    return stored[:, None] & (where <= positions(inputs)[..., None])


def draft_markov(
    static: DraftStatic,
    w: DraftRoot,
    base: jax.Array,
    inputs: StepInputs,
    *,
    sample: bool,
) -> tuple[jax.Array, jax.Array]:
    """Drafts from left to right: each adds the bias of the token before it. Crosses ranks.

    Args: base f32 [B, K, X] logits of the block on this rank; inputs with the anchor in column 0,
    `position` its position. With `sample` a row of temperature above 0 draws from
    softmax(logits / temperature), no filters; else the largest logit counts, the lower id in ties.
    Returns: drafts i32 [B, K], logits f32 [B, K, X] on this rank before the temperature.
    """
    previous = inputs.tokens[:, 0]
    drafts, all_logits = [], []
    for k in range(base.shape[1]):
        row = w.markov_w1[jnp.clip(previous, 0, w.markov_w1.shape[0] - 1)]
        logits = base[:, k] + markov_bias(static.nx, row, w.markov_w2)
        noise = None
        if sample:
            position = inputs.position + k
            noise = draft_noise(inputs.seed, position, k, logits.shape[-1], static.ranks)
        previous = pick(logits, inputs.temperature, noise, static.ranks)
        drafts.append(previous)
        all_logits.append(logits)
    return jnp.stack(drafts, axis=1), jnp.stack(all_logits, axis=1)

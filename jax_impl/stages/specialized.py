"""The stages of `latency_specialized`: thin calls into `pallas_kernels`, one name per stage.

Signatures are those of `jax_impl.stages.standard`, except that a layer's weights come as a `Layer`
(the stacks and its place in them), which is what kernels take. What is a standard function here is
listed at the end.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_impl.cache import StepInputs
from jax_impl.collectives import all_gather, all_gather_packed, all_reduce, all_reduce_packed
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.numerics import f32
from jax_impl.ops.kda import Records
from jax_impl.ops.router import choose_experts
from jax_impl.params import Layer, Root
from jax_impl.stages import standard
from jax_impl.static import Static
from pallas_kernels import attn_res as attn_res_kernel
from pallas_kernels import experts as experts_kernel
from pallas_kernels import kda as kda_kernel
from pallas_kernels import kda_commit as commit_kernel
from pallas_kernels import latent_up, skinny
from pallas_kernels import route as route_kernel

BF16 = jnp.bfloat16
# one trace and one lowering for all layers: the layer's number is an operand
_once = partial(jax.jit, static_argnums=0)
_once_per_block = partial(_once, static_argnames="starts_block")


def unmet_settings(run: RunConfig) -> list[str]:
    """Run settings that the kernels do not serve; each with what was found and expected."""
    wanted = {"profile": "V", "compute": "bfloat16", "experts": "tp", "commit": "replay", "dcp": 1}
    return [
        f"{name} {getattr(run, name)!r} found, kernels need {value!r}"
        for name, value in wanted.items()
        if getattr(run, name) != value
    ]


def unmet_shapes(config: ModelConfig, run: RunConfig, ranks: int) -> list[str]:
    """Sizes of a model that the kernels do not take, at 1 and at 64 rows."""
    from jax_impl.stages.limits import unmet

    return unmet(config, run, ranks)


@_once_per_block
def attn_in(
    static: Static,
    w: Layer,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    *,
    starts_block: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`standard.attn_in` in one kernel."""
    n, i = w.stacks, w.index
    return attn_res_kernel.attn_res(
        prefix, snapshots, count, delta,
        n.self_attention_res_norm, n.self_attention_res_proj, n.input_layernorm,
        layer=i, eps=static.config.rms_norm_eps, snapshot=starts_block,
    )  # fmt: skip


@_once
def kda(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, tuple[Records, jax.Array]]:
    """`standard.kda` in two kernels; the pending commit holds records."""
    fused = _in_proj(w, layer, x)
    heads, update, key, g = _mix(static, w, layer, fused, inputs, state, window, commit=False)
    channels = window.shape[3]
    raw = fused[:, :channels].reshape(*inputs.tokens.shape, channels)
    return heads, (Records(update, key, g), raw)


@_once
def kda_step(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`standard.kda_step` in two kernels; state and window in place."""
    fused = _in_proj(w, layer, x)
    heads, state, window = _mix(static, w, layer, fused, inputs, state, window, commit=True)
    return heads, state, window


def _in_proj(w: Layer, layer: int | jax.Array, x: jax.Array) -> jax.Array:
    return skinny.skinny(x, w.stacks.in_proj, layer, out_dtype=BF16)


def _mix(static: Static, w: Layer, layer, fused, inputs, state, window, *, commit: bool):
    k = w.stacks
    weights = kda_kernel.Weights(k.f_b_proj, k.conv1d, k.A_log, k.dt_bias, k.o_norm)
    rows = kda_kernel.Rows(inputs.slot, inputs.position, inputs.count)
    return kda_kernel.kda(
        fused, state, window, weights, layer, rows,
        eps=static.config.rms_norm_eps, lower_bound=static.config.gate_lower_bound, commit=commit,
    )  # fmt: skip


def kda_commit(
    static: Static,
    pending: list[tuple[Records, jax.Array]],
    count: jax.Array,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`standard.kda_commit` for all layers in one kernel; state and window in place."""
    records = [jnp.stack(parts) for parts in zip(*(r for r, _ in pending), strict=True)]
    raw = jnp.stack([r for _, r in pending])
    rows = kda_kernel.Rows(inputs.slot, inputs.position, count)
    return commit_kernel.kda_commit(*records, raw, state, window, rows)


def mla(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array,
    inputs: StepInputs,
    kv_latent: jax.Array,
    kv_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`standard.mla`: projections by kernels, attention still standard."""
    return standard.mla(static, w.sliced(), layer, x, inputs, kv_latent, kv_scale)


@_once_per_block
def attn_out(
    static: Static,
    w: Layer,
    attention: Layer,
    heads: jax.Array,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    *,
    starts_block: bool,
) -> tuple[jax.Array, jax.Array]:
    """`standard.attn_out` in two kernels."""
    n, i = w.stacks, w.index
    partial = skinny.skinny(heads, attention.stacks.o_proj, attention.index)
    y, prefix, _ = attn_res_kernel.attn_res(
        prefix, snapshots, count, all_reduce(partial, static.ranks),
        n.mlp_res_norm, n.mlp_res_proj, n.post_attention_layernorm,
        layer=i, eps=static.config.rms_norm_eps, reset=starts_block,
    )  # fmt: skip
    return y, prefix


@_once
def dense(static: Static, w: Layer, y: jax.Array) -> jax.Array:
    """`standard.dense` in two kernels."""
    hidden = skinny.skinny(y, w.stacks.gate_up_proj, w.index, situ=static.betas)
    partial = skinny.skinny(hidden, w.stacks.down_proj, w.index)
    return static.nx.round(all_reduce(partial, static.ranks))


@_once
def route(
    static: Static, w: Layer, y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`standard.route`: one kernel for all that reads y."""
    c, m = static.config, w.stacks
    logits, latent, hidden = route_kernel.route(
        y, m.gate, m.routed_expert_down_proj, m.shared_gate_up_proj, w.index, betas=static.betas
    )
    logits, latent = all_gather_packed((logits, latent), static.ranks)
    ids, weights = choose_experts(
        logits,
        m.e_score_correction_bias[w.index],
        c.num_experts_per_token,
        c.num_expert_group,
        c.topk_group,
        c.routed_scaling_factor,
    )
    return latent, ids, weights, hidden


@_once
def experts(
    static: Static,
    w: Layer,
    latent: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`standard.experts` in kernels."""
    m = w.stacks
    width = static.config.moe_intermediate_size // static.ranks.size
    routed = experts_kernel.experts(
        latent, ids, weights, m.w13_tiles, m.w2_tiles, w.index, width=width, betas=static.betas
    )
    return routed, skinny.skinny(hidden, m.shared_down_proj, w.index)


@_once
def moe_out(static: Static, w: Layer, routed: jax.Array, shared: jax.Array) -> jax.Array:
    """`standard.moe_out`: norm and up projection in one kernel."""
    m, nx = w.stacks, static.nx
    total, shared = (nx.round(x) for x in all_reduce_packed((routed, shared), static.ranks))
    up = latent_up.latent_up(
        total, m.routed_expert_norm[w.index], m.routed_expert_up_proj, w.index,
        eps=static.config.rms_norm_eps,
    )  # fmt: skip
    return nx.round(f32(all_gather(up, static.ranks)) + f32(shared))


@_once
def logits(static: Static, w: Root, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`standard.logits`: the product by a kernel."""
    values = f32(skinny.skinny(hidden, w.lm_head[None], 0, out_dtype=BF16))
    return values, jnp.max(values, -1), jnp.argmax(values, -1).astype(jnp.int32)


# standard functions: what they do is outside the layers
embed = standard.embed
head_in = standard.head_in
draft_context = standard.draft_context
draft_block = standard.draft_block
draft_markov = standard.draft_markov

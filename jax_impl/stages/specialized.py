"""The stages of `latency_specialized`: thin calls into `pallas_kernels`, one name per stage.

Signatures are those of `jax_impl.stages.standard`, except that a layer's weights come as a `Layer`
(the stacks and its place in them), which is what kernels take. What is a standard function here is
listed at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.cache import StepInputs
from jax_impl.collectives import all_gather, all_gather_packed, all_reduce, all_reduce_packed
from jax_impl.config import RunConfig
from jax_impl.numerics import f32
from jax_impl.ops.kda import Records
from jax_impl.params import Kda, Layer, LayerWeights, Moe, Root
from jax_impl.stages import standard
from jax_impl.stages.contract import Ahead, Delta, Pending, Routed, Shares, plain, whole
from jax_impl.static import Static
from pallas_kernels import attn_res as attn_res_kernel
from pallas_kernels import experts as experts_kernel
from pallas_kernels import (
    experts_row,
    kda_out,
    latent_up,
    meeting,
    mix_products,
    mla_attend,
    mla_query,
    mla_value,
    mla_value_out,
    paged,
    skinny,
    topk,
)
from pallas_kernels import kda as kda_kernel
from pallas_kernels import kda_commit as commit_kernel
from pallas_kernels import route as route_kernel
from pallas_kernels.mix_products import Mix
from pallas_kernels.skinny import Projection

BF16 = jnp.bfloat16


def _once(stage: Callable[..., Any], **static: Any) -> Any:
    """One trace and one lowering of a stage for all layers, in the loop of `model` and outside.

    A layer's numbers are operands: i32 where they are known too, whose type would be another one.
    A name with a line in front is that of the stage without it.
    """
    stage.__name__ = stage.__name__.removeprefix("_")
    jitted = jax.jit(stage, static_argnums=0, **static)

    @functools.wraps(stage)
    def call(static: Static, *args: Any, **named: Any) -> Any:
        args = jax.tree.map(lambda a: np.int32(a) if isinstance(a, int) else a, args)
        return jitted(static, *args, **named)

    return call


_once_per_block = partial(_once, static_argnames="starts_block")


def unmet_settings(run: RunConfig) -> list[str]:
    """Run settings that the kernels do not serve; each with what was found and expected."""
    wanted = {"profile": "V", "compute": "bfloat16", "experts": "tp", "commit": "replay", "dcp": 1}
    return [
        f"{name} {getattr(run, name)!r} found, kernels need {value!r}"
        for name, value in wanted.items()
        if getattr(run, name) != value
    ]


def attn_in(
    static: Static,
    layer: LayerWeights,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array | Delta,
    *,
    starts_block: bool,
) -> tuple[jax.Array | Ahead, jax.Array, jax.Array]:
    """`standard.attn_in` in one kernel; for few rows with the attention's first products.

    What only a few layers have, a delta in one part and dense weights, is kept from it: a kernel
    of their own would take a second to lower and run once.
    """
    if not isinstance(delta, Delta):
        delta = Delta(delta, jnp.zeros(delta.shape, jnp.float32), meeting.counters())
    layer = layer._replace(mlp=None)
    return _attn_in(static, layer, prefix, snapshots, count, delta, starts_block=starts_block)


@_once_per_block
def _attn_in(static, layer, prefix, snapshots, count, delta, *, starts_block):
    n, i = layer.norms.stacks, layer.norms.index
    mix = Mix(
        prefix, snapshots, count, delta.up,
        n.self_attention_res_norm, n.self_attention_res_proj, n.input_layernorm, i, delta.shared,
    )  # fmt: skip
    items, index = _attention_items(layer.attention), layer.attention.index
    return _mixed(static, mix, items, index, delta.counters, snapshot=starts_block)


def _mixed(static, mix, items, layer, counters, **kw):
    """(x, prefix, snapshots); x with the products of `items` where one kernel makes both."""
    eps = static.config.rms_norm_eps
    if not items or mix_products.limits(mix, items):
        return mix.by(attn_res_kernel.attn_res, eps=eps, **kw)
    counters = meeting.counters() if counters is None else counters
    x, *rest, done, counters = mix_products.mix_products(mix, items, counters, layer, eps=eps, **kw)
    return Ahead(x, done, counters), *rest


def _attention_items(w: Layer) -> list[Projection]:
    m = w.stacks
    first = (m.in_proj,) if isinstance(m, Kda) else (m.a_proj, m.g_proj)
    return [Projection(matrix, BF16) for matrix in first]


def _products(
    x: jax.Array | Ahead, items: list[Projection], layer: int | jax.Array
) -> list[jax.Array]:
    """Those of x, unless they came with it."""
    return x.done if isinstance(x, Ahead) else skinny.projections(x, items, layer)


def _products_and_counters(
    x: jax.Array | Ahead, items: list[Projection], layer: int | jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The same, and counters of which all but the first are at 0."""
    if isinstance(x, Ahead) and x.counters is not None:
        return x.done, x.counters
    *done, counters = skinny.projections(plain(x), items, layer, zeros=True)
    return done, counters


@_once
def kda(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array | Ahead,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array | Ahead, tuple[Records, jax.Array]]:
    """`standard.kda` in two kernels, or one behind `Ahead`; the pending commit holds records.

    For few rows the heads come with their output projection.
    """
    (fused,), counters = _products_and_counters(x, _attention_items(w), layer)
    heads, update, key, g = _heads(
        static, w, layer, fused, counters, inputs, state, window, commit=False
    )
    channels = window.shape[3]
    raw = fused[:, :channels].reshape(*inputs.tokens.shape, channels)
    return heads, (Records(update, key, g), raw)


@_once
def kda_step(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array | Ahead,
    inputs: StepInputs,
    state: jax.Array,
    window: jax.Array,
) -> tuple[jax.Array | Ahead, jax.Array, jax.Array]:
    """`standard.kda_step` as `kda` is here; state and window in place."""
    (fused,), counters = _products_and_counters(x, _attention_items(w), layer)
    return _heads(static, w, layer, fused, counters, inputs, state, window, commit=True)


def _heads(static, w, layer, fused, counters, inputs, state, window, *, commit: bool):
    """What `kda_kernel.kda` gives; the heads with their output projection where that fits."""
    k, c = w.stacks, static.config
    weights = kda_kernel.Weights(k.f_b_proj, k.conv1d, k.A_log, k.dt_bias, k.o_norm)
    rows = kda_kernel.Rows(inputs.slot, inputs.position, inputs.count)
    kw = dict(eps=c.rms_norm_eps, lower_bound=c.gate_lower_bound, commit=commit)
    arrays = fused, state, window, weights
    if kda_out.limits(*arrays, rows, k.o_proj):
        return kda_kernel.kda(*arrays, layer, rows, **kw)
    found, *done = kda_out.kda_out(*arrays, layer, rows, k.o_proj, counters, **kw)
    return Ahead(found[0], done), *found[1:]


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


@_once
def mla(
    static: Static,
    w: Layer,
    layer: int | jax.Array,
    x: jax.Array | Ahead,
    inputs: StepInputs,
    kv_latent: jax.Array,
    kv_scale: jax.Array | None,
) -> tuple[jax.Array | Ahead, jax.Array]:
    """`standard.mla` in five kernels, or four behind `Ahead`; the latent cache in place.

    For few rows the heads come with their output projection.
    """
    c, m, eps = static.config, w.stacks, static.run.latent_eps
    (batch, tokens), heads = inputs.tokens.shape, c.num_attention_heads // static.ranks.size
    a, gate = _products(x, _attention_items(w), w.index)
    q, counters = skinny.projections(
        a, [Projection(m.q_b_proj, BF16)], w.index, norm=(m.q_a_layernorm, eps), zeros=True
    )
    tuning = mla_attend.default_tuning(batch, tokens * heads, static.run.fp8)
    ends = paged.ends(inputs.position, inputs.count, tokens)
    place = paged.place(ends, inputs.page_table, kv_latent.shape[2])
    cache = jax.new_ref(kv_latent)
    q_rows = mla_query.query(
        q, a, m.kv_b_proj, w.index, m.kv_a_layernorm, cache, layer, place, kv_scale,
        eps=eps, heads=heads, tokens=tokens, columns=tuning.columns,
    )  # fmt: skip
    parts = mla_attend.attend(
        q_rows, cache, layer, inputs.page_table, ends, kv_scale,
        heads=heads, latent=c.kv_lora_rank, scale=c.qk_head_dim**-0.5, tuning=tuning,
    )  # fmt: skip
    operands = parts, ends, gate, m.kv_b_proj
    if mla_value_out.limits(*operands, m.o_proj, heads=heads):
        return mla_value.value(*operands, w.index, heads=heads), jax.freeze(cache)
    found, *done = mla_value_out.value_out(*operands, m.o_proj, counters, w.index, heads=heads)
    return Ahead(found, done), jax.freeze(cache)


def attn_out(
    static: Static,
    layer: LayerWeights,
    heads: jax.Array | Ahead,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    *,
    starts_block: bool,
) -> tuple[jax.Array | Ahead, jax.Array]:
    """`standard.attn_out` in two kernels, or one behind `Ahead`.

    For few rows with the first products of `route`. Behind `Ahead` it is the same for all kinds of
    attention, whose weights are kept from it.
    """
    layer = layer._replace(attention=None) if isinstance(heads, Ahead) else layer
    return _attn_out(static, layer, heads, prefix, snapshots, count, starts_block=starts_block)


@_once_per_block
def _attn_out(static, layer, heads, prefix, snapshots, count, *, starts_block):
    n, i, w = layer.norms.stacks, layer.norms.index, layer.mlp
    if isinstance(heads, Ahead):
        partial, counters = heads.done
    else:
        o_proj, place = layer.attention.stacks.o_proj, layer.attention.index
        partial, counters = skinny.projections(heads, [Projection(o_proj)], place, zeros=True)
    mix = Mix(
        prefix, snapshots, count, all_reduce(partial, static.ranks),
        n.mlp_res_norm, n.mlp_res_proj, n.post_attention_layernorm, i,
    )  # fmt: skip
    items = _route_items(static, w) if isinstance(w.stacks, Moe) else []
    y, prefix, _ = _mixed(static, mix, items, w.index, counters, reset=starts_block)
    return y, prefix


@_once
def dense(static: Static, w: Layer, y: jax.Array) -> jax.Array:
    """`standard.dense` in two kernels."""
    hidden = skinny.skinny(y, w.stacks.gate_up_proj, w.index, situ=static.betas)
    partial = skinny.skinny(hidden, w.stacks.down_proj, w.index)
    return static.nx.round(all_reduce(partial, static.ranks))


def _copies(static: Static) -> int:
    """Looped-back gathers are written by the kernels, as they would write to the ranks' peers."""
    return static.ranks.size if static.ranks.axis is None else 1


def _route_items(static: Static, w: Layer) -> list[Projection]:
    m = w.stacks
    return route_kernel.items(
        m.gate, m.routed_expert_down_proj, m.shared_gate_up_proj, static.betas, _copies(static)
    )


@_once
def route(static: Static, w: Layer, y: jax.Array | Ahead) -> Routed:
    """`standard.route` in two kernels: what reads y; the choice, beside it the shared experts.

    Behind `Ahead` the first is done; for one row the second is left to the kernel of the experts,
    if it takes it.
    """
    c, m = static.config, w.stacks
    (logits, latent, hidden), counters = _products_and_counters(y, _route_items(static, w), w.index)
    if _copies(static) == 1:
        logits, latent = all_gather_packed((logits, latent), static.ranks)
    routed = Routed(latent, None, None, None, pending=Pending(logits, hidden, counters))
    k, width = c.num_experts_per_token, _width(static)
    if not experts_row.limits(_row(w, routed), m.w13_tiles, m.w2_tiles, k=k, width=width):
        return routed
    choice = topk.topk(
        logits, m.e_score_correction_bias, w.index, k=k, scaling=c.routed_scaling_factor,
        shared=(hidden, m.shared_down_proj),
    )  # fmt: skip
    return Routed(latent, choice.ids, choice.weights, choice.shared, choice.units)


def _width(static: Static) -> int:
    return static.config.moe_intermediate_size // static.ranks.size


def _row(w: Layer, routed: Routed) -> experts_row.Row:
    m, pending = w.stacks, routed.pending
    return experts_row.Row(
        routed.latent, pending.logits, m.e_score_correction_bias, pending.hidden, m.shared_down_proj
    )


@_once
def experts(static: Static, w: Layer, routed: Routed) -> Shares:
    """`standard.experts` in one kernel and the sum, with what is pending; beyond 8 rows in two."""
    m, width, betas = w.stacks, _width(static), static.betas
    if routed.pending is not None:
        c = static.config
        found = experts_row.experts_row(
            _row(w, routed), m.w13_tiles, m.w2_tiles, routed.pending.counters, w.index,
            k=c.num_experts_per_token, scaling=c.routed_scaling_factor, width=width, betas=betas,
            out_dtype=jnp.float32 if static.ranks.axis else BF16,
        )  # fmt: skip
        return Shares(*found)
    total = experts_kernel.experts(
        routed.latent, routed.ids, routed.weights, m.w13_tiles, m.w2_tiles, w.index,
        width=width, betas=betas, units=routed.units,
    )  # fmt: skip
    return Shares(total, routed.shared, routed.ids, routed.weights)


@_once
def moe_out(static: Static, w: Layer, routed: jax.Array, shared: jax.Array) -> Delta:
    """`standard.moe_out`: norm and up projection in one kernel; `attn_in` adds the parts."""
    m = w.stacks
    total, shared = all_reduce_packed((routed, shared), static.ranks)
    if total.dtype != BF16:  # not rounded by the kernel that made it
        total = static.nx.round(total)
    up, counters = latent_up.latent_up(
        total, m.routed_expert_norm, m.routed_expert_up_proj, w.index,
        eps=static.config.rms_norm_eps, copies=_copies(static), zeros=True,
    )  # fmt: skip
    return Delta(up if _copies(static) > 1 else all_gather(up, static.ranks), shared, counters)


@_once
def head_in(
    static: Static,
    w: Root,
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array | Delta,
) -> tuple[jax.Array, jax.Array]:
    """`standard.head_in`, which is outside the layers."""
    delta = whole(static.nx, delta)
    return standard.head_in(static, w, prefix, snapshots, count, delta)


@_once
def logits(static: Static, w: Root, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`standard.logits`: the product by a kernel."""
    values = f32(skinny.skinny(hidden, w.lm_head[None], 0, out_dtype=BF16))
    return values, jnp.max(values, -1), jnp.argmax(values, -1).astype(jnp.int32)


# standard functions: what they do is outside the layers
embed = standard.embed
draft_context = standard.draft_context
draft_block = standard.draft_block
draft_markov = standard.draft_markov

"""What the kernels do not take of a model's sizes; nothing is allocated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_impl.binding import ROWS as ROW_UNIT
from jax_impl.config import ModelConfig, RunConfig
from pallas_kernels import (
    attn_res,
    common,
    experts,
    experts_pack,
    kda,
    kda_commit,
    latent_up,
    mla_attend,
    mla_query,
    mla_value,
    mxfp4,
    route,
    skinny,
    topk,
)
from pallas_kernels.skinny import Projection

ROWS = (1, 64)


def unmet(config: ModelConfig, run: RunConfig, ranks: int) -> list[str]:
    """Every unmet condition of every kernel, once, with the stage that has it."""
    found: list[str] = []
    for rows in ROWS:
        for stage, reasons in _stages(config, run, ranks, rows).items():
            found += [f"{stage}: {reason}" for reason in reasons]
    return list(dict.fromkeys(found))


def _s(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _stages(c: ModelConfig, run: RunConfig, ranks: int, n: int) -> dict[str, list[str]]:
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    d, z, heads = c.hidden_size, c.routed_expert_hidden_size, c.kda_num_heads // ranks
    p, width = heads * c.kda_head_dim, c.moe_intermediate_size // ranks
    shared, betas = c.shared_intermediate_size // ranks, (1.0, 1.0)
    taps = c.short_conv_kernel_size
    row, columns = _s(bf16, n, d), common.round_up(4 * p + c.kda_head_dim + heads, ROW_UNIT)
    state = _s(f32, 1, n, heads, c.kda_head_dim, c.kda_head_dim)
    window = _s(bf16, 1, n, taps - 1, 3 * p)
    weights = kda.Weights(
        _s(bf16, 1, p, c.kda_head_dim), _s(f32, 1, 3 * p, taps), _s(f32, 1, heads),
        _s(f32, 1, p), _s(f32, 1, c.kda_head_dim),
    )  # fmt: skip
    index = kda.Rows(*[_s(i32, n)] * 3)
    record = _s(f32, 1, n, 1, heads, c.kda_head_dim)

    def product(x: jax.ShapeDtypeStruct, rows: int, **kw) -> list[str]:
        return skinny.limits(x, [Projection(_s(bf16, 1, rows, x.shape[1]), **kw)])

    out = {
        "attn_in": attn_res.limits(row, _s(bf16, n, c.num_snapshots, d), row),
        "kda": product(row, columns, out_dtype=bf16)
        + kda.limits(_s(bf16, n, columns), state, window, weights, index),
        "kda_commit": kda_commit.limits(
            record, record, record, _s(bf16, 1, n, 1, 3 * p), state, window, index
        ),
        "attn_out": product(_s(bf16, n, p), d),
        "dense": product(row, 2 * c.intermediate_size // ranks, situ=betas)
        + product(_s(bf16, n, c.intermediate_size // ranks), d),
        "route": route.limits(
            row, _s(bf16, 1, c.num_experts // ranks, d), _s(bf16, 1, z // ranks, d),
            _s(bf16, 1, 2 * shared, d), betas=betas,
        )
        + topk.limits(
            _s(f32, n, c.num_experts), _s(f32, 1, c.num_experts), k=c.num_experts_per_token,
            shared=(_s(bf16, n, shared), _s(bf16, 1, d, shared)),
        ),
        "mla": _mla(c, run, ranks, row),
        "moe_out": latent_up.limits(_s(bf16, n, z), _s(bf16, z), _s(bf16, 1, d // ranks, z)),
        "logits": product(row, c.vocab_size // ranks, out_dtype=bf16),
    }  # fmt: skip
    out["experts"] = []
    if width % mxfp4.ROWS or z % mxfp4.ROWS:
        out["experts"] += [
            f"expert width {width} per rank and latent width {z}: expected multiples of 64"
        ]
    else:
        tiles = c.num_experts * width // experts_pack.HALF, c.num_experts * z // mxfp4.ROWS
        out["experts"] += experts.limits(
            _s(bf16, n, z), _s(i32, n, c.num_experts_per_token),
            _s(jnp.uint32, 1, tiles[0], mxfp4.tile_lines(z), mxfp4.LINE),
            _s(jnp.uint32, 1, tiles[1], mxfp4.tile_lines(width), mxfp4.LINE), width=width,
        )  # fmt: skip
    return out


def _mla(c: ModelConfig, run: RunConfig, ranks: int, row: jax.ShapeDtypeStruct) -> list[str]:
    """Of all sequences with one token each."""
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    n, d = row.shape
    heads, latent = c.num_attention_heads // ranks, c.kv_lora_rank
    width = heads * c.v_head_dim
    a, q = _s(bf16, n, c.q_lora_rank + c.kv_row), _s(bf16, n, heads * c.qk_head_dim)
    kv_b = _s(bf16, 1, heads * (c.qk_nope_head_dim + c.v_head_dim), latent)
    cache = _s(jnp.dtype(run.kv_cache_dtype), 1, n, run.page_size, c.kv_row)
    t = mla_attend.default_tuning(n, heads, run.fp8)
    groups = -(-heads // t.columns)
    q_rows = _s(mla_attend.query_dtype(cache.dtype), n, groups * t.columns, c.kv_row)
    parts = mla_attend.Parts(
        _s(f32, n, groups, t.splits, t.columns, latent), _s(f32, n, groups, t.splits, t.columns)
    )
    ends = _s(i32, n, 1)
    weights = [Projection(_s(bf16, 1, a.shape[1], d)), Projection(_s(bf16, 1, width, d))]
    norm = _s(bf16, 1, c.q_lora_rank), 1.0
    q_b = Projection(_s(bf16, 1, q.shape[1], c.q_lora_rank))
    return (
        skinny.limits(row, weights)
        + skinny.limits(a, [q_b], norm=norm)
        + mla_query.limits(
            q, a, kv_b, _s(bf16, 1, latent), cache, _s(i32, n), heads=heads, tokens=1,
            columns=t.columns,
        )
        + mla_attend.limits(q_rows, cache, ends, ends, heads=heads, latent=latent, tuning=t)
        + mla_value.limits(parts, ends, _s(bf16, n, width), kv_b, heads=heads)
    )  # fmt: skip

"""Multi-head latent attention without rotation (specification §3.5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_impl.numerics import Numerics, f32

FP8_MAX = 448.0  # largest finite e4m3fn value


def to_cache(x: Float[Array, "*rows w"], dtype: jnp.dtype, scale: jax.Array | None) -> jax.Array:
    """Latent rows as they are stored; FP8 is divided by `scale` and saturates instead of NaN."""
    if scale is None:
        return x.astype(dtype)
    return jnp.clip(f32(x) / scale, -FP8_MAX, FP8_MAX).astype(dtype)


def from_cache(nx: Numerics, rows: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Stored latent rows as compute-dtype values."""
    return nx.round(f32(rows) if scale is None else f32(rows) * scale)


def split_kv_b(
    kv_b: Float[Array, "HW R"], nope: int, v_dim: int
) -> tuple[Float[Array, "H nope R"], Float[Array, "H V R"]]:
    """kv_b_proj as (W_UK, W_UV): per head its first `nope` rows, then `v_dim` rows."""
    heads = kv_b.reshape(-1, nope + v_dim, kv_b.shape[-1])
    return heads[:, :nope], heads[:, nope:]


def _weights(
    scores: Float[Array, "B H T S"], visible: Bool[Array, "B T S"]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(scores - top) of what is visible, their sum and top [B, H, T, 1] (-inf: sees nothing)."""
    seen = visible[:, None]
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), -1, keepdims=True)
    weight = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    return weight, jnp.sum(weight, -1, keepdims=True), top


def _softmax(scores: Float[Array, "B H T S"], visible: Bool[Array, "B T S"]) -> jax.Array:
    """Softmax over the visible positions; a row that sees nothing gives zeros, not NaN."""
    weight, total, _ = _weights(scores, visible)
    return weight / jnp.where(total == 0.0, 1.0, total)


def absorbed_attention(
    nx: Numerics,
    q: Float[Array, "B T H dq"],
    kv: Float[Array, "B S row"],
    w_uk: Float[Array, "H nope R"],
    w_uv: Float[Array, "H V R"],
    visible: Bool[Array, "B T S"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T H V"]:
    """Attention in the latent space (vLLM decode): W_UK goes to the query, W_UV to the result.

    `scale` None is the inverse root of the query width.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_row = absorb_query(nx, q, w_uk)
    latent, _ = latent_attention(nx, q_row, kv, visible, w_uv.shape[2], scale)
    return expand_value(nx, latent, w_uv)


def absorb_query(
    nx: Numerics, q: Float[Array, "B T H dq"], w_uk: Float[Array, "H nope R"]
) -> Float[Array, "B T H row"]:
    """Queries that meet cache rows directly: W_UK^T q, then the un-rotated part."""
    nope = w_uk.shape[1]
    q_latent = nx.round(nx.einsum("bthn,hnr->bthr", q[..., :nope], w_uk))
    return jnp.concatenate([q_latent, q[..., nope:]], axis=-1)


def latent_attention(
    nx: Numerics,
    q_row: Float[Array, "B T H row"],
    kv: Float[Array, "B S row"],
    visible: Bool[Array, "B T S"],
    rank: int,
    scale: float,
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H"]]:
    """Mean of the visible latents under softmax, and the log-sum-exp of the scores; both f32.

    A row that sees nothing gives zeros and -inf.
    """
    weight, total, top = _weights(scale * nx.einsum("bthr,bsr->bhts", q_row, kv), visible)
    share = weight / jnp.where(total == 0.0, 1.0, total)
    # the shares stay f32: the product with the latents is not a bf16 GEMM in this form
    latent = jnp.einsum("bhts,bsr->bthr", share, f32(kv[..., :rank]), precision="highest")
    return latent, jnp.moveaxis((top + jnp.log(total))[..., 0], 1, 2)


def merge_attention(
    latents: Float[Array, "W B T H R"], lse: Float[Array, "W B T H"]
) -> Float[Array, "B T H R"]:
    """Attention over the union of W parts of the context, each with its log-sum-exp."""
    top = jnp.max(lse, axis=0)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weight, axis=0)
    share = weight / jnp.where(total == 0.0, 1.0, total)
    return jnp.sum(share[..., None] * latents, axis=0)


def expand_value(
    nx: Numerics, latent: Float[Array, "B T H R"], w_uv: Float[Array, "H V R"]
) -> Float[Array, "B T H V"]:
    """W_UV on the attended latents, which are rounded once before it."""
    return nx.round(nx.einsum("bthr,hvr->bthv", nx.round(latent), w_uv))


def explicit_attention(
    nx: Numerics,
    q: Float[Array, "B T H dq"],
    kv: Float[Array, "B S row"],
    w_uk: Float[Array, "H nope R"],
    w_uv: Float[Array, "H V R"],
    visible: Bool[Array, "B T S"],
) -> Float[Array, "B T H V"]:
    """Attention with keys and values per head, as the published code's eager path rounds it."""
    rank = w_uk.shape[2]
    latent, k_rope = kv[..., :rank], kv[..., rank:]
    k_nope = nx.round(nx.einsum("bsr,hnr->bshn", latent, w_uk))
    v = nx.round(nx.einsum("bsr,hvr->bshv", latent, w_uv))
    k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    scores = nx.round(nx.einsum("bthd,bshd->bhts", q, k))
    scores = nx.round(f32(scores) * q.shape[-1] ** -0.5)
    share = nx.round(_softmax(f32(scores), visible))
    return nx.round(nx.einsum("bhts,bshv->bthv", share, v))


def output_gate(
    nx: Numerics, o: Float[Array, "*rows c"], gate: Float[Array, "*rows c"]
) -> Float[Array, "*rows c"]:
    """Output gate: o * sigmoid(gate); profile H rounds the sigmoid first."""
    s = jax.nn.sigmoid(f32(gate))
    if nx.profile == "H":
        s = f32(nx.round(s))
    return nx.round(f32(o) * s)

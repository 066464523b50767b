"""The formulas of the two attention kinds, KDA and MLA; projections and caches are the caller's.

Legend: T tokens of one sequence, H heads, K and V key and value width of a KDA head, C convolution
channels, R width of the MLA latent, S cached rows. "Compute" and "wide" are the two dtypes of
`Numerics`; `nm.round` marks every rounding point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ref.numerics import Numerics, fp8_decode, fp8_encode, linear

L2_EPS = 1e-6  # a constant of the formula, not a field of the configuration


# --- KDA ---


def short_conv(raw: Tensor, window: Tensor, weight: Tensor, nm: Numerics) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution with SiLU over the raw projections.

    Args:
        raw: [T, C] raw projections of these tokens, compute.
        window: [taps - 1, C] raw projections before them, oldest first, compute; zeros at the
            start.
        weight: [C, 1, taps], wide; the last tap belongs to the current token.
        nm: numerics.

    Returns:
        [T, C], compute (wide with `kda_fused`), and the window after these tokens [taps - 1, C].
    """
    taps = weight.shape[-1]
    history = torch.cat([window, raw])
    acc = torch.zeros(raw.shape, dtype=nm.wide_dtype, device=raw.device)
    for j in range(taps):
        acc = acc + nm.wide(weight[:, 0, j]) * nm.wide(history[j : j + raw.shape[0]])
    out = acc * torch.sigmoid(acc)
    return (out if nm.kda_fused else nm.round(out)), history[raw.shape[0] :].clone()


def l2_norm(x: Tensor, nm: Numerics) -> Tensor:
    """Wide x / sqrt(sum x^2 + 1e-6) over the last axis: the epsilon is added to the sum."""
    wide = nm.wide(x)
    return wide / torch.sqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def kda_log_decay(z: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float, nm: Numerics) -> Tensor:
    """Log decay g = bound * sigmoid(exp(A_log) * (z + dt_bias)), in (bound, 0).

    Args:
        z: [..., H, K], compute.
        a_log: at least [H], wide; a longer stored vector is padding after the first H entries.
        dt_bias: [H * K], wide.
        bound: lower bound of g, negative.
        nm: numerics.

    Returns:
        [..., H, K], wide.
    """
    heads, width = z.shape[-2:]
    rate = torch.exp(nm.wide(a_log[:heads]))[:, None]
    return bound * torch.sigmoid(rate * (nm.wide(z) + nm.wide(dt_bias).view(heads, width)))


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, nm: Numerics
) -> tuple[Tensor, Tensor]:
    """Gated delta rule, token by token: decay, error against the decayed state, write, read.

    Args:
        q: [T, H, K] normalised and scaled query, wide.
        k: [T, H, K] normalised key, wide.
        v: [T, H, V] value, compute or wide.
        log_decay: [T, H, K], wide.
        beta: [T, H] write strength, wide.
        state: [H, V, K] state before the first token, wide; not modified.
        nm: numerics.

    Returns:
        Outputs [T, H, V], compute (wide with `kda_fused`), and the state after the last token,
        wide.
    """
    outputs = []
    for t in range(q.shape[0]):
        state = state * torch.exp(log_decay[t])[:, None, :]
        error = nm.wide(v[t]) - (state * k[t][:, None, :]).sum(-1)
        write = beta[t][:, None] * error
        state = state + write[:, :, None] * k[t][:, None, :]
        outputs.append((state * q[t][:, None, :]).sum(-1))
    out = torch.stack(outputs)
    return (out if nm.kda_fused else nm.round(out)), state


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, nm: Numerics) -> Tensor:
    """RMSNorm per head times sigmoid of the gate, one rounding in both profiles.

    Args:
        o: [..., H, V], compute or wide.
        gate: [..., H, V], compute.
        weight: [V], wide, shared by the heads.
        eps: epsilon on the mean.
        nm: numerics.

    Returns:
        [..., H, V], compute.
    """
    wide = nm.wide(o)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return nm.round(normed * nm.wide(weight) * torch.sigmoid(nm.wide(gate)))


# --- MLA ---


def mla_explicit(
    q: Tensor, rows: Tensor, kv_b: Tensor, nope: int, start: int, nm: Numerics
) -> Tensor:
    """Causal attention with keys and values per head, rounded as eager attention rounds.

    QK^T, the scaled scores, the probabilities and PV are each rounded to compute; softmax is wide.
    Wide rows (read from an FP8 cache) are rounded to compute first, as they become GEMM operands.

    Args:
        q: [T, H, nope + rope], compute, never rotated.
        rows: [S, R + rope] cached rows, normalised latent then raw shared key, compute or wide; the
            rows of the T new tokens are the last ones.
        kv_b: [H * (nope + value), R], compute: per head the key rows, then the value rows.
        nope: width of the per-head key part.
        start: tokens before the first of these T, so that S = start + T.
        nm: numerics.

    Returns:
        [T, H, value], compute.
    """
    heads, rank, rows = q.shape[1], kv_b.shape[1], nm.round(rows)
    up = linear(rows[:, :rank], kv_b, nm).view(rows.shape[0], heads, -1)  # [S, H, nope + value]
    shared = rows[:, None, rank:].expand(-1, heads, -1)
    key, value = torch.cat([up[..., :nope], shared], dim=-1), up[..., nope:]
    scores = nm.round(torch.einsum("thd,shd->hts", nm.wide(q), nm.wide(key)))
    scores = nm.round(nm.wide(scores) * q.shape[-1] ** -0.5)
    probs = nm.round(causal_softmax(nm.wide(scores), start))
    return nm.round(torch.einsum("hts,shv->thv", nm.wide(probs), nm.wide(value)))


def mla_absorbed(
    q: Tensor, rows: Tensor, kv_b: Tensor, nope: int, start: int, nm: Numerics
) -> Tensor:
    """The same attention with both halves of `kv_b` moved to the query and the output side.

    Scores and probabilities stay wide; the absorbed query, the mixed latent and the output are
    rounded. Arguments and result as in `mla_explicit`.
    """
    heads, rank = q.shape[1], kv_b.shape[1]
    up = nm.wide(kv_b).view(heads, -1, rank)
    absorbed = mla_absorbed_query(q, kv_b, nope, nm)
    scores = torch.einsum("thr,sr->hts", nm.wide(absorbed), nm.wide(rows)) * q.shape[-1] ** -0.5
    probs = causal_softmax(scores, start)
    mixed = nm.round(torch.einsum("hts,sr->thr", probs, nm.wide(rows[:, :rank])))
    return nm.round(torch.einsum("thr,hvr->thv", nm.wide(mixed), up[:, nope:]))


def mla_absorbed_query(q: Tensor, kv_b: Tensor, nope: int, nm: Numerics) -> Tensor:
    """[W_UK^T q_n | q_r], [T, H, R + rope], compute (wide after the optional rounding to e4m3)."""
    up = nm.wide(kv_b).view(q.shape[1], -1, kv_b.shape[1])
    latent = nm.round(torch.einsum("thn,hnr->thr", nm.wide(q[..., :nope]), up[:, :nope]))
    absorbed = torch.cat([latent, q[..., nope:]], dim=-1)
    if nm.query_scale is None:
        return absorbed
    return fp8_decode(fp8_encode(absorbed, nm.query_scale, nm), nm.query_scale, nm)


def causal_softmax(scores: Tensor, start: int) -> Tensor:
    """Softmax over the last axis of [H, T, S]; query t sees the columns up to start + t."""
    tokens, columns = scores.shape[1:]
    position = torch.arange(tokens, device=scores.device)[:, None] + start
    hidden = torch.arange(columns, device=scores.device)[None, :] > position
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)


def mla_gate(o: Tensor, gate: Tensor, nm: Numerics) -> Tensor:
    """Output gate o * sigmoid(gate); H rounds the sigmoid first, V rounds the product only."""
    sig = torch.sigmoid(nm.wide(gate))
    if nm.profile == "H":
        sig = nm.wide(nm.round(sig))
    return nm.round(nm.wide(o) * sig)

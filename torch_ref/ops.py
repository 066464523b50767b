"""One function per formula of the model; no cache, no weights lookup, no configuration object.

This module holds norms, attention residuals and everything of the MLPs, and hands on the formulas
of `torch_ref.attention` and `torch_ref.mxfp4`, so that a caller needs this name only.

Legend: T tokens of one sequence, D hidden width, E experts, X chosen experts, Z width of the MoE
latent. "Compute" and "wide" are the two dtypes of `Numerics`; `nm.round` marks every rounding
point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ref.attention import causal_softmax as causal_softmax
from torch_ref.attention import gated_rms_norm as gated_rms_norm
from torch_ref.attention import kda_log_decay as kda_log_decay
from torch_ref.attention import kda_recurrence as kda_recurrence
from torch_ref.attention import l2_norm as l2_norm
from torch_ref.attention import mla_absorbed as mla_absorbed
from torch_ref.attention import mla_absorbed_query as mla_absorbed_query
from torch_ref.attention import mla_explicit as mla_explicit
from torch_ref.attention import mla_gate as mla_gate
from torch_ref.attention import short_conv as short_conv
from torch_ref.mxfp4 import mxfp4_decode as mxfp4_decode
from torch_ref.numerics import Numerics, linear

# A constant of the formula, not a field of the configuration.
ROUTER_EPS = 1e-20


# --- norms and attention residuals ---


def rms_norm(x: Tensor, weight: Tensor, eps: float, nm: Numerics) -> Tensor:
    """RMSNorm over the last axis; the epsilon is added to the mean.

    Profile H rounds the normalised value and then the product with the weight; V rounds once.

    Args:
        x: [..., n], compute or (after an unrounded mix) wide.
        weight: [n], compute.
        eps: epsilon on the mean of squares.
        nm: numerics.

    Returns:
        [..., n], compute.
    """
    wide, gamma = nm.wide(x), nm.wide(weight)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if nm.profile == "H":
        return nm.round(gamma * nm.wide(nm.round(normed)))
    return nm.round(normed * gamma)


def attn_res(
    prefix: Tensor,
    snapshots: Sequence[Tensor],
    norm: Tensor,
    proj: Tensor,
    eps: float,
    nm: Numerics,
) -> Tensor:
    """Attention residual: softmax mixture over depth of the raw snapshots and the prefix.

    Args:
        prefix: [T, D], the running sum, compute; it is the last source.
        snapshots: each [T, D], compute.
        norm: [D], weight of the score norm, compute.
        proj: [1, D], score projection, compute.
        eps: epsilon of the score norm.
        nm: numerics.

    Returns:
        [T, D], **wide**: whether the mix is rounded depends on what follows, see `mix_for_norm`.
    """
    sources = nm.wide(torch.stack([*snapshots, prefix], dim=1))  # [T, sources, D]
    score_weight = nm.wide(norm) * nm.wide(proj[0])
    scale = torch.rsqrt(sources.square().mean(-1, keepdim=True) + eps)
    if nm.profile == "H":
        scores = (sources * scale * score_weight).sum(-1)
    else:
        scores = scale[..., 0] * (sources * score_weight).sum(-1)
    weights = torch.softmax(scores, dim=-1)
    return (weights[..., None] * sources).sum(1)


def mix_for_norm(mix: Tensor, nm: Numerics) -> Tensor:
    """A mix on its way into an RMSNorm: H rounds it to compute, V hands the wide value over."""
    return nm.round(mix) if nm.profile == "H" else mix


# --- MLPs ---


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, nm: Numerics) -> Tensor:
    """Gated activation [b tanh(g/b) sigmoid(g)] * [c tanh(u/c)], one rounding at the end.

    Args:
        gate: g, any shape, compute; the sigmoid takes it uncapped.
        up: u, same shape, compute.
        beta: soft cap b of the gate.
        linear_beta: soft cap c of the up half; None leaves u as it is.
        nm: numerics.

    Returns:
        Same shape, compute.
    """
    g, u = nm.wide(gate), nm.wide(up)
    capped = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return nm.round(beta * torch.tanh(g / beta) * torch.sigmoid(g) * capped)


def mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, betas: tuple[float, float], nm: Numerics
) -> Tensor:
    """Gated MLP down(SiTU(gate x, up x)), for the dense layer, shared and routed experts.

    Args:
        x: [N, in], compute.
        gate: [m, in], compute.
        up: [m, in], compute.
        down: [out, m], compute.
        betas: the two soft caps of SiTU.
        nm: numerics.

    Returns:
        [N, out], compute.
    """
    return linear(situ(linear(x, gate, nm), linear(x, up, nm), *betas, nm), down, nm)


class Routing(NamedTuple):
    """Choice of the router for T tokens.

    Attributes:
        idx: [T, X] int64 expert ids, ascending.
        weight: [T, X] wide, in the order of `idx`.
        gap: [T] wide, the X-th minus the next best biased score (inf if nothing is left to choose):
            how near the choice is to a tie. It describes the scores even when the choice was
            forced.
        edge: [T, 2] int64, the X-th expert by biased score and the next best, whatever was forced;
            [T, 1] if nothing is left to choose.
        scores: [T, E] wide, the unbiased sigmoid scores.
    """

    idx: Tensor
    weight: Tensor
    gap: Tensor
    edge: Tensor
    scores: Tensor


def router(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    nm: Numerics,
    *,
    scaling: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    forced: Tensor | None = None,
) -> Routing:
    """Sigmoid router with a bias that acts on the selection only.

    Equal biased scores are decided for the lower expert id. Experts outside the kept groups are
    never chosen (masked with -inf).

    Args:
        y: [T, D], compute.
        weight: [E, D], compute.
        bias: [E], wide.
        top_k: number X of experts to choose.
        nm: numerics; logits and scores are wide in every profile.
        scaling: factor on the normalised weights.
        groups: number of contiguous expert groups.
        kept_groups: groups that stay, by the sum of their two largest biased scores.
        forced: [T, X] expert ids that replace the choice; the weights follow from the scores.

    Returns:
        The routing.
    """
    scores = torch.sigmoid(nm.wide(y) @ nm.wide(weight).T)
    biased = scores + nm.wide(bias)
    if groups > 1:
        grouped = biased.view(biased.shape[0], groups, -1)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        dropped = group_score.sort(dim=-1, descending=True, stable=True).indices[:, kept_groups:]
        mask = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, dropped, True)
        biased = grouped.masked_fill(mask[..., None], float("-inf")).flatten(1)
    ranked = biased.sort(dim=-1, descending=True, stable=True)
    following = torch.full_like(biased[:, :1], float("-inf"))
    following = torch.cat([ranked.values, following], dim=-1)[:, top_k]
    idx = ranked.indices[:, :top_k] if forced is None else forced.to(scores.device).long()
    idx = idx.sort(dim=-1).values
    chosen = scores.gather(1, idx)
    weights = chosen / (chosen.sum(-1, keepdim=True) + ROUTER_EPS) * scaling
    gap, edge = ranked.values[:, top_k - 1] - following, ranked.indices[:, top_k - 1 : top_k + 1]
    return Routing(idx, weights, gap, edge, scores)


def routed_sum(
    latent: Tensor,
    routing: Routing,
    expert: Callable[[int], tuple[Tensor, Tensor, Tensor]],
    betas: tuple[float, float],
    nm: Numerics,
) -> Tensor:
    """Weighted sum of the chosen experts: each output rounded, products and sum wide, one rounding.

    Args:
        latent: [T, Z], compute.
        routing: choice and weights.
        expert: gives (gate, up, down) of an expert id, [m, Z], [m, Z], [Z, m], compute; it is
            called once for every distinct chosen expert.
        betas: the two soft caps of SiTU.
        nm: numerics.

    Returns:
        [T, Z], compute: the complete sum, not yet normalised.
    """
    outputs = torch.empty(
        *routing.idx.shape, latent.shape[-1], dtype=nm.dtype, device=latent.device
    )
    for e in routing.idx.unique().tolist():
        token, place = (routing.idx == e).nonzero(as_tuple=True)
        outputs[token, place] = mlp(latent[token], *expert(e), betas, nm)
    return nm.round((nm.wide(outputs) * routing.weight[..., None]).sum(1))


def latent_moe(
    y: Tensor,
    routing: Routing,
    expert: Callable[[int], tuple[Tensor, Tensor, Tensor]],
    down: Tensor,
    norm: Tensor,
    up: Tensor,
    betas: tuple[float, float],
    eps: float,
    nm: Numerics,
) -> tuple[Tensor, Tensor]:
    """Routed half of the LatentMoE: down-projection, experts, norm of their sum, up-projection.

    Args:
        y: [T, D], compute; the router read the same vector.
        routing: choice and weights.
        expert: as in `routed_sum`.
        down: [Z, D], compute.
        norm: [Z], compute: weight of the norm on the complete sum.
        up: [D, Z], compute.
        betas: the two soft caps of SiTU.
        eps: epsilon of the norm.
        nm: numerics.

    Returns:
        [T, D], compute, without the shared expert; and the sum before the norm [T, Z], compute.
    """
    total = routed_sum(linear(y, down, nm), routing, expert, betas, nm)
    return linear(rms_norm(total, norm, eps, nm), up, nm), total

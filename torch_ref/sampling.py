"""From logits to the distribution a token is drawn from, and the draw; no generator anywhere.

Whatever is random comes in as an argument, so that two implementations can be given the same
numbers. Results have the wider of f32 and the dtype of the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_OFF = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """Settings of one request.

    Attributes:
        temperature: 0 means the largest logit, whatever the filters.
        min_p: tokens below this share of the largest probability are dropped; 0 drops none.
        top_k: number of most probable tokens that stay; None keeps all.
        top_p: mass of the most probable tokens that stay; 1 keeps all.
    """

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuses values outside their range, all at once."""
        checks = {
            f"temperature {self.temperature} must be finite and at least 0": (
                0 <= self.temperature < math.inf
            ),
            f"min_p {self.min_p} must lie in [0, 1]": 0 <= self.min_p <= 1,
            f"top_k {self.top_k} must be at least 1": self.top_k is None or self.top_k >= 1,
            f"top_p {self.top_p} must lie in (0, 1]": 0 < self.top_p <= 1,
        }
        problems = [text for text, fine in checks.items() if not fine]
        if problems:
            raise ValueError("; ".join(problems))


def widened(x: Tensor) -> Tensor:
    """`x` in float64 if it is that, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then min-p, then top-k, then top-p, each on what the one before left over.

    All tokens that tie with the k-th largest logit stay. Top-p keeps a token if the mass of those
    ranked above it is below `top_p` (at equal logits the lower id ranks first), so one always
    stays. The mass is that of the distribution after min-p and top-k, renormalised.

    Args:
        logits: [..., V], any float dtype.
        sampling: settings with a temperature above 0.

    Returns:
        [..., V], wide logits; dropped tokens have -inf.
    """
    if sampling.temperature == 0:
        raise ValueError("temperature 0 has no distribution; take the largest logit")
    x = widened(logits) / sampling.temperature
    if sampling.min_p > 0:
        floor = x.amax(-1, keepdim=True) + math.log(sampling.min_p)
        x = x.masked_fill(x < floor, _OFF)
    if sampling.top_k is not None and sampling.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(sampling.top_k, dim=-1).values[..., -1:], _OFF)
    if sampling.top_p < 1:
        ranked = x.sort(dim=-1, descending=True, stable=True)
        mass = torch.softmax(ranked.values, dim=-1)
        dropped = mass.cumsum(-1) - mass >= sampling.top_p
        dropped[..., 0] = False
        x = x.masked_fill(torch.zeros_like(dropped).scatter(-1, ranked.indices, dropped), _OFF)
    return x


def largest(logits: Tensor) -> int:
    """Id of the largest entry of [V]; the lowest id wins ties, NaN counts as -inf."""
    return int(logits.masked_fill(logits.isnan(), _OFF).argmax())


def draw(logits: Tensor, temperature: float, noise: Tensor | None) -> int:
    """Gumbel-max draw from softmax(logits / T), or the largest logit at temperature 0.

    Args:
        logits: [V], any float dtype; a distribution is given by its logarithm and temperature 1.
        temperature: at least 0.
        noise: [V] Gumbel noise, not read at temperature 0.

    Returns:
        The token id.
    """
    if temperature == 0:
        return largest(logits)
    if noise is None:
        raise ValueError("a draw needs noise")
    return largest(widened(logits) / temperature + noise)

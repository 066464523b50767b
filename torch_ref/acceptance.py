"""Acceptance of drafted tokens: greedy, standard, block and synthetic, by name.

A rule is first turned into numbers: a threshold per draft for its uniform, and for every possible
accepted count the distribution of the one token that follows. The uniforms come last. The same
numbers serve a step and the exact enumeration of what a rule does.

Legend: K drafts, V vocabulary; row i of the target judges draft i, row K follows the last draft.
A draft id of -1 is a placeholder: never accepted, and the end of the drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ref.sampling import Sampling, draw, largest, process, widened

RULES = ("greedy", "standard", "block", "synthetic")


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: one of `RULES`.
        length: synthetic only: mean tokens per step, the one after the drafts included.
        rates: synthetic only, instead of `length`: per draft the probability that it and all drafts
            before it are accepted.
    """

    name: str
    length: float | None = None
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses contradictions that can be seen without the number of drafts."""
        given = (self.length is not None) + (self.rates is not None)
        if self.name not in RULES:
            raise ValueError(f"rule {self.name!r} is not one of {RULES}")
        if given != (self.name == "synthetic"):
            raise ValueError(
                f"rule {self.name!r} with length {self.length} and rates {self.rates}: 'synthetic' "
                "takes exactly one of the two, the other rules take neither"
            )

    def unconditional(self, k: int) -> list[float]:
        """Per draft, the probability that it and all before it are accepted (synthetic only).

        A length becomes the schedule of least variance: certain acceptances, one fraction, zeros.

        Raises:
            ValueError: the length lies outside 1..K + 1, or the rates are not K values in [0, 1]
                that never grow.
        """
        if self.rates is not None:
            fine = len(self.rates) == k and all(0 <= r <= 1 for r in self.rates)
            if not fine or any(a < b for a, b in pairwise(self.rates)):
                raise ValueError(f"rates {self.rates} must be {k} values in [0, 1], never growing")
            return list(self.rates)
        if self.length is None or not 1 <= self.length <= k + 1:
            raise ValueError(
                f"acceptance length {self.length} with {k} drafts must lie in 1..{k + 1}"
            )
        accepted = self.length - 1
        whole = math.floor(accepted)
        return ([1.0] * whole + [accepted - whole] + [0.0] * k)[:k]

    def conditional(self, k: int) -> list[float]:
        """Per draft, its probability once all before it are accepted (synthetic only)."""
        rates = [1.0, *self.unconditional(k)]
        return [b / a if a > 0 else 0.0 for a, b in pairwise(rates)]

    def describe(self, k: int) -> str:
        """What ran, in words; a forced acceptance says so, with its schedule."""
        if self.name != "synthetic":
            return f"{self.name} acceptance, {k} drafts"
        rates = self.unconditional(k)
        schedule = "minimum-variance schedule" if self.rates is None else "given rates"
        return (
            f"synthetic acceptance, length {1 + sum(rates):g}, {k} drafts, {schedule} "
            f"{[round(r, 6) for r in rates]}, draft acceptance rate {sum(rates) / k:.6f}"
        )


class Plan(NamedTuple):
    """A rule applied to the distributions and drafts of one step, before any uniform is known.

    Attributes:
        threshold: [valid] one per draft before the first placeholder.
        strict: whether a uniform must be below its threshold (else at most equal).
        scan_all: False: the first failure ends the walk. True: the last success counts, whatever
            failed before it.
        last: [valid + 1, V], by accepted count, the distribution of the token that follows.
    """

    threshold: list[float]
    strict: bool
    scan_all: bool
    last: Tensor

    def accepted(self, uniforms: Sequence[float] | Tensor) -> int:
        """How many drafts the uniforms accept; each must lie in (0, 1)."""
        passed = []
        for u, t in zip(uniforms, self.threshold, strict=False):
            u = float(u)
            if not 0 < u < 1:
                raise ValueError(f"uniform {u} is outside (0, 1)")
            passed.append(u < t if self.strict else u <= t)
        if len(passed) < len(self.threshold):
            raise ValueError(f"{len(passed)} uniforms for {len(self.threshold)} drafts")
        if self.scan_all:
            return max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        return passed.index(False) if False in passed else len(passed)

    def probabilities(self) -> list[float]:
        """Probability of every accepted count under independent uniform numbers."""
        t = [min(max(x, 0.0), 1.0) for x in self.threshold]
        if self.scan_all:  # count i + 1: draft i passes and all after it fail
            t = [1.0, *t]
            return [t[i] * math.prod(1 - x for x in t[i + 1 :]) for i in range(len(t))]
        t = [*t, 0.0]
        return [math.prod(t[:i]) * (1 - t[i]) for i in range(len(t))]


def valid_drafts(drafts: Sequence[int] | Tensor) -> list[int]:
    """The drafts before the first placeholder."""
    ids = [int(d) for d in drafts]
    return ids[: ids.index(-1)] if -1 in ids else ids


def plan(rule: Rule, target: Tensor, draft: Tensor | None, drafts: Sequence[int] | Tensor) -> Plan:
    """Thresholds and following distributions of a rule at a temperature above 0.

    Args:
        rule: any but greedy.
        target: [K + 1, V], processed distributions of the target.
        draft: [K, V], distributions the drafts were drawn from; None: chosen without chance, so
            that each is a point mass.
        drafts: [K] ids.

    Returns:
        The plan, in the dtype of `target` as far as it is a tensor.
    """
    valid, k = valid_drafts(drafts), len(drafts)
    masses = [draft[i] if draft is not None else _point(target[i], d) for i, d in enumerate(valid)]
    if rule.name == "standard":
        ratios = _ratios(target, masses, valid)
        return Plan(ratios, True, False, _following(target, masses, [1.0] * len(valid), draft))
    if rule.name == "synthetic":
        rates = rule.conditional(k)[: len(valid)]
        return Plan(rates, True, False, _following(target, masses, [1.0] * len(valid), draft))
    if rule.name != "block":
        raise ValueError(f"rule {rule.name!r} has no distributions; it compares largest logits")
    carried = [1.0]  # clipped product of the ratios so far
    for ratio in _ratios(target, masses, valid):
        carried.append(min(carried[-1] * ratio, 1.0))
    thresholds = []
    for i, c in enumerate(carried[1:], start=1):
        if i == len(valid):
            thresholds.append(c)
            continue
        ahead = float((c * target[i] - masses[i]).clamp(min=0).sum())
        below = ahead + 1 - c
        thresholds.append(ahead / below if below > 0 else 1.0)
    return Plan(thresholds, False, True, _following(target, masses, carried[:-1], draft))


def _point(like: Tensor, token: int) -> Tensor:
    return torch.zeros_like(like).index_fill(0, torch.tensor([token], device=like.device), 1.0)


def _ratios(target: Tensor, masses: Sequence[Tensor], valid: Sequence[int]) -> list[float]:
    """Target over draft probability per draft; a draft of probability 0 passes unless both are."""
    ratios = []
    for i, d in enumerate(valid):
        p, q = float(target[i, d]), float(masses[i][d])
        ratios.append(p / q if q > 0 else (math.inf if p > 0 else 0.0))
    return ratios


def _following(
    target: Tensor, masses: Sequence[Tensor], carried: Sequence[float], draft: Tensor | None
) -> Tensor:
    """By accepted count, [valid + 1, V]: residual after a rejection, else the row of the target.

    For a point mass the residual is the row without the rejected token. An empty residual, which
    rounding or a synthetic rejection can produce, is replaced by the row itself.
    """
    rows = []
    for i, (mass, c) in enumerate(zip(masses, carried, strict=True)):
        row = target[i]
        left = (c * row - mass).clamp(min=0) if draft is not None else row * (1 - mass)
        total = left.sum()
        rows.append(left / total if total > 0 else row)
    return torch.stack([*rows, target[len(masses)]])


class Outcome(NamedTuple):
    """Result of one step.

    Attributes:
        accepted: number of accepted drafts.
        tokens: the accepted drafts and the token that follows, accepted + 1 ids.
        last: [V] distribution the last token was drawn from; a point mass at temperature 0.
    """

    accepted: int
    tokens: list[int]
    last: Tensor


def accept(
    rule: Rule,
    logits: Tensor,
    drafts: Sequence[int] | Tensor,
    sampling: Sampling,
    *,
    draft_logits: Tensor | None = None,
    uniforms: Sequence[float] | Tensor | None = None,
    noise: Tensor | None = None,
) -> Outcome:
    """Decides one step from raw logits.

    At temperature 0 standard and block are the greedy rule, and draft logits are not read. Drafts
    chosen by the largest logit have no distribution: hand over no draft logits for them.

    Args:
        rule: which rule; greedy needs temperature 0.
        logits: [K + 1, V] of the target, unprocessed.
        drafts: [K] ids, -1 for a placeholder.
        sampling: settings of the request; the filters act on the target only.
        draft_logits: [K, V] the drafts were drawn from, before the temperature; None means point
            masses.
        uniforms: [K] in (0, 1); not read by a greedy comparison.
        noise: [K + 1, V] Gumbel noise by row; not read at temperature 0.

    Returns:
        The outcome.

    Raises:
        ValueError: shapes do not fit, or something that is needed is missing.
    """
    k, zero = len(drafts), sampling.temperature == 0
    if logits.shape[0] != k + 1:
        raise ValueError(f"{logits.shape[0]} target rows for {k} drafts, expected {k + 1}")
    if rule.name == "greedy" and not zero:
        raise ValueError(f"rule 'greedy' needs temperature 0, got {sampling.temperature}")
    compares = zero and rule.name != "synthetic"
    if (uniforms is None and not compares) or (noise is None and not zero):
        raise ValueError(f"rule {rule.name!r} needs uniforms, and noise above temperature 0")
    valid = valid_drafts(drafts)
    if zero:
        best = [largest(row) for row in logits]
        if compares:
            count = _agreeing(valid, best)
        else:
            rates = rule.conditional(k)[: len(valid)]
            count = Plan(rates, True, False, logits).accepted(uniforms)
        last = _point(widened(logits[count]), best[count])
        return Outcome(count, [*valid[:count], best[count]], last)
    target = torch.softmax(process(logits, sampling), dim=-1)
    mass = None
    if draft_logits is not None:
        mass = torch.softmax(widened(draft_logits) / sampling.temperature, dim=-1).to(target.dtype)
    ready = plan(rule, target, mass, drafts)
    count = ready.accepted(uniforms)
    last = ready.last[count]
    return Outcome(count, [*valid[:count], draw(last.log(), 1.0, noise[count])], last)


def _agreeing(drafts: Sequence[int], best: Sequence[int]) -> int:
    """How many leading drafts are the largest logit of their row."""
    agree = [d == b for d, b in zip(drafts, best, strict=False)]
    return agree.index(False) if False in agree else len(agree)

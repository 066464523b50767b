"""`Acceptance`: which rule judges drafts, and how drafts are drawn; no JAX import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jax_impl.config import ConfigError
from jax_impl.draft_config import MAX_DRAFTS
from jax_impl.problems import listed

SYNTHETIC_LABEL = "synthetic acceptance"  # what every output of a forced run carries


@dataclass(frozen=True)
class Acceptance:
    """How drafts are drawn and judged; hashable.

    Attributes:
        rule: `standard` stops at the first rejection, `block` verifies the drafts together,
            `synthetic` forces how many are accepted (for measurements; the text means nothing).
        drafting: `greedy` takes the drafter's largest logit, `probabilistic` draws.
        length: synthetic only: mean tokens per step, recovered or bonus token included, 1..K + 1;
            the schedule of minimum variance.
        rates: synthetic only, instead of `length`: for each draft the probability that it and all
            before it are accepted; not rising.
    """

    rule: Literal["standard", "block", "synthetic"] = "standard"
    drafting: Literal["greedy", "probabilistic"] = "greedy"
    length: float | None = None
    rates: tuple[float, ...] | None = None

    def require(self, drafts: int) -> None:
        """Check the settings for K = `drafts`.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        problems = []
        if type(drafts) is not int or not 1 <= drafts <= MAX_DRAFTS:
            problems.append(f"drafts: found {drafts!r}, expected 1..{MAX_DRAFTS}")
            drafts = MAX_DRAFTS
        choices = {
            "rule": ("standard", "block", "synthetic"),
            "drafting": ("greedy", "probabilistic"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name}: found {getattr(self, name)!r}, expected one of {allowed}")
        given = [n for n in ("length", "rates") if getattr(self, n) is not None]
        if self.rule != "synthetic" and given:
            problems.append(
                f"{' and '.join(given)}: found with rule {self.rule!r}, expected rule 'synthetic'"
            )
        elif self.rule == "synthetic" and len(given) != 1:
            found = " and ".join(given) or "neither"
            problems.append(f"rule 'synthetic': found {found}, expected a length or rates")
        if self.length is not None and not 1 <= self.length <= drafts + 1:
            problems.append(
                f"length: found {self.length}, expected 1..{drafts + 1} tokens per step"
            )
        if self.rates is not None:
            falling = all(a >= b for a, b in zip((1.0, *self.rates), self.rates, strict=False))
            bounded = all(0 <= r <= 1 for r in self.rates)
            if len(self.rates) != drafts or not (falling and bounded):
                problems.append(
                    f"rates: found {self.rates}, expected {drafts} numbers within 0..1, not rising"
                )
        if problems:
            do = "Change these settings; a drafter's K drafts give 1 to K + 1 tokens per step."
            raise ConfigError(listed("acceptance", problems, do))

    def schedule(self, drafts: int) -> tuple[float, ...]:
        """Synthetic: for each of K = `drafts` the probability that all up to it are accepted."""
        self.require(drafts)
        if self.rates is not None:
            return self.rates
        if self.length is None:
            raise ConfigError(f"rule {self.rule!r} has no schedule")
        more = self.length - 1
        whole = math.floor(more)
        steps = [1.0] * whole + [more - whole] + [0.0] * drafts
        return tuple(steps[:drafts])

    def conditional(self, drafts: int) -> tuple[float, ...]:
        """Synthetic: the probability of each draft, given that all before it are accepted."""
        rates = self.schedule(drafts)
        return tuple(
            r / before if before else 0.0
            for before, r in zip((1.0, *rates[:-1]), rates, strict=True)
        )

    def describe(self, drafts: int) -> dict[str, object]:
        """For reports: the rule by name; a forced run says so, with length, rate and schedule."""
        found: dict[str, object] = {
            "rule": self.rule,
            "drafting": self.drafting,
            "drafts": drafts,
        }
        if self.rule == "synthetic":
            rates = self.schedule(drafts)
            found |= {
                "label": SYNTHETIC_LABEL,
                "acceptance_length": 1 + sum(rates) if self.length is None else self.length,
                "draft_acceptance_rate": sum(rates) / drafts,
                "schedule": list(rates),
                "schedule_kind": "given rates" if self.length is None else "minimum variance",
            }
        return found

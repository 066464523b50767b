"""`Acceptance`: which rule judges drafts, and how drafts are drawn; no JAX import."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

from jax_impl.config import ConfigError
from jax_impl.draft_config import MAX_DRAFTS
from jax_impl.problems import listed

SYNTHETIC_LABEL = "synthetic acceptance"  # what every output of a forced run carries
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


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

    def __post_init__(self) -> None:
        """A list of rates is taken as a tuple, which can be hashed."""
        if isinstance(self.rates, list):
            object.__setattr__(self, "rates", tuple(self.rates))

    def problems(self, drafts: int, called: Callable[[str], str] = str) -> list[str]:
        """What is wrong with the settings for K = `drafts`, each as found and expected.

        Args:
            drafts: K.
            called: what the user calls a setting, by its name here; `drafts` is one of them.
        """
        problems = []
        rule, length, rates = (called(name) for name in ("rule", "length", "rates"))
        if type(drafts) is not int or not 1 <= drafts <= MAX_DRAFTS:
            problems.append(f"{called('drafts')}: found {drafts!r}, expected 1..{MAX_DRAFTS}")
            drafts = MAX_DRAFTS
        choices = {
            "rule": ("standard", "block", "synthetic"),
            "drafting": ("greedy", "probabilistic"),
        }
        for name, allowed in choices.items():
            if (found := getattr(self, name)) not in allowed:
                problems.append(f"{called(name)}: found {found!r}, expected one of {allowed}")
        given = " and ".join(called(n) for n in ("length", "rates") if getattr(self, n) is not None)
        if self.rule != "synthetic" and given:
            problems.append(
                f"{given}: found with {rule} {self.rule!r}, expected {rule} 'synthetic'"
            )
        elif self.rule == "synthetic" and (self.length is None) == (self.rates is None):
            found = given or "neither"
            problems.append(f"{rule} 'synthetic': found {found}, expected {length} or {rates}")
        if self.length is not None and not (
            isinstance(self.length, Real) and 1 <= self.length <= drafts + 1
        ):
            problems.append(
                f"{length}: found {self.length!r}, expected 1..{drafts + 1} tokens per step"
            )
        if self.rates is not None and not _falling(self.rates, drafts):
            problems.append(
                f"{rates}: found {self.rates}, expected {drafts} numbers within 0..1, one for "
                "each draft, not rising"
            )
        return problems

    def require(self, drafts: int) -> None:
        """Check the settings for K = `drafts`.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        if problems := self.problems(drafts):
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


def _falling(rates: Any, drafts: int) -> bool:
    """Whether rates are `drafts` numbers within 0..1, none above the one before it."""
    if not isinstance(rates, tuple) or len(rates) != drafts:
        return False
    values: tuple[Any, ...] = rates
    if not all(isinstance(r, Real) for r in values) or not all(0 <= r <= 1 for r in values):
        return False
    return all(a >= b for a, b in pairwise(values))


def parse_rates(text: str) -> tuple[float, ...]:
    """Rates from a comma list such as `0.9,0.72,0.36`; `Acceptance.problems` judges them.

    Raises:
        ValueError: something else than numbers and commas, with what was found.
    """
    parts = text.split(",")
    bad = [p for p in parts if not _NUMBER.fullmatch(p)]
    if bad:
        raise ValueError(
            f"found {bad[0]!r} in {text!r}, expected decimal numbers with commas between, such as "
            "0.9,0.72,0.36"
        )
    return tuple(float(p) for p in parts)

"""`Sampling`: how a request draws its tokens, and what is out of range; no JAX import."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from jax_impl.problems import is_whole


@dataclass(frozen=True)
class Sampling:
    """Settings of one request's draws.

    Filters apply in this order: temperature, min-p, top-k, top-p, each on what is left.

    Attributes:
        temperature: 0 is greedy.
        top_k: how many of the most probable tokens stay; 0 keeps all.
        top_p: probability that the most probable tokens which stay have together; 1 keeps all.
        min_p: share of the largest probability that a token needs to stay; 0 keeps all.
        seed: of the draws; a token depends on (seed, position) alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def filters(self) -> list[str]:
        """Names of the filters that are on."""
        off = {"top_k": 0, "top_p": 1, "min_p": 0}
        return [name for name, value in off.items() if getattr(self, name) != value]

    def problems(self, called: Callable[[str], str] = str) -> list[str]:
        """What is out of range, each as found and expected.

        Args:
            called: what the user calls a setting, by its name here.
        """
        expected = {
            "temperature": (self._finite("temperature", 0), "0 (greedy) or a finite number above"),
            "top_k": (_whole(self.top_k, 31), "0 (off) or how many tokens may be drawn"),
            "top_p": (
                self._finite("top_p", 0) and 0 < self.top_p <= 1,
                "more than 0, at most 1 (off)",
            ),
            "min_p": (self._finite("min_p", 0) and self.min_p <= 1, "0 (off) to 1"),
            "seed": (_whole(self.seed, 32), f"0..{2**32 - 1}"),
        }
        found = [
            f"{called(name)} {getattr(self, name)}: expected {what}"
            for name, (fine, what) in expected.items()
            if not fine
        ]
        on = [name for name in self.filters() if expected[name][0]]
        if on and self.temperature == 0:
            given = ", ".join(f"{called(name)} {getattr(self, name)}" for name in on)
            found.append(
                f"{given}: expected {called('temperature')} above 0; at 0 the largest logit is "
                "taken, whatever the filters"
            )
        return found

    def _finite(self, name: str, least: float) -> bool:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        return least <= value and math.isfinite(value)


def _whole(value: Any, bits: int) -> bool:
    return is_whole(value) and 0 <= value < 2**bits

"""One comparison's outcome, and the functions that turn distances into outcomes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from parity import metrics
from parity.tolerances import EXACT, Tolerance, tolerance

Status = Literal["passed", "failed", "not run", "not recorded"]


@dataclass(frozen=True)
class Where:
    """What is compared: everything in a verdict that does not come from the numbers.

    Attributes:
        suite: `ops`, `model`, `compare` or `mutants`.
        folder: recorded folder or checkpoint, as given.
        case: operation file, run or layer.
        dtype: compute dtype of our side.
        profile: rounding profile of our side, `-` where the formula has none.
        against: what the numbers are compared with.
        ours: whose numbers they are.
    """

    suite: str
    folder: str
    case: str
    dtype: str = "float32"
    profile: str = "-"
    against: str = "recorded float64"
    ours: str = "jax"

    def at(self, **changes: str) -> Where:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Verdict:
    """One quantity compared under one tolerance.

    Attributes:
        judged: name of the metric that the tolerance limits, `exact` for equality.
        value: that metric.
        limit: what it may be.
        status: `not run` counts as a failure of the whole run; `not recorded` is a remark.
    """

    where: Where
    quantity: str
    judged: str
    value: float | None
    limit: float | None
    reason: str
    status: Status
    note: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the comparison ran and held."""
        return self.status == "passed"

    def as_dict(self) -> dict[str, Any]:
        """Flat form for JSON."""
        rest = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "where"
        }
        return dataclasses.asdict(self.where) | rest | {"passed": self.passed}


def judge(
    where: Where, quantity: str, found: metrics.Metrics, limit: Tolerance, note: str = ""
) -> Verdict:
    """Applies one tolerance to computed metrics; a NaN never passes."""
    if limit.metric == EXACT:
        good, value = bool(found["exact"]), found.get("max_abs")
    else:
        value = found.get(limit.metric)
        good = value is not None and bool(value <= limit.limit)
    if found.get("pattern_equal") is False:
        good, note = False, _join(note, "NaN or infinities at different places")
    return Verdict(
        where, quantity, limit.metric, value, limit.limit, limit.reason,
        "passed" if good else "failed", note, found,
    )  # fmt: skip


def compare(
    where: Where,
    quantity: str,
    got: Any,
    want: Any,
    key: str,
    *,
    logits: bool = False,
    note: str = "",
    extra: metrics.Metrics | None = None,
    judged_as: str | None = None,
    limit: Tolerance | None = None,
) -> Verdict:
    """Distance of two arrays under the tolerance `key` for `judged_as`, by default `where.dtype`.

    `limit` is one of that key that a recording makes tighter.

    A shape that differs is a failed verdict that names both shapes.
    """
    limit = limit or tolerance(key, judged_as or where.dtype)
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return failed(where, quantity, f"shape: found {got.shape}, expected {want.shape}", limit)
    measure = metrics.logit_distance if logits else metrics.distance
    return judge(where, quantity, measure(got, want) | (extra or {}), limit, note)


def failed(where: Where, quantity: str, note: str, limit: Tolerance | None = None) -> Verdict:
    """A comparison that could not produce a distance because our result is wrong in kind."""
    metric, bound, reason = (limit.metric, limit.limit, limit.reason) if limit else ("-", None, "")
    return Verdict(where, quantity, metric, None, bound, reason, "failed", note)


def not_run(where: Where, quantity: str, cause: str) -> Verdict:
    """Something that was asked for and did not happen."""
    return Verdict(where, quantity, "-", None, None, "", "not run", cause)


def not_recorded(where: Where, quantity: str, what: str) -> Verdict:
    """A remark: optional numbers that a folder does not hold, so that nothing asked for them."""
    return Verdict(where, quantity, "-", None, None, "", "not recorded", what)


def _join(*notes: str) -> str:
    return "; ".join(n for n in notes if n)

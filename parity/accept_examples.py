"""Worked examples of the acceptance rules: exact decimals in, tokens and six decimals out.

Four tokens and three drafts. `T` are the target's rows, `D` the drafter's; drafts count from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

T = np.array(
    [[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.4, 0.1], [0.05, 0.15, 0.3, 0.5]]
)
D = np.array([[0.2, 0.5, 0.1, 0.2], [0.5, 0.25, 0.15, 0.1], [0.1, 0.3, 0.2, 0.4]])
NOISE = np.array(
    [[0.1, -0.2, 0.3, 1.5], [0.4, 0, -0.5, 0.9], [1.2, 0.7, -0.1, 0.2], [0, 0.25, 0.6, -0.3]]
)
GREEDY_LOGITS = np.array(
    [[0.1, 2, -1, 0.5], [1.5, 0.2, 1.4, -0.3], [0, 0, 3, 1], [0.3, 0.9, 0.9, -2]]
)  # the last row ends in a tie
RACE = -np.log(np.tile([0.7, 0.2, 1.5, 0.4], (4, 1)))  # a race of exponentials, as Gumbel noise
GIVEN = (0.9, 0.72, 0.36)  # synthetic: P(all drafts up to i accepted)


class Example(NamedTuple):
    """One decision.

    `last` is the distribution of the final token: a row of T by number, four numbers, or None
    where it is not part of the example.
    """

    id: str
    drafts: tuple[int, ...]
    uniforms: tuple[float, ...]
    tokens: tuple[int, ...]
    last: int | tuple[float, ...] | None = None


class Group(NamedTuple):
    """Examples under one setting."""

    name: str
    rule: str
    full: bool  # drafts judged by the distribution they came from; else as certain
    temperature: float
    examples: tuple[Example, ...]
    logits: np.ndarray = np.log(T)
    noise: np.ndarray = NOISE


_HALF = (0.5, 0.5, 0.5)
_GREEDY = (
    Example("all", (1, 0, 2), _HALF, (1, 0, 2, 1)),
    Example("one", (1, 2, 2), _HALF, (1, 0)),
    Example("none", (3, 0, 2), _HALF, (1,)),
    Example("placeholder", (1, -1, 2), _HALF, (1, 0)),
    Example("no drafts", (-1, -1, -1), _HALF, (1,)),
)
_SEVENTHS = (0.428571, 0, 0.571429, 0)
_STANDARD = (
    Example("S1", (1, 0, 2), (0.55, 0.15, 0.99), (1, 0, 2, 2), 3),
    Example("S2", (1, 0, 2), (0.55, 0.25, 0.99), (1, 1), (0, 0.777778, 0, 0.222222)),
    Example("S3", (1, 0, 2), (0.65, 0.01, 0.01), (0,), (0.666667, 0, 0.333333, 0)),
    Example("S4", (0, 3, -1), (0.99, 0.99, 0.01), (0, 3, 0), 2),
    Example("S5", (3, 1, 3), (0.45, 0.95, 0.30), (3, 1, 0), _SEVENTHS),
    Example("S6", (-1, 0, 2), (0.01, 0.01, 0.01), (3,), 0),
)
_STANDARD_POINT = (
    Example("O1", (0, 1, 2), (0.35, 0.55, 0.38), (0, 1, 2, 2), 3),
    Example("O2", (0, 1, 2), (0.35, 0.65, 0.10), (0, 3), (0.25, 0, 0.25, 0.5)),
    Example("O3", (3, 1, 2), (0.20, 0.10, 0.10), (0,), (0.444444, 0.333333, 0.222222, 0)),
)
_BLOCK = (
    Example("B1", (1, 0, 2), (0.2, 0.5, 0.2), (1, 0, 2, 2), 3),
    Example("B2", (1, 0, 2), (0.2, 0.5, 0.3), (1, 1), (0, 0.846154, 0, 0.153846)),
    Example("B3", (1, 0, 2), (0.3, 0.1, 0.5), (0,), (0.666667, 0, 0.333333, 0)),
    Example("B4", (0, 1, 2), (0.999, 0.999, 0.999), (0, 1, 2, 2), 3),
    Example("B5", (2, 1, 3), (0.9, 0.9, 0.5), (2, 1, 0), _SEVENTHS),
    Example("B6", (3, 0, 2), (0.99, 0.99, 0.15), (3, 0, 2, 2), 3),
    Example("B7", (1, 1, -1), (0.10, 0.55, 0.01), (1, 1, 0), 2),
    Example("B8", (1, 1, -1), (0.95, 0.65, 0.01), (1, 1, 0), 2),
)
# the same drafts and uniforms under the token-by-token rule
_BLOCK_AS_STANDARD = (
    Example("B1", (1, 0, 2), (0.2, 0.5, 0.2), (1, 1)),
    Example("B2", (1, 0, 2), (0.2, 0.5, 0.3), (1, 1)),
    Example("B3", (1, 0, 2), (0.3, 0.1, 0.5), (1, 0, 2, 2)),
    Example("B4", (0, 1, 2), (0.999, 0.999, 0.999), (0, 1, 2, 2)),
    Example("B5", (2, 1, 3), (0.9, 0.9, 0.5), (2, 1, 0)),
    Example("B6", (3, 0, 2), (0.99, 0.99, 0.15), (0,)),
    Example("B7", (1, 1, -1), (0.10, 0.55, 0.01), (1, 1, 0)),
    Example("B8", (1, 1, -1), (0.95, 0.65, 0.01), (0,)),
)
_BLOCK_POINT = (
    Example("C1", (0, 1, 2), (0.25, 0.20, 0.09), (0, 1, 2, 2), 3),
    Example("C2", (0, 1, 2), (0.20, 0.20, 0.50), (0, 3), (0.25, 0, 0.25, 0.5)),
    Example("C3", (0, 1, 2), (0.25, 0.20, 0.50), (3,), (0, 0.5, 0.333333, 0.166667)),
)
_FORCED = {
    "Y1": ((3, 3, 3), (0.89, 0.79, 0.49)),
    "Y2": ((3, 3, 3), (0.89, 0.81, 0.10)),
    "Y3": ((1, 0, 1), (0.50, 0.50, 0.70)),
    "Y4": ((3, -1, 0), (0.5, 0.0001, 0.1)),
}


def _forced(*outcomes: tuple) -> tuple[Example, ...]:
    pairs = zip(_FORCED.items(), outcomes, strict=True)
    return tuple(Example(name, *given, *outcome) for (name, given), outcome in pairs)


_FORCED_GREEDY = _forced(((3, 3, 3, 3),), ((3, 1),), ((1, 0, 2),), ((3, 1),))
_FORCED_FULL = _forced(
    ((3, 3, 3, 2), 3), ((3, 1), (0, 0.777778, 0, 0.222222)), ((1, 0, 0), _SEVENTHS), ((3, 1), 1)
)
_FORCED_POINT = _forced(
    ((3, 3, 3, 2), 3), ((3, 1), (0.125, 0.75, 0.125, 0)),
    ((1, 0, 0), (0.333333, 0, 0.533333, 0.133333)), ((3, 1), 1),
)  # fmt: skip
_RACE_UNIFORMS = ((0.55, 0.15, 0.99), (0.55, 0.25, 0.99), (0.65, 0.01, 0.01))
_RACE_FULL = tuple(
    Example(f"race {i}", (1, 0, 2), u, tokens)
    for i, (u, tokens) in enumerate(zip(_RACE_UNIFORMS, ((1, 0, 2, 3), (1, 1), (0,)), strict=True))
)  # the bonus row's winner is token 3: 0.5 / 0.4 is the largest share over its clock
_RACE_POINT = tuple(Example(f"race {i}", (1, 0, 2), u, (0,)) for i, u in enumerate(_RACE_UNIFORMS))

GROUPS: tuple[Group, ...] = (
    Group("greedy, standard", "standard", False, 0.0, _GREEDY, GREEDY_LOGITS),
    Group("greedy, block", "block", True, 0.0, _GREEDY, GREEDY_LOGITS),
    Group("standard", "standard", True, 1.0, _STANDARD),
    Group("standard, one-hot", "standard", False, 1.0, _STANDARD_POINT),
    Group("block", "block", True, 1.0, _BLOCK),
    Group("block's uniforms, standard", "standard", True, 1.0, _BLOCK_AS_STANDARD),
    Group("block, one-hot", "block", False, 1.0, _BLOCK_POINT),
    Group("synthetic, greedy", "synthetic", False, 0.0, _FORCED_GREEDY),
    Group("synthetic", "synthetic", True, 1.0, _FORCED_FULL),
    Group("synthetic, one-hot", "synthetic", False, 1.0, _FORCED_POINT),
    Group("exponential race", "standard", True, 1.0, _RACE_FULL, np.log(T), RACE),
    Group("exponential race, one-hot", "standard", False, 1.0, _RACE_POINT, np.log(T), RACE),
)

# block: drafts, whether full, carried products c_1.., thresholds h_0..
BLOCK_NUMBERS: tuple[tuple[str, tuple[int, ...], bool, tuple, tuple], ...] = (
    ("B1", (1, 0, 2), True, (0.6, 0.12, 0.24), (0.245283, 0, 0.24)),
    ("B4", (0, 1, 2), True, (1, 1, 1), (1, 1, 1)),
    ("B5", (2, 1, 3), True, (1, 1, 0.25), (1, 1, 0.25)),
    ("B6", (3, 0, 2), True, (0.5, 0.1, 0.2), (0.090909, 0, 0.2)),
    ("B7", (1, 1, -1), True, (0.6, 1), (0.245283, 1)),
    ("C", (0, 1, 2), False, (0.4, 0.24, 0.096), (0.210526, 0.159292, 0.096)),
)

# length or None, given rates or None, K, unconditional, conditional
SCHEDULES: tuple[tuple[float | None, tuple[float, ...] | None, int, tuple, tuple], ...] = (
    (1.0, None, 3, (0, 0, 0), (0, 0, 0)),
    (1.25, None, 3, (0.25, 0, 0), (0.25, 0, 0)),
    (2.0, None, 3, (1, 0, 0), (1, 0, 0)),
    (3.5, None, 7, (1, 1, 0.5, 0, 0, 0, 0), (1, 1, 0.5, 0, 0, 0, 0)),
    (5.3, None, 7, (1, 1, 1, 1, 0.3, 0, 0), (1, 1, 1, 1, 0.3, 0, 0)),
    (3.999, None, 3, (1, 1, 0.999), (1, 1, 0.999)),
    (4.0, None, 3, (1, 1, 1), (1, 1, 1)),
    (8.0, None, 7, (1,) * 7, (1,) * 7),
    (6.0, None, 7, (1, 1, 1, 1, 1, 0, 0), (1, 1, 1, 1, 1, 0, 0)),
    (None, (0.9, 0.72, 0.36, 0.0), 4, (0.9, 0.72, 0.36, 0), (0.9, 0.8, 0.5, 0)),
)

# P(accepted = 0..K) of the tables T and D by rule
LENGTHS: dict[str, tuple[tuple[float, ...], ...]] = {
    "standard": ((0.3, 0.7), (0.3, 0.315, 0.385), (0.3, 0.315, 0.13475, 0.25025)),
    "block": ((0.3, 0.7), (0.3, 0.21, 0.49), (0.3, 0.21, 0.1285, 0.3615)),
}

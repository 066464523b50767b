"""What a router's near-tie excuses, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from parity.engine_rules import Wanted, explained
from parity.engine_ties import near_ties, row_noise
from parity.engine_truth import Noise, Truth
from parity.verdict import Where

WHERE = Where("vllm", "made up", "-", dtype="bfloat16")
NOISE = Noise(0.2, np.array([0.01, 0.01]))  # margins up to 0.85, gaps up to 0.02
THEIRS, OURS, FAR, V = 1, 2, 3, 6


def row(**levels):
    """Logits [V] of one row; 0 where nothing is said."""
    names = {"theirs": THEIRS, "ours": OURS, "far": FAR}
    found = np.zeros(V)
    for name, level in levels.items():
        found[names[name]] = level
    return found


def truth(exact, other, gap=0.005, bf16=None):
    """One row, two layers, a near-tie in the second one between experts 4 and 9."""
    gaps = np.array([[0.5, gap]])
    edges = np.array([[[1, 2], [4, 9]]])
    rounded = exact if bf16 is None else bf16
    asked = []

    def choice(at, place):
        asked.append((at, place))
        return other

    found = Truth(
        exact[None], gaps, None, edges, [3, 7], rounded[None], None, None, [], choice
    )  # fmt: skip
    return found, asked


def verdict(logits, *given, **more):
    made, asked = truth(*given, **more)
    wanted = Wanted(0, np.array([THEIRS]))
    return explained(WHERE, wanted, logits[None], made, NOISE), asked


def test_a_token_that_the_exchanged_expert_gives_is_explained_and_the_tie_is_named():
    exact, other = row(theirs=4, ours=10), row(theirs=9, ours=5)
    found, asked = verdict(exact, exact, other)
    assert found.passed and asked == [(0, (1,))]
    assert "near-tie in layer 7 (experts 4 and 9, gap 5.0e-03, 0.50 of its noise" in found.note
    assert "layer 7 decided otherwise: the recorded token 0 below the best, ours 4" in found.note


def test_without_a_near_tie_nothing_is_exchanged():
    exact, other = row(theirs=4, ours=10), row(theirs=9, ours=5)
    found, asked = verdict(exact, exact, other, gap=0.03)
    assert not found.passed and asked == [] and "UNEXPLAINED" in found.note


def test_a_tie_that_does_not_bring_the_recorded_token_near_explains_nothing():
    exact, other = row(theirs=4, ours=10), row(theirs=6, ours=10)
    found, asked = verdict(exact, exact, other)
    assert asked and not found.passed and found.metrics["unexplained"] == 1
    assert "near-tie in layer 7" in found.note and "UNEXPLAINED" in found.note


def test_a_wrong_token_of_ours_is_not_excused_by_a_near_tie():
    exact, other = row(theirs=10, ours=5), row(theirs=5, ours=9)
    ours = row(theirs=10, far=17)  # far is near in no decision, whatever the tie does
    found, _ = verdict(ours, exact, other)
    assert not found.passed and found.metrics["deficits"] == [7.0]
    assert verdict(row(theirs=5, ours=9), exact, other)[0].passed  # what the other expert gives


def test_a_deficit_beyond_what_the_exchange_moves_is_not_excused():
    exact, other = row(theirs=10, ours=9.5), row(theirs=9, ours=10)
    small, large = row(theirs=8, ours=10), row(theirs=8, ours=11)  # 2, 3; moved 1.5, margin 0.85
    assert verdict(small, exact, other)[0].passed
    assert not verdict(large, exact, other)[0].passed


def test_a_row_that_bf16_moves_far_has_that_for_its_unit():
    exact = row(theirs=8, ours=10)
    moved = exact + np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    found, asked = verdict(exact, exact, exact, bf16=moved)
    assert found.passed and asked and "but bf16 moves this row by 1 " in found.note
    assert not verdict(exact, exact, exact, bf16=exact + 0.3 * (moved - exact))[0].passed
    far = row(ours=10, theirs=8, far=11)  # near to the recorded token for us, not in truth
    assert not verdict(far, exact, exact, bf16=moved)[0].passed


def test_two_ties_may_be_decided_otherwise_together():
    exact, alone, both = row(theirs=10, ours=5), row(theirs=10, ours=4), row(theirs=5, ours=9)
    made, asked = truth(exact, alone)

    def choice(at, places):
        asked.append(places)
        return both if len(places) == 2 else alone

    made = made._replace(gaps=np.array([[0.008, 0.005]]), other_choice=choice)
    wanted = Wanted(0, np.array([THEIRS]))
    found = explained(WHERE, wanted, both[None], made, NOISE)
    assert found.passed and asked == [(1,), (0,), (1, 0)]  # the nearest first
    assert "layer 7 and 3 decided otherwise: the recorded token 4 below the best" in found.note


def test_the_unit_of_a_row_ignores_what_moves_all_of_it():
    made, _ = truth(row(ours=1), row(), bf16=row(ours=1) + 3)
    assert row_noise(made, 0) == 0


def test_a_deficit_that_is_no_number_is_never_explained():
    made, _ = truth(row(ours=1), row(ours=1), bf16=row(ours=9))
    for deficit in (float("nan"), float("inf")):
        assert not near_ties(made, NOISE, 0, THEIRS, OURS, deficit).enough

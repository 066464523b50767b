from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parity import metrics
from parity.tolerances import EXACT, TOLERANCES, Tolerance, tolerance
from parity.verdict import Where, compare, judge

FINITE = st.floats(-1e6, 1e6, width=32)
WHERE = Where("ops", "folder", "case")
MATRIX = hnp.arrays(np.float64, (4, 5), elements=FINITE)


@given(MATRIX)
def test_an_array_has_no_distance_to_itself(x):
    found = metrics.distance(x, x)
    assert found["exact"] and found["max_abs"] == found["rel_l2"] == found["cos_diff"] == 0.0


@given(MATRIX, st.integers(0, 3), st.integers(0, 4))
def test_worst_index_is_where_the_error_was_put(x, row, column):
    y = x.copy()
    y[row, column] += 1e7
    found = metrics.distance(y, x)
    assert found["worst"] == [row, column]
    assert found["max_abs"] == pytest.approx(1e7)
    assert not found["exact"]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_pattern_of_non_finite_numbers_must_be_equal(odd):
    x = np.zeros((2, 3))
    y = x.copy()
    y[1, 2] = odd
    assert metrics.distance(y, y)["exact"]
    assert not metrics.distance(y, x)["pattern_equal"]
    verdict = compare(WHERE, "q", y, x, "op")
    assert verdict.status == "failed" and "NaN" in verdict.note


def test_infinities_of_other_sign_differ():
    assert not metrics.pattern_equal(np.array([np.inf]), np.array([-np.inf]))


def test_one_bad_row_of_many_shows():
    want = np.ones((1000, 8))
    got = want.copy()
    got[777] += 0.01
    found = metrics.distance(got, want)
    assert found["worst"][0] == 777 and found["max_abs"] == pytest.approx(0.01)


def test_kl_is_that_of_the_definition_and_zero_under_a_shift():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 7))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    assert metrics.kl_rows(a, b) == pytest.approx((p * np.log(p / q)).sum(-1))
    assert metrics.kl_rows(a, a + 3.0) == pytest.approx(np.zeros(3), abs=1e-12)


def test_kl_direction_is_reference_against_ours():
    sharp, flat = np.array([[5.0, 0.0, 0.0]]), np.zeros((1, 3))
    found = metrics.logit_distance(got=flat, want=sharp)
    assert found["kl_max"] == pytest.approx(metrics.kl_rows(sharp, flat)[0])
    assert found["kl_max"] != pytest.approx(metrics.kl_rows(flat, sharp)[0])


def test_flips_come_with_the_margin_of_the_reference():
    want = np.array([[3.0, 1.0, 0.0], [1.0, 0.75, 0.0]])
    got = np.array([[3.0, 1.0, 0.0], [0.5, 0.75, 0.0]])
    found = metrics.logit_distance(got, want)
    assert found["top1"] == 0.5
    assert found["flip_row"] == 1 and found["flip_margin"] == pytest.approx(0.25)


def test_top_k_overlap_counts_shared_ids():
    want = np.array([[4.0, 3.0, 2.0, 1.0, 0.0]])
    assert metrics.top_k_overlap(want[:, ::-1], want, k=2) == 0.0
    assert metrics.top_k_overlap(want, want, k=2) == 1.0


def test_first_divergence():
    found = metrics.first_divergence(np.array([1, 2, 9]), np.array([1, 2, 3]), np.array([5, 6, 7]))
    assert found == {"equal_prefix": 2, "length": 3, "got_id": 9, "want_id": 3, "margin": 7.0}
    assert metrics.first_divergence(np.arange(3), np.arange(3))["equal_prefix"] == 3


def test_expert_sets_are_compared_without_order():
    want, gap = np.array([[0, 1], [2, 3]]), np.array([0.5, 1e-9])
    assert metrics.set_flips(want[:, ::-1], want, gap)["flipped"] == 0
    found = metrics.set_flips(np.array([[0, 1], [2, 4]]), want, gap)
    assert found["flipped"] == 1 and found["flip_gap_max"] == 1e-9 and found["flip_rows"] == [1]


def test_another_shape_is_a_failed_verdict_that_names_both():
    verdict = compare(WHERE, "q", np.zeros(3), np.zeros(4), "op")
    assert verdict.status == "failed" and "(3,)" in verdict.note and "(4,)" in verdict.note


@pytest.mark.parametrize("value", [np.nan, None])
def test_a_metric_that_is_no_number_never_passes(value):
    assert judge(WHERE, "q", {"rms": value}, Tolerance("rms", 1.0, "")).status == "failed"


def test_a_missing_tolerance_is_never_guessed():
    with pytest.raises(KeyError, match="no tolerance"):
        tolerance("nonsense", "float32")


def test_every_tolerance_has_a_reason_and_a_limit():
    for (name, dtype), entry in TOLERANCES.items():
        assert entry.reason, (name, dtype)
        assert entry.limit > 0 or entry.metric == EXACT, (name, dtype)

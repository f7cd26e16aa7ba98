"""Judging results: what one score hides, rows, factors, NaN, undefined rows."""

import numpy as np
import pytest

from fp8 import calc_diff, judge


def rows(count=100, width=16):
    return np.random.default_rng(0).choice([-1.0, 1.0], (count, width))  # rows of equal norm


@pytest.mark.parametrize(("fraction", "score"), [(1, 0.00503), (5, 0.02564), (18, 0.0989)])
def test_score_of_zeroed_rows_by_hand(fraction, score):
    # ROCm/aiter#5032: f / (2 - f); 18 % destroyed rows pass a limit of 0.1
    reference, actual = rows(), rows()
    actual[:fraction] = 0
    verdict = judge(reference, actual)
    assert verdict.score == pytest.approx(score, abs=6e-6)
    assert (verdict.bad_rows, verdict.num_rows, verdict.worst_row_score) == (fraction, 100, 1.0)
    assert not verdict.holds


@pytest.mark.parametrize(("factor", "score"), [(1.1, 0.00452), (2.5, 0.310)])
def test_common_factor_is_named(factor, score):
    verdict = judge(rows(), rows() * factor)
    assert verdict.score == pytest.approx(score, abs=5e-4)
    assert verdict.factor == pytest.approx(factor)
    assert verdict.hint == f"scaled by {factor:.3g}"


def test_factor_of_two_hints_at_fnuz():
    # sgl-project/sglang#2667
    actual = rows() * 0.5
    actual[3, 2] = np.nan
    assert "E4M3FN bytes read as E4M3FNUZ" in judge(rows(), actual).hint


def test_equal_results_hold_and_nan_equals_nan():
    x = rows()
    x[0, 0] = np.nan
    assert judge(x, x).holds
    assert judge(x, x).hint == ""
    y = x.copy()
    y[5, 5] = np.nan
    verdict = judge(x, y)
    assert (verdict.holds, verdict.bad_rows) == (False, 1)
    assert verdict.hint == "same up to 1 NaN"


def test_rows_of_zeros_are_equal_to_themselves_and_to_nothing_else():
    x, y = rows(), rows()
    x[4] = y[4] = 0
    assert judge(x, y).worst_row_score == 0
    assert judge(x, y).holds
    y[4, 1] = 1e-30
    assert (judge(x, y).bad_rows, judge(x, y).worst_row) == (1, 4)


def test_bound_counts_elements():
    reference, actual = rows(), rows()
    actual[7, 3] += 0.5
    bound = np.full(reference.shape, 0.1)
    verdict = judge(reference, actual, bound)
    assert (verdict.beyond_bound, verdict.bad_rows, verdict.worst_ratio, verdict.worst_row) == (1, 1, 5.0, 7)
    assert judge(reference, actual, bound * 6).holds
    assert judge(reference, reference, bound * 0).holds
    assert judge(reference, actual, bound * 0).worst_ratio == np.inf


def test_infinity_is_no_match_for_a_number():
    x, y = rows(), rows()
    y[2, 2] = np.inf
    assert judge(x, y, np.full(x.shape, 1e9)).bad_rows == 1
    assert judge(y, y).holds


def test_undefined_rows_are_left_out():
    reference, actual = rows().reshape(2, 50, 16), rows().reshape(2, 50, 16)
    actual[1, 7] = np.nan
    defined = np.ones((2, 50), bool)
    assert not judge(reference, actual).holds
    defined[1, 7] = False
    assert judge(reference, actual, defined=defined).holds
    assert judge(reference, actual, defined=defined & False).hint == "no row is defined"


def test_calc_diff_by_hand():
    assert calc_diff([1, 0], [1, 0]) == 0
    assert calc_diff([1, 0], [0, 1]) == 1
    assert calc_diff([0, 0], [0, 0]) == 0
    assert calc_diff([1, 1], [2, 2]) == pytest.approx(0.2)


def test_errors():
    with pytest.raises(ValueError, match="must have one shape"):
        judge(rows(), rows(50))
    with pytest.raises(ValueError, match="bound"):
        judge(rows(), rows(), np.ones(3))
    with pytest.raises(ValueError, match="defined"):
        judge(rows(), rows(), defined=np.ones(3, bool))

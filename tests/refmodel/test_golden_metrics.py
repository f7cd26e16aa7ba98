import ml_dtypes
import numpy as np
import pytest
from golden_oracle import measure_slowly
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.golden.metrics import measure
from refmodel.golden.tolerance import Tolerance

NARROW = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def test_hand_computed_values():
    r = np.float32([[1, 2], [0, -4]])
    a = np.float32([[1, 2.5], [0.25, -4]])
    d = measure(r, a, Tolerance(atol=0.3))
    assert (d.total, d.differing, d.violations) == (4, 2, 1)
    assert (d.first_differing, d.first_violation) == ((0, 1), (0, 1))
    assert d.worst_abs == (0.5, (0, 1), 2.0, 2.5)
    assert d.worst_rel == (0.25, (0, 1), 2.0, 2.5)  # of zero the absolute error counts, and the first one stays
    assert d.worst_ulp == (0x3E800000, (1, 0), 0.0, 0.25)
    assert d.worst_row.index == (0,)
    assert d.worst_row.error == pytest.approx(0.5 / 5**0.5)
    assert (d.rows, d.differing_rows, d.bad_rows) == (2, 2, 1)
    assert d.difference == pytest.approx((0.25 + 0.0625) / (21 + 1 + 6.25 + 0.0625 + 16))
    assert d.scale == pytest.approx((1 + 5 + 16) / 21)
    assert d.rms_reference == pytest.approx((21 / 4) ** 0.5)


@st.composite
def pairs(draw):
    dtype = draw(st.sampled_from(NARROW))
    shape = draw(st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4), (0, 4), ()]))
    specials = [0.0, -0.0, 1.0, -2.0, 0.5, 3.0, 448.0, float("nan"), float("inf"), -float("inf")]
    size = int(np.prod(shape))
    values = st.lists(st.sampled_from(specials), min_size=size, max_size=size)
    r = np.array(draw(values), np.float64).astype(dtype).reshape(shape)
    a = np.array(draw(values), np.float64).astype(dtype).reshape(shape)
    keep = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape)
    return r, np.where(keep, r, a)


@given(pairs(), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 1.0]), st.sampled_from([2, 3, 1 << 17]))
@settings(max_examples=150, deadline=None)
def test_fast_equals_slow_whatever_the_block_size(pair, rtol, atol, block):
    r, a = pair
    slow = measure_slowly(r, a, rtol, atol)
    rule = Tolerance(rtol=rtol, atol=atol)
    fast = measure(r, a, rule, elements=block)
    assert fast == measure(r, a, rule, threads=2, elements=block)
    if fast.total == 0:
        return
    for key in ("differing", "violations", "nan_both", "unequal_nonfinite", "first_differing", "first_violation"):
        assert getattr(fast, key) == slow[key], key
    assert (fast.worst_abs.error if fast.worst_abs else 0.0) == slow["worst_abs"]
    assert (fast.worst_rel.error if fast.worst_rel else 0.0) == slow["worst_rel"]
    for key in ("difference", "scale"):
        assert getattr(fast, key) == (slow[key] if slow[key] is None else pytest.approx(slow[key])), key


@pytest.mark.parametrize("elements", [3, 7, 10, 64])
def test_rows_are_counted_alike_in_pieces_and_whole(elements):
    rng = np.random.default_rng(1)
    r = rng.standard_normal((6, 10)).astype(np.float32)
    a = r.copy()
    a[1, [0, 9]] += 1
    a[4] *= 1.5
    rule = Tolerance(rms=0.1)
    pieces, whole = measure(r, a, rule, elements=elements), measure(r, a, rule)
    assert (pieces.differing_rows, pieces.bad_rows) == (whole.differing_rows, whole.bad_rows) == (2, 2)
    assert pieces.worst_row.index == whole.worst_row.index
    assert pieces.worst_row.error == pytest.approx(whole.worst_row.error)
    assert (pieces.violations, pieces.first_violation) == (whole.violations, whole.first_violation)


# ROCm/aiter#5032: a score over the whole tensor hides destroyed rows
@pytest.mark.parametrize(("part", "score"), [(0.01, 0.00503), (0.05, 0.02564), (0.18, 0.0989)])
def test_zeroed_rows_of_equal_norm_score_little_but_are_counted(part, score):
    r = np.tile(np.float32([3, 4, 0, 0]), (1000, 1))
    a = r.copy()
    a[: int(1000 * part)] = 0
    d = measure(r, a, Tolerance(rtol=0.1, rms=0.1))
    assert d.difference == pytest.approx(part / (2 - part))
    assert d.difference == pytest.approx(score, abs=6e-5)
    assert (d.bad_rows, d.rows) == (int(1000 * part), 1000)
    assert d.worst_row == (1.0, (0,), None, None)


@pytest.mark.parametrize(("factor", "score"), [(1.1, 0.00452), (2.5, 0.310)])
def test_a_uniform_factor_has_cosine_one_and_is_fitted(factor, score):
    r = np.random.default_rng(0).standard_normal((20, 30))
    d = measure(r, r * factor)
    assert d.cosine == pytest.approx(1)
    assert d.scale == pytest.approx(factor)
    assert d.scale_residual == pytest.approx(0, abs=1e-7)
    assert d.difference == pytest.approx(score, abs=6e-4)


# NVIDIA/TensorRT#2895, #4507: statistics of zeros, NaN and nothing
def test_zero_reference_nan_and_empty():
    d = measure(np.zeros((2, 3)), np.ones((2, 3)), Tolerance(rtol=1e-3))
    assert d.worst_rel.error == 1.0
    assert (d.scale, d.cosine, d.norm_ratio) == (None, None, None)
    assert d.violations == 6
    both = np.float32([np.nan, 1])
    d = measure(both, both.copy())
    assert (d.nan_both, d.violations, d.identical) == (1, 0, True)
    d = measure(np.float32([1, 2]), np.float32([1, np.nan]), Tolerance(rtol=10))
    assert (d.violations, d.unequal_nonfinite, d.first_violation, d.nan_actual) == (1, 1, (1,), 1)
    d = measure(np.zeros((0, 7)), np.zeros((0, 7)))
    assert (d.total, d.identical) == (0, True)
    d = measure(np.float32([np.inf, -np.inf]), np.float32([np.inf, np.inf]))
    assert (d.differing, d.violations, d.first_violation) == (1, 1, (1,))


def test_nothing_is_computed_in_the_narrow_type():
    fp8 = ml_dtypes.float8_e4m3fn
    d = measure(np.array([448], fp8), np.array([-448], fp8))
    assert d.worst_abs == (896.0, (0,), 448.0, -448.0)
    ones = np.ones((1, 4096), ml_dtypes.bfloat16)
    assert measure(ones, ones).rms_reference == 1.0


def test_integers_are_exact_beyond_float64():
    big = np.int64([2**62])
    d = measure(big, big + 1)
    assert (d.differing, d.violations) == (1, 1)
    assert measure(np.array([True, False]), np.array([True, True])).differing == 1
    assert measure(np.uint64([2**64 - 1]), np.uint64([2**64 - 1])).identical


# deepseek-ai/DeepGEMM#38: rows that nobody wrote are not compared
def test_rows_that_are_not_valid_are_read_on_neither_side():
    r = np.ones((3, 4, 2), np.float32)
    a = r.copy()
    valid = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    a[~valid] = np.nan
    d = measure(r, a, valid=valid)
    assert (d.total, d.violations, d.nan_actual, d.rows) == (12, 0, 0, 6)
    a[0, 1, 1] = 7
    assert measure(r, a, valid=valid).first_violation == (0, 1, 1)
    d = measure(np.arange(4.0), np.array([0, 9, 2, 9.0]), valid=np.array([True, True, True, False]))
    assert (d.violations, d.worst_row.index) == (1, (1,))
    with pytest.raises(ValueError, match="leading axes"):
        measure(r, a, valid=np.ones(4, bool))


def test_ulps_and_root_mean_square_as_rules():
    r = np.float32([1.0, 1e-9, 2.0])
    a = r.copy()
    a[1] += np.float32(1e-6)
    assert measure(r, a, Tolerance(rtol=1e-5)).violations == 1
    assert measure(r, a, Tolerance(rtol=1e-5, rms=1e-5)).violations == 0
    b = np.nextafter(r, np.float32(9))
    assert measure(r, b, Tolerance(ulps=1)).violations == 0
    assert measure(r, np.nextafter(b, np.float32(9)), Tolerance(ulps=1)).violations == 3


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="differ"):
        measure(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="cannot be compared"):
        measure(np.array(["a"]), np.array(["a"]))
    with pytest.raises(ValueError, match="cannot be compared"):
        measure(np.zeros(1, complex), np.zeros(1, complex))

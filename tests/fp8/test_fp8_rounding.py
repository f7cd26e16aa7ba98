"""One rounding: float64 to bfloat16, rounding to odd, and the fused multiply-add."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from fp8_oracle import bfloat16, float32
from hypothesis import given
from hypothesis import strategies as st

from fp8 import fma32, to_bfloat16
from fp8.rounding import add_to_odd

MAX_BFLOAT16 = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def test_by_hand():
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 - 2**-40, -(1 + 2**-8 + 2**-40)])
    assert to_bfloat16(x).astype(np.float64).tolist() == [1.0078125, 1.0, 1.015625, 1.0, -1.0078125]
    assert float(x[0].astype(ml_dtypes.bfloat16)) == 1.0  # what two roundings give


def test_subnormals_overflow_and_specials():
    tie = 1.5 * 2.0**-133  # between the two smallest bfloat16
    x = [tie, tie * (1 - 2**-50), tie * (1 + 2**-50), 2.0**-134, 2.0**-134 * (1 + 2**-52), 2.0**-300, -(2.0**-300)]
    got = to_bfloat16(np.array(x)).astype(np.float64)
    assert got.tolist() == [2 * 2.0**-133, 2.0**-133, 2 * 2.0**-133, 0.0, 2.0**-133, 0.0, -0.0]
    assert np.signbit(got[-1])
    halfway = MAX_BFLOAT16 * (1 + 2.0**-8 / (2 - 2.0**-7))
    x = [MAX_BFLOAT16, np.nextafter(halfway, 0), halfway, 1e300, -1e300, np.inf, -np.inf]
    assert to_bfloat16(np.array(x)).astype(np.float64).tolist() == [MAX_BFLOAT16] * 2 + [np.inf] * 2 + [
        -np.inf,
        np.inf,
        -np.inf,
    ]
    nan = to_bfloat16(np.array([np.nan, -np.nan]))
    assert np.isnan(nan.astype(np.float32)).all()


def test_bfloat16_values_and_ties_stay_right():
    with np.errstate(invalid="ignore"):
        wide = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(to_bfloat16(wide).astype(np.float64), wide)
    wide = wide[np.isfinite(wide) & (wide != 0)]
    for factor in (1 + 2.0**-9, 1 - 2.0**-50, 1 + 2.0**-50):
        for value, got in zip(wide[::97], to_bfloat16(wide[::97] * factor)):
            assert Fraction(float(got)) == bfloat16(Fraction(value * factor))


def test_neighbours_of_ties_among_narrow_values():
    """Inexact values whose float32 lies one step beside a tie, among so many narrow ones that all are looked at."""
    x = np.ones(64)
    x[5] = 1 + 2**-8 + 2**-23 - 2**-30  # above the tie: up
    x[9] = 1 + 2**-7 + 2**-8 - 2**-23 + 2**-30  # below the tie of an odd value: down
    assert to_bfloat16(x)[[5, 9]].astype(np.float64).tolist() == [1 + 2**-7, 1 + 2**-7]


@given(st.lists(st.floats(-3e38, 3e38), min_size=1, max_size=20))
def test_one_rounding_of_any_float64(values):
    for value, got in zip(values, to_bfloat16(np.array(values))):
        assert Fraction(float(got)) == bfloat16(Fraction(value))


@given(st.integers(-(2**60), 2**60), st.integers(-200, 60))
def test_beside_ties_and_float32_neighbours(mantissa, exponent):
    value = math.ldexp(float(mantissa >> 52 << 52 | mantissa & 7), exponent)  # few high bits, few low ones
    if abs(value) < 1e38:
        assert Fraction(float(to_bfloat16(np.array([value]))[0])) == bfloat16(Fraction(value))


def test_float32_bfloat16_shapes_and_errors():
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    np.testing.assert_array_equal(to_bfloat16(x), x.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(to_bfloat16(x.T), to_bfloat16(x).T)
    assert to_bfloat16(to_bfloat16(x)).dtype == ml_dtypes.bfloat16
    assert to_bfloat16(np.float64(1.5)).shape == ()
    assert to_bfloat16(np.zeros((0, 4))).shape == (0, 4)
    with pytest.raises(ValueError, match="int64"):
        to_bfloat16(np.arange(3))


def test_large_arrays_are_rounded_throughout():
    x = np.random.default_rng(0).standard_normal(100_003)
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)  # two roundings: right save beside ties
    assert np.count_nonzero(to_bfloat16(x) != expected) <= 5
    x[70_000] = 1 + 2**-8 + 2**-40
    assert float(to_bfloat16(x)[70_000]) == 1.0078125


def test_fma_by_hand():
    x = np.float32(1 + 2**-12)
    assert fma32(x, x, np.float32(2.0**-60)) == np.float32(float.fromhex("0x1.002002p0"))
    assert np.float32(np.float64(x) * np.float64(x) + 2.0**-60) == np.float32(float.fromhex("0x1.002p0"))  # naive
    assert np.isnan(fma32(np.float32(np.inf), np.float32(0), np.float32(1)))
    assert fma32(np.float32(np.inf), np.float32(1), np.float32(1)) == np.inf


FLOAT32 = st.floats(-(2.0**50), 2.0**50, width=32)


@given(FLOAT32, FLOAT32, FLOAT32)
def test_fma_rounds_once(x, y, z):
    got = fma32(np.float32(x), np.float32(y), np.float32(z))
    assert Fraction(float(got)) == float32(Fraction(x) * Fraction(y) + Fraction(z))


@given(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1), st.integers(-90, -20), st.sampled_from([-1, 1]))
def test_fma_beside_ties(x, y, exponent, sign):
    z = np.float32(sign * 2.0**exponent)
    x, y = np.float32(x * 2.0**-12), np.float32(y * 2.0**-12)
    got = fma32(x, y, z)
    assert Fraction(float(got)) == float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_sum_to_odd(x, y):
    got = float(add_to_odd(np.array(x), np.array(y)))
    exact = Fraction(x) + Fraction(y)
    if Fraction(got) != exact:
        assert np.array(got).view(np.int64) & 1  # inexact: odd, and a neighbour of the exact sum
        low, high = sorted(
            [Fraction(got), Fraction(float(np.nextafter(got, np.inf if exact > Fraction(got) else -np.inf)))]
        )
        assert low < exact < high

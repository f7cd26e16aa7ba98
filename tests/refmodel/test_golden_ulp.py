import ml_dtypes
import numpy as np
import pytest
from golden_oracle import all_values, sorted_numbers
from hypothesis import given
from hypothesis import strategies as st

from refmodel.golden.ulp import has_ulp, ulp_distance, ulp_keys, widen

FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", FP8)
def test_distance_is_the_number_of_values_between_for_every_pair_of_fp8_codes(dtype):
    place = {value: i for i, value in enumerate(sorted_numbers(dtype))}
    codes = all_values(dtype)
    codes = codes[~np.isnan(widen(codes))]
    a, b = np.meshgrid(codes.view(np.uint8), codes.view(np.uint8))
    expected = [
        abs(place[float(x)] - place[float(y)])
        for x, y in zip(a.ravel().view(dtype).astype(np.float64), b.ravel().view(dtype).astype(np.float64))
    ]
    assert ulp_distance(a.ravel().view(dtype), b.ravel().view(dtype)).tolist() == expected


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_keys_number_every_16_bit_value_in_order(dtype):
    codes = all_values(dtype)
    wide = widen(codes)
    numbers = ~np.isnan(wide)
    order = np.argsort(wide[numbers], kind="stable")
    keys, values = ulp_keys(codes)[numbers][order].astype(int), wide[numbers][order]
    assert (np.diff(keys) == np.where(np.diff(values) == 0, 0, 1)).all()


def test_hand_counted_distances():
    one, next_up = np.float32([1.0]), np.nextafter(np.float32([1.0]), np.float32(2))
    assert ulp_distance(one, next_up).tolist() == [1]
    assert ulp_distance(np.float32([0.0]), np.float32([-0.0])).tolist() == [0]
    tiny = np.float32([2.0**-149])
    assert ulp_distance(tiny, -tiny).tolist() == [2]
    assert ulp_distance(np.float32([1.0]), np.float32([2.0])).tolist() == [2**23]
    assert ulp_distance(np.float64([1.0]), np.float64([2.0])).tolist() == [2**52]
    assert ulp_distance(np.float64([-np.inf]), np.float64([np.inf])).tolist() == [2 * 0x7FF0000000000000]
    assert ulp_distance(np.array([1], ml_dtypes.bfloat16), np.array([1.0078125], ml_dtypes.bfloat16)).tolist() == [1]


@given(st.floats(-1e300, 1e300), st.integers(0, 40))
def test_float64_distance_counts_steps(x, steps):
    y = x
    for _ in range(steps):
        y = float(np.nextafter(y, np.inf))
    assert ulp_distance(np.float64([x]), np.float64([y])).tolist() == [steps]


def test_e8m0_codes_are_their_own_numbers():
    e8m0 = pytest.importorskip("ml_dtypes").float8_e8m0fnu
    values = np.array([120, 127, 130], np.uint8).view(e8m0)
    assert ulp_distance(values, values[::-1].copy()).tolist() == [10, 0, 10]


def test_what_has_no_ulp_is_refused():
    assert not has_ulp(np.int32)
    with pytest.raises(ValueError, match="int32 has no ULP"):
        ulp_keys(np.int32([1]))
    with pytest.raises(ValueError, match="float32 and float64 differ"):
        ulp_distance(np.float32([1]), np.float64([1]))


@pytest.mark.parametrize("dtype", [*FP8, ml_dtypes.bfloat16, np.float16])
def test_widen_is_exact(dtype):
    codes = all_values(dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(widen(codes), codes.astype(np.float64))

"""Formats, encoder and decoder against ml_dtypes, against fractions, and against values worked out by hand."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from fp8_oracle import FIELDS, nearest_code, value_of
from hypothesis import given
from hypothesis import strategies as st

from fp8 import E4M3, E4M3FNUZ, E5M2, E8M0, decode, encode
from fp8.formats import FORMATS, Format, format_of

FLOATS = [E4M3, E4M3FNUZ, E5M2]
ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def codes_of(x, fmt, overflow="saturate"):
    return encode(x, fmt, overflow).view(np.uint8)


def by_ml_dtypes(x, fmt, overflow):
    """ml_dtypes never saturates; clipping before gives the saturating cast."""
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float32)
        if overflow == "saturate":
            x = np.clip(x, np.float32(-fmt.max), np.float32(fmt.max))
        return x.astype(fmt.dtype).view(np.uint8)


def all_values(dtype):
    return np.arange(256, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_code_has_the_value_of_ml_dtypes(fmt):
    expected = all_values(fmt.dtype).astype(np.float64)
    for dtype in (np.float64, np.float32, ml_dtypes.bfloat16):
        got = decode(all_values(fmt.dtype), dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float64), expected)
        np.testing.assert_array_equal(
            np.signbit(got.astype(np.float64))[expected == 0], np.signbit(expected[expected == 0])
        )


@pytest.mark.parametrize("name", FIELDS)
def test_every_code_has_the_value_of_its_bit_fields(name):
    for code, value in enumerate(FORMATS[name].values()):
        expected = value_of(code, name)
        if isinstance(expected, Fraction):
            assert Fraction(float(value)) == expected
        else:
            np.testing.assert_equal(float(value), expected)


def test_format_limits_by_hand():
    assert (E4M3.max, E4M3FNUZ.max, E5M2.max, E8M0.max) == (448.0, 240.0, 57344.0, 2.0**127)
    assert (E4M3.smallest_step, E4M3FNUZ.smallest_step, E5M2.smallest_step) == (2.0**-9, 2.0**-10, 2.0**-16)


def test_e4m3_cast_by_hand():
    # jax-ml/ml_dtypes#260, #400; onnx/onnx#4805; local-inference-lab/b12x#388
    x = [448, 464, 464.0001, 465, 2**-9, 2**-10, 2**-10 * 1.0001, 3 * 2**-10, -(2**-11), 17, 19, np.inf, -np.inf]
    saturated = [0x7E, 0x7E, 0x7E, 0x7E, 0x01, 0x00, 0x01, 0x02, 0x80, 0x58, 0x5A, 0x7E, 0xFE]
    strict = [0x7E, 0x7E, 0x7F, 0x7F, 0x01, 0x00, 0x01, 0x02, 0x80, 0x58, 0x5A, 0x7F, 0xFF]
    for dtype in (np.float32, np.float64):
        assert codes_of(np.array(x, dtype), E4M3).tolist() == saturated
        assert codes_of(np.array(x, dtype), E4M3, "nan").tolist() == strict
    assert decode(np.array([0x01, 0x58, 0x5A], np.uint8).view(E4M3.dtype)).tolist() == [0.001953125, 16.0, 20.0]


def test_fn_and_fnuz_bytes_differ_by_hand():
    # sgl-project/sglang#2667
    raw = np.array([0x38, 0x80, 0x7F, 0x01], np.uint8)
    np.testing.assert_array_equal(decode(raw.view(E4M3.dtype)), [1.0, -0.0, np.nan, 2**-9])
    np.testing.assert_array_equal(decode(raw.view(E4M3FNUZ.dtype)), [0.5, np.nan, 240.0, 2**-10])


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
def test_encoder_equals_ml_dtypes_on_all_bfloat16(fmt, overflow, dtype):
    with np.errstate(invalid="ignore"):
        x = ALL_BFLOAT16.astype(dtype)
    np.testing.assert_array_equal(codes_of(x, fmt, overflow), by_ml_dtypes(x, fmt, overflow))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_value_encodes_to_its_code(fmt):
    raw = np.array([code for code in range(256) if np.isfinite(fmt.values()[code])], np.uint8)
    np.testing.assert_array_equal(encode(decode(raw.view(fmt.dtype)), fmt).view(np.uint8), raw)


def ties_and_neighbours(fmt) -> np.ndarray:
    """float32: each midpoint of neighbouring values, the values themselves, and three neighbours on both sides."""
    grid = np.unique(fmt.values()[np.isfinite(fmt.values())])
    beyond = fmt.max + (grid[-1] - grid[-2]) / 2  # the tie with what would follow the largest value
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [beyond, -beyond]]).astype(np.float32)
    bits = points.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    return bits.reshape(-1).view(np.float32)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.name)
def test_encoder_equals_ml_dtypes_on_ties_and_neighbours(fmt):
    x = ties_and_neighbours(fmt)
    for overflow in ("saturate", "nan"):
        np.testing.assert_array_equal(codes_of(x, fmt, overflow), by_ml_dtypes(x, fmt, overflow))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("count", [1 << 18, pytest.param(1 << 24, marks=pytest.mark.long)])
def test_encoder_equals_ml_dtypes_on_random_patterns(fmt, count):
    x = np.random.default_rng(1).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(codes_of(x, fmt), by_ml_dtypes(x, fmt, "saturate"))
    np.testing.assert_array_equal(codes_of(x, fmt, "nan"), by_ml_dtypes(x, fmt, "nan"))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20), st.sampled_from(FLOATS))
def test_float64_is_rounded_once(values, fmt):
    got = codes_of(np.array(values), fmt)
    for value, code in zip(values, got):
        expected = nearest_code(Fraction(value), fmt.name)
        if expected & 0x7F == 0:  # the sign of zero: kept by E4M3 and E5M2; FNUZ has one zero
            expected = 0x80 if np.signbit(value) and fmt != E4M3FNUZ else 0
        assert code == expected


@given(st.sampled_from(FLOATS), st.integers(0, 125), st.integers(-60, -30), st.sampled_from([-1, 0, 1]))
def test_float64_beside_a_tie_is_rounded_once(fmt, code, exponent, side):
    low, high = value_of(code, fmt.name), value_of(code + 1, fmt.name)
    if isinstance(low, float) or isinstance(high, float):
        return
    value = (low + high) / 2 * (1 + side * Fraction(2) ** exponent)
    wide = float(value)  # 53 bits hold it from 2^-48 on; below it is the tie itself
    assert codes_of(np.array([wide]), fmt)[0] == nearest_code(Fraction(wide), fmt.name)


def test_nan_and_infinity():
    x = np.array([np.nan, np.inf, -np.inf])
    assert codes_of(x, E5M2, "nan")[1:].tolist() == [0x7C, 0xFC]
    assert codes_of(x, E5M2)[1:].tolist() == [0x7B, 0xFB]
    assert codes_of(x, E4M3FNUZ).tolist() == [0x80, 0x7F, 0xFF]
    for fmt in FLOATS:
        assert np.isnan(decode(encode(x, fmt))[0])


def test_e8m0_takes_powers_of_two_only():
    x = np.array([2.0**-127, 0.5, 1.0, 2.0**127, np.nan])
    assert encode(x, E8M0).view(np.uint8).tolist() == [0, 126, 127, 254, 255]
    np.testing.assert_array_equal(decode(encode(x, E8M0)), x)
    for bad in (3.0, 0.0, -1.0, np.inf, 2.0**-128):
        with pytest.raises(ValueError, match="1 of 2 values are not powers of two"):
            encode(np.array([1.0, bad]), E8M0)


def test_shapes_strides_and_read_only_input():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    x.flags.writeable = False
    expected = x.astype(E4M3.dtype)
    for view in (x, x.transpose(2, 0, 1), x[:, ::2], x[0, 0, 0]):
        got = encode(view, E4M3)
        assert got.shape == view.shape
        np.testing.assert_array_equal(got.view(np.uint8), np.asarray(view.astype(E4M3.dtype)).view(np.uint8))
    np.testing.assert_array_equal(decode(expected.transpose(2, 0, 1)), expected.astype(np.float64).transpose(2, 0, 1))
    out = np.empty((2, 3, 4))
    assert decode(expected, out=out) is out
    np.testing.assert_array_equal(out, expected.astype(np.float64))
    many = np.arange(200_001, dtype=np.uint32).astype(np.uint8).view(E4M3.dtype)
    np.testing.assert_array_equal(decode(many), many.astype(np.float64))
    assert encode(np.zeros((0, 3)), E4M3).shape == (0, 3)
    assert decode(np.zeros((2, 0), E4M3.dtype), np.float32).shape == (2, 0)


def test_clear_errors():
    with pytest.raises(ValueError, match="float16"):
        encode(np.zeros(2, np.float16), E4M3)
    with pytest.raises(ValueError, match="overflow = 'wrap'"):
        encode(np.zeros(2), E4M3, overflow="wrap")
    with pytest.raises(ValueError, match="uint8 belong to no 8-bit format"):
        decode(np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="not int32"):
        decode(np.zeros(2, E4M3.dtype), np.int32)
    with pytest.raises(ValueError, match="8 bits"):
        Format("odd", np.dtype(np.uint8), 4, 4, 7, nan_codes=())
    with pytest.raises(ValueError, match="out float32"):
        decode(np.zeros(2, E4M3.dtype), np.float64, out=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        decode(np.zeros((2, 2), E4M3.dtype), np.float64, out=np.zeros((2, 2), order="F"))
    assert format_of(ml_dtypes.float8_e4m3fn) is E4M3

"""Exact distances between floating-point values, counted in representable values (ULP).

A float is a sign and a magnitude, so its bits, read as an integer with the sign applied, number the
representable values in order: neighbours differ by one, and both zeros are number 0.
"""

import ml_dtypes
import numpy as np

# Sign-magnitude formats by dtype: the signed integer of the same width.
_SIGNED = {
    np.dtype(np.float64): np.int64,
    np.dtype(np.float32): np.int32,
    np.dtype(np.float16): np.int16,
    np.dtype(ml_dtypes.bfloat16): np.int16,
    np.dtype(ml_dtypes.float8_e4m3fn): np.int8,
    np.dtype(ml_dtypes.float8_e5m2): np.int8,
    np.dtype(ml_dtypes.float8_e4m3fnuz): np.int8,
    np.dtype(ml_dtypes.float8_e5m2fnuz): np.int8,
}
_E8M0 = getattr(ml_dtypes, "float8_e8m0fnu", None)
_E8M0 = None if _E8M0 is None else np.dtype(_E8M0)  # unsigned: its code is its number
_WIDER = {np.int8: np.int16, np.int16: np.int32, np.int32: np.int64}


def has_ulp(dtype) -> bool:
    """Whether `ulp_distance` knows `dtype` (float64, float32, float16, bfloat16, the FP8 formats, E8M0)."""
    return np.dtype(dtype) in _SIGNED or np.dtype(dtype) == _E8M0


def ulp_keys(x: np.ndarray) -> np.ndarray:
    """Number the values of `x` in order: a signed integer array of the width of `x`, both zeros 0.

    Keys of NaN are outside the range of keys of numbers and mean nothing.
    Raises ValueError for a dtype that is no floating-point format.
    """
    x = np.ascontiguousarray(x)
    if x.dtype == _E8M0:
        return x.view(np.uint8).astype(np.int16)
    if x.dtype not in _SIGNED:
        raise ValueError(f"ulp_keys: dtype {x.dtype} has no ULP; a floating-point dtype is required")
    bits = x.view(_SIGNED[x.dtype])
    width = 8 * bits.dtype.itemsize
    sign = bits >> (width - 1)  # 0 or -1
    magnitude = bits & np.array((1 << (width - 1)) - 1, bits.dtype)
    return (magnitude ^ sign) - sign


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable values lie between `a` and `b`, element by element, exactly.

    Both have one dtype. The result is an unsigned integer or wider signed integer array; where either side
    is NaN it means nothing. Raises ValueError for two dtypes or one without ULP.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"ulp_distance: dtypes {a.dtype} and {b.dtype} differ; ULP is defined within one dtype")
    left, right = ulp_keys(a), ulp_keys(b)
    wider = _WIDER.get(left.dtype.type)
    if wider is not None:
        return np.abs(np.subtract(left, right, dtype=wider))
    # float64: the distance can need 64 bits; subtraction of two's complement numbers wraps to the right value.
    larger, smaller = np.maximum(left, right), np.minimum(left, right)
    return larger.view(np.uint64) - smaller.view(np.uint64)


_TABLES: dict = {}


def widen(x: np.ndarray) -> np.ndarray:
    """Every value of `x` as float64, exactly (64-bit integers: to the nearest float64)."""
    if x.dtype == np.float64:
        return x
    if x.dtype.itemsize == 1 and x.dtype != np.bool_ and has_ulp(x.dtype):
        if x.dtype not in _TABLES:
            with np.errstate(invalid="ignore"):
                _TABLES[x.dtype] = np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float64)
        return _TABLES[x.dtype].take(
            x.view(np.uint8), mode="clip"
        )  # no code is out of range; clip is faster than a check
    if x.dtype == ml_dtypes.bfloat16:
        bits = np.left_shift(x.view(np.uint16), 16, dtype=np.uint32)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return bits.view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)

"""From values to codes and back, by tables.

Encoding: the upper 16 bits of a float32, with the lowest of them set when anything below is set (a sticky bit), hold
all that a rounding to 4 significant bits needs. So 65,536 bytes answer every float32. The table is computed from the
definition of the format, not from another library.
"""

import functools

import ml_dtypes
import numpy as np

from fp8.formats import E8M0, Format, format_of
from fp8.rounding import float32_carrier

_CHUNK = 1 << 15  # elements whose temporaries stay in a core's cache
_DECODE_CHUNK = 1 << 16
OVERFLOWS = ("saturate", "nan")


def _round_to_format(value: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 values rounded to nearest even on the format's grid, as if its exponent had no upper end."""
    exponent = np.frexp(value)[1] - 1
    step = np.maximum(exponent, fmt.min_normal_exponent) - fmt.mantissa_bits
    return np.ldexp(np.rint(np.ldexp(value, -step)), step)


@functools.cache
def _encode_table(fmt: Format, overflow: str) -> np.ndarray:
    """uint8 [65536]: the code for each upper half of a float32."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        value = (upper << np.uint32(16)).view(np.float32).astype(np.float64)
    finite = np.isfinite(value)
    rounded = np.where(finite, _round_to_format(np.where(finite, value, 0.0), fmt), value)
    too_large = np.abs(rounded) > fmt.max
    magnitude = np.where(np.isnan(rounded), 0.0, np.minimum(np.abs(rounded), fmt.max))

    grid = fmt.values()[:128]  # ascending over the codes with sign bit 0, then inf and NaN
    grid = grid[np.isfinite(grid)]
    code = np.searchsorted(grid, magnitude)
    negative = np.signbit(value)
    if overflow == "nan":
        code = np.where(too_large, fmt.inf_codes[0] if fmt.inf_codes else fmt.nan_codes[0], code)
    code = np.where(negative, code | 0x80, code)
    code = np.where(np.isnan(value), _quiet_nan(fmt) | np.where(negative, 0x80, 0), code)
    if fmt.nan_codes == (0x80,):  # no negative zero: what would be one is zero, and NaN has a single code
        code = np.where(code == 0x80, 0, code)
        code = np.where(np.isnan(value) | ((overflow == "nan") & too_large), 0x80, code)
    return code.astype(np.uint8)


def _quiet_nan(fmt: Format) -> int:
    """The code that stands for NaN: the one whose top mantissa bit is the only one set, where there is a choice."""
    return 0x7E if fmt.inf_codes else fmt.nan_codes[0]


def _upper_half(x: np.ndarray) -> np.ndarray:
    """Table index of each element of a contiguous float32 chunk: its upper 16 bits, the lowest one sticky."""
    bits = x.view(np.uint32)
    index = bits & np.uint32(0xFFFF)
    index += np.uint32(0xFFFF)
    index |= bits
    index >>= np.uint32(16)
    return index


def encode_into(x: np.ndarray, table: np.ndarray, codes: np.ndarray) -> None:
    """Codes (uint8, contiguous [n]) of one contiguous chunk of float64, float32 or bfloat16 values [n]."""
    if x.dtype == ml_dtypes.bfloat16:
        index = x.view(np.uint16)
    else:
        index = _upper_half(float32_carrier(x) if x.dtype == np.float64 else x)
    np.take(table, index, out=codes, mode="clip")


def encode_table(fmt: Format, overflow: str = "saturate") -> np.ndarray:
    """The table for `encode_into`. Raises ValueError for an unknown rule."""
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow = {overflow!r} is not one of {OVERFLOWS}")
    if fmt == E8M0:
        raise ValueError("E8M0 holds bare powers of two: use encode(x, E8M0), which takes nothing else")
    return _encode_table(fmt, overflow)


def encode(x, fmt: Format, overflow: str = "saturate") -> np.ndarray:
    """`x` (float64, float32 or bfloat16, any shape) as codes of `fmt`: one round-to-nearest-even.

    overflow="saturate": what rounds beyond the largest finite value, infinity included, becomes that value (PTX
    `cvt.satfinite`); "nan": it becomes infinity if the format has one, else NaN (ml_dtypes). NaN stays NaN. E8M0 takes
    exact powers of two and NaN only: how to round a scale is a rule of its own (`fp8.scales`).
    Returns an array of the format's ml_dtypes dtype. Raises ValueError for other dtypes, rules, or E8M0 input.
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64, ml_dtypes.bfloat16):
        raise ValueError(f"encode takes float64, float32 or bfloat16, not {x.dtype}")
    if fmt == E8M0:
        return _encode_e8m0(x)
    table = encode_table(fmt, overflow)
    flat = np.ascontiguousarray(x).reshape(-1)
    codes = np.empty(flat.size, np.uint8)
    for start in range(0, flat.size, _CHUNK):
        encode_into(flat[start : start + _CHUNK], table, codes[start : start + _CHUNK])
    return codes.view(fmt.dtype).reshape(x.shape)


def _encode_e8m0(x: np.ndarray) -> np.ndarray:
    """Exact powers of two from 2^-127 to 2^127, and NaN, as E8M0 codes."""
    value = x.astype(np.float64)
    mantissa, exponent = np.frexp(value)
    nan = np.isnan(value)
    bad = ~nan & ((mantissa != 0.5) | (exponent - 1 < -127) | (exponent - 1 > 127))
    if bad.any():
        raise ValueError(
            f"{np.count_nonzero(bad)} of {bad.size} values are not powers of two from 2^-127 to 2^127 (the first is "
            f"{value[bad][0]!r}); E8M0 keeps only an exponent: round scales up first with fp8.ceil_power_of_two"
        )
    return np.where(nan, 0xFF, exponent - 1 + 127).astype(np.uint8).view(E8M0.dtype)


@functools.cache
def _decode_table(fmt: Format, dtype: np.dtype) -> np.ndarray:
    """[256] values of the codes; every one of them is exact in bfloat16, float32 and float64."""
    return fmt.values().astype(dtype)


def decode(codes, dtype=np.float64, out: np.ndarray | None = None) -> np.ndarray:
    """The values of `codes` (ml_dtypes float8 of any shape) as float64, float32 or bfloat16, exactly.

    out: where to write, a C-contiguous array of that shape and dtype. Raises ValueError for codes of another dtype
    (bare uint8 does not say which format it is; use `.view`), for another result dtype, and for an unfit `out`.
    """
    codes, dtype = np.asarray(codes), np.dtype(dtype)
    if dtype not in (np.float32, np.float64, ml_dtypes.bfloat16):
        raise ValueError(f"decode gives float64, float32 or bfloat16, not {dtype}")
    table = _decode_table(format_of(codes.dtype), dtype)
    if out is None:
        out = np.empty(codes.shape, dtype)
    elif out.shape != codes.shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(f"out {out.dtype} {out.shape} must be a C-contiguous {dtype} array of shape {codes.shape}")
    raw, flat = np.ascontiguousarray(codes).view(np.uint8).reshape(-1), out.reshape(-1)
    for start in range(
        0, raw.size, _DECODE_CHUNK
    ):  # a chunk at a time: np.take makes 8-byte indices of all it is given
        np.take(table, raw[start : start + _DECODE_CHUNK], out=flat[start : start + _DECODE_CHUNK], mode="clip")
    return out

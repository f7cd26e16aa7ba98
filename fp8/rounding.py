"""One rounding from a wide float to a narrow one.

`astype` takes float64 to bfloat16 or E4M3 through float32 and so rounds twice: 1 + 2^-8 + 2^-40 becomes 1.0, though it
lies above the midpoint of 1.0 and 1.0078125. Here float32 stands between only as a carrier that remembers on which side
of a midpoint the value was.
"""

import ml_dtypes
import numpy as np

_CHUNK = 1 << 15  # elements whose temporaries stay in a core's cache


def float32_carrier(x: np.ndarray) -> np.ndarray:
    """float32 array from which a later rounding to at most 14 significant bits equals one rounding of `x`.

    A second rounding goes wrong only if the first one lands exactly on a midpoint or on a value of the narrow format.
    Both have 16 low bits of 0x8000 or 0x0000 in float32, subnormals included; where such a carrier is not exact, it is
    moved one ulp back towards the value. `x` is float64; NaN and infinity stay.
    """
    with np.errstate(over="ignore", under="ignore"):
        carrier = x.astype(np.float32)
    bits = carrier.view(np.uint32).reshape(-1)
    suspect = (bits & np.uint32(0x7FFF)) == 0
    where = np.flatnonzero(suspect)
    if where.size * 8 > bits.size:  # values that were narrow before: gathering them costs more than taking all
        where = slice(None)
    wide = np.abs(x.reshape(-1)[where])
    narrow = np.abs(carrier.reshape(-1)[where]).astype(np.float64)
    bits[where] += (wide > narrow) & suspect[where]
    bits[where] -= (wide < narrow) & suspect[where]
    return carrier


def to_bfloat16(x) -> np.ndarray:
    """`x` (float64, float32 or bfloat16, any shape) as a bfloat16 array: one round-to-nearest-even.

    Values beyond the largest bfloat16 become infinity as IEEE 754 demands; NaN keeps its sign and becomes quiet.
    Raises ValueError for other dtypes.
    """
    x = np.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return x
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"to_bfloat16 takes float64, float32 or bfloat16, not {x.dtype}")
    if x.dtype == np.float32:
        return x.astype(ml_dtypes.bfloat16)
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty(flat.size, ml_dtypes.bfloat16)
    for start in range(0, flat.size, _CHUNK):
        out[start : start + _CHUNK] = float32_carrier(flat[start : start + _CHUNK])
    return out.reshape(x.shape)


def add_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """float64 x + y rounded to odd: an inexact sum gets an odd last bit, so that a later rounding to float32 is right.

    Boldo and Melquiond, "When double rounding is odd" (2005). Non-finite sums stay as they are.
    """
    total = np.asarray(x + y)
    with np.errstate(invalid="ignore"):
        y_part = total - x
        error = (x - (total - y_part)) + (y - y_part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    bits += np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return total


def fma32(x, y, z) -> np.ndarray:
    """float32 x * y + z with a single rounding, as a GPU's or CPU's fused multiply-add gives it."""
    x, y, z = (np.asarray(value, np.float32).astype(np.float64) for value in (x, y, z))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return add_to_odd(x * y, z).astype(np.float32)

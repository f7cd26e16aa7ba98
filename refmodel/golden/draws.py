"""Inputs of operator goldens: values that are the same on every machine and with every version of NumPy.

Everything comes from the raw 64-bit words of PCG64, whose stream NumPy guarantees (that of its distributions it does
not), through integers and products that are rounded once.
"""

import hashlib
import math

import numpy as np

from fp8.rounding import to_bfloat16

_CHUNK = 1 << 18  # values made at a time
_UNIT = (
    1.7320508075688772 / 65536
)  # the sum of four uniform 16-bit integers has a standard deviation of 65536 / sqrt(3)


def words(key: str, count: int) -> np.ndarray:
    """uint64 [count]: the first words of the stream that `key` names."""
    return _stream(key).random_raw(count)


def _stream(key: str) -> np.random.PCG64:
    return np.random.PCG64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))


def normal(key: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    """bfloat16 of that shape, close to normal with standard deviation `scale`: sums of four 16-bit integers."""
    out = np.empty(math.prod(shape), to_bfloat16(np.zeros(0)).dtype)
    stream = _stream(key)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        parts = stream.random_raw(part.size).astype("<u8", copy=False).view("<u2").reshape(-1, 4)
        total = parts.astype(np.int64).sum(axis=1) - 2 * 65535
        part[...] = to_bfloat16(total * (_UNIT * scale))
    return out.reshape(shape)


def permutation(key: str, count: int) -> np.ndarray:
    """int64 [count]: the numbers below `count` in the order of their words."""
    return np.argsort(words(key, count), kind="stable")


def fractions(key: str, *shape: int) -> np.ndarray:
    """float32 of that shape, uniform over the multiples of 2^-16 in (0, 1]."""
    return ((words(key, math.prod(shape)) >> np.uint64(48)).astype(np.float32) + 1).reshape(shape) * np.float32(2**-16)

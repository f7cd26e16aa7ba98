"""When a product of 8-bit operands is exact in float64, and what to do when it is not.

Every finite code is a whole multiple of its format's smallest step. A sum of K products in which a has multiples of q_a
up to max|a| (b likewise) is exact in float64, in any order, if K max|a| max|b| <= 2^53 q_a q_b. For E4M3 x E4M3 that
holds for every operand up to K = 171,196. For E4M3 x E5M2 it holds for K up to 10 only, so the operands at hand are
looked at, and if they do not pass, the E5M2 operand is split into two bands of exponents whose products both pass.
"""

from typing import NamedTuple

import numpy as np

from fp8.codec import decode
from fp8.formats import E5M2, Format, format_of
from fp8.rounding import add_to_odd

E4M3_PRODUCTS = 171_196  # how many products of E4M3 values can be summed exactly in float64, whatever they are


class Extent(NamedTuple):
    """Of some finite values: the largest magnitude, and the largest power of two that divides all of them."""

    largest: float
    step: float


def _lowest_bits(value: np.ndarray) -> np.ndarray:
    """The lowest set bit of each non-zero finite float64."""
    mantissa, exponent = np.frexp(np.abs(value))
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    return np.ldexp((whole & -whole).astype(np.float64), exponent - 53)


def _extent(value: np.ndarray) -> Extent:
    value = value[np.isfinite(value) & (value != 0)]
    if not value.size:
        return Extent(0.0, 1.0)
    return Extent(float(np.abs(value).max()), float(_lowest_bits(value).min()))


def format_extent(fmt: Format) -> Extent:
    """The extent of all values of a format."""
    return _extent(fmt.values())


def codes_extent(codes: np.ndarray) -> Extent:
    """The extent of the values that occur among `codes`."""
    present = np.bincount(codes.reshape(-1).view(np.uint8), minlength=256) > 0
    return _extent(format_of(codes.dtype).values()[present])


def is_exact(num_products: int, a: Extent, b: Extent) -> bool:
    """Whether every sum of `num_products` products is exact in float64, in any order."""
    # Powers of two divide exactly, and what remains is below 2^53 in every case that can pass.
    return num_products * (a.largest / a.step) * (b.largest / b.step) <= 2.0**53


def split_bands(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decoded E5M2 values as (high, low) with high + low = value: below 1 in magnitude is low, the rest is high."""
    low = np.abs(value) < 1.0
    return np.where(low, 0.0, value), np.where(low, value, 0.0)


class ExactOperands(NamedTuple):
    """Decoded operands float64 [R, K] such that the sum of the products a_i b_i^T is the exact product, one or two."""

    a: tuple[np.ndarray, ...]
    b: tuple[np.ndarray, ...]


def exact_operands(a_codes: np.ndarray, b_codes: np.ndarray, block_k: int) -> ExactOperands:
    """Decode a [M, K] and b [N, K] for exact products over blocks of `block_k`.

    Raises ValueError if neither one product nor two bands are exact for these operands.
    """
    a_format, b_format = format_of(a_codes.dtype), format_of(b_codes.dtype)
    a, b = decode(a_codes, np.float64), decode(b_codes, np.float64)
    if is_exact(block_k, format_extent(a_format), format_extent(b_format)):
        return ExactOperands((a,), (b,))
    if is_exact(block_k, codes_extent(a_codes), codes_extent(b_codes)):
        return ExactOperands((a,), (b,))
    if (a_format == E5M2) != (b_format == E5M2):
        a_parts = split_bands(a) if a_format == E5M2 else (a, a)
        b_parts = split_bands(b) if b_format == E5M2 else (b, b)
        if all(is_exact(block_k, _extent(x.reshape(-1)), _extent(y.reshape(-1))) for x, y in zip(a_parts, b_parts)):
            return ExactOperands(a_parts, b_parts)
    raise ValueError(
        f"{a_format.name} x {b_format.name} over {block_k} products is not exact in float64 for these operands; use "
        "accumulator 'float32_sequential' or a tensor core's, a smaller block, or values of a narrower range"
    )


def exact_partial(operands: ExactOperands, k: slice) -> np.ndarray:
    """float32 [M, N]: the exact sum of products over the columns `k`, rounded to nearest even once."""
    parts = [a[:, k] @ b[:, k].T for a, b in zip(operands.a, operands.b)]
    if len(parts) == 1:
        return parts[0].astype(np.float32)
    with np.errstate(invalid="ignore"):
        return add_to_odd(*parts).astype(np.float32)

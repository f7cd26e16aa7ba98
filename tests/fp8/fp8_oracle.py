"""Slow and obvious: formats by their bit fields as fractions, rounding by search, sums by fractions."""

import functools
from fractions import Fraction

import numpy as np

# name -> (exponent bits, mantissa bits, bias, NaN codes, infinity codes), from the OFP8 and FNUZ papers
FIELDS = {
    "E4M3": (4, 3, 7, {0x7F, 0xFF}, set()),
    "E4M3FNUZ": (4, 3, 8, {0x80}, set()),
    "E5M2": (5, 2, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
}


def value_of(code: int, name: str) -> Fraction | float:
    """The value of a code: a Fraction, or a float infinity or NaN. Minus zero is a Fraction zero."""
    exponent_bits, mantissa_bits, bias, nans, infinities = FIELDS[name]
    if code in nans:
        return float("nan")
    sign = -1 if code & 0x80 else 1
    if code in infinities:
        return sign * float("inf")
    mantissa = code & (2**mantissa_bits - 1)
    exponent = (code & 0x7F) >> mantissa_bits
    assert exponent < 2**exponent_bits
    if exponent == 0:
        return sign * Fraction(mantissa, 2**mantissa_bits) * power(1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * power(exponent - bias)


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


@functools.cache
def positive_grid(name: str) -> tuple[list[Fraction], list[int]]:
    codes = [code for code in range(128) if not isinstance(value_of(code, name), float)]
    return [value_of(code, name) for code in codes], codes


def nearest_code(value: Fraction, name: str, saturate: bool = True) -> int:
    """Round to nearest, ties to the even code; beyond the largest value saturate, or give None for overflow."""
    grid, codes = positive_grid(name)
    magnitude = abs(value)
    step_up = grid[-1] + (grid[-1] - grid[-2])  # the value that would follow the largest
    if magnitude > (grid[-1] + step_up) / 2 and not saturate:
        return None
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if grid[middle] <= magnitude else (low, middle)
    below, above = magnitude - grid[low], grid[high] - magnitude
    code = codes[low] if below < above or (below == above and codes[low] % 2 == 0) else codes[high]
    return code | 0x80 if value < 0 else code


def round_to_bits(value: Fraction, bits: int, smallest_exponent: int) -> Fraction:
    """To nearest even with `bits` significant bits, and to multiples of 2^(smallest_exponent - bits + 1) at least."""
    if value == 0:
        return value
    step = power(max(exponent_of(value), smallest_exponent) - bits + 1)
    return round(value / step) * step  # Fraction's round is to nearest, ties to even


def float32(value: Fraction) -> Fraction:
    return round_to_bits(value, 24, -126)


def bfloat16(value: Fraction) -> Fraction:
    return round_to_bits(value, 8, -126)


def exponent_of(value: Fraction) -> int:
    """floor(log2 |value|)."""
    value = abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if power(exponent) <= value else exponent - 1


def fractions_of(array) -> list:
    return [Fraction(float(x)) for x in np.asarray(array, np.float64).reshape(-1)]


def exact_gemm(a, b, order: str = "a_then_b", fma: bool = False) -> list[list[Fraction]]:
    """The definition of the blockwise product: rational sum per block, then float32 operations in ascending k."""
    result = []
    block = a.block[1]
    for m in range(a.shape[0]):
        row = []
        for n in range(b.shape[0]):
            total = Fraction(0)
            for index, start in enumerate(range(0, a.shape[1], block)):
                x, y = fractions_of(a.codes[m, start : start + block]), fractions_of(b.codes[n, start : start + block])
                partial = float32(sum((p * q for p, q in zip(x, y)), Fraction(0)))
                sa = Fraction(float(a.scale[m, index]))
                sb = Fraction(float(b.scale[n // b.block[0], index]))
                if order == "scales_first":
                    first, last = partial, float32(sa * sb)
                elif order == "a_then_b":
                    first, last = float32(partial * sa), sb
                else:
                    first, last = float32(partial * sb), sa
                total = float32(total + (first * last if fma else float32(first * last)))
            row.append(total)
        result.append(row)
    return result


def _significand(value: Fraction, smallest_exponent: int) -> int | None:
    """The exponent with which a value enters a product, None for zero."""
    return None if value == 0 else max(exponent_of(value), smallest_exponent)


def fused_sum(a, b, c, fraction_bits=13, output_bits=13, smallest=(-6, -6), floor=False, scale=0) -> Fraction:
    """One tensor-core instruction on lists of Fractions a and b and a Fraction c, by the description of MMA-Sim."""
    terms = []
    for x, y in zip(a, b):
        exponents = _significand(x, smallest[0]), _significand(y, smallest[1])
        if None not in exponents:
            terms.append((x * y * power(scale), sum(exponents) + scale))
    if c != 0:
        terms.append((c, max(exponent_of(c), -126)))
    if not terms:
        return Fraction(0)
    unit = power(max(-126, max(exponent for _, exponent in terms)) - fraction_bits)
    cut = (lambda q: q.numerator // q.denominator) if floor else int  # int() of a Fraction goes towards zero
    total = sum(cut(value / unit) for value, _ in terms) * unit
    if total == 0:
        return total
    step = power(max(exponent_of(total), -126) - output_bits)
    return int(total / step) * step

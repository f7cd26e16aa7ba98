"""What a tensor core returns: products aligned to the largest exponent, cut, summed, and cut again.

One instruction adds up to 32 products and the accumulator C as one fused sum. The exponent of a product is the sum of
its factors' exponents (it is not renormalised; a subnormal factor counts with the format's smallest exponent, a zero
with none). Every term is cut to a multiple of 2^(largest exponent - fraction bits), the cut terms are added exactly,
and the sum is cut towards zero to the unit's output width.
Source: MMA-Sim, arXiv 2511.10909 (github.com/microsoft/MMA-Sim). The DeepSeek-V3 report, section 3.5.2, describes the
same sums but calls the shift sign-filling, which rounds negative terms down: `shift="sign_fill"`.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fp8.formats import E4M3, E5M2, Format, format_of
from fp8.scales import require_powers_of_two

STEP = 32  # products of one instruction
SHIFTS = {"truncate": np.trunc, "sign_fill": np.floor}
_ZERO_EXPONENT = -64  # of a zero factor; with any other factor it gives at most -49, real products at least -28
_NO_PRODUCT = -40
_NAN = np.uint32(0x7FFFFFFF)  # the NaN that tensor cores return


@dataclass(frozen=True)
class Unit:
    """fraction_bits kept of each aligned term, output_bits of fraction kept of a sum.

    dtype holds 33 cut terms and their sum exactly; with float32 the smallest exponent that counts is -100, which is
    enough for accumulators that are themselves sums of unscaled products (they are multiples of 2^-32).
    """

    name: str
    fraction_bits: int
    output_bits: int
    dtype: type

    @property
    def smallest_exponent(self) -> int:
        return -100 if self.dtype == np.float32 else -126


UNITS = {
    "hopper": Unit("hopper", 13, 13, np.float32),  # WGMMA with FP8 operands
    "blackwell": Unit("blackwell", 25, 23, np.float64),  # tcgen05 with FP8 operands
}


class Operand(NamedTuple):
    """One operand, k first: value [K, R] in the unit's dtype and exponent int8 [K, R]."""

    value: np.ndarray
    exponent: np.ndarray

    def part(self, start: int, stop: int) -> "Operand":
        return Operand(self.value[start:stop], self.exponent[start:stop])


@functools.cache
def _exponent_table(fmt: Format) -> np.ndarray:
    """int8 [256]: the exponent with which a code enters a product."""
    value = fmt.values()
    finite = np.where(np.isfinite(value), value, 1.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, fmt.min_normal_exponent)
    return np.where(finite == 0, _ZERO_EXPONENT, exponent).astype(np.int8)


def load_operand(codes: np.ndarray, unit: Unit) -> Operand:
    """codes [R, K] of E4M3 or E5M2, decoded for `fused_sum`. Raises ValueError for another format."""
    fmt = format_of(codes.dtype)
    if fmt not in (E4M3, E5M2):
        raise ValueError(f"tensor cores multiply E4M3 and E5M2, not {fmt.name}")
    raw = np.ascontiguousarray(codes.view(np.uint8).T)
    return Operand(np.take(fmt.values().astype(unit.dtype), raw), np.take(_exponent_table(fmt), raw))


def float32_exponent(x: np.ndarray) -> np.ndarray:
    """int32: the exponent of each float32; -126 for zero and subnormals, 127 at most."""
    exponent = ((x.view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int32)
    return np.clip(exponent, 1, 254) - 127


def largest_exponent(a: Operand, b: Operand, scale_exponent=None) -> np.ndarray:
    """int32 [m, n]: the largest exponent of the products of each row pair, far below any other if all are zero."""
    shape = (a.exponent.shape[1], b.exponent.shape[1])
    largest, candidate = np.full(shape, 2 * _ZERO_EXPONENT, np.int8), np.empty(shape, np.int8)
    for a_row, b_row in zip(a.exponent, b.exponent):
        np.add(a_row[:, None], b_row, out=candidate)
        np.maximum(largest, candidate, out=largest)
    largest = largest.astype(np.int32)
    shifted = largest if scale_exponent is None else largest + scale_exponent
    return np.where(largest < _NO_PRODUCT, -1000, shifted)


def fused_sum(a: Operand, b: Operand, c, unit: Unit, shift: str = "truncate", scale_exponent=None) -> np.ndarray:
    """float32 [m, n]: one instruction on at most 32 rows of k.

    c float32 [m, n] or None (there is none); scale_exponent int32 [m, n]: exponent of the block scales inside the
    instruction. With a float32 unit, c must be a sum of unscaled products: `mma_step` takes any c.
    """
    cut = SHIFTS[shift]
    top = np.maximum(largest_exponent(a, b, scale_exponent), unit.smallest_exponent)
    if c is not None:
        top = np.maximum(top, float32_exponent(c))
    align = unit.fraction_bits - top
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        factor = np.ldexp(unit.dtype(1), align if scale_exponent is None else align + scale_exponent)
        term, total = np.empty(top.shape, unit.dtype), np.zeros(top.shape, unit.dtype)
        for a_row, b_row in zip(a.value, b.value):
            np.multiply(a_row[:, None], b_row, out=term)
            term *= factor
            cut(term, out=term)
            total += term
        if c is not None:
            total += cut(np.ldexp(c.astype(unit.dtype), align))
        return _cut_output(np.ldexp(total, -align), unit)


def _cut_output(total: np.ndarray, unit: Unit) -> np.ndarray:
    """float32: cut towards zero to the output width, and to multiples of 2^(-126 - width) below the normal range."""
    word, mantissa_bits = (np.uint32, 23) if unit.dtype == np.float32 else (np.uint64, 52)
    kept = total.view(word) & ~word((1 << (mantissa_bits - unit.output_bits)) - 1)
    cut = kept.view(unit.dtype)
    if unit.dtype != np.float32:
        step = 126 + unit.output_bits
        tiny = np.abs(total) < 2.0**-126
        cut = np.where(tiny, np.ldexp(np.trunc(np.ldexp(np.where(tiny, total, 0.0), step)), -step), cut)
    out = cut.astype(np.float32)
    nan = np.isnan(total)
    if nan.any():
        out.view(np.uint32)[nan] = _NAN
    return out


def scale_exponents(a_scale, b_scale) -> np.ndarray:
    """int32 [m, n] from float32 scales [m] and [n]. Raises ValueError, with a count, if some are no powers of two."""
    require_powers_of_two(a_scale, "a_scale, inside the instruction,")
    require_powers_of_two(b_scale, "b_scale, inside the instruction,")
    exponents = [np.frexp(scale)[1].astype(np.int32) - 1 for scale in (a_scale, b_scale)]
    return exponents[0][:, None] + exponents[1]


def mma_step(a, b, c=None, unit: str = "hopper", a_scale=None, b_scale=None, shift: str = "truncate") -> np.ndarray:
    """float32 [M, N]: one tensor-core instruction, D = A B^T + C.

    a [M, K] and b [N, K]: codes of E4M3 or E5M2 with K of at most 32; c float32 [M, N], None for zero. unit="hopper"
    (WGMMA: 13 fraction bits) or "blackwell" (tcgen05: 25, output cut to float32). Block scales a_scale [M] and
    b_scale [N], powers of two in float32, act inside the instruction and only on Blackwell. NaN is 0x7FFFFFFF.
    Raises ValueError for anything else.
    """
    a, b = np.asarray(a), np.asarray(b)
    if unit not in UNITS or shift not in SHIFTS:
        raise ValueError(f"unit {unit!r}, shift {shift!r}: known are {tuple(UNITS)} and {tuple(SHIFTS)}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] > STEP:
        raise ValueError(f"a {a.shape} and b {b.shape}: [M, K] and [N, K] with the same K of at most {STEP} are needed")
    if c is not None and (np.asarray(c).dtype != np.float32 or np.shape(c) != (a.shape[0], b.shape[0])):
        raise ValueError(f"c must be float32 {(a.shape[0], b.shape[0])}, not {np.asarray(c).dtype} {np.shape(c)}")
    if (a_scale is None) != (b_scale is None) or (a_scale is not None and unit == "hopper"):
        raise ValueError("scales inside the instruction come in pairs, and only Blackwell has them")
    exact = replace(UNITS[unit], dtype=np.float64)
    scale = None if a_scale is None else scale_exponents(np.asarray(a_scale), np.asarray(b_scale))
    c = None if c is None else np.ascontiguousarray(c)
    return fused_sum(load_operand(a, exact), load_operand(b, exact), c, exact, shift, scale)

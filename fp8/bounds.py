"""How far a kernel may be from the exact product: rigorous, for the operands at hand, element by element.

`ordered_bound` follows an accumulator instruction by instruction: which terms lie so low that alignment cuts them, how
far the accumulator and the output are cut, then each float32 operation of the promotion and the store. It holds for
kernels that add in that order. `order_free_bound` knows only the sums of magnitudes; it holds for any order of terms
and blocks, and is loose. The exact value is the real number sum of a_code * a_scale * b_code * b_scale.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp8.blockscaled import BlockScaled
from fp8.codec import decode
from fp8.exact import codes_extent, exact_operands
from fp8.formats import format_of
from fp8.gemm import KERNELS, GemmRule, block_partials, check_operands, panels, promote
from fp8.scales import is_power_of_two
from fp8.tensorcore import STEP, UNITS, float32_exponent, fused_sum, largest_exponent, load_operand, scale_exponents

_ROW_PANEL, _COLUMN_PANEL = 128, 512


class BoundedProduct(NamedTuple):
    """value float64 [M, N]: the exact product; bound float64 [M, N]: no kernel of the rule is further from it."""

    value: np.ndarray
    bound: np.ndarray


def _half_step(x: np.ndarray, fraction_bits: int = 23) -> np.ndarray:
    """float64: half the distance between neighbours at each float32 `x` with this many fraction bits."""
    return np.ldexp(1.0, float32_exponent(x) - fraction_bits - 1)


class _Panel(NamedTuple):
    """Operands of one panel: codes [m, K] and [n, K], scales [m, Kb] and [n, Kb] float32, block_k."""

    a: np.ndarray
    b: np.ndarray
    a_scale: np.ndarray
    b_scale: np.ndarray
    block_k: int

    def blocks(self):
        return panels(self.a.shape[1], self.block_k)

    def scale(self, index: int) -> np.ndarray:
        """float64 [m, n]: the exact product of both scales of a block."""
        return self.a_scale[:, index, None].astype(np.float64) * self.b_scale[:, index].astype(np.float64)


def _by_panel(a: BlockScaled, b: BlockScaled, compute) -> BoundedProduct:
    """Run `compute(panel) -> BoundedProduct` over the panels of [M, N]."""
    result = BoundedProduct(*(np.zeros((a.shape[0], b.shape[0])) for _ in range(2)))
    for columns in panels(b.shape[0], _COLUMN_PANEL):
        b_scale = b.scale[np.arange(columns.start, columns.stop) // b.block[0]]
        for rows in panels(a.shape[0], _ROW_PANEL):
            part = compute(_Panel(a.codes[rows], b.codes[columns], a.scale[rows], b_scale, a.block[1]))
            result.value[rows, columns], result.bound[rows, columns] = part
    return result


def ordered_bound(
    a: BlockScaled,
    b: BlockScaled,
    rule: GemmRule = KERNELS["deepgemm_sm90"],
    out_dtype=ml_dtypes.bfloat16,
    shift: str = "truncate",
) -> BoundedProduct:
    """The exact product, and the bound for a kernel that adds by `rule` in ascending k and stores as `out_dtype`.

    a and b as for `gemm`. Raises ValueError as `gemm` does.
    """
    check_operands(a, b, rule, shift, out_dtype)

    def compute(panel: _Panel) -> BoundedProduct:
        value, slack = _exact_value(panel)
        if rule.accumulator == "blackwell":
            total, bound = _chain_bound(panel, shift)
        else:
            total, bound = _promoted_bound(panel, rule, shift)
        return BoundedProduct(value, bound + slack + _store_bound(total, out_dtype))

    return _by_panel(a, b, compute)


def _exact_value(panel: _Panel) -> tuple[np.ndarray, np.ndarray]:
    """The exact product in float64, and how far that itself, and a kernel by underflow, may be from it."""
    operands = exact_operands(panel.a, panel.b, min(panel.block_k, max(panel.a.shape[1], 1)))
    value, magnitude = (np.zeros((panel.a.shape[0], panel.b.shape[0])) for _ in range(2))
    num_roundings = 4
    for index, k in enumerate(panel.blocks()):
        block = sum(a[:, k] @ b[:, k].T for a, b in zip(*operands)) * panel.scale(index)
        value += block
        magnitude += np.abs(block)
        num_roundings += 1
    underflow = num_roundings * 2.0**-148  # products with a scale that fall below the smallest float32
    return value, num_roundings * 2.0**-53 * magnitude + underflow


def _store_bound(total: np.ndarray, out_dtype) -> np.ndarray | float:
    return _half_step(total, 7) if np.dtype(out_dtype) == ml_dtypes.bfloat16 else 0.0


def _promoted_bound(panel: _Panel, rule: GemmRule, shift: str) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel's float32 total is, and how far it may be from the exact product."""
    shape = (panel.a.shape[0], panel.b.shape[0])
    total, bound = np.zeros(shape, np.float32), np.zeros(shape)
    for index, (partial, partial_bound) in enumerate(_partial_bounds(panel, rule.accumulator, shift)):
        a_scale, b_scale = panel.a_scale[:, index, None], panel.b_scale[:, index]
        bound += partial_bound * panel.scale(index) + _scaling_bound(partial, a_scale, b_scale, rule)
        total = promote(total, partial, a_scale, b_scale, rule)
        if index or rule.promotion == "fma":  # the first addition is to zero
            bound += _half_step(total)
    return total, bound


def _scaling_bound(partial, a_scale, b_scale, rule: GemmRule) -> np.ndarray:
    """The roundings between a partial sum and the term that is added; a power of two rounds nothing."""
    fused = rule.promotion == "fma"
    if rule.scale_order == "scales_first":
        scale = a_scale * b_scale
        exact = is_power_of_two(a_scale) | is_power_of_two(b_scale)
        bound = np.abs(partial.astype(np.float64)) * np.where(exact, 0.0, _half_step(scale))
        return bound if fused else bound + np.where(is_power_of_two(scale), 0.0, _half_step(partial * scale))
    first, last = (a_scale, b_scale) if rule.scale_order == "a_then_b" else (b_scale, a_scale)
    scaled = partial * first
    bound = np.where(is_power_of_two(first), 0.0, _half_step(scaled)) * last.astype(np.float64)
    return bound if fused else bound + np.where(is_power_of_two(last), 0.0, _half_step(scaled * last))


def _partial_bounds(panel: _Panel, accumulator: str, shift: str):
    """Yield for each block the kernel's partial sum (float32) and its distance from the exact one at most (float64)."""
    if accumulator == "exact":
        for partial in block_partials(panel.a, panel.b, panel.block_k, "exact"):
            yield partial, _half_step(partial)
    elif accumulator == "float32_sequential":
        step = codes_extent(panel.a).step * codes_extent(panel.b).step
        a, b = (np.ascontiguousarray(decode(codes, np.float32).T) for codes in (panel.a, panel.b))
        for k in panel.blocks():
            yield _sequential_bound(a[k], b[k], step)
    else:
        unit = UNITS["hopper"]
        a, b = load_operand(panel.a, unit), load_operand(panel.b, unit)
        for k in panel.blocks():
            total, bound = None, 0.0
            for start in range(k.start, k.stop, STEP):
                parts = [operand.part(start, min(start + STEP, k.stop)) for operand in (a, b)]
                total, loss = _step_bound(*parts, total, unit, shift, _product_bits(panel))
                bound = bound + loss
            yield total, bound


def _sequential_bound(a: np.ndarray, b: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Each addition rounds by half a step of the running sum at most, and not at all while that holds every product."""
    total = a[0][:, None] * b[0]
    bound = np.zeros(total.shape)
    for a_row, b_row in zip(a[1:], b[1:]):
        total += a_row[:, None] * b_row
        half = _half_step(total)
        bound += np.where(2 * half > step, half, 0.0)
    return total, bound


def _product_bits(panel: _Panel) -> int:
    """Fraction bits of a product of two significands."""
    return format_of(panel.a.dtype).mantissa_bits + format_of(panel.b.dtype).mantissa_bits


def _step_bound(a, b, c, unit, shift, product_bits, scale_exponent=None) -> tuple[np.ndarray, np.ndarray]:
    """One instruction's result, and how much it may have cut off: terms, accumulator and output.

    A term is a multiple of 2^(its exponent - product_bits), so alignment cuts it only if that is below the last kept
    bit; the accumulator has output_bits of fraction; the output is cut only if it carried beyond the kept width.
    """
    top = np.maximum(largest_exponent(a, b, scale_exponent), unit.smallest_exponent)
    if c is not None:
        top = np.maximum(top, float32_exponent(c))
    lowest_kept = top - unit.fraction_bits
    threshold = lowest_kept + product_bits if scale_exponent is None else lowest_kept + product_bits - scale_exponent
    threshold = np.clip(threshold, -40, 127).astype(np.int8)  # products of a zero lie below -40 and lose nothing
    num_cut = np.zeros(top.shape, np.int32)
    for a_row, b_row in zip(a.exponent, b.exponent):
        exponent = a_row[:, None] + b_row
        num_cut += (exponent < threshold) & (exponent >= -40)
    if c is not None:
        num_cut += (c != 0) & (float32_exponent(c) - unit.output_bits < lowest_kept)
    out = fused_sum(a, b, c, unit, shift, scale_exponent)
    output_step = float32_exponent(out) - unit.output_bits
    output_loss = np.where(output_step > lowest_kept, np.ldexp(1.0, output_step) - np.ldexp(1.0, lowest_kept), 0.0)
    return out, num_cut * np.ldexp(1.0, lowest_kept) + output_loss


def _chain_bound(panel: _Panel, shift: str) -> tuple[np.ndarray, np.ndarray]:
    """Blackwell: the chain of instructions over all of K, scales inside."""
    unit = UNITS["blackwell"]
    a, b = load_operand(panel.a, unit), load_operand(panel.b, unit)
    total = np.zeros((panel.a.shape[0], panel.b.shape[0]), np.float32)
    bound = np.zeros(total.shape)
    for index, k in enumerate(panel.blocks()):
        scale = scale_exponents(panel.a_scale[:, index], panel.b_scale[:, index])
        for start in range(k.start, k.stop, STEP):
            parts = [operand.part(start, min(start + STEP, k.stop)) for operand in (a, b)]
            total, loss = _step_bound(*parts, total, unit, shift, _product_bits(panel), scale)
            bound += loss
    return total, bound


def order_free_bound(
    a: BlockScaled, b: BlockScaled, rule: GemmRule = KERNELS["deepgemm_sm90"], out_dtype=ml_dtypes.bfloat16
) -> BoundedProduct:
    """The exact product, and a bound from magnitudes alone: for any order of terms, blocks and scales.

    Let S be the sum of |a b| over a block. Plain float32 addition of n products loses at most n u S / (1 - n u) with
    u = 2^-24. A tensor core's instruction cuts 33 terms and its output at most at 2^(floor(log2 S') - fraction bits),
    where S' = S / (1 - losses) bounds every accumulator. The promotion adds (blocks + 2) roundings of u.
    """
    check_operands(a, b, rule, "truncate", out_dtype)

    def compute(panel: _Panel) -> BoundedProduct:
        value, slack = _exact_value(panel)
        absolute = [np.abs(decode(codes, np.float64)) for codes in (panel.a, panel.b)]
        bound, magnitude = np.zeros(value.shape), np.zeros(value.shape)
        for index, k in enumerate(panel.blocks()):
            block = absolute[0][:, k] @ absolute[1][:, k].T
            loss = 0.0 if rule.accumulator == "blackwell" else _block_loss(block, k.stop - k.start, rule.accumulator)
            bound += loss * panel.scale(index)
            magnitude += (block + loss) * panel.scale(index)
        if rule.accumulator == "blackwell":
            bound += _aligned_loss(magnitude, -(-panel.a.shape[1] // STEP), "blackwell")
        else:
            roundings = (len(panel.a_scale[0]) + 3) * 2.0**-24
            bound += roundings / (1 - roundings) * magnitude
        total = (np.abs(value) + bound + slack).astype(np.float32)
        return BoundedProduct(value, bound + slack + 2 * np.asarray(_store_bound(total, out_dtype)))

    return _by_panel(a, b, compute)


def _block_loss(magnitude: np.ndarray, num_products: int, accumulator: str) -> np.ndarray:
    """How far a block's partial sum may be off, given its sum of magnitudes."""
    if accumulator == "hopper":
        return _aligned_loss(magnitude, -(-num_products // STEP), "hopper")
    roundings = (1 if accumulator == "exact" else num_products) * 2.0**-24
    return roundings / (1 - roundings) * magnitude


def _aligned_loss(magnitude: np.ndarray, num_steps: int, name: str) -> np.ndarray:
    """Losses of `num_steps` instructions: 33 terms at 2^-fraction bits and the output at 2^-output bits each."""
    unit = UNITS[name]
    share = num_steps * (33 * 2.0**-unit.fraction_bits + 2.0**-unit.output_bits)
    if share >= 1:
        return np.full(magnitude.shape, np.inf)
    largest = magnitude / (1 - share)
    return share * np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1), 0.0)

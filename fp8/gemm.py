"""Products of block-scaled matrices: D = A B^T with one pair of scales per block of K (128 in DeepSeek-V3).

A sum of 128 products of E4M3 values is exact in float64: every product is a whole multiple of 2^-18 and at most 448^2,
so 128 of them need 43 bits of the 53. The block product is then the same on every machine, in any order, for any number
of rows. It is rounded to float32, scaled and added in ascending k ("promotion"), as float32 operations: that is the
definition. The other accumulators are what hardware and plain float32 loops give in its place.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp8.blockscaled import BlockScaled
from fp8.codec import decode
from fp8.exact import E4M3_PRODUCTS, exact_operands, exact_partial
from fp8.formats import E4M3, format_of
from fp8.rounding import fma32, to_bfloat16
from fp8.tensorcore import SHIFTS, STEP, UNITS, fused_sum, load_operand, scale_exponents

_ROW_PANEL, _COLUMN_PANEL = 128, 512  # rows and columns decoded and accumulated at a time
_PRODUCT_PANEL = 4096  # columns of one exact block product: long rows cost less per call, 4 MiB still lie in cache

ACCUMULATORS = ("exact", "hopper", "blackwell", "float32_sequential")
PROMOTIONS = ("mul_add", "fma")
SCALE_ORDERS = ("a_then_b", "b_then_a", "scales_first")


class GemmRule(NamedTuple):
    """How a kernel adds: `gemm(a, b, **rule._asdict())`.

    accumulator: within a block, and for "blackwell" over all of K with the scales inside the instruction.
    promotion: total + scaled partial as two roundings ("mul_add") or with the last product fused ("fma").
    scale_order: (p * sa) * sb, (p * sb) * sa, or (sa * sb) * p, each product rounded to float32.
    """

    accumulator: str = "exact"
    promotion: str = "mul_add"
    scale_order: str = "a_then_b"


REFERENCE = GemmRule()
KERNELS = {
    "reference": REFERENCE,
    "deepseek_v3_triton": GemmRule("hopper", "fma", "a_then_b"),  # the compiler contracts the last product
    "deepgemm_sm90": GemmRule("hopper", "fma", "scales_first"),
    "cublas_1d1d": GemmRule("hopper", "fma", "a_then_b"),
    "cublas_1d2d": GemmRule("hopper", "fma", "a_then_b"),
    "cublas_2d1d": GemmRule("hopper", "fma", "b_then_a"),
    "deepgemm_sm100": GemmRule("blackwell"),
}


def block_product(codes, a_scale, weight, w_scale, block_n: int = 128, block_k: int = 128) -> np.ndarray:
    """float32 [M, N]: blockwise FP8 product of decoded operands, `exact` accumulation, `mul_add` promotion.

    codes float64 [M, K] and weight float64 [K, N] (C-contiguous is fastest) hold decoded E4M3 values without scales;
    a_scale float32 [M, ceil(K/128)], w_scale float32 [ceil(N/block_n), ceil(K/128)]. Per block of K: the exact product,
    rounded to float32, times a_scale, times w_scale, added in float32 in ascending k (DeepSeek-V3 inference/kernel.py
    `fp8_gemm`). A row's bits do not depend on the other rows. Shapes are the caller's to get right: `gemm` checks them.
    """
    num_rows, num_columns = codes.shape[0], weight.shape[1]
    out = np.empty((num_rows, num_columns), np.float32)
    for columns in panels(num_columns, _PRODUCT_PANEL):
        scale = np.ascontiguousarray(w_scale[np.arange(columns.start, columns.stop) // block_n].T)  # [Kb, n]
        for rows in panels(num_rows, _ROW_PANEL):
            _exact_panel(codes[rows], a_scale[rows], weight[:, columns], scale, block_k, out[rows, columns])
    return out


def panels(size: int, step: int):
    """The slices that cut `size` into pieces of `step`, the last one shorter."""
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _exact_panel(codes, a_scale, weight, w_scale, block_k, out) -> None:
    """Write the scaled and added block products of one panel to `out` [m, n]; nothing is allocated per block."""
    product = np.empty((codes.shape[0], weight.shape[1]), np.float64)
    partial = np.empty(product.shape, np.float32)
    total = np.zeros(product.shape, np.float32)
    for index in range(a_scale.shape[1]):
        k = slice(index * block_k, (index + 1) * block_k)
        np.matmul(codes[:, k], weight[k], out=product)
        np.copyto(partial, product, casting="same_kind")
        partial *= a_scale[:, index, None]
        partial *= w_scale[index]
        total += partial
    out[...] = total


def gemm(
    a: BlockScaled,
    b: BlockScaled,
    accumulator: str = "exact",
    promotion: str = "mul_add",
    out_dtype=ml_dtypes.bfloat16,
    scale_order: str = "a_then_b",
    shift: str = "truncate",
) -> np.ndarray:
    """D [M, N] = A B^T, bfloat16 or float32: a [M, K] in blocks 1 x k, b [N, K] in blocks n x k (128 x 128, 1 x 128).

    accumulator: "exact"; "hopper" (WGMMA steps of 32, 13 fraction bits); "blackwell" (25 bits, scales, which must be
    powers of two, inside the instruction, no promotion); "float32_sequential" (one rounded addition per product, k
    ascending). promotion, scale_order: see `GemmRule`; `KERNELS` names those of known kernels. shift: "truncate" or
    "sign_fill", how a tensor core cuts negative terms. A block as long as K means that nothing is promoted on the way.
    Raises ValueError where the operands do not fit each other, or a rule is unknown or impossible for them.
    """
    rule = GemmRule(accumulator, promotion, scale_order)
    check_operands(a, b, rule, shift, out_dtype)
    if rule == REFERENCE and a.codes.dtype == b.codes.dtype == E4M3.dtype and a.block[1] <= E4M3_PRODUCTS:
        out = _gemm_exact(a, b)
    else:
        out = _gemm_by_rule(a, b, rule, shift)
    out[np.isnan(out)] = np.nan  # one NaN: its sign and payload depend on the machine
    return to_bfloat16(out) if np.dtype(out_dtype) == ml_dtypes.bfloat16 else out


def _gemm_exact(a: BlockScaled, b: BlockScaled) -> np.ndarray:
    """The default rule on E4M3. b is decoded a block of k at a time, which stays in cache while all rows use it."""
    out = np.zeros((a.shape[0], b.shape[0]), np.float32)
    a_values, block_k = decode(a.codes, np.float64), a.block[1]
    for columns in panels(b.shape[0], _COLUMN_PANEL):
        scale = np.ascontiguousarray(b.scale[np.arange(columns.start, columns.stop) // b.block[0]].T)  # [Kb, n]
        values = np.empty((columns.stop - columns.start) * block_k, np.float64)
        for index, k in enumerate(panels(b.shape[1], block_k)):
            codes = np.ascontiguousarray(b.codes[columns, k])  # [n, k]
            weight = decode(codes, np.float64, out=values[: codes.size].reshape(codes.shape))
            for rows in panels(a.shape[0], _ROW_PANEL):
                partial = np.matmul(a_values[rows, k], weight.T).astype(np.float32)
                partial *= a.scale[rows, index, None]
                partial *= scale[index]
                out[rows, columns] += partial
    return out


def _gemm_by_rule(a: BlockScaled, b: BlockScaled, rule: GemmRule, shift: str) -> np.ndarray:
    out = np.empty((a.shape[0], b.shape[0]), np.float32)
    for columns in panels(b.shape[0], _COLUMN_PANEL):
        b_scale = b.scale[np.arange(columns.start, columns.stop) // b.block[0]]  # [n, Kb]
        for rows in panels(a.shape[0], _ROW_PANEL):
            a_codes, b_codes, a_scale = a.codes[rows], b.codes[columns], a.scale[rows]
            if rule.accumulator == "blackwell":
                out[rows, columns] = _blackwell(a_codes, b_codes, a_scale, b_scale, a.block[1], shift)
                continue
            total = np.zeros((a_codes.shape[0], b_codes.shape[0]), np.float32)
            partials = block_partials(a_codes, b_codes, a.block[1], rule.accumulator, shift)
            for index, partial in enumerate(partials):
                total = promote(total, partial, a_scale[:, index, None], b_scale[:, index], rule)
            out[rows, columns] = total
    return out


def block_partials(a_codes, b_codes, block_k: int, accumulator: str, shift: str = "truncate"):
    """Yield float32 [M, N] for each block of K in ascending order: the unscaled sum as the accumulator gives it."""
    if accumulator == "exact":
        operands = exact_operands(a_codes, b_codes, min(block_k, max(a_codes.shape[1], 1)))
        yield from (exact_partial(operands, k) for k in panels(a_codes.shape[1], block_k))
    elif accumulator == "hopper":
        a, b = load_operand(a_codes, UNITS["hopper"]), load_operand(b_codes, UNITS["hopper"])
        for k in panels(a_codes.shape[1], block_k):
            total = None
            for start in range(k.start, k.stop, STEP):
                stop = min(start + STEP, k.stop)
                total = fused_sum(a.part(start, stop), b.part(start, stop), total, UNITS["hopper"], shift)
            yield total
    else:
        a, b = (np.ascontiguousarray(decode(codes, np.float32).T) for codes in (a_codes, b_codes))
        for k in panels(a_codes.shape[1], block_k):
            yield _sequential_sum(a[k], b[k])


def _sequential_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [m, n] from a [k, m] and b [k, n]: products (exact in float32) added one after the other."""
    total, term = (np.zeros((a.shape[1], b.shape[1]), np.float32) for _ in range(2))
    with np.errstate(invalid="ignore"):
        for a_row, b_row in zip(a, b):
            np.multiply(a_row[:, None], b_row, out=term)
            total += term
    return total


def promote(total, partial, a_scale, b_scale, rule: GemmRule) -> np.ndarray:
    """float32: total plus the scaled partial sum, by the rule's scale order and promotion (scales broadcast)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if rule.scale_order == "scales_first":
            first, last = partial, a_scale * b_scale
        elif rule.scale_order == "a_then_b":
            first, last = partial * a_scale, b_scale
        else:
            first, last = partial * b_scale, a_scale
        return fma32(first, last, total) if rule.promotion == "fma" else total + first * last


def _blackwell(a_codes, b_codes, a_scale, b_scale, block_k: int, shift: str) -> np.ndarray:
    """float32 [m, n]: one chain of instructions over all of K, each with the scales of its block inside."""
    unit = UNITS["blackwell"]
    a, b = load_operand(a_codes, unit), load_operand(b_codes, unit)
    total = np.zeros((a_codes.shape[0], b_codes.shape[0]), np.float32)
    for index, k in enumerate(panels(a_codes.shape[1], block_k)):
        scale = scale_exponents(a_scale[:, index], b_scale[:, index])
        for start in range(k.start, k.stop, STEP):
            stop = min(start + STEP, k.stop)
            total = fused_sum(a.part(start, stop), b.part(start, stop), total, unit, shift, scale)
    return total


def check_operands(a: BlockScaled, b: BlockScaled, rule: GemmRule, shift: str, out_dtype) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} must be matrices [M, K] and [N, K] with the same K")
    if a.block[0] != 1 or a.block[1] != b.block[1]:
        raise ValueError(f"a in blocks of {a.block} and b of {b.block}: (1, k) for a and the same k for b are needed")
    known = (ACCUMULATORS, PROMOTIONS, SCALE_ORDERS, tuple(SHIFTS), ("bfloat16", "float32"))
    names = ("accumulator", "promotion", "scale_order", "shift", "out_dtype")
    for name, value, allowed in zip(names, (*rule, shift, np.dtype(out_dtype).name), known):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r} is not one of {allowed}")
    for operand in (a, b):
        if not format_of(operand.codes.dtype).signed:
            raise ValueError(f"{operand.codes.dtype} is a format for scales, not for operands")

"""Products of block-scaled matrices: D = A B^T with one scale pair per 128 of K.

A sum of 128 products of E4M3 values is exact in float64: every product is a whole multiple of 2^-18 and at most 448^2,
so 128 of them need 43 bits of the 53. The block product is then the same on every machine, in any order, for any number
of rows. It is rounded to float32, scaled and added in ascending k, as float32 operations: that is the definition.
"""

import ml_dtypes
import numpy as np

from fp8.blockscaled import BlockScaled
from fp8.codec import decode
from fp8.formats import E4M3
from fp8.rounding import to_bfloat16

_ROW_PANEL, _COLUMN_PANEL = 128, 512  # a panel's float64 product and float32 sums fit a core's second-level cache


def _column_scales(scale: np.ndarray, block_n: int, columns: slice) -> np.ndarray:
    """float32 [Kb, n]: for each block of k, the scale of each column of the panel."""
    index = np.arange(columns.start, columns.stop) // block_n
    return np.ascontiguousarray(scale[index].T)


def block_product(codes, a_scale, weight, w_scale, block_n: int = 128, block_k: int = 128) -> np.ndarray:
    """float32 [M, N]: blockwise FP8 product of decoded operands, `exact` accumulation, `mul_add` promotion.

    codes float64 [M, K] and weight float64 [K, N] (C-contiguous is fastest) hold decoded E4M3 values without scales;
    a_scale float32 [M, ceil(K/128)], w_scale float32 [ceil(N/block_n), ceil(K/128)]. Per block of K: the exact product,
    rounded to float32, times a_scale, times w_scale, added in float32 in ascending k (DeepSeek-V3 inference/kernel.py
    `fp8_gemm`). A row's bits do not depend on the other rows. Shapes are the caller's to get right: `gemm` checks them.
    """
    num_rows, num_columns = codes.shape[0], weight.shape[1]
    out = np.zeros((num_rows, num_columns), np.float32)
    for start in range(0, num_columns, _COLUMN_PANEL):
        columns = slice(start, min(start + _COLUMN_PANEL, num_columns))
        scales = _column_scales(w_scale, block_n, columns)
        for top in range(0, num_rows, _ROW_PANEL):
            rows = slice(top, min(top + _ROW_PANEL, num_rows))
            _panel(codes[rows], a_scale[rows], weight[:, columns], scales, block_k, out[rows, columns])
    return out


def _panel(codes, a_scale, weight, w_scale, block_k, out) -> None:
    """Add the scaled block products of one panel to `out` [m, n]."""
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
) -> np.ndarray:
    """D [M, N] = A B^T of a [M, K] in 1 x 128 blocks and b [N, K] in 128 x 128 or 1 x 128 blocks.

    Raises ValueError where the operands do not fit each other.
    """
    _check(a, b, out_dtype)
    if accumulator != "exact" or promotion != "mul_add":
        raise ValueError(f"accumulator {accumulator!r} with promotion {promotion!r} is unknown")
    out = np.empty((a.shape[0], b.shape[0]), np.float32)
    a_values = decode(a.codes, np.float64)
    step = max(1, _COLUMN_PANEL // b.block[0]) * b.block[0]
    for start in range(0, b.shape[0], step):
        columns = slice(start, min(start + step, b.shape[0]))
        weight = decode(b.codes[columns], np.float64).T
        scale = b.scale[start // b.block[0] :]
        out[:, columns] = block_product(a_values, a.scale, weight, scale, b.block[0], a.block[1])
    return to_bfloat16(out) if np.dtype(out_dtype) == ml_dtypes.bfloat16 else out


def _check(a: BlockScaled, b: BlockScaled, out_dtype) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} must be matrices [M, K] and [N, K] with the same K")
    if a.block[0] != 1 or a.block[1] != b.block[1]:
        raise ValueError(f"a in blocks of {a.block} and b of {b.block}: (1, k) for a and the same k for b are needed")
    if a.codes.dtype != E4M3.dtype or b.codes.dtype != E4M3.dtype:
        raise ValueError(f"{a.codes.dtype} x {b.codes.dtype} is not exact in float64; both must be {E4M3.dtype}")
    if np.dtype(out_dtype) not in (ml_dtypes.bfloat16, np.float32):
        raise ValueError(f"out_dtype = {np.dtype(out_dtype)}: bfloat16 or float32")

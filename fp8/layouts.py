"""How kernels want scales in memory: column-major with padded columns, four exponents in an int32, transposed.

The arrays here hold the same scales as `BlockScaled.scale` [M, Kb]; only their order, padding and packing differ.
Source: DeepGEMM csrc/utils/layout.hpp and deep_gemm/utils/math.py; TransformerEngine Float8BlockScaling.
"""

import numpy as np

from fp8.scales import require_powers_of_two

_TMA_BYTES = 16  # a TMA load wants the stride between columns to be a multiple of this


def tma_aligned_rows(num_rows: int, itemsize: int = 4) -> int:
    """`num_rows` rounded up so that a column of elements of `itemsize` bytes is a multiple of 16 bytes long."""
    step = _TMA_BYTES // itemsize
    return -(-num_rows // step) * step


def column_major_aligned(scale) -> np.ndarray:
    """`scale` [..., M, Kb] (4-byte elements) with strides (1, roundup(M, 4)) elements: DeepGEMM's layout for A.

    The result compares equal to `scale`; the padding between columns is zero, never uninitialised
    (vllm-project/vllm#49783). Raises ValueError for other element sizes.
    """
    scale = np.asarray(scale)
    if scale.ndim < 2 or scale.dtype.itemsize != 4:
        raise ValueError(f"scale {scale.dtype} {scale.shape}: [..., M, Kb] of float32 or packed int32 is needed")
    num_rows, num_blocks = scale.shape[-2:]
    columns = np.zeros((*scale.shape[:-2], num_blocks, tma_aligned_rows(num_rows)), scale.dtype)
    columns[..., :num_rows] = scale.swapaxes(-1, -2)
    return columns.swapaxes(-1, -2)[..., :num_rows, :]


def pack_ue8m0(scale) -> np.ndarray:
    """float32 scales [..., M, Kb], powers of two, as int32 [..., M, ceil(Kb/4)]: byte j of a word is block 4i + j.

    A byte is the exponent plus 127; bytes beyond Kb are 0. Only the exponent is kept, so anything else than a power of
    two is refused: raises ValueError with the count (sgl-project/sglang#39193, vllm-project/vllm#22399).
    """
    scale = np.asarray(scale)
    require_powers_of_two(scale, "the packed layout")
    num_blocks = scale.shape[-1]
    exponent = np.zeros((*scale.shape[:-1], -(-num_blocks // 4) * 4), np.uint8)
    exponent[..., :num_blocks] = np.frexp(scale)[1] - 1 + 127
    return exponent.view("<i4").astype(np.int32, copy=False)


def unpack_ue8m0(packed, num_blocks: int | None = None) -> np.ndarray:
    """The float32 scales [..., M, num_blocks] of `pack_ue8m0`; without `num_blocks` the padding is unpacked too.

    Byte 0 is 2^-127 and 255 is NaN, as in E8M0. Raises ValueError if the words do not hold `num_blocks`.
    """
    packed = np.asarray(packed)
    if packed.dtype != np.int32 or packed.ndim < 1:
        raise ValueError(f"packed scales are int32 [..., ceil(Kb/4)], not {packed.dtype} {packed.shape}")
    held = packed.shape[-1] * 4
    num_blocks = held if num_blocks is None else num_blocks
    if not held - 4 < num_blocks <= held:
        raise ValueError(f"{packed.shape[-1]} words hold {held - 3} to {held} blocks, not {num_blocks}")
    exponent = np.ascontiguousarray(packed.astype("<i4", copy=False)).view(np.uint8)[..., :num_blocks]
    scale = np.ldexp(np.float32(1.0), np.minimum(exponent, 254).astype(np.int32) - 127)
    return np.where(exponent == 255, np.float32(np.nan), scale)


def scale_per_row(scale, num_rows: int, block_rows: int = 128) -> np.ndarray:
    """Scales [Nb, Kb] of blocks `block_rows` high, repeated for each of `num_rows` rows: [N, Kb].

    DeepGEMM on SM100 wants weights' scales this way before packing. Raises ValueError if the rows do not fit.
    """
    scale = np.asarray(scale)
    if -(-num_rows // block_rows) != scale.shape[-2]:
        raise ValueError(f"{scale.shape[-2]} rows of scales do not cover {num_rows} rows in blocks of {block_rows}")
    return np.repeat(scale, block_rows, axis=-2)[..., :num_rows, :]


def transposed_padded(scale) -> np.ndarray:
    """Scales [M, Kb] of 1 x 128 blocks as [Kb, roundup(M, 4)], zero-padded: TransformerEngine and cuBLAS."""
    scale = np.asarray(scale)
    out = np.zeros((scale.shape[1], -(-scale.shape[0] // 4) * 4), scale.dtype)
    out[:, : scale.shape[0]] = scale.T
    return out


def inner_padded(scale) -> np.ndarray:
    """Scales [Nb, Kb] of 128 x 128 blocks as [Nb, roundup(Kb, 4)], zero-padded: TransformerEngine and cuBLAS."""
    scale = np.asarray(scale)
    out = np.zeros((scale.shape[0], -(-scale.shape[1] // 4) * 4), scale.dtype)
    out[:, : scale.shape[1]] = scale
    return out

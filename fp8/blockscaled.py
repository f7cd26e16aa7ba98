"""A matrix stored as 8-bit codes with one scale per block, and the quantiser that makes it."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fp8.codec import decode, encode_into, encode_table
from fp8.formats import E4M3, format_of
from fp8.recipes import Recipe, block_scaling, find_recipe
from fp8.rounding import to_bfloat16

_SLAB = 1 << 15  # elements quantised at a time, so that temporaries stay in a core's cache

_BFLOAT16_MAX = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def num_blocks(size: int, block: int) -> int:
    """How many blocks cover `size`; the last one may be partial."""
    return -(-size // block)


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """codes [..., M, K] (an ml_dtypes 8-bit dtype), scale float32 [..., ceil(M/bm), ceil(K/bk)], block = (bm, bk).

    The value of an element is code * scale of its block (the checkpoints' `weight_scale_inv` is this multiplier).
    Raises ValueError if shapes and dtypes do not fit; the block is never guessed from shapes
    (NVIDIA/TensorRT-Model-Connect#1115).
    """

    codes: np.ndarray
    scale: np.ndarray
    block: tuple[int, int] = (1, 128)

    def __post_init__(self):
        format_of(self.codes.dtype)
        if self.codes.ndim < 2:
            raise ValueError(f"codes of shape {self.codes.shape}: at least two axes [..., M, K] are needed")
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"block = {self.block}: two positive sizes (rows, columns) are needed")
        if self.scale.dtype != np.float32:
            raise ValueError(f"scale is {self.scale.dtype}; it must be float32 (unpacked, also for powers of two)")
        rows, columns = (num_blocks(size, block) for size, block in zip(self.codes.shape[-2:], self.block))
        expected = (*self.codes.shape[:-2], rows, columns)
        if self.scale.shape != expected:
            raise ValueError(
                f"scale of shape {self.scale.shape} does not fit codes {self.codes.shape} in blocks of {self.block}: "
                f"{expected} is needed"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, index) -> "BlockScaled":
        """One matrix of a stack [G, M, K], or some of them; a single matrix cannot be cut, its blocks would shift."""
        if self.codes.ndim == 2:
            raise ValueError("a single matrix has no stack axis to index; use rows(...) for a 1 x K block")
        return BlockScaled(self.codes[index], self.scale[index], self.block)

    def rows(self, index) -> "BlockScaled":
        """The rows `index` (slice or index array) of a matrix [M, K] whose blocks are one row high."""
        if self.codes.ndim != 2 or self.block[0] != 1:
            raise ValueError(f"rows() needs a matrix in blocks of one row, not shape {self.shape} in {self.block}")
        return BlockScaled(self.codes[index], self.scale[index], self.block)

    def dequantize(self, dtype=np.float32) -> np.ndarray:
        """code * scale [..., M, K] as float64 (exact), or rounded once to float32 or bfloat16."""
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, np.float64, ml_dtypes.bfloat16):
            raise ValueError(f"dequantize gives float64, float32 or bfloat16, not {dtype}")
        out = np.empty(self.codes.shape, dtype)
        if self.codes.ndim > 2:
            for index in range(self.codes.shape[0]):
                out[index] = self[index].dequantize(dtype)
            return out
        slab = max(1, _SLAB // (self.block[0] * max(self.codes.shape[1], 1)))  # block rows at a time
        for first in range(0, self.scale.shape[0], slab):
            rows = slice(first * self.block[0], (first + slab) * self.block[0])
            value = self._scaled_rows(rows, self.scale[first : first + slab], dtype)
            out[rows] = to_bfloat16(value) if dtype == ml_dtypes.bfloat16 else value
        return out

    def _scaled_rows(self, rows: slice, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """code * scale of some block rows: in float32 for float32, else in float64, where it is exact."""
        compute = np.float32 if dtype == np.float32 else np.float64
        value = decode(self.codes[rows], compute)
        scale = np.repeat(scale.astype(compute), self.block[0], axis=0)[: value.shape[0]]
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            if value.shape[1] == scale.shape[1] * self.block[1]:
                blocks = value.reshape(*scale.shape, self.block[1])
                blocks *= scale[:, :, None]
            else:
                value *= np.repeat(scale, self.block[1], axis=1)[:, : value.shape[1]]
        return value


def quantize(
    x,
    block: tuple[int, int] = (1, 128),
    recipe: str | Recipe = "deepseek_v3",
    scale_format: str | None = None,
) -> BlockScaled:
    """`x` [..., M, K] (bfloat16, float32 or float64) as E4M3 codes with a scale per block, by a library's recipe.

    The recipes are defined on float32: float64 is rounded to it once, first. The last block of a row or column may be
    partial; only real values count for its scale. scale_format: "float32" or "ue8m0" (a power of two, rounded up before
    the values are scaled); None is the recipe's own default. A block that holds an infinity or NaN dequantises to NaN
    as a whole, save where the recipe says otherwise. Raises ValueError for other dtypes, shapes, blocks or names.
    """
    x, recipe = np.asarray(x), find_recipe(recipe)
    scale_format = recipe.scale_formats[0] if scale_format is None else scale_format
    if x.ndim < 2 or x.dtype not in (np.float32, np.float64, ml_dtypes.bfloat16):
        raise ValueError(f"quantize takes [..., M, K] of bfloat16, float32 or float64, not {x.dtype} {x.shape}")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"block = {block}: two positive sizes (rows, columns) are needed")
    rows, columns = x.shape[-2:]
    grid = (num_blocks(rows, block[0]), num_blocks(columns, block[1]))
    codes = np.empty(x.shape, np.uint8)
    scale = np.empty((*x.shape[:-2], *grid), np.float32)
    if not x.size:
        block_scaling(np.zeros(0, np.float32), recipe, scale_format)  # a wrong scale_format is an error here too
        return BlockScaled(codes.view(E4M3.dtype), scale, tuple(block))
    matrices = zip(x.reshape(-1, rows, columns), codes.reshape(-1, rows, columns), scale.reshape(-1, *grid))
    for matrix, matrix_codes, matrix_scale in matrices:
        _quantize_matrix(matrix, block, recipe, scale_format, matrix_codes, matrix_scale)
    return BlockScaled(codes.view(E4M3.dtype), scale, tuple(block))


def _quantize_matrix(x, block, recipe, scale_format, codes, scale) -> None:
    """Fill codes [M, K] and scale [Mb, Kb] of one matrix, a slab of whole block rows at a time."""
    num_rows, num_columns = x.shape
    table = encode_table(E4M3, recipe.overflow)
    largest = _BFLOAT16_MAX if x.dtype == ml_dtypes.bfloat16 else np.finfo(np.float32).max
    padded = scale.shape[1] * block[1]
    slab_blocks = max(1, _SLAB // (block[0] * padded))
    for first in range(0, scale.shape[0], slab_blocks):
        rows = slice(first * block[0], min((first + slab_blocks) * block[0], num_rows))
        slab = np.zeros((num_blocks(rows.stop - rows.start, block[0]) * block[0], padded), np.float32)
        with np.errstate(over="ignore"):
            slab[: rows.stop - rows.start, :num_columns] = x[rows]
        blocks = slab.reshape(-1, block[0], scale.shape[1], block[1])
        amax = np.abs(blocks).max(axis=3).max(axis=1)  # [blocks, Kb]
        scaling = block_scaling(amax, recipe, scale_format, largest)
        scale[first : first + slab_blocks] = scaling.scale
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            operation = np.divide if scaling.divide else np.multiply
            operation(blocks, scaling.factor[:, None, :, None], out=blocks)
        slab_codes = np.empty(slab.size, np.uint8)
        encode_into(slab.reshape(-1), table, slab_codes)
        codes[rows] = slab_codes.reshape(slab.shape)[: rows.stop - rows.start, :num_columns]

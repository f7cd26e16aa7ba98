"""The one matrix product over token rows: a row's bits do not depend on the rows beside it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fp8 import BlockScaled, decode, gemm
from fp8.gemm import block_product
from refmodel.memory import aligned_empty, side_by_side
from refmodel.products import PANEL_INPUTS, multiply_tiles, panel_columns, tiles_of
from refmodel.rowcounts import MOST_ROWS, RowCounts, row_counts
from refmodel.threads import MULTIPLY_ADD, each, thread_count

# rows of a product that one of several threads computes at a time
_PIECE = 256

_ROWS = np.arange(MOST_ROWS)
#: output columns are padded with zeros to a multiple of this when weights are loaded
COLUMN_MULTIPLE = 16


@dataclass(frozen=True)
class DenseWeight:
    """A weight as `linear` multiplies with it: C-contiguous, in the compute dtype.

    matrix [K, N padded], or in panels of columns [N / 64, K, 64] (`in_panels`; 32 in float64).
    """

    matrix: np.ndarray
    out_features: int

    @property
    def in_features(self) -> int:
        return self.matrix.shape[-2]

    @cached_property
    def counts(self) -> RowCounts:
        """How many rows at a time this weight may be multiplied with."""
        return row_counts(self.matrix, panel=self.matrix.ndim > 2)

    @cached_property
    def tiles(self) -> np.ndarray:
        """A copy for products of few rows, made when the first one comes (`refmodel.products.tiles_of`)."""
        return side_by_side(tiles_of(self.matrix))

    @classmethod
    def from_rows(cls, weight: np.ndarray) -> "DenseWeight":
        """From a checkpoint's [N, K] layout; float64 or float32."""
        N, K = weight.shape
        matrix = aligned_empty((K, -(-N // COLUMN_MULTIPLE) * COLUMN_MULTIPLE), weight.dtype)
        matrix[:, :N], matrix[:, N:] = weight.T, 0
        matrix.flags.writeable = False
        return cls(matrix, N)

    def in_panels(self) -> "DenseWeight":
        """The weight in panels of columns, where it has few inputs and whole panels; else the weight itself.

        A product of few rows reads each panel in one go, through OpenBLAS's kernel for small products. Which layout a
        weight has may decide the last bits of a result: experts always take this one.
        """
        (K, N), columns = self.matrix.shape, panel_columns(self.matrix.dtype)
        if K > PANEL_INPUTS or N % columns:
            return self
        panels = aligned_empty((N // columns, K, columns), self.matrix.dtype)
        panels[...] = self.matrix.reshape(K, -1, columns).swapaxes(0, 1)
        panels.flags.writeable = False
        return DenseWeight(panels, self.out_features)


@dataclass(frozen=True)
class Fp8Weight:
    """A blockwise FP8 weight: parts [N_i, K] with their own 128 x 128 grids, side by side along N.

    Decoded once: codes as exact float64 [K, N], and one float32 scale per column and K block [N, K/128]. Not decoded
    (a model larger than the budget): a product decodes a panel at a time. Both give the same bits, for both are exact.
    """

    parts: tuple[BlockScaled, ...]
    matrix: np.ndarray | None = None
    column_scale: np.ndarray | None = None

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]

    @classmethod
    def from_parts(cls, parts: list[BlockScaled], decoded: bool = True) -> "Fp8Weight":
        """From weights [N_i, K] as a checkpoint stores them."""
        if not decoded:
            return cls(tuple(parts))
        matrix = np.ascontiguousarray(np.concatenate([decode(part.codes, np.float64) for part in parts]).T)  # [K, N]
        scale = np.concatenate([_per_row(part) for part in parts])  # [N, K/128]
        matrix.flags.writeable = scale.flags.writeable = False
        return cls(tuple(parts), matrix, scale)

    def product(self, x: BlockScaled) -> np.ndarray:
        """x [T, K] in blocks of (1, 128) -> float32 [T, N]."""
        if self.matrix is not None:
            return block_product(decode(x.codes, np.float64), x.scale, self.matrix, self.column_scale, block_n=1)
        return np.concatenate([gemm(x, part, out_dtype=np.float32) for part in self.parts], axis=1)


def _per_row(weight):
    rows = weight.codes.shape[0]
    return np.repeat(weight.scale, weight.block[0], axis=0)[:rows]  # [N, K/128]


def linear(x, weight: DenseWeight | Fp8Weight) -> np.ndarray:
    """x @ weight, unrounded: [T, K] -> [T, N].

    DenseWeight takes an array in the weight's dtype. Fp8Weight takes rows quantised in blocks of (1, 128) and returns
    float32: each 128-block summed exactly, scaled and added in ascending order (`fp8.gemm`, accumulator `exact`).
    Raises ValueError when the widths or dtypes do not fit.
    """
    if isinstance(weight, Fp8Weight):
        if not isinstance(x, BlockScaled) or x.codes.shape[1] != weight.in_features:
            raise ValueError(
                f"linear: an FP8 weight of {weight.in_features} inputs takes BlockScaled rows of that width"
            )
        return weight.product(x)
    _check_fit(x, weight)
    if weight.matrix.ndim > 2:
        return grouped_linear(x, [weight], [slice(0, len(x))])
    T, counts = len(x), weight.counts
    count = counts.in_tiles(T)
    if count:
        product = multiply_tiles(_pad_rows(x, count), weight.tiles, T)
    else:
        product = matmul_rows(x, weight.matrix, counts)
    return product if product.shape[1] == weight.out_features else product[:, : weight.out_features]


def _check_fit(x, weight):
    matrix = weight.matrix
    if x.ndim != 2 or x.shape[1] != matrix.shape[-2] or x.dtype != matrix.dtype:
        raise ValueError(
            f"linear: x {x.dtype} {x.shape} does not fit a {matrix.dtype} weight of {weight.in_features} inputs"
        )


def grouped_linear(x, weights: list, cuts: list[slice], out: np.ndarray | None = None) -> np.ndarray:
    """Each weight times its own rows: [n, N], the rows of a cut being linear(x[cut], its weight), unrounded.

    The weights are of one shape, layout and dtype. `cuts` ascend and cover the n rows of x. `out` [n, N], if given,
    is C-contiguous and gets the result. Raises ValueError as `linear` does.
    """
    if isinstance(weights[0], Fp8Weight):
        return np.concatenate([linear(x.rows(cut), weight) for cut, weight in zip(cuts, weights)], out=out)
    _check_fit(x, weights[0])
    n, N, counts, matrix = cuts[-1].stop, weights[0].out_features, weights[0].counts, weights[0].matrix
    padded = matrix.size // matrix.shape[-2]
    result = np.empty((n, padded), x.dtype) if out is None or padded > N else out
    if matrix.ndim == 2:
        places, multiply = result, counts.multiply
    else:  # a call of panels is always one product
        places, multiply = result.reshape(n, *matrix.shape[::2]).swapaxes(0, 1), np.matmul  # [N / 64, n, 64]
    for weight, cut in zip(weights, cuts):
        for first, count in counts.plan(cut.stop - cut.start):
            start, stop = cut.start + first, cut.start + first + count
            if stop <= n:  # rows of the next weight that are taken in here get their values from it
                multiply(x[start:stop], weight.matrix, out=places[..., start:stop, :])
            else:
                product = multiply(_pad_rows(x[start:n], count), weight.matrix)
                places[..., start:n, :] = product[..., : n - start, :]
    if out is None or result is out:
        return result[:, :N]
    out[...] = result[:, :N]
    return out


def matmul_rows(x: np.ndarray, matrix: np.ndarray, counts: RowCounts | None = None) -> np.ndarray:
    """x [..., T, K] @ matrix [..., K, N], with only the row counts that keep rows independent of each other.

    Leading axes (heads, key blocks) are separate products of one shape and broadcast as in np.matmul.
    `matrix` is C-contiguous in its last two axes, or a transposed view of such.
    """
    counts = row_counts(matrix) if counts is None else counts
    T = x.shape[-2]
    calls = counts.plan(T)
    if len(calls) == 1 and T <= _PIECE:  # in decode most: matmul finds the shape of its result in less time than we do
        count = calls[0][1]
        return counts.multiply(x, matrix) if count == T else counts.multiply(_pad_rows(x, count), matrix)[..., :T, :]
    K, N = matrix.shape[-2:]
    spread = matrix.ndim == 2 and T > _PIECE and thread_count() > 1
    calls = counts.plan(T, _PIECE) if spread else calls
    lead = x.shape[:-2] if matrix.ndim == 2 else np.broadcast_shapes(x.shape[:-2], matrix.shape[:-2])
    out = np.empty((*lead, sum(count for _, count in calls), N), x.dtype)  # the last call may reach past the end
    each(lambda call: _multiply_call(x, *call, matrix, counts, out), calls, T * K * N * MULTIPLY_ADD if spread else 0)
    return out[..., :T, :]


def _multiply_call(x, first, count, matrix, counts, out):
    """One call of a plan: `count` rows of out from row `first` on, of which x may lack the last ones."""
    rows = slice(first, first + count)
    counts.multiply(_pad_rows(x[..., rows, :], count), matrix, out=out[..., rows, :])


def _pad_rows(x, count):
    """x [..., T, K] with rows behind it that nobody will read: [..., count, K]; x itself where it has as many."""
    if x.shape[-2] == count:
        return x
    return x.take(_ROWS[:count], axis=-2, mode="clip")  # the last row again and again

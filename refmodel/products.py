"""How rows are multiplied by a matrix in one call of a plan: K at once, in steps, in panels of columns, or by tiles.

OpenBLAS has a kernel of its own for small products, which reads weights as they lie (the large one packs them first)
but adds K in one go where the large one stops every few hundred. With K in steps below that both give the same bits.
"""

import numpy as np

K_STEP = 256
#: multiply-adds up to which OpenBLAS takes its kernel for small products
SMALL_PRODUCT = 10**6
#: rows up to which it pays to cut a larger product into panels of columns, and rows that pay for tiles
FEW, FEW_IN_TILES = 24, 56
#: inputs of a weight up to which a panel of it meets FEW rows in a small product
PANEL_INPUTS = 512
_PANEL_BYTES = 256  # of a panel's row


def panel_columns(dtype: np.dtype) -> int:
    """Columns of a panel: four cache lines."""
    return _PANEL_BYTES // dtype.itemsize


def multiply(rows: np.ndarray, matrix: np.ndarray, step: int, out: np.ndarray | None = None) -> np.ndarray:
    """rows [..., count, K] @ matrix [..., K, N], the products of K steps added in ascending order.

    Few rows take a large matrix in panels of columns, each of them a small product.
    """
    count, N = rows.shape[-2], matrix.shape[-1]
    if count > FEW or step > K_STEP or matrix.ndim > 2 or count * step * N <= SMALL_PRODUCT:
        return _in_steps(rows, matrix, step, out)
    panel = panel_columns(matrix.dtype)
    width = max(panel, SMALL_PRODUCT // (count * step) // panel * panel)
    out = np.empty((*rows.shape[:-1], N), rows.dtype) if out is None else out
    for start in range(0, N, width):
        columns = slice(start, start + width)
        _in_steps(rows, matrix[:, columns], step, out[..., columns])
    return out


def _in_steps(rows, matrix, step, out):
    K = matrix.shape[-2]
    if step >= K:
        return np.matmul(rows, matrix, out=out)
    out = np.matmul(rows[..., :step], matrix[..., :step, :], out=out)
    for start in range(step, K, step):
        part = slice(start, start + step)
        out += np.matmul(rows[..., part], matrix[..., part, :])
    return out


def tiles_of(matrix: np.ndarray) -> np.ndarray:
    """A copy of [K, N], K one step or some whole ones, in tiles [P, S, K / S, 64]: panels of columns (the last one
    filled with zeros), cut at the steps. Few rows read them as they lie, in one call."""
    (K, N), columns = matrix.shape, panel_columns(matrix.dtype)
    step, panels = min(K, K_STEP), -(-N // columns)
    padded = np.zeros((K, panels * columns), matrix.dtype)
    padded[:, :N] = matrix
    return np.ascontiguousarray(padded.reshape(K // step, step, panels, columns).transpose(2, 0, 1, 3))


def multiply_tiles(rows: np.ndarray, tiles: np.ndarray, wanted: int) -> np.ndarray:
    """The first `wanted` rows of rows [count, K] @ the matrix behind `tiles`: [wanted, N padded].

    Products of K steps are added in ascending order.
    """
    panels, steps, step, columns = tiles.shape
    parts = np.matmul(rows.reshape(-1, steps, step).swapaxes(0, 1), tiles)[:, :, :wanted]  # [P, S, wanted, 64]
    total = parts[:, 0]
    for s in range(1, steps):
        total = total + parts[:, s]
    return total.swapaxes(0, 1).reshape(wanted, panels * columns)

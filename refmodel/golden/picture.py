"""Small pictures of large errors: the worst error in each cell of a coarse grid over rows and columns."""

import numpy as np

from refmodel.golden.ulp import widen

ROWS, COLUMNS = 48, 96  # cells of a picture at most
_PIECE = 1 << 20  # elements that are widened at a time


def error_picture(reference: np.ndarray, actual: np.ndarray, rms: float) -> np.ndarray:
    """max |actual - reference| / rms in each cell, float64 [<= 48, <= 96]; inf where one side is not finite.

    Rows are all axes but the last taken together (tokens, or tokens and heads), columns are the last axis.
    """
    columns = max(reference.shape[-1] if reference.ndim else 1, 1)
    r, a = reference.reshape(-1, columns), actual.reshape(-1, columns)
    height, width = min(len(r), ROWS), min(columns, COLUMNS)
    edges = np.linspace(0, len(r), height + 1).astype(int)
    starts = np.linspace(0, columns, width + 1).astype(int)[:-1]
    picture = np.zeros((height, width))
    step = max(1, _PIECE // columns)
    for cell in range(height):
        for row in range(edges[cell], edges[cell + 1], step):
            stop = min(row + step, edges[cell + 1])
            worst = _errors(r[row:stop], a[row:stop]).max(axis=0)
            picture[cell] = np.maximum(picture[cell], np.maximum.reduceat(worst, starts))
    return picture / (rms or 1.0)


def _errors(r: np.ndarray, a: np.ndarray) -> np.ndarray:
    wide_r, wide_a = widen(np.ascontiguousarray(r)), widen(np.ascontiguousarray(a))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(wide_a - wide_r)
        same = (wide_r == wide_a) | (np.isnan(wide_r) & np.isnan(wide_a))
    error[same] = 0.0
    error[np.isnan(error)] = np.inf
    return error


LEVELS = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)


def levels(picture: np.ndarray) -> np.ndarray:
    """The level of each cell: 0 is no error, k an error up to LEVELS[k], the last one is above 1 or not finite."""
    return np.searchsorted(np.array(LEVELS[:-1]), picture, side="left").clip(0, len(LEVELS) - 1)

"""Sums in a fixed order with named rounding points: the arithmetic of every combine."""

import numpy as np

_BLOCK = 1 << 17  # accumulator elements that stay in a core's cache


def accumulator_dtype(storage: np.dtype) -> np.dtype:
    """float64 for float64 rows, float32 for all narrower ones."""
    return np.dtype(np.float64) if storage == np.float64 else np.dtype(np.float32)


def ordered_sum(
    rows: np.ndarray,
    index: np.ndarray,
    counts: np.ndarray,
    weights: np.ndarray | None = None,
    initial: np.ndarray | None = None,
    out_dtype: np.dtype | None = None,
) -> np.ndarray:
    """Sum groups of rows in a given order, rounding once at the end.

    Group g adds `counts[g]` rows: the terms of all groups stand one after the other in `index` [P], and each names a
    row of `rows` [M, D]. The sum starts at `initial` [G, D], or at +0.0, in float32 (float64 for float64 rows); a term
    is the row, or the row times its entry of `weights` [P], product and sum each rounded to the accumulator's dtype.
    Returns [G, D] in `out_dtype`, by default the dtype of `rows`. A group without terms is 0.0.
    """
    groups, width = len(counts), rows.shape[1]
    wide = accumulator_dtype(rows.dtype)
    if weights is not None:
        weights = weights.astype(wide, copy=False)[:, None]
    starts = np.cumsum(counts) - counts
    out = np.empty((groups, width), out_dtype or rows.dtype)
    block = max(1, _BLOCK // max(1, width))
    for first in range(0, groups, block):
        part = slice(first, min(first + block, groups))
        total = np.zeros((part.stop - first, width), wide) if initial is None else initial[part].astype(wide)
        _add_terms(total, rows, index, starts[part], counts[part], weights)
        out[part] = total.astype(out.dtype, copy=False)
    return out


def _add_terms(total, rows, index, starts, counts, weights) -> None:
    """Add the first term of every group, then the second of those that have one, and so on."""
    everywhere = int(counts.min(initial=counts.max(initial=0)))  # terms that no group lacks
    for depth in range(int(counts.max(initial=0))):
        groups = np.flatnonzero(counts > depth) if depth >= everywhere else slice(None)
        terms = starts[groups] + depth
        values = rows.take(index[terms], axis=0).astype(total.dtype, copy=False)  # a copy of our own already
        if weights is not None:
            values *= weights[terms]
        total[groups] += values

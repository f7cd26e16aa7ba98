"""Say in a few words what a difference looks like: scaled, permuted, shifted, some rows only."""

import numpy as np

from refmodel.golden.metrics import Difference
from refmodel.golden.ulp import widen

SAMPLE_ELEMENTS = 1 << 22  # patterns are looked for in the first rows; this is enough to see them
EXPLAINED = 0.1  # a pattern explains a difference if it leaves at most this part of it
COLUMN_BLOCK = 128


def _explains(expected: np.ndarray, actual: np.ndarray, error: float) -> bool:
    return expected.shape == actual.shape and float(np.linalg.norm(actual - expected)) <= EXPLAINED * error


def half_split_order(width: int) -> np.ndarray:
    """Where each element of an interleaved RoPE vector (pairs side by side) stands in half-split order:
    [0, 2, 4, ..., 1, 3, 5, ...]."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _scaled(difference: Difference) -> str | None:
    scale, left_over = difference.scale, difference.scale_residual
    if difference.norm_ratio == 0:
        return "all zeros"
    if scale is None or left_over is None or abs(scale - 1) < 1e-3:
        return None
    if left_over * difference.norm_ratio > EXPLAINED * difference.relative_error:
        return None
    return "the sign is flipped" if abs(scale + 1) < 0.01 else f"scaled by {scale:.4g}"


def _moved(r: np.ndarray, a: np.ndarray, error: float) -> str | None:
    """Columns or rows in another place; `r` and `a` are [rows, columns] in float64."""
    rows, columns = r.shape
    if columns > 2 and columns % 2 == 0:
        order = half_split_order(columns)
        if _explains(r[:, order], a, error):
            return "the last axis is in half-split order (RoPE pairs de-interleaved)"
        if _explains(r[:, np.argsort(order)], a, error):
            return "the last axis is in interleaved order (RoPE halves interleaved)"
    if rows > 2 and _explains(r[:-1], a[1:], float(np.linalg.norm((a - r)[1:]))):
        return "rows are shifted by one: row i holds what row i - 1 should"
    if rows > 2 and _explains(r[1:], a[:-1], float(np.linalg.norm((a - r)[:-1]))):
        return "rows are shifted by one: row i holds what row i + 1 should"
    if rows == columns and _explains(r.T, a, error):
        return "transposed"
    if rows > 1 and _explains(r[np.lexsort(r.T[::-1])], a[np.lexsort(a.T[::-1])], error):
        return "the same rows in another order"
    if columns > 1 and _explains(np.sort(r, axis=1), np.sort(a, axis=1), error):
        return "each row holds the same values in another order"
    return None


def _span(flags: np.ndarray, what: str) -> str | None:
    """Which of the rows or columns differ; None where it is none or more than half of them."""
    bad = np.flatnonzero(flags)
    if len(bad) == 0 or 2 * len(bad) > len(flags):
        return None
    first, last = int(bad[0]), int(bad[-1])
    if last - first + 1 != len(bad):
        return f"{len(bad)} of {len(flags)} {what} (the first is {first})"
    if first == last:
        return f"{what[:-1]} {first}"
    return f"{what} {first} to {'the last' if last == len(flags) - 1 else last}"


def _places(r: np.ndarray, a: np.ndarray, threshold: float) -> str | None:
    far = np.abs(a - r) > threshold
    rows, columns = far.any(axis=1), far.any(axis=0)
    spans = [s for s in (_span(rows, "rows"), _span(columns, "columns")) if s is not None]
    if len(columns) > COLUMN_BLOCK:
        blocks = np.logical_or.reduceat(columns, np.arange(0, len(columns), COLUMN_BLOCK))
        if (span := _span(blocks, "column blocks")) is not None:
            spans = [s for s in spans if not s.startswith("column")] + [f"{span} (of 128)"]
    return f"only {' and '.join(spans)} differ" if spans else None


def looks_like(reference: np.ndarray, actual: np.ndarray, difference: Difference) -> str | None:
    """One phrase about the pattern of a difference, or None where none is plain.

    Looks at the first 4 million elements. It is a hint for the eye, not a verdict.
    """
    if difference.unequal_nonfinite:
        side = "actual" if difference.nan_actual + difference.inf_actual else "reference"
        kind = "NaN" if difference.nan_actual + difference.nan_reference > 0 else "infinity"
        return f"{kind} on one side at {difference.unequal_nonfinite} elements (in the {side})"
    if difference.worst_ulp is not None and difference.worst_ulp.error <= 2:
        return f"off by at most {difference.worst_ulp.error} ulp"
    if (scaled := _scaled(difference)) is not None:
        return scaled
    columns = reference.shape[-1] if reference.ndim else 1
    rows = min(max(SAMPLE_ELEMENTS // max(columns, 1), 1), reference.size // max(columns, 1))
    if columns > SAMPLE_ELEMENTS:
        return None
    r = widen(np.ascontiguousarray(reference.reshape(-1, columns)[:rows]))
    a = widen(np.ascontiguousarray(actual.reshape(-1, columns)[:rows]))
    if not (np.isfinite(r).all() and np.isfinite(a).all()):
        return None
    error = float(np.linalg.norm(a - r))
    if error == 0:
        return None
    d = a - r
    if d.size > 2 and float(d.std()) <= EXPLAINED * abs(float(d.mean())):
        return f"shifted by a constant {d.mean():.4g}"
    moved = _moved(r, a, error)
    return moved or _places(r, a, EXPLAINED * float(np.abs(d).max()))

"""Holding a kernel's result to a reference: by element against a bound, by row, and as a whole.

One normalised error over a whole tensor hides damage: a kernel that zeroes 18 % of equal rows scores 0.099, and a
factor of 1.1 on everything 0.0045 (ROCm/aiter#5032). So the worst row, the rows beyond the limit and a common factor
are told too, and rows that the reference calls undefined are left out.
"""

from typing import NamedTuple

import numpy as np

ROW_LIMIT = 1e-3  # DeepGEMM tests: calc_diff of two FP8 products stays below this


class Verdict(NamedTuple):
    """What `judge` found; rows are counted over all leading axes, in C order.

    score: calc_diff of all defined rows; worst_row, worst_row_score; bad_rows: rows beyond the bound (or ROW_LIMIT
    without one) or with NaN where the reference has none; beyond_bound: elements; worst_ratio: the largest
    |difference| / bound (0 without one); factor: least-squares factor from reference to actual; hint: what the
    difference looks like, or "".
    """

    score: float
    worst_row: int
    worst_row_score: float
    bad_rows: int
    num_rows: int
    beyond_bound: int
    worst_ratio: float
    factor: float
    hint: str

    @property
    def holds(self) -> bool:
        return self.bad_rows == 0


def calc_diff(x, y) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2) in float64; 0 if both are zero throughout. Source: DeepGEMM `calc_diff`."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    norm = (x * x + y * y).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (x * y).sum() / norm)


def judge(reference, actual, bound=None, defined=None) -> Verdict:
    """Hold `actual` [..., M, N] to `reference` of the same shape.

    bound: float64 of that shape, e.g. from `fp8.ordered_bound`, the allowed |actual - reference| of each element, where
    `reference` is that function's `value`; None judges rows by `ROW_LIMIT`. defined: bool [..., M], rows to look at.
    NaN equals NaN. Raises ValueError if shapes differ.
    """
    reference, actual = np.asarray(reference, np.float64), np.asarray(actual, np.float64)
    if reference.shape != actual.shape or reference.ndim < 2:
        raise ValueError(f"reference {reference.shape} and actual {actual.shape} must have one shape [..., M, N]")
    if bound is not None and np.shape(bound) != reference.shape:
        raise ValueError(f"bound {np.shape(bound)} must have the shape {reference.shape} of the reference")
    if defined is not None and np.shape(defined) != reference.shape[:-1]:
        raise ValueError(f"defined {np.shape(defined)} must have one flag per row, {reference.shape[:-1]}")
    keep = np.ones(reference.shape[:-1], bool) if defined is None else np.asarray(defined, bool)
    row_numbers = np.flatnonzero(keep)
    if not row_numbers.size:
        return Verdict(0.0, -1, 0.0, 0, 0, 0, 0.0, 1.0, "no row is defined")
    expected, got = reference[keep], actual[keep]
    wrong = np.isnan(expected) != np.isnan(got)
    ratio = np.zeros(expected.shape) if bound is None else _ratio(expected, got, np.asarray(bound, np.float64)[keep])
    x, y = np.where(np.isfinite(expected), expected, 0.0), np.where(np.isfinite(got), got, 0.0)
    scores = _row_scores(x, y)
    bad = wrong.any(axis=1) | ((scores > ROW_LIMIT) if bound is None else (ratio > 1).any(axis=1))
    bad |= (np.isinf(expected) | np.isinf(got)).any(axis=1) & ((expected != got) & ~np.isnan(expected)).any(axis=1)
    worst = int(scores.argmax())
    both = np.isfinite(expected) & np.isfinite(got)
    x_both, y_both = np.where(both, x, 0.0), np.where(both, y, 0.0)
    energy = float((x_both * x_both).sum())
    factor = float((x_both * y_both).sum()) / energy if energy else 1.0
    hint = _hint(x_both, y_both, factor, int(wrong.sum())) if bad.any() else ""
    numbers = (int(bad.sum()), bad.size, int((ratio > 1).sum()), float(ratio.max(initial=0.0)))
    return Verdict(calc_diff(x, y), int(row_numbers[worst]), float(scores[worst]), *numbers, factor, hint)


def _ratio(expected: np.ndarray, got: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """|got - expected| / bound; infinite where they differ and nothing is allowed; 0 where either is not finite."""
    finite = np.isfinite(expected) & np.isfinite(got)
    distance = np.abs(np.where(finite, got, 0.0) - np.where(finite, expected, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance == 0, 0.0, distance / bound)


def _row_scores(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """calc_diff of each row."""
    norm = (x * x + y * y).sum(axis=1)
    return np.where(norm > 0, 1 - 2 * (x * y).sum(axis=1) / np.where(norm > 0, norm, 1.0), 0.0)


def _hint(x: np.ndarray, y: np.ndarray, factor: float, num_nan: int) -> str:
    """Name a common factor, if one explains the difference."""
    if factor <= 0 or calc_diff(factor * x, y) > 1e-4:
        return ""
    if abs(factor - 1) < 0.005:
        return "same up to a few elements" if num_nan == 0 else f"same up to {num_nan} NaN"
    hint = f"scaled by {factor:.3g}"
    if abs(factor - 2) < 0.01 or abs(factor - 0.5) < 0.0025:
        hint += ": E4M3FN bytes read as E4M3FNUZ, or the other way round, differ by this factor"
    return hint

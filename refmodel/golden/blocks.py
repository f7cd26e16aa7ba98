"""The statistics of one block of a pair of tensors (see `metrics`)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from refmodel.golden.blockstats import Block, BlockStats, OpenRow, Point, row_error
from refmodel.golden.ulp import has_ulp, ulp_distance, widen


class Verdict(NamedTuple):
    """Elements of a block outside the tolerance: how many, the flat position of the first, in how many rows."""

    count: int
    first: int | None
    rows: int


@dataclass(frozen=True)
class Limits:
    """The element rules as numbers; not final while the reference's root mean square is unknown."""

    rtol: float
    atol: float
    ulps: int
    final: bool


def _pair(left, right, block: Block, mask):
    """Both sides of a block, C-contiguous, ignored rows set to zero on both."""
    r, a = np.ascontiguousarray(block.cut(left)), np.ascontiguousarray(block.cut(right))
    if mask is not None:
        rows = mask[block.row : block.stop]
        if not rows.all():
            r, a = r.copy(), a.copy()
            r[~rows] = 0
            a[~rows] = 0
    return r, a


def _same_bytes(r: np.ndarray, a: np.ndarray) -> bool:
    if r.dtype != a.dtype:
        return False
    unsigned = f"u{r.dtype.itemsize}"
    return np.array_equal(r.view(unsigned), a.view(unsigned))


def _check_dtype(dtype: np.dtype) -> None:
    if dtype.kind not in "iubf" and not has_ulp(dtype):
        raise ValueError(f"dtype {dtype} cannot be compared; numbers (integer, float, bool) are required")
    if dtype.itemsize > 8:
        raise ValueError(f"dtype {dtype} is wider than 8 bytes; float64 is the widest that is compared")


def measure_block(left, right, block: Block, limits: Limits, mask=None) -> BlockStats:
    """The statistics of one block of `left` (reference) and `right` (actual), both [rows, columns]."""
    _check_dtype(left.dtype)
    _check_dtype(right.dtype)
    r, a = _pair(left, right, block, mask)
    stats = BlockStats(block, left.shape[1])
    if _same_bytes(r, a):
        return _measure_same(r, stats)
    return _measure_different(r, a, stats, limits)


def _measure_same(r: np.ndarray, stats: BlockStats) -> BlockStats:
    wide = widen(r).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        rr = float(np.dot(wide, wide))
    if not np.isfinite(rr):
        nan, inf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
        wide = np.where(np.isfinite(wide), wide, 0.0)
        with np.errstate(over="ignore"):
            rr = float(np.dot(wide, wide))
        counts = {"nan_reference": nan, "nan_actual": nan, "nan_both": nan, "inf_reference": inf, "inf_actual": inf}
        stats = replace(stats, nonfinite=nan + inf, **counts)
    stats = replace(stats, rr=rr, aa=rr, ra=rr)
    if stats.block.columns < stats.width:
        stats = replace(stats, open_row=OpenRow(stats.block.row, 0.0, rr, False, False))
    return stats


def _differences(r: np.ndarray, a: np.ndarray):
    """float64 values with non-finite pairs set to 0, the error, which elements differ, which are not finite."""
    wide_r, wide_a = widen(r), widen(a)
    with np.errstate(over="ignore", invalid="ignore"):
        differs = wide_r != wide_a
        if r.dtype.kind in "iub" and a.dtype.kind in "iub":
            differs = r != a  # 64-bit integers do not fit float64
        d = wide_a - wide_r
        finite = bool(np.isfinite(d.sum()))
    odd = None
    if not finite:
        odd = ~(np.isfinite(wide_r) & np.isfinite(wide_a))
        differs &= ~(np.isnan(wide_r) & np.isnan(wide_a))
        d[odd] = 0.0
    return wide_r, wide_a, d, differs, odd


def _count_nonfinite(wide_r, wide_a, odd, differs, stats: BlockStats) -> BlockStats:
    nan_r, nan_a = np.isnan(wide_r), np.isnan(wide_a)
    return replace(
        stats,
        nonfinite=int(odd.sum()),
        nan_reference=int(nan_r.sum()),
        nan_actual=int(nan_a.sum()),
        nan_both=int((nan_r & nan_a).sum()),
        inf_reference=int(np.isinf(wide_r).sum()),
        inf_actual=int(np.isinf(wide_a).sum()),
        unequal_nonfinite=int((differs & odd).sum()),
    )


def _worst(errors: np.ndarray, stats: BlockStats) -> Point:
    index = int(errors.argmax())
    value = errors.flat[index]
    error = int(value) if errors.dtype.kind in "iu" else float(value)
    return Point(error, stats.block.flat(index, stats.width))


def _violating(r, a, wide_r, absolute, differs, odd, limits: Limits) -> np.ndarray:
    if limits.rtol == limits.atol == limits.ulps == 0:
        return differs
    allowed = np.abs(wide_r) * limits.rtol
    np.maximum(allowed, limits.atol, out=allowed)
    bad = absolute > allowed
    if limits.ulps and r.dtype == a.dtype and has_ulp(r.dtype):
        bad &= ulp_distance(r, a) > limits.ulps
    if odd is not None:
        bad |= odd
    return bad & differs


def _verdict(bad: np.ndarray, block: Block, width: int) -> Verdict:
    count = int(np.count_nonzero(bad))
    if not count:
        return Verdict(0, None, 0)
    return Verdict(count, block.flat(int(bad.argmax()), width), int(bad.any(axis=1).sum()))


def judge_block(left, right, block: Block, limits: Limits, mask=None) -> Verdict:
    """Count the elements of one block that are outside final limits."""
    r, a = _pair(left, right, block, mask)
    wide_r, _, d, differs, odd = _differences(r, a)
    bad = _violating(r, a, wide_r, np.abs(d), differs, odd, limits)
    return _verdict(bad, block, left.shape[1])


def _measure_different(r, a, stats: BlockStats, limits: Limits) -> BlockStats:
    block, width = stats.block, stats.width
    wide_r, wide_a, d, differs, odd = _differences(r, a)
    if odd is not None:
        stats = _count_nonfinite(wide_r, wide_a, odd, differs, stats)
        wide_r, wide_a = np.where(odd, 0.0, wide_r), np.where(odd, 0.0, wide_a)
    differing = int(np.count_nonzero(differs))
    absolute = np.abs(d)
    verdict = Verdict(0, None, 0)
    if limits.final and differing:
        verdict = _verdict(_violating(r, a, wide_r, absolute, differs, odd, limits), block, width)
    row_dd = np.einsum("ij,ij->i", d, d)
    row_rr = np.einsum("ij,ij->i", wide_r, wide_r)
    stats = replace(
        stats,
        differing=differing,
        first_differing=block.flat(int(differs.argmax()), width) if differing else None,
        violations=verdict.count,
        first_violation=verdict.first,
        worst_abs=_worst(absolute, stats),
        rr=float(row_rr.sum()),
        aa=float(np.dot(wide_a.ravel(), wide_a.ravel())),
        ra=float(np.dot(wide_r.ravel(), wide_a.ravel())),
        dd=float(row_dd.sum()),
    )
    if r.dtype == a.dtype and has_ulp(r.dtype):
        distance = ulp_distance(r, a)
        if odd is not None:
            distance[odd] = 0
        stats = replace(stats, worst_ulp=_worst(distance, stats))
    scale = np.abs(wide_r)
    scale += scale == 0  # no relative error to zero: the absolute one counts
    stats = replace(stats, worst_rel=_worst(np.divide(absolute, scale, out=scale), stats))
    return _with_rows(stats, row_dd, row_rr, differs, verdict)


def _with_rows(stats: BlockStats, row_dd, row_rr, differs, verdict: Verdict) -> BlockStats:
    block = stats.block
    if block.columns < stats.width:  # a piece of one row: its error is known when the row ends
        partial = OpenRow(block.row, float(row_dd[0]), float(row_rr[0]), bool(differs.any()), verdict.rows > 0)
        return replace(stats, open_row=partial, differing_rows=int(partial.differs), bad_rows=verdict.rows)
    errors = row_error(row_dd, row_rr)
    worst = int(errors.argmax())
    return replace(
        stats,
        worst_row=Point(float(errors[worst]), (block.row + worst) * stats.width),
        differing_rows=int(differs.any(axis=1).sum()),
        bad_rows=verdict.rows,
    )

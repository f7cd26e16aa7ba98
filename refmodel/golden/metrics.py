"""What differs between two tensors, in numbers that disagree about damage in different ways.

One score hides damage: a kernel that destroys 18 % of the rows has a normalised difference of 0.099
(ROCm/aiter#5032), and a tensor scaled by 2 has cosine 1. So `measure` reports counts, worst elements, worst row,
fitted scale and norms together, and only elements decide. Tensors are read in blocks: memory stays bounded
however large they are, and memory-mapped files work as they are.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from refmodel.golden.blocks import Limits, judge_block, measure_block
from refmodel.golden.blockstats import Block, BlockStats, Point, merge
from refmodel.golden.tolerance import EXACT, Tolerance

BLOCK_ELEMENTS = 1 << 16  # a few float64 temporaries of this size stay in the L2 cache
ALLOCATION = 16 << 20


class Worst(NamedTuple):
    """The element (or row) where an error is greatest: the error, its index, both values there."""

    error: float
    index: tuple[int, ...]
    reference: float | int | None = None
    actual: float | int | None = None


@dataclass(frozen=True)
class Difference:
    """The result of `measure`. Sums run over elements that are finite on both sides.

    differing: elements with other values (NaN on both sides and 0 against -0 do not count).
    violations: elements outside the tolerance, a NaN or infinity on one side only included; `first_*` are the
    indices of the first of each in C order. `unequal_nonfinite` of them are NaN or infinite on one side only.
    worst_rel: |actual - reference| / |reference|, and the absolute error where the reference is 0.
    worst_row: norm of the row's error over the norm of the reference row (the error's norm where that is 0).
    difference: sum (a - r)^2 / (sum a^2 + sum r^2), equal to DeepGEMM's 1 - 2 <a, r> / (<a, a> + <r, r>).
    scale: the factor s that minimises |a - s r|; scale_residual: |a - s r| / |a|. None where undefined.
    """

    shape: tuple[int, ...]
    total: int
    identical: bool
    differing: int = 0
    first_differing: tuple[int, ...] | None = None
    violations: int = 0
    first_violation: tuple[int, ...] | None = None
    unequal_nonfinite: int = 0
    nan_reference: int = 0
    nan_actual: int = 0
    nan_both: int = 0
    inf_reference: int = 0
    inf_actual: int = 0
    worst_abs: Worst | None = None
    worst_rel: Worst | None = None
    worst_ulp: Worst | None = None
    worst_row: Worst | None = None
    rows: int = 0
    differing_rows: int = 0
    bad_rows: int = 0
    difference: float | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    scale: float | None = None
    scale_residual: float | None = None
    rms_reference: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """Norm of the error over the norm of the reference; None where the reference is zero."""
        if self.difference is None or self.norm_ratio is None:
            return None
        return float(np.sqrt(self.difference * (1 + self.norm_ratio**2)))

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        out = asdict(self)
        for key in ("worst_abs", "worst_rel", "worst_ulp", "worst_row"):
            worst = getattr(self, key)
            out[key] = None if worst is None else worst._asdict()
        return out


def _as_rows(x: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """[..., n] -> [rows, n]; a scalar is one row of one element, and so is what the mask marks one by one."""
    columns = x.shape[-1] if x.ndim and (valid is None or valid.ndim < x.ndim) else 1
    rows = x.size // columns if columns else 0
    return x.reshape(rows, columns)


def _row_mask(valid: np.ndarray | None, shape: tuple[int, ...], rows: int) -> np.ndarray | None:
    """The mask over leading axes, spread over all rows of the tensor."""
    if valid is None:
        return None
    if valid.dtype != np.bool_ or valid.shape != shape[: valid.ndim]:
        raise ValueError(
            f"valid has dtype {valid.dtype} and shape {valid.shape} for a tensor of shape {shape}; "
            "booleans over its leading axes are required"
        )
    return np.repeat(valid.ravel(), rows // max(valid.size, 1))


def iterate_blocks(rows: int, columns: int, elements: int) -> Iterator[Block]:
    """Blocks of whole rows, or pieces of one row where a row is longer than a block."""
    if columns > elements:
        for row in range(rows):
            for start in range(0, columns, elements):
                yield Block(row, row + 1, start, min(start + elements, columns))
        return
    step = max(1, elements // max(columns, 1))
    for row in range(0, rows, step):
        yield Block(row, min(row + step, rows), 0, columns)


def _ordered(function, blocks: Iterator[Block], threads: int) -> Iterator[BlockStats]:
    """`function` over all blocks, results in block order, a bounded number of them in flight."""
    if threads <= 1:
        yield from map(function, blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(blocks, 8 * threads)):
            yield from pool.map(function, batch)


def measure(
    reference: np.ndarray,
    actual: np.ndarray,
    tolerance: Tolerance = EXACT,
    valid: np.ndarray | None = None,
    threads: int = 1,
    after_block=None,
    elements: int = BLOCK_ELEMENTS,
) -> Difference:
    """Compare two arrays of one shape; dtypes may differ (then there are no ULP).

    valid: booleans over leading axes; rows where it is False are read on neither side (padding, rows that a
    grouped kernel leaves unwritten). after_block(bytes) is called as reading goes on, once per block of `elements`.
    Raises ValueError for two shapes, a mask that does not fit, or values that are not numbers.
    """
    reference, actual = np.asarray(reference), np.asarray(actual)
    if reference.shape != actual.shape:
        raise ValueError(f"measure: shapes {reference.shape} and {actual.shape} differ")
    valid = None if valid is None else np.asarray(valid)
    left, right = _as_rows(reference, valid), _as_rows(actual, valid)
    rows, columns = left.shape
    mask = _row_mask(valid, reference.shape, rows)
    total = reference.size if mask is None else int(mask.sum()) * columns
    if total == 0:
        return Difference(reference.shape, 0, identical=True)
    live = rows if mask is None else int(mask.sum())
    # glibc maps and unmaps large arrays one by one, at a page fault per 4 KiB, until a larger one has been freed:
    # then it keeps them. Without this line the temporaries of each block cost five times what the arithmetic does.
    np.empty(ALLOCATION, np.uint8)
    limits = Limits(tolerance.rtol, tolerance.atol, tolerance.ulps, final=not tolerance.rms)

    def first_pass(block: Block) -> BlockStats:
        return measure_block(left, right, block, limits, mask)

    sums, suspects = None, []
    for stats in _ordered(first_pass, iterate_blocks(rows, columns, elements), threads):
        if stats.differing:
            suspects.append((stats.block, stats.worst_abs.error, stats.unequal_nonfinite))
        sums = stats if sums is None else merge(sums, stats)
        if after_block is not None:
            after_block(stats.block.size * (reference.itemsize + actual.itemsize))
    finite = max(total - sums.nonfinite, 1)
    rms = float(np.sqrt(sums.rr / finite))
    if not limits.final:
        limits = replace(limits, atol=max(tolerance.atol, tolerance.rms * rms), final=True)
        sums = _second_pass(left, right, mask, limits, suspects, sums)
    row_axes = max(reference.ndim - 1, 0) if columns != 1 or valid is None else reference.ndim
    return _finish(reference, actual, sums, total, (live, row_axes), rms)


def _second_pass(left, right, mask, limits: Limits, suspects: list, sums: BlockStats) -> BlockStats:
    """Count violations once the root mean square of the reference is known."""
    sums = replace(sums, violations=0, first_violation=None, bad_rows=0)
    last_bad_row = -1
    for block, worst, nonfinite in suspects:
        if worst <= limits.atol and not nonfinite:
            continue
        verdict = judge_block(left, right, block, limits, mask)
        first = sums.first_violation if sums.first_violation is not None else verdict.first
        repeated = verdict.rows > 0 and block.row == last_bad_row and block.columns < left.shape[1]
        sums = replace(
            sums,
            violations=sums.violations + verdict.count,
            first_violation=first,
            bad_rows=sums.bad_rows + verdict.rows - repeated,
        )
        last_bad_row = block.row if verdict.rows else last_bad_row
    return sums


def _ratio(numerator: float, denominator: float) -> float | None:
    value = numerator / denominator if denominator > 0 else np.nan
    return float(value) if np.isfinite(value) else None


def _value(x: np.ndarray, index: tuple[int, ...]) -> float | int:
    value = x[index]
    return int(value) if x.dtype.kind in "iub" else float(value)


def _finish(reference, actual, sums: BlockStats, total: int, rows: tuple[int, int], rms: float) -> Difference:
    shape = reference.shape

    def where(flat: int | None):
        return None if flat is None else tuple(int(i) for i in np.unravel_index(flat, shape))

    def worst(point: Point | None):
        if point is None or point.error == 0:
            return None
        index = where(point.flat)
        return Worst(point.error, index, _value(reference, index), _value(actual, index))

    norms = float(np.sqrt(sums.rr) * np.sqrt(sums.aa))
    row = sums.worst_row
    fitted = _ratio(sums.ra, sums.rr)
    left_over = None if fitted is None else max(sums.aa - sums.ra * fitted, 0.0)
    return Difference(
        shape=shape,
        total=total,
        identical=sums.differing == 0,
        differing=sums.differing,
        first_differing=where(sums.first_differing),
        violations=sums.violations,
        first_violation=where(sums.first_violation),
        unequal_nonfinite=sums.unequal_nonfinite,
        nan_reference=sums.nan_reference,
        nan_actual=sums.nan_actual,
        nan_both=sums.nan_both,
        inf_reference=sums.inf_reference,
        inf_actual=sums.inf_actual,
        worst_abs=worst(sums.worst_abs),
        worst_rel=worst(sums.worst_rel),
        worst_ulp=worst(sums.worst_ulp),
        worst_row=None if row is None or row.error == 0 else Worst(row.error, where(row.flat)[: rows[1]]),
        rows=rows[0],
        differing_rows=sums.differing_rows,
        bad_rows=sums.bad_rows,
        difference=_ratio(sums.dd, sums.aa + sums.rr),
        cosine=_ratio(sums.ra, norms),
        norm_ratio=_ratio(float(np.sqrt(sums.aa)), float(np.sqrt(sums.rr))),
        scale=fitted,
        scale_residual=None if left_over is None else _ratio(float(np.sqrt(left_over)), float(np.sqrt(sums.aa))),
        rms_reference=rms,
    )

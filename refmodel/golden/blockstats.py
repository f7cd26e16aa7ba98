"""Blocks of a pair of tensors, what is counted in them, and how two neighbours add up (see `metrics`)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
    """Rows `row:stop` and columns `column:end` of a tensor seen as [rows, columns]."""

    row: int
    stop: int
    column: int
    end: int

    @property
    def columns(self) -> int:
        return self.end - self.column

    @property
    def size(self) -> int:
        return (self.stop - self.row) * self.columns

    def cut(self, x: np.ndarray) -> np.ndarray:
        return x[self.row : self.stop, self.column : self.end]

    def flat(self, index: int, width: int) -> int:
        """Position in the whole tensor, `width` columns wide, of element `index` of the block."""
        return (self.row + index // self.columns) * width + self.column + index % self.columns


class Point(NamedTuple):
    """An error and the flat position of its element (of a row's first element)."""

    error: float
    flat: int


@dataclass(frozen=True)
class OpenRow:
    """Sums of the last row of what was read so far, if the row goes on in the next block."""

    row: int
    dd: float
    rr: float
    differs: bool
    bad: bool


@dataclass(frozen=True)
class BlockStats:
    """Counts, sums and worst elements of a run of blocks; positions are flat in the whole tensor."""

    block: Block
    width: int
    differing: int = 0
    first_differing: int | None = None
    violations: int = 0
    first_violation: int | None = None
    unequal_nonfinite: int = 0
    nonfinite: int = 0
    nan_reference: int = 0
    nan_actual: int = 0
    nan_both: int = 0
    inf_reference: int = 0
    inf_actual: int = 0
    worst_abs: Point | None = None
    worst_rel: Point | None = None
    worst_ulp: Point | None = None
    worst_row: Point | None = None
    differing_rows: int = 0
    bad_rows: int = 0
    rr: float = 0.0
    aa: float = 0.0
    ra: float = 0.0
    dd: float = 0.0
    open_row: OpenRow | None = None


def row_error(dd, rr):
    """Norm of the error over norm of the reference, from sums of squares; the error's norm where that is 0."""
    return np.sqrt(dd) / np.sqrt(np.where(rr == 0, 1.0, rr))


def _larger(a: Point | None, b: Point | None) -> Point | None:
    if a is None or (b is not None and b.error > a.error):
        return b
    return a


_ADDED = (
    "differing",
    "violations",
    "unequal_nonfinite",
    "nonfinite",
    "nan_reference",
    "nan_actual",
    "nan_both",
    "inf_reference",
    "inf_actual",
    "differing_rows",
    "bad_rows",
    "rr",
    "aa",
    "ra",
    "dd",
)


def merge(a: BlockStats, b: BlockStats) -> BlockStats:
    """Statistics of `a` followed by `b`; of equal worst errors the first stays."""
    values = {name: getattr(a, name) + getattr(b, name) for name in _ADDED}
    for name in ("worst_abs", "worst_rel", "worst_ulp", "worst_row"):
        values[name] = _larger(getattr(a, name), getattr(b, name))
    for name in ("first_differing", "first_violation"):
        values[name] = getattr(a, name) if getattr(a, name) is not None else getattr(b, name)
    row = b.open_row
    if row is not None:
        if a.open_row is not None and a.open_row.row == row.row:
            values["differing_rows"] -= int(a.open_row.differs and row.differs)
            values["bad_rows"] -= int(a.open_row.bad and row.bad)
            row = OpenRow(
                row.row, a.open_row.dd + row.dd, a.open_row.rr + row.rr, a.open_row.differs or row.differs,
                a.open_row.bad or row.bad,
            )  # fmt: skip
        if b.block.end == b.width:
            error = float(row_error(np.float64(row.dd), np.float64(row.rr)))
            values["worst_row"] = _larger(a.worst_row, Point(error, row.row * b.width))
    return replace(b, open_row=row, **values)

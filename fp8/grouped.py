"""Grouped products: rows sorted by expert, each group with its own weight, in the three layouts of DeepGEMM.

Contiguous: all rows in one matrix, an expert id per row, -1 for padding, every group starting on a multiple of the
alignment. Prefix sum: the same rows, described by where each group ends. Masked: one block of rows per expert, of which
the first so many count. Each result says which rows are defined; a kernel may leave anything in the others.
Source: DeepGEMM README.md and deep_gemm/include/deep_gemm/scheduler (the block scheduler of grouped kernels).
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp8.blockscaled import BlockScaled
from fp8.gemm import REFERENCE, GemmRule, gemm

ALIGNMENT = 128  # DeepGEMM get_mk_alignment_for_contiguous_layout(); also its BLOCK_M there
_HALF = 64  # rows whose validity a kernel reads from their first row


class GroupedProduct(NamedTuple):
    """out [M, N] (or [G, M, N]) and defined, bool [M] (or [G, M]): the rows that a comparison may look at."""

    out: np.ndarray
    defined: np.ndarray


class ContiguousLayout(NamedTuple):
    """grouped_layout int32 [sum of padded counts]: expert id per row, -1 for padding; starts and padded int64 [G]."""

    grouped_layout: np.ndarray
    starts: np.ndarray
    padded: np.ndarray


def align(size, alignment: int):
    """`size` (or an array of sizes) rounded up to a multiple; 0 stays 0."""
    return -(-size // alignment) * alignment


def contiguous_layout(counts, alignment: int = ALIGNMENT) -> ContiguousLayout:
    """Where the rows of each group stand if every group starts on a multiple of `alignment`.

    counts [G]: real rows per group. Padded counts are sizes of places, never numbers of tokens
    (InternLM/xtuner#2053). Raises ValueError for negative counts or an alignment below 1.
    """
    counts = np.asarray(counts, np.int64)
    if counts.ndim != 1 or (counts < 0).any() or alignment < 1:
        raise ValueError(f"counts {counts.tolist()}, alignment {alignment}: non-negative counts [G], alignment >= 1")
    padded = align(counts, alignment)
    starts = np.concatenate([[0], np.cumsum(padded)[:-1]]).astype(np.int64) if counts.size else padded
    layout = np.full(int(padded.sum()), -1, np.int32)
    for group, (start, count) in enumerate(zip(starts, counts)):
        layout[start : start + count] = group
    return ContiguousLayout(layout, starts, padded)


def _check_groups(a: BlockScaled, b: BlockScaled, a_dims: int) -> None:
    if len(a.shape) != a_dims or len(b.shape) != 3:
        raise ValueError(f"a {a.shape} and b {b.shape}: a with {a_dims} axes and b [G, N, K] are needed")
    if a_dims == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"a {a.shape} has {a.shape[0]} groups and b {b.shape} has {b.shape[0]}")


def _check_layout(layout, num_rows: int, num_groups: int) -> np.ndarray:
    layout = np.asarray(layout)
    if layout.dtype.kind not in "iu" or layout.shape != (num_rows,):
        raise ValueError(f"grouped_layout {layout.dtype} {layout.shape}: one integer per row of a, [{num_rows}]")
    bad = (layout < -1) | (layout >= num_groups)
    if bad.any():
        raise ValueError(f"grouped_layout has {np.count_nonzero(bad)} ids outside -1 to {num_groups - 1}")
    return layout.astype(np.int64)


def misaligned_blocks(grouped_layout, alignment: int = ALIGNMENT) -> np.ndarray:
    """int64: the blocks of `alignment` rows that hold rows of more than one expert, padding (-1) left aside."""
    layout = np.asarray(grouped_layout, np.int64)
    padded = np.full(align(layout.size, alignment), -1, np.int64)
    padded[: layout.size] = layout
    blocks = padded.reshape(-1, alignment)
    largest = blocks.max(axis=1, initial=-1)
    return np.flatnonzero(((blocks != -1) & (blocks != largest[:, None])).any(axis=1))


def grouped_gemm_contiguous(
    a: BlockScaled,
    b: BlockScaled,
    grouped_layout,
    alignment: int = ALIGNMENT,
    out_dtype=ml_dtypes.bfloat16,
    rule: GemmRule = REFERENCE,
) -> GroupedProduct:
    """a [M, K], b [G, N, K]: row m times the weight of expert grouped_layout[m]; rows of -1 are undefined (zero here).

    Raises ValueError for ids outside -1 to G - 1 and for blocks that hold rows of two experts: a kernel would read
    only the first row's id there (`contiguous_as_read` gives what it returns).
    """
    _check_groups(a, b, 2)
    layout = _check_layout(grouped_layout, a.shape[0], b.shape[0])
    blocks = misaligned_blocks(layout, alignment)
    if blocks.size:
        raise ValueError(
            f"{blocks.size} of the blocks of {alignment} rows hold rows of more than one expert (the first is block "
            f"{blocks[0]}): start every group on a multiple of {alignment}, as contiguous_layout does"
        )
    return GroupedProduct(_rows_by_expert(a, b, layout, out_dtype, rule), layout >= 0)


def contiguous_as_read(
    a: BlockScaled,
    b: BlockScaled,
    grouped_layout,
    alignment: int = ALIGNMENT,
    out_dtype=ml_dtypes.bfloat16,
    rule: GemmRule = REFERENCE,
) -> GroupedProduct:
    """What a kernel returns for any contiguous layout, aligned or not.

    It reads the expert at the first row of each block of `alignment` rows (a negative id counts as 0), and whether rows
    count at the first row of each half block of 64; halves that do not count are written as zero. `defined` marks the
    rows of experts that got their own weight.
    """
    _check_groups(a, b, 2)
    layout = _check_layout(grouped_layout, a.shape[0], b.shape[0])
    row = np.arange(layout.size)
    read = np.maximum(layout[row // alignment * alignment], 0)
    read = np.where(layout[row // _HALF * _HALF] < 0, -1, read)
    return GroupedProduct(_rows_by_expert(a, b, read, out_dtype, rule), (layout >= 0) & (read == layout))


def grouped_gemm_prefix_sum(
    a: BlockScaled,
    b: BlockScaled,
    ends,
    alignment: int = ALIGNMENT,
    out_dtype=ml_dtypes.bfloat16,
    rule: GemmRule = REFERENCE,
) -> GroupedProduct:
    """a [M, K], b [G, N, K], ends int [G]: group g is the rows from align(ends[g - 1]) to ends[g].

    The rows between a group's end and the next start are undefined (zero here). Raises ValueError if a group would end
    before it starts or beyond M.
    """
    _check_groups(a, b, 2)
    ends = np.asarray(ends, np.int64)
    if ends.shape != (b.shape[0],):
        raise ValueError(f"ends {ends.shape}: one end per group, [{b.shape[0]}]")
    starts = np.concatenate([[0], align(ends[:-1], alignment)])
    if (ends < starts).any() or (ends > a.shape[0]).any():
        raise ValueError(
            f"ends {ends.tolist()} with groups starting at {starts.tolist()}: each must end between its start and the "
            f"{a.shape[0]} rows of a"
        )
    layout = np.full(a.shape[0], -1, np.int64)
    for group, (start, end) in enumerate(zip(starts, ends)):
        layout[start:end] = group
    return GroupedProduct(_rows_by_expert(a, b, layout, out_dtype, rule), layout >= 0)


def grouped_gemm_masked(
    a: BlockScaled,
    b: BlockScaled,
    masked_m,
    out_dtype=ml_dtypes.bfloat16,
    rule: GemmRule = REFERENCE,
) -> GroupedProduct:
    """a [G, M, K], b [G, N, K], masked_m int [G]: the first masked_m[g] rows of group g times weight g.

    The other rows are neither read nor defined (zero here). Raises ValueError for counts outside 0 to M.
    """
    _check_groups(a, b, 3)
    masked_m = np.asarray(masked_m)
    if masked_m.shape != (a.shape[0],) or masked_m.dtype.kind not in "iu":
        raise ValueError(f"masked_m {masked_m.dtype} {masked_m.shape}: one integer per group, [{a.shape[0]}]")
    if (masked_m < 0).any() or (masked_m > a.shape[1]).any():
        raise ValueError(f"masked_m {masked_m.tolist()}: each must lie between 0 and the {a.shape[1]} rows of a group")
    out = np.zeros((a.shape[0], a.shape[1], b.shape[1]), np.dtype(out_dtype))
    for group, count in enumerate(masked_m):
        if count:
            rows = a[group].rows(slice(0, int(count)))
            out[group, :count] = gemm(rows, b[group], out_dtype=out_dtype, **rule._asdict())
    return GroupedProduct(out, np.arange(a.shape[1]) < masked_m[:, None])


def _rows_by_expert(a: BlockScaled, b: BlockScaled, expert: np.ndarray, out_dtype, rule: GemmRule) -> np.ndarray:
    """[M, N]: each row of a times the weight that `expert` names; zero where it is -1."""
    out = np.zeros((a.shape[0], b.shape[1]), np.dtype(out_dtype))
    for group in range(b.shape[0]):
        rows = np.flatnonzero(expert == group)
        if rows.size:
            out[rows] = gemm(a.rows(rows), b[group], out_dtype=out_dtype, **rule._asdict())
    return out

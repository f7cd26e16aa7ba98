"""Look at one tensor: numbers about it, a part of it, its histogram."""

import re
from typing import NamedTuple

import numpy as np

from refmodel.numerics import widen


class Statistics(NamedTuple):
    """Numbers about a tensor; min to rms over its finite elements, None where there are none."""

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    zeros: int
    nan: int
    inf: int


class Histogram(NamedTuple):
    """Counts of finite elements between neighbouring edges; the last interval holds its right edge."""

    edges: np.ndarray  # float64 [bins + 1]
    counts: np.ndarray  # int64 [bins]


def wide(array: np.ndarray) -> np.ndarray:
    """Any number as float64, exactly (integers above 2^53 excepted)."""
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype.kind in "biu" else widen(array, np.dtype(np.float64))


def statistics(array: np.ndarray) -> Statistics:
    """Of an array of any numeric dtype and shape."""
    array = np.asarray(array)
    x = wide(array)
    finite = x[np.isfinite(x)]
    numbers = (None,) * 4
    if finite.size:
        numbers = (finite.min(), finite.max(), finite.mean(), np.sqrt(np.mean(finite * finite)))
        numbers = tuple(float(number) for number in numbers)
    nan = int(np.isnan(x).sum())
    return Statistics(
        array.shape, array.dtype.name, *numbers, int((x == 0).sum()), nan, int(x.size - finite.size - nan)
    )


def histogram(array: np.ndarray, bins: int = 12) -> Histogram:
    """Equal intervals from the least to the greatest finite element. Raises ValueError for fewer than one."""
    if bins < 1:
        raise ValueError(f"histogram of {bins} intervals: at least one is needed")
    x = wide(array)
    counts, edges = np.histogram(x[np.isfinite(x)], bins)
    return Histogram(edges, counts)


def has_nan(made, name: str) -> str | None:
    """For `Stepper.until(check=has_nan)`: says how many elements are NaN or infinite, None if there are none."""
    x = wide(made[name])
    bad = ~np.isfinite(x)
    if not bad.any():
        return None
    first = [int(i) for i in np.argwhere(bad)[0]]
    rows = made.rows(name)
    if rows is not None:
        first[0] = int(rows[first[0]])
    return f"{int(np.isnan(x).sum())} NaN and {int(np.isinf(x).sum())} infinite of {x.size}, first at {first}"


def parse_selection(text: str) -> tuple[str, tuple | None]:
    """`layers.1.attn_core.norm[3, :8]` as a name and an index; None without brackets.

    Raises ValueError for anything that is not integers, slices and `...` in the brackets.
    """
    match = re.fullmatch(r"([\w.*?-]+)\s*(?:\[(.*)\])?", text.strip())
    if not match:
        raise ValueError(f"{text!r}: must be a name, or a name and an index like layers.1.attn_core.norm[3, :8]")
    name, inside = match.groups()
    if inside is None:
        return name, None
    return name, tuple(_index(part.strip(), text) for part in inside.split(","))


def _index(part: str, text: str):
    if part == "...":
        return ...
    try:
        if ":" not in part:
            return int(part)
        ends = [int(end) if end.strip() else None for end in part.split(":")]
        return slice(*ends) if len(ends) <= 3 else int(part)
    except ValueError:
        raise ValueError(f"{text!r}: {part!r} is no index; 3, 2:8, :, ::2 and ... are") from None


def select(array: np.ndarray, index: tuple, rows: np.ndarray | None = None) -> np.ndarray:
    """array[index], where the first axis counts global rows, of which `array` holds `rows` (None: all).

    Raises ValueError for an index out of bounds, and for a row that is not there.
    """
    if rows is not None and not np.array_equal(rows, np.arange(len(rows))):
        first = index[0] if index else slice(None)
        index = (_held(first, rows), *index[1:])
    try:
        return np.asarray(array[index])
    except IndexError as error:
        raise ValueError(f"an array of shape {array.shape}: {error}") from None


def _held(first, rows: np.ndarray):
    """The first index in terms of the rows that are there."""
    if first is ...:
        return first
    if isinstance(first, int):
        place = int(np.searchsorted(rows, first))
        if place == len(rows) or rows[place] != first:
            raise ValueError(f"row {first} is not there yet; rows so far: {spans(rows)}")
        return place
    if any(end is not None and end < 0 for end in (first.start, first.stop, first.step)) or first.step == 0:
        raise ValueError(f"only some rows are there, which count upwards from 0; rows so far: {spans(rows)}")
    stop = int(rows[-1]) + 1 if first.stop is None and len(rows) else first.stop or 0
    return np.flatnonzero(np.isin(rows, np.arange(first.start or 0, stop, first.step or 1)))


def spans(rows: np.ndarray, most: int = 6) -> str:
    """Ascending row numbers in short: `0-4, 9, 12-15`."""
    if not len(rows):
        return "none"
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most]]
    return ", ".join(words) + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")

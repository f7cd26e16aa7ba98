"""One source's part of an exchange, what a destination gets of it, and how the parts are put together."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.ledger import Tag

_MANY_ROWS = 16  # rows for each pair of ranks on average, from which on slices are as fast as a gather


class Received(NamedTuple):
    """What one rank got in one exchange, sources in the order asked for."""

    sources: tuple[int, ...]
    counts: np.ndarray  # int64 [S] rows from each source
    arrays: dict[str, np.ndarray]  # name -> [sum(counts), ...], read-only where nothing had to be joined; see `receive`
    control: np.ndarray | None  # int32 or int64 [sources that sent control words, words]; None if there is none
    lengths: dict[str, np.ndarray]  # ragged array -> int64 [sum(counts)] bytes of each row


class Picked:
    """Rows `index` [n] of `base` [T, ...], copied only when they are taken: a row that goes to many is kept once."""

    def __init__(self, base: np.ndarray, index: np.ndarray):
        self.base, self.index = base, index

    dtype = property(lambda self: self.base.dtype)
    itemsize = property(lambda self: self.base.itemsize)
    shape = property(lambda self: (len(self.index), *self.base.shape[1:]))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows) -> np.ndarray:
        """The rows that a slice or an index array [m] names, as an array of its own."""
        return self.base.take(self.index[rows], axis=0)

    def take(self, rows, axis: int) -> np.ndarray:
        """As of an array: `axis` is 0."""
        return self[rows]

    @classmethod
    def of(cls, array: "np.ndarray | Picked", index: np.ndarray) -> "Picked":
        """Rows of an array, or of rows picked before."""
        return cls(array.base, array.index[index]) if isinstance(array, Picked) else cls(array, index)

    def owned(self) -> "Picked":
        """The same rows of a read-only copy."""
        base = self.base.copy()
        base.setflags(write=False)
        return Picked(base, self.index)

    @classmethod
    def joined(cls, parts: "list[Picked]") -> "Picked":
        """The rows of several, one after the other."""
        lengths = np.array([len(part.base) for part in parts])
        first = np.cumsum(lengths) - lengths
        index = np.concatenate([part.index + start for part, start in zip(parts, first)])
        return cls(np.concatenate([part.base for part in parts]), index)


class Outgoing(NamedTuple):
    """One source's part of an exchange: rows `starts[d]` to `starts[d] + splits[d]` of each array go to rank d."""

    arrays: dict[str, np.ndarray | Picked]
    classes: dict[str, str]
    starts: np.ndarray  # int64 [R]
    splits: np.ndarray  # int64 [R]
    destinations: tuple[int, ...]
    control: np.ndarray | None  # [number of control destinations, words]
    control_to: tuple[int, ...]
    offsets: dict[str, np.ndarray]  # ragged array -> int64 [rows + 1], where each row's bytes begin
    terms: dict[str, object]  # what all ranks must agree on, as this source understands it

    def row_bytes(self) -> dict[str, int]:
        """Bytes of one row by class, without the ragged arrays."""
        sizes: dict[str, int] = {}
        for name, array in self.arrays.items():
            if name not in self.offsets:
                width = array.itemsize * math.prod(array.shape[1:])
                sizes[self.classes[name]] = sizes.get(self.classes[name], 0) + width
        return sizes

    def ragged_bytes(self) -> dict[str, np.ndarray]:
        """int64 [R] bytes for each destination by class, of the ragged arrays."""
        stop = self.starts + self.splits
        return {self.classes[name]: offset[stop] - offset[self.starts] for name, offset in self.offsets.items()}

    def part(self, name: str, dst: int) -> np.ndarray:
        """What of an array goes to `dst` (a view)."""
        start, stop = int(self.starts[dst]), int(self.starts[dst] + self.splits[dst])
        if name in self.offsets:
            start, stop = int(self.offsets[name][start]), int(self.offsets[name][stop])
        return self.arrays[name][start:stop]

    def row_lengths(self, name: str, dst: int) -> np.ndarray:
        """int64 [rows for dst]: bytes of each row of a ragged array."""
        start = int(self.starts[dst])
        return np.diff(self.offsets[name][start : start + int(self.splits[dst]) + 1])

    def control_for(self, dst: int) -> np.ndarray | None:
        """The control words for `dst`, if there are any."""
        position = _positions(self.control_to).get(dst)
        return None if position is None else self.control[position]


class Pool(NamedTuple):
    """A whole exchange of many ranks put together once, so that each rank takes its rows by one gather per array."""

    arrays: dict[str, np.ndarray | Picked]  # name -> [rows of all sources, ...]
    first: np.ndarray  # int64 [source, destination] where the rows begin
    splits: np.ndarray  # int64 [source, destination]
    control: np.ndarray | None  # [source, destination, words]

    @classmethod
    def of(cls, parts: list[Outgoing]) -> "Pool | None":
        """None where gathering does not pay: ragged arrays, many rows for each pair, control words for some only."""
        splits = np.stack([part.splits for part in parts])
        with_control = [part.control is not None for part in parts]
        everyone = all(len(part.control_to) == len(parts) for part in parts) or not any(with_control)
        if any(part.offsets for part in parts) or splits.mean() > _MANY_ROWS or not everyone:
            return None
        lengths = np.array([len(next(iter(part.arrays.values()))) for part in parts])
        arrays = {name: _stacked([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        first = np.stack([part.starts for part in parts]) + (np.cumsum(lengths) - lengths)[:, None]
        control = np.stack([part.control for part in parts]) if any(with_control) else None
        return cls(arrays, first, splits, control)

    def part(self, dst: int, sources: tuple[int, ...], gathered: bool) -> Received:
        chosen = slice(None) if len(sources) == len(self.splits) else list(sources)
        counts = np.ascontiguousarray(self.splits[chosen, dst])
        total = int(counts.sum())
        index = np.repeat(self.first[chosen, dst] - (np.cumsum(counts) - counts), counts) + np.arange(total)
        pick = (lambda array: array.take(index, axis=0)) if gathered else (lambda array: Picked.of(array, index))
        arrays = {name: pick(array) for name, array in self.arrays.items()}
        control = None if self.control is None else self.control[chosen, dst]
        return Received(sources, counts, arrays, control, {})


def _stacked(arrays: list):
    """The rows of all, one after the other; what one source picked the others picked too, or had no rows to pick."""
    if not any(isinstance(array, Picked) for array in arrays):
        return np.concatenate(arrays)
    return Picked.joined([a if isinstance(a, Picked) else Picked(a, np.arange(len(a))) for a in arrays])


def join_parts(dst: int, sources: tuple[int, ...], parts: list[Outgoing]) -> Received:
    """Put together what `sources` have for `dst`."""
    counts = [int(part.splits[dst]) for part in parts]
    filled = [part for part, count in zip(parts, counts) if count] or parts[:1]
    arrays = {}
    for name in parts[0].arrays:
        pieces = [part.part(name, dst) for part in filled]
        arrays[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    control = [words for part in parts if (words := part.control_for(dst)) is not None]
    lengths = {name: np.concatenate([part.row_lengths(name, dst) for part in parts]) for name in parts[0].offsets}
    return Received(sources, np.array(counts, np.int64), arrays, np.array(control) if control else None, lengths)


@lru_cache(maxsize=4096)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    """Where each rank stands in `ranks`."""
    return {rank: position for position, rank in enumerate(ranks)}


def describe(tag: Tag) -> str:
    """The name of a message in an error."""
    request = "" if tag.request is None else f", request {tag.request}"
    hop = f" ({tag.hop})" if tag.hop else ""
    return f"layer {tag.layer}, message {tag.stage}{hop} of micro-batch {tag.micro_batch}, step {tag.step}{request}"


def some_ranks(ranks: list[int]) -> str:
    """The first few of many ranks."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"

"""The emulated network: the only way from one rank to others, and every byte that takes it enters the ledger."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.topology import Topology

__all__ = ["Network", "NotDelivered", "Outgoing", "Received", "Tag"]


class NotDelivered(ValueError):
    """A rank wanted to receive what has not arrived; names the rank, the layer, the message and the sources."""


class Received(NamedTuple):
    """What one rank got in one exchange, sources in the order asked for."""

    sources: tuple[int, ...]
    counts: np.ndarray  # int64 [S] rows from each source
    arrays: dict[str, np.ndarray]  # name -> [sum(counts), ...], read-only where nothing had to be joined
    control: np.ndarray | None  # int32 or int64 [sources that sent control words, words]; None if there is none


class Outgoing(NamedTuple):
    """One source's part of an exchange: rows `starts[d]` to `starts[d] + splits[d]` of each array go to rank d."""

    arrays: dict[str, np.ndarray]
    classes: dict[str, str]
    starts: np.ndarray  # int64 [R]
    splits: np.ndarray  # int64 [R]
    destinations: tuple[int, ...]
    control: np.ndarray | None  # [number of control destinations, words]
    control_to: tuple[int, ...]
    offsets: dict[str, np.ndarray]  # ragged array -> int64 [rows + 1], where each row's bytes begin

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

    def control_for(self, dst: int) -> np.ndarray | None:
        """The control words for `dst`, if there are any."""
        position = _positions(self.control_to).get(dst)
        return None if position is None else self.control[position]


class Network:
    """Mailboxes between `topology.num_ranks` ranks in one process.

    Nothing waits: `ready` says whether a receive would succeed. A packet goes to every destination of a send, with zero
    rows too, so that a receiver knows when it has heard from all. A send is kept until each destination took its part.
    """

    def __init__(self, topology: Topology, ledger: Ledger | None = None):
        self.topology = topology
        self.ledger = Ledger(topology) if ledger is None else ledger
        self._all = tuple(range(topology.num_ranks))
        self._sent: dict[Tag, dict[int, Outgoing]] = {}
        self._left: dict[Tag, int] = {}  # parts sent and not yet taken
        self._taken: dict[Tag, set[tuple[int, int]]] = {}

    def send_rows(
        self,
        src: int,
        arrays: dict[str, tuple[np.ndarray, str]],
        splits: np.ndarray,
        tag: Tag,
        destinations: Sequence[int] | None = None,
        starts: np.ndarray | None = None,
        control: np.ndarray | None = None,
        control_to: Sequence[int] | None = None,
        lengths: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Send rows of `arrays` (name -> (array [n, ...], byte class)), `splits[d]` consecutive rows to rank d.

        A fresh array is taken over and made read-only, a view is copied, so that sender and receiver share nothing.
        `destinations` get a packet (all ranks by default); `starts` overrides where each destination's rows begin, so
        that one row can go to many. `control` [len(control_to), words] holds one row of control words for each of
        `control_to` (the destinations by default). `lengths` makes an array ragged: flat uint8, with the bytes of each
        row [n].
        Raises ValueError if rows and splits disagree, or if `src` already sent under this tag.
        """
        if src in self._sent.get(tag, ()):
            raise ValueError(f"rank {src} sent {describe(tag)} twice: one send for each rank and tag")
        outgoing = self._outgoing(src, arrays, splits, tag, destinations, starts, control, control_to, lengths or {})
        self._record(src, outgoing, tag)
        self._post(src, outgoing, tag)

    def ready(self, dst: int, tag: Tag, sources: Sequence[int] | None = None) -> bool:
        """Has every one of `sources` (all ranks by default) sent its packet of this exchange to `dst`?"""
        sent = self._sent.get(tag)
        if sent is None:
            return False
        return len(sent) == len(self._all) or all(source in sent for source in (sources or self._all))

    def missing(self, dst: int, tag: Tag, sources: Sequence[int] | None = None) -> list[int]:
        """The sources that `dst` still waits for."""
        sent = self._sent.get(tag, ())
        return [source for source in (sources or self._all) if source not in sent]

    def receive(self, dst: int, tag: Tag, sources: Sequence[int] | None = None) -> Received:
        """Take what `sources` sent to `dst`; rows of one array stand together, in the order of `sources`.

        Raises NotDelivered if a source has not sent yet, and ValueError if `dst` took its part before.
        """
        sources = self._all if sources is None else tuple(sources)
        missing = self.missing(dst, tag, sources)
        if missing:
            raise NotDelivered(f"rank {dst} has not received {describe(tag)} from rank(s) {_some(missing)}")
        sent = self._sent[tag]
        self._take(dst, tag, sources)
        return join_parts(dst, sources, [sent[source] for source in sources])

    def pending(self) -> list[tuple[Tag, int]]:
        """Exchanges of which a part was sent and not taken, with the number of such parts."""
        return [(tag, left) for tag, left in self._left.items() if left]

    def _outgoing(self, src, arrays, splits, tag, destinations, starts, control, control_to, lengths) -> Outgoing:
        splits = np.asarray(splits, np.int64)
        destinations = self._all if destinations is None else tuple(destinations)
        rows = {len(lengths.get(name, array)) for name, (array, _) in arrays.items()}
        if splits.shape != (len(self._all),) or len(rows) > 1 or splits.min(initial=0) < 0:
            raise ValueError(
                f"rank {src}, {describe(tag)}: splits of shape {splits.shape} and arrays of {sorted(rows)} rows; "
                f"one count of at least 0 for each of {len(self._all)} ranks and equally long arrays are needed"
            )
        if starts is None:
            starts = np.cumsum(splits) - splits
            if rows and int(splits.sum()) != min(rows):
                raise ValueError(
                    f"rank {src}, {describe(tag)}: splits add up to {splits.sum()}, not to {min(rows)} rows"
                )
        if control is not None and control_to is None:
            control_to = destinations
        owned = {name: _owned(array) for name, (array, _) in arrays.items()}
        classes = {name: cls for name, (_, cls) in arrays.items()}
        offsets = {name: np.concatenate([[0], np.cumsum(length)]) for name, length in lengths.items()}
        return Outgoing(owned, classes, starts, splits, destinations, control, tuple(control_to or ()), offsets)

    def _record(self, src: int, outgoing: Outgoing, tag: Tag) -> None:
        if outgoing.arrays:
            self.ledger.append(src, outgoing.splits, outgoing.row_bytes(), tag, outgoing.ragged_bytes())
        if outgoing.control is not None and outgoing.control_to:
            rows = _one_each(outgoing.control_to, len(self._all))
            size = outgoing.control.shape[1] * outgoing.control.itemsize
            self.ledger.append(src, rows, {"control": size}, tag)

    def _post(self, src: int, outgoing: Outgoing, tag: Tag) -> None:
        self._sent.setdefault(tag, {})[src] = outgoing
        self._left[tag] = self._left.get(tag, 0) + len(outgoing.destinations)

    def _take(self, dst: int, tag: Tag, sources: tuple[int, ...]) -> None:
        taken = self._taken.setdefault(tag, set())
        again = [source for source in sources if (source, dst) in taken]
        if again:
            raise ValueError(f"rank {dst} received {describe(tag)} from rank(s) {_some(again)} twice")
        taken.update((source, dst) for source in sources)
        self._left[tag] -= len(sources)
        if not self._left[tag] and len(self._sent[tag]) == len(self._all):
            for table in (self._left, self._taken):
                del table[tag]
            self._sent.pop(tag)


def join_parts(dst: int, sources: tuple[int, ...], parts: list[Outgoing]) -> Received:
    """Put together what `sources` have for `dst`."""
    counts = [int(part.splits[dst]) for part in parts]
    filled = [part for part, count in zip(parts, counts) if count] or parts[:1]
    arrays = {}
    for name in parts[0].arrays:
        pieces = [part.part(name, dst) for part in filled]
        arrays[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    control = [words for part in parts if (words := part.control_for(dst)) is not None]
    return Received(sources, np.array(counts, np.int64), arrays, np.array(control) if control else None)


@lru_cache(maxsize=4096)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    """Where each rank stands in `ranks`."""
    return {rank: position for position, rank in enumerate(ranks)}


@lru_cache(maxsize=4096)
def _one_each(ranks: tuple[int, ...], count: int) -> np.ndarray:
    """int32 [count]: 1 for each of `ranks`; shared by all records of the ledger that have it."""
    rows = np.zeros(count, np.int32)
    rows[list(ranks)] = 1
    return rows


def describe(tag: Tag) -> str:
    """The name of a message in an error."""
    request = "" if tag.request is None else f", request {tag.request}"
    hop = f" ({tag.hop})" if tag.hop else ""
    return f"layer {tag.layer}, message {tag.stage}{hop} of micro-batch {tag.micro_batch}, step {tag.step}{request}"


def _owned(array: np.ndarray) -> np.ndarray:
    """A read-only array of which no one else holds a writable view."""
    if not array.flags.owndata or array.base is not None:
        array = array.copy()
    array.setflags(write=False)
    return array


def _some(ranks: list[int]) -> str:
    """The first few of many ranks."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"

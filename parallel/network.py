"""The emulated network: the only way from one rank to others, and every byte that takes it enters the ledger."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.messages import Outgoing, Picked, Pool, Received, describe, join_parts, some_ranks
from parallel.topology import Topology

__all__ = ["Network", "NotDelivered", "Outgoing", "Received", "Tag"]


_MANY_RANKS = 16  # from here on an exchange is put together as a whole


class NotDelivered(ValueError):
    """A rank wanted to receive what has not arrived; names the rank, the layer, the message and the sources."""


class Disagreement(ValueError):
    """Two ranks understand one exchange differently."""


class Parcel(NamedTuple):
    """What one rank sent to another that the other has not taken yet; control words travel beside the rows."""

    tag: Tag
    src: int
    dst: int
    rows: int


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
        self._taken: dict[Tag, np.ndarray] = {}
        self._pools: dict[Tag, Pool | None] = {}
        self._agreed: set[Tag] = set()  # exchanges whose terms all ranks share

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
        terms: dict[str, object] | None = None,
    ) -> None:
        """Send rows of `arrays` (name -> (array [n, ...], byte class)), `splits[d]` consecutive rows to rank d.

        A fresh array is taken over and made read-only; a view, and the base of a `Picked`, is copied: sender and
        receiver share nothing. `destinations` get a packet (all ranks by default); `starts` overrides where each
        destination's rows begin, so that one row can go to many. `control` [len(control_to), words] holds one row of
        control words for each of `control_to` (the destinations by default). `lengths` makes an array ragged: flat
        uint8, with the bytes of each row [n]. `terms` are values on which all ranks of the exchange must agree; they
        travel outside the byte count, as a packet's tag does.
        Raises ValueError if rows and splits disagree, or if `src` already sent under this tag.
        """
        if src in self._sent.get(tag, ()):
            raise ValueError(f"rank {src} sent {describe(tag)} twice: one send for each rank and tag")
        outgoing = self._outgoing(
            src, arrays, splits, tag, destinations, starts, control, control_to, lengths or {}, terms or {}
        )
        self._record(src, outgoing, tag)
        self._post(src, outgoing, tag)

    def ready(self, dst: int, tag: Tag, sources: Sequence[int] | None = None) -> bool:
        """Has every one of `sources` (all ranks by default) sent its packet of this exchange to `dst`?"""
        sent = self._sent.get(tag, ())
        if len(sent) == len(self._all) or not sources:
            return len(sent) == len(self._all)
        return all(source in sent for source in sources)

    def missing(self, dst: int, tag: Tag, sources: Sequence[int] | None = None) -> list[int]:
        """The sources that `dst` still waits for."""
        sent = self._sent.get(tag, ())
        return [source for source in (sources or self._all) if source not in sent]

    def receive(self, dst: int, tag: Tag, sources: Sequence[int] | None = None, *, gathered: bool = True) -> Received:
        """Take what `sources` (all ranks by default) sent to `dst`; rows of an array stand in the order of `sources`.

        Without `gathered` an array may be a `Picked`: for one who takes rows from it once, and saves a copy of them.
        Raises NotDelivered if a source has not sent yet, and ValueError if `dst` took its part before.
        """
        sources = self._all if sources is None else tuple(sources)
        if not self.ready(dst, tag, sources):
            missing = self.missing(dst, tag, sources)
            raise NotDelivered(f"rank {dst} has not received {describe(tag)} from rank(s) {some_ranks(missing)}")
        self._check_terms(dst, tag, sources)
        received = self._join(dst, tag, sources, gathered)
        self._take(dst, tag, sources)
        return received

    def pending(self) -> list[tuple[Tag, int]]:
        """Exchanges of which a part was sent and not taken, with the number of such parts."""
        return [(tag, left) for tag, left in self._left.items() if left]

    def under_way(self) -> list[Parcel]:
        """Every packet that was sent and not taken, empty ones included, in the order of sending."""
        parcels = []
        for tag, sent in self._sent.items():
            taken = self._taken.get(tag)
            for src, outgoing in sent.items():
                for dst in outgoing.destinations:
                    if taken is None or not taken[src, dst]:
                        parcels.append(Parcel(tag, src, dst, int(outgoing.splits[dst])))
        return parcels

    def _outgoing(
        self, src, arrays, splits, tag, destinations, starts, control, control_to, lengths, terms
    ) -> Outgoing:
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
        if control is None:
            control_to = ()
        elif control_to is None:
            control_to = destinations
        owned = {name: _owned(array) for name, (array, _) in arrays.items()}
        classes = {name: cls for name, (_, cls) in arrays.items()}
        offsets = {name: np.concatenate([[0], np.cumsum(length)]) for name, length in lengths.items()}
        return Outgoing(owned, classes, starts, splits, destinations, control, tuple(control_to), offsets, terms)

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

    def _join(self, dst: int, tag: Tag, sources: tuple[int, ...], gathered: bool) -> Received:
        if sources == self._all and len(sources) >= _MANY_RANKS and tag not in self._pools:
            pool = self._pools[tag] = Pool.of(self._parts(dst, tag, sources))
            if pool is not None:  # which now has the rows: the sources' own arrays need not stay beside it
                sent = self._sent[tag]
                sent.update({source: sent[source]._replace(arrays={}) for source in sources})
        if self._pools.get(tag) is not None:
            return self._pools[tag].part(dst, sources, gathered)
        return join_parts(dst, sources, self._parts(dst, tag, sources))

    def _parts(self, dst: int, tag: Tag, sources: tuple[int, ...]) -> list[Outgoing]:
        """What each source sent, as far as `dst` can see it."""
        sent = self._sent[tag]
        return [sent[source] for source in sources]

    def _check_terms(self, dst: int, tag: Tag, sources: tuple[int, ...]) -> None:
        if tag in self._agreed:
            return
        sent = self._sent[tag]
        mine = sent[dst].terms if dst in sent else sent[sources[0]].terms
        for source in sources:
            if sent[source].terms != mine:
                raise Disagreement(
                    f"rank {dst}, {describe(tag)}: rank {source} sent it with {sent[source].terms}, "
                    f"rank {dst} has {mine}; all ranks must agree"
                )
        if sources == self._all:
            self._agreed.add(tag)

    def _take(self, dst: int, tag: Tag, sources: tuple[int, ...]) -> None:
        taken = self._taken.setdefault(tag, np.zeros((len(self._all), len(self._all)), bool))  # [source, destination]
        chosen = slice(None) if sources == self._all else list(sources)
        if taken[chosen, dst].any():
            again = [source for source in sources if taken[source, dst]]
            raise ValueError(f"rank {dst} received {describe(tag)} from rank(s) {some_ranks(again)} twice")
        taken[chosen, dst] = True
        self._left[tag] -= len(sources)
        if not self._left[tag] and len(self._sent[tag]) == len(self._all):
            for table in (self._sent, self._left, self._taken, self._pools):
                table.pop(tag, None)
            self._agreed.discard(tag)


@lru_cache(maxsize=4096)
def _one_each(ranks: tuple[int, ...], count: int) -> np.ndarray:
    """int32 [count]: 1 for each of `ranks`; shared by all records of the ledger that have it."""
    rows = np.zeros(count, np.int32)
    rows[list(ranks)] = 1
    return rows


def _owned(array: np.ndarray | Picked) -> np.ndarray | Picked:
    """A read-only array of which no one else holds a writable view."""
    if isinstance(array, Picked):
        return array.owned()
    if not array.flags.owndata or array.base is not None:
        array = array.copy()
    array.setflags(write=False)
    return array

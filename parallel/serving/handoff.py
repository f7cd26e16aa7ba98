"""Hand-over of a request's cache from a prefill rank to a decode rank, as one-sided writes.

The decode side reserves pages; the prefill side sends chunks of rows as they are computed, and last what decoding needs
besides: the first token, its position, sampling state, and the hidden state from which the MTP layer drafts. A write
reads its source when it is delivered, not when it is sent, and arrives in any order, as RDMA does. So the pages of both
sides stay owned until both sides are done and no write is under way (sgl-project/sglang#24527). Fresh pages hold
poison, which finds rows that are sent before they are computed (#33970) or used before they arrive (#30233).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Metadata(NamedTuple):
    """What goes over besides the cache. hidden: the state that the MTP layer's first draft starts from, or None."""

    first_token: int
    position: int
    hidden: np.ndarray | None = None
    sampling: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Token and position as int32 each, then the rest."""
        return 8 + (0 if self.hidden is None else self.hidden.nbytes) + len(self.sampling)


@dataclass(frozen=True)
class CachePages:
    """The cache of one rank: for every layer an array [num_pages, page_size, width], all of one shape and dtype."""

    layers: Sequence[np.ndarray]

    def __post_init__(self):
        kinds = {(layer.shape, layer.dtype) for layer in self.layers}
        if len(kinds) != 1 or self.layers[0].ndim != 3:
            raise ValueError(
                f"layers must be arrays [num_pages, page_size, width] of one kind, not {sorted(map(str, kinds))}"
            )

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.layers[0].shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.layers[0].shape[2] * self.layers[0].dtype.itemsize

    def poison(self, pages: Sequence[int]) -> None:
        """Mark every row of these pages as not written."""
        for layer in self.layers:
            layer[list(pages)] = _poison_of(layer.dtype)

    def places(self, pages: Sequence[int], first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, row in page) of the tokens first .. stop - 1 of a request that owns `pages`."""
        token = np.arange(first, stop)
        return np.asarray(pages, np.int64)[token // self.page_size], token % self.page_size

    def is_written(self, layer: int, pages: Sequence[int], first: int, stop: int) -> bool:
        """Whether none of these rows is poison."""
        rows = self.layers[layer][self.places(pages, first, stop)]  # [n, width]
        return not _is_poison(rows).any()


class _Write(NamedTuple):
    """A one-sided write of the rows of tokens first .. stop - 1 in one layer."""

    layer: int
    first: int
    stop: int


class _Notice(NamedTuple):
    """The decode side tells the prefill side that it has given up."""


class HandOver:
    """The passage of one request with `num_tokens` cached tokens; both sides and the wire call its methods.

    `record(class, layer, rows, bytes of a row)` hears of every delivery. The decode side may hold the first `have`
    tokens already. Source and destination may differ in page size and in
    page numbers. Raises ValueError for caches that differ otherwise, or too few pages.
    """

    def __init__(
        self,
        source: CachePages,
        source_pages: Sequence[int],
        destination: CachePages,
        destination_pages: Sequence[int],
        num_tokens: int,
        have: int = 0,
        record: Callable[[str, int, int, int], None] | None = None,
    ):
        kinds = [
            (len(side.layers), side.layers[0].shape[2], side.layers[0].dtype.name) for side in (source, destination)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(f"source and destination differ in (layers, width, dtype): {kinds[0]} and {kinds[1]}")
        for name, side, pages in (("source", source, source_pages), ("destination", destination, destination_pages)):
            if len(pages) * side.page_size < num_tokens:
                raise ValueError(f"{len(pages)} {name} pages of {side.page_size} do not hold {num_tokens} tokens")
        if not 0 <= have <= num_tokens:
            raise ValueError(f"have = {have}: the decode side holds from 0 to all {num_tokens} tokens")
        self.source, self.destination = source, destination
        self.source_pages, self.destination_pages = list(source_pages), list(destination_pages)
        self.num_tokens, self.have = num_tokens, have
        self.under_way: list[_Write | Metadata | _Notice] = []
        self.sent = have  # tokens that are sent or need not be
        self.metadata: Metadata | None = None
        self.payload_bytes = self.metadata_bytes = self.writes = 0
        self._record = record or (lambda cls, layer, rows, row_bytes: None)
        self._arrived = np.zeros((len(destination.layers), num_tokens), bool)
        self._arrived[:, :have] = True
        self._source_done = self._destination_done = self._source_aborted = self._source_knows = False

    # What the prefill side does

    def send(self, stop: int) -> None:
        """Send the rows of all tokens before `stop` that are not sent yet, in every layer.

        Does nothing once it is known that the decode side has given up. Raises ValueError for rows that are not
        computed yet.
        """
        self._must_be_open("send")
        if self._source_knows:
            return
        if not self.sent <= stop <= self.num_tokens:
            raise ValueError(f"stop = {stop}: {self.sent} of {self.num_tokens} tokens are sent")
        for layer in range(len(self.source.layers)):
            if not self.source.is_written(layer, self.source_pages, self.sent, stop):
                raise ValueError(f"tokens {self.sent} .. {stop - 1} of layer {layer} are sent before they are computed")
            if stop > self.sent:
                self.under_way.append(_Write(layer, self.sent, stop))
        self.sent = stop

    def finish(self, metadata: Metadata) -> None:
        """The last thing sent. Raises ValueError if rows are missing that the decode side needs."""
        self._must_be_open("finish")
        if not self._source_knows:
            if self.sent < self.num_tokens:
                raise ValueError(f"finish after {self.sent} of {self.num_tokens} tokens: send the rest first")
            self.under_way.append(metadata)
        self._source_done = True

    def abort_source(self) -> None:
        """The prefill side gives up: the decode side will never be complete, whatever has arrived."""
        self._source_aborted = self._source_done = True

    # What the wire does

    def deliver(self, index: int = 0) -> None:
        """Carry out one of `under_way`, any of them."""
        item = self.under_way.pop(index)
        if isinstance(item, _Notice):
            self._source_knows = True
            return
        if isinstance(item, Metadata):
            self.metadata = item
            self.metadata_bytes += item.num_bytes
            self._record("control", 0, 1, item.num_bytes)
            return
        rows = self.source.layers[item.layer][self.source.places(self.source_pages, item.first, item.stop)]
        self.destination.layers[item.layer][self.destination.places(self.destination_pages, item.first, item.stop)] = (
            rows
        )
        self._arrived[item.layer, item.first : item.stop] = True
        self.payload_bytes += rows.nbytes
        self.writes += 1
        self._record("cache", item.layer, len(rows), self.source.row_bytes)

    # What the decode side does

    @property
    def complete(self) -> bool:
        """Whether everything has arrived and nobody gave up."""
        return (
            self.metadata is not None
            and bool(self._arrived.all())
            and not (self._source_aborted or self._destination_done)
        )

    @property
    def failed(self) -> bool:
        """Whether the prefill side gave up: the decode side must abort too."""
        return self._source_aborted

    def take(self) -> Metadata:
        """Begin decoding. Raises ValueError unless all rows and the metadata are there."""
        if not self.complete:
            missing = int((~self._arrived).sum())
            raise ValueError(f"hand-over is not complete: {missing} rows missing, metadata {self.metadata is not None}")
        for layer in range(len(self.destination.layers)):
            if not self.destination.is_written(layer, self.destination_pages, 0, self.num_tokens):
                raise ValueError(f"layer {layer} holds rows that nobody wrote, although all arrived")
        self._destination_done = True
        return self.metadata

    def abort_destination(self) -> None:
        """The decode side gives up and says so; its pages stay reserved until `destination_free`."""
        if not self._destination_done:
            self.under_way.append(_Notice())
        self._destination_done = True

    # Who may free what

    @property
    def source_free(self) -> bool:
        """The prefill side may free its pages: it is done and no write reads them any more."""
        return self._source_done and not self._writes_left

    @property
    def destination_free(self) -> bool:
        """No write will touch the decode side's pages again: both sides are done and nothing is under way."""
        return self._source_done and self._destination_done and not self._writes_left

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows that the request needs, without those it has: tokens x row x layers."""
        return (self.num_tokens - self.have) * self.source.row_bytes * len(self.source.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of the source pages that hold them, whole."""
        size = self.source.page_size
        pages = -(-self.num_tokens // size) - self.have // size if self.num_tokens > self.have else 0
        return pages * size * self.source.row_bytes * len(self.source.layers)

    @property
    def _writes_left(self) -> bool:
        return any(not isinstance(item, _Notice) for item in self.under_way)

    def _must_be_open(self, what: str) -> None:
        if self._source_done:
            raise ValueError(f"{what} after the prefill side was done or gave up")


def _poison_of(dtype: np.dtype):
    """NaN for floats, -1 for signed integers; all bits set for bytes, which FP8 rows read as NaN everywhere."""
    if dtype.kind == "u":
        return np.iinfo(dtype).max
    return -1 if dtype.kind == "i" else np.nan


def _is_poison(rows: np.ndarray) -> np.ndarray:
    """bool [n]: a float row with any NaN, an integer row that is all poison."""
    if rows.dtype.kind in "iu":
        return (rows == _poison_of(rows.dtype)).all(axis=-1)
    return np.isnan(rows.astype(np.float32)).any(axis=-1)

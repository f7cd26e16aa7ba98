"""The ledger: what was really moved, between whom, over which link, of which class, for which layer and stage."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from parallel.topology import LINKS, Topology

CLASSES = ("payload", "scales", "routing", "header", "padding", "control", "cache")
ROW_CLASSES = ("payload", "cache")  # the classes of which every row of data has bytes; control words are not rows
DIRECTIONS = ("dispatch", "combine")


class Tag(NamedTuple):
    """Names one exchange: every rank's part of it carries the same tag.

    `stage` begins with its direction (`dispatch_send`, `combine_forward`); `hop` tells apart two exchanges of a stage.
    """

    stage: str
    layer: int = 0
    micro_batch: int = 0
    step: int = 0
    hop: str = ""
    request: int | None = None


class Entry(NamedTuple):
    """One line of the ledger as a reader sees it."""

    src: int
    dst: int
    link: str
    cls: str
    tag: Tag
    rows: int
    bytes: int


class Ledger:
    """Append-only record of sends; sums of it are the volumes.

    One `append` records one source's part of an exchange: a vector over destinations, and for each class the bytes of
    one row. 144 ranks and 58 layers stay about 1e5 short records, so that recording costs no more than moving.
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        self._tags: dict[Tag, int] = {}
        self._signatures: dict[tuple, int] = {}
        self._src: list[int] = []
        self._tag: list[int] = []
        self._signature: list[int] = []
        self._rows: list[np.ndarray] = []
        self._uneven: list[tuple[int, str, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self._src)

    def append(self, src: int, rows: np.ndarray, row_bytes: dict[str, int], tag: Tag, uneven: dict | None = None):
        """Record that `src` sent `rows[dst]` rows to each rank, `row_bytes[class]` bytes of each class per row.

        `rows` is an integer array [R] that the caller does not change afterwards; `uneven` maps a class to int64 [R]
        bytes per destination, where the bytes of a row depend on its values.
        Raises ValueError for a class that CLASSES does not name.
        """
        for name in (*row_bytes, *(uneven or ())):
            if name not in CLASSES:
                raise ValueError(f"class {name!r} is none of {', '.join(CLASSES)}")
        signature = tuple(sorted(row_bytes.items()))
        for name, amounts in (uneven or {}).items():
            self._uneven.append((len(self._src), name, np.asarray(amounts, np.int64)))
        self._src.append(src)
        self._tag.append(self._tags.setdefault(tag, len(self._tags)))
        self._signature.append(self._signatures.setdefault(signature, len(self._signatures)))
        self._rows.append(np.asarray(rows, np.int32))

    def merge(self, other: "Ledger") -> None:
        """Append every record of `other`, which must be of the same topology."""
        if other.topology != self.topology:
            raise ValueError(f"a ledger of {other.topology} cannot be merged into one of {self.topology}")
        tags, signatures = list(other._tags), list(other._signatures)
        uneven: dict[int, dict] = {}
        for position, name, amounts in other._uneven:
            uneven.setdefault(position, {})[name] = amounts
        for position, src in enumerate(other._src):
            row_bytes = dict(signatures[other._signature[position]])
            tag = tags[other._tag[position]]
            self.append(src, other._rows[position], row_bytes, tag, uneven.get(position))

    def matrix(
        self,
        direction: str | None = None,
        link: str | None = None,
        unit: str = "bytes",
        classes: Iterable[str] | str | None = None,
        **where,
    ) -> np.ndarray:
        """Sum over the records: int64 [R, R] (source, destination).

        `direction` is "dispatch" or "combine", `link` one of LINKS, `classes` some of CLASSES, each None for all;
        `where` holds fields of Tag (`layer=3`, `stage="dispatch_send"`). `unit` "rows" counts each row once, where it
        has bytes in one of `classes`; without `classes` control words are no rows.
        Raises ValueError for a name that does not exist.
        """
        wanted = self._classes(unit, classes)
        if link is not None and link not in LINKS:
            raise ValueError(f"link = {link!r} is none of {', '.join(LINKS)}")
        count = self.topology.num_ranks
        total = np.zeros((count, count), np.int64)
        if self._src:
            chosen = self._chosen_tags(direction, where)[self._tag]
            weight = self._row_weights(unit, wanted)[self._signature]
            picked = np.flatnonzero(chosen & (weight > 0))
            if picked.size:
                self._add(total, picked, weight[picked])
            if unit == "bytes":
                for position, name, amounts in self._uneven:
                    if chosen[position] and name in wanted:
                        total[self._src[position]] += amounts
        if link is not None:
            total[self.topology.link_matrix() != LINKS.index(link)] = 0
        return total

    def entries(self) -> list[Entry]:
        """Every (source, destination, class) with rows, in the order of recording; slow, for tests and tables."""
        tags, signatures = list(self._tags), list(self._signatures)
        lines = []
        for position, src in enumerate(self._src):
            tag, rows = tags[self._tag[position]], self._rows[position]
            classes = {name: rows.astype(np.int64) * size for name, size in signatures[self._signature[position]]}
            classes.update({name: amounts for at, name, amounts in self._uneven if at == position})
            for name, amounts in classes.items():
                for dst in np.flatnonzero(rows):
                    link = self.topology.link(src, int(dst))
                    lines.append(Entry(src, int(dst), link, name, tag, int(rows[dst]), int(amounts[dst])))
        return lines

    def _classes(self, unit: str, classes) -> tuple[str, ...]:
        if unit not in ("bytes", "rows"):
            raise ValueError(f'unit = {unit!r} is neither "bytes" nor "rows"')
        if classes is None:
            return CLASSES if unit == "bytes" else ROW_CLASSES
        wanted = (classes,) if isinstance(classes, str) else tuple(classes)
        for name in wanted:
            if name not in CLASSES:
                raise ValueError(f"class {name!r} is none of {', '.join(CLASSES)}")
        return wanted

    def _chosen_tags(self, direction, where) -> np.ndarray:
        """bool [number of tags]: does the tag match?"""
        if direction is not None and direction not in DIRECTIONS:
            raise ValueError(f"direction = {direction!r} is none of {', '.join(DIRECTIONS)}")
        for field in where:
            if field not in Tag._fields:
                raise ValueError(f"{field!r} is no field of a tag; those are {', '.join(Tag._fields)}")
        where = {field: value for field, value in where.items() if value is not None}
        return np.array(
            [
                (direction is None or tag.stage.startswith(direction))
                and all(getattr(tag, field) == value for field, value in where.items())
                for tag in self._tags
            ],
            dtype=bool,
        )

    def _row_weights(self, unit: str, wanted) -> np.ndarray:
        """int64 [number of signatures]: what one row counts for."""
        uneven = {self._signature[position] for position, name, _ in self._uneven if name in wanted}
        weights = []
        for number, signature in enumerate(self._signatures):
            sizes = [size for name, size in signature if name in wanted]
            has_rows = any(sizes) or number in uneven
            weights.append(sum(sizes) if unit == "bytes" else int(has_rows))
        return np.array(weights, np.int64)

    def _add(self, total, picked, weight) -> None:
        """Add weight * rows of the picked records to their sources' lines, one source's records at a time."""
        src = np.array(self._src)[picked]
        for rank in np.unique(src):
            mine = np.flatnonzero(src == rank)
            rows = np.array([self._rows[position] for position in picked[mine]], np.int64)
            total[rank] += (rows * weight[mine, None]).sum(axis=0)

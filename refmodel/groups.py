"""Which requests of a batch are attended to in one go."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from refmodel.cache import PAGE_SIZE

# requests are attended to together while their keys fit a core's second-level cache, and few tokens are new
_TOGETHER_BYTES = 2 << 20
#: new tokens of a request up to which it may have company
FEW_TOKENS = 8


class Group(NamedTuple):
    """Requests with equally many new tokens and key blocks; one that has many new tokens is alone."""

    segments: list
    rows: slice | np.ndarray  # the batch's rows that are theirs
    keys: list[int]  # of each, up to its last token here

    @property
    def new_tokens(self) -> int:
        """Of each request."""
        return self.segments[0].stop - self.segments[0].start

    @property
    def blocks(self) -> int:
        """Key blocks of each request, the last one filled in part."""
        return -(-self.keys[0] // PAGE_SIZE)


def with_tokens(segments) -> list:
    """A request may come without new tokens, and without any key."""
    return [segment for segment in segments if segment.stop > segment.start]


def alike(segments, row_bytes: int) -> Iterator[Group]:
    """Segments in groups, of which one has few bytes of keys; `row_bytes`: of a cache row in the compute dtype."""
    kinds: dict[tuple[int, int], list] = {}
    for segment in with_tokens(segments):
        kinds.setdefault((segment.stop - segment.start, -(-segment.keys // PAGE_SIZE)), []).append(segment)
    for (new, blocks), members in kinds.items():
        most = max(1, _TOGETHER_BYTES // (blocks * PAGE_SIZE * row_bytes)) if new <= FEW_TOKENS else 1
        for start in range(0, len(members), most):
            group = members[start : start + most]
            yield Group(group, _rows(group), [segment.keys for segment in group])


def _rows(group):
    start, stop = group[0].start, group[-1].stop
    if stop - start == sum(segment.stop - segment.start for segment in group):
        return slice(start, stop)  # they follow each other
    return np.concatenate([np.arange(segment.start, segment.stop) for segment in group])

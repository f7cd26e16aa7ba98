"""Dispatched rows compared by where they come from, whatever order or layout they stand in."""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.deepep_elastic import ElasticExpanded
from parallel.dispatch.deepep_low_latency import LowLatencyDispatch


class SourceRows(NamedTuple):
    """Rows with their keys: int64 [n, 3] (local expert, source rank, token on that rank), in any order."""

    key: np.ndarray
    rows: tuple[np.ndarray, ...]  # [n, ...] each: the rows, or codes and scales


def low_latency_rows(received: LowLatencyDispatch) -> SourceRows:
    """The defined rows of a low-latency buffer [e, R * max, H]."""
    counts = received.handle.layout_range & 0xFFFFFFFF  # [e, R]
    begin = received.handle.layout_range >> 32
    experts, sources = counts.shape
    flat = counts.reshape(-1)
    expert, source = np.divmod(np.repeat(np.arange(experts * sources), flat), sources)
    place = np.arange(int(flat.sum())) - np.repeat(np.cumsum(flat) - flat, flat) + begin[expert, source]
    token = received.handle.src_info[expert, place]
    parts = received.packed_recv_x if isinstance(received.packed_recv_x, tuple) else (received.packed_recv_x,)
    return SourceRows(np.stack([expert, source, token], axis=1), tuple(part[expert, place] for part in parts))


def expanded_rows(received: ElasticExpanded, num_max_tokens_per_rank: int) -> SourceRows:
    """The defined rows of an expanded elastic buffer, one for each (token, expert)."""
    row, slot = np.nonzero(received.recv_src_metadata[:, 2:] >= 0)
    place = received.recv_src_metadata[row, 2 + slot]
    source, token = np.divmod(received.recv_src_metadata[row, 0], num_max_tokens_per_rank)
    expert = np.searchsorted(received.psum_num_recv_tokens_per_expert, place, side="right")
    parts = received.recv_x if isinstance(received.recv_x, tuple) else (received.recv_x,)
    return SourceRows(np.stack([expert, source, token], axis=1), tuple(part[place] for part in parts))


def row_differences(left: SourceRows, right: SourceRows) -> list[str]:
    """What distinguishes two sets of rows, one line for each row: missing, duplicate or of other bits.

    Empty when each (expert, source rank, token) has the same bytes in both.
    """
    first, second = _by_key(left), _by_key(right)
    lines = []
    for key in sorted(first.keys() | second.keys()):
        name = f"expert {key[0]}, rank {key[1]}, token {key[2]}"
        mine, other = first.get(key, []), second.get(key, [])
        if not mine or not other:
            lines.append(f"{name}: missing in the {'first' if not mine else 'second'}")
        elif len(mine) > 1 or len(other) > 1:
            lines.append(f"{name}: {len(mine)} times in the first, {len(other)} in the second")
        elif mine != other:
            lines.append(f"{name}: the rows differ")
    return lines


def _by_key(rows: SourceRows) -> dict[tuple[int, int, int], list[tuple[bytes, ...]]]:
    found: dict[tuple[int, int, int], list[tuple[bytes, ...]]] = {}
    for number, key in enumerate(rows.key.tolist()):
        found.setdefault(tuple(key), []).append(tuple(part[number].tobytes() for part in rows.rows))
    return found

"""Why measured bytes may differ from counted ones: each known mistake is made in the count, and compared again."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from parallel.dispatch.counter_model import Options, at, matrix_of, overhead
from parallel.dispatch.logfmt import row_bounds
from parallel.dispatch.measurements import Measurement
from parallel.dispatch.row_bytes import PAYLOADS
from parallel.dispatch.volumes import DIRECTIONS, Volumes, volumes_of

MISSING = {
    "scales are left out": ("scales",),
    "padding is left out": ("padding",),
    "control words are left out": ("control",),
    "only payload and scales are counted": ("header", "routing", "padding", "control"),
    "only payload is counted": ("scales", "header", "routing", "padding", "control"),
}
_LOGFMT = "rows come back as LogFMT-10"
UNITS = {
    "words of 4 bytes were taken for bytes": 0.25,
    "bytes were taken for words of 4 bytes": 4.0,
    "GiB were taken for GB": 1 / 1.024**3,
    "GB were taken for GiB": 1.024**3,
}


class Mistake(NamedTuple):
    """What may have happened, and the least and most bytes that it makes."""

    name: str
    low: float
    high: float


def counter_cause(m: Measurement, total: Volumes, options: Options) -> str | None:
    """The mistakes (at most two) that bring a counter into its interval, closest to the bytes alone first; None if none
    does."""
    slack, fitting = 1 + options.slack, []
    for mistake in _mistakes(m, total, options.mtu):
        low, high = mistake.low * options.repeat, mistake.high * options.repeat
        if low > 0 and m.high >= low / slack and m.low <= high * slack:
            fitting.append((abs((m.low + m.high) / 2 - low) / low, mistake.name))
    return ", or ".join(name for _, name in sorted(fitting)[:2]) or None


def _mistakes(m: Measurement, total: Volumes, mtu: int) -> Iterator[Mistake]:
    counted, extra = at(matrix_of(total, m), m), overhead(total, m, mtu)
    for name, value in (*_added(m, total), *_left_out(m, total)):
        if value:
            yield Mistake(name, counted + value, counted + value + extra)
    for name, factor in _targets(total):
        yield Mistake(name, counted * factor, (counted + extra) * factor)
    if total.dispatch == "low_latency" and m.direction != "dispatch" and total.payload in ("fp8", "bf16"):
        rows = at(total.matrix("combine", unit="rows") * (matrix_of(total, m) > 0), m)
        low, high = (counted + rows * (size - 2 * total.hidden) for size in row_bounds(total.hidden))
        yield Mistake(_LOGFMT, low, high + extra)
    for payload in PAYLOADS:
        if payload != total.payload:
            other = volumes_of(total.counts, total.hidden, total.dispatch, payload, total.mode)
            value = at(matrix_of(other, m), m)
            yield Mistake(
                f"rows travel as {payload} instead of {total.payload}", value, value + overhead(other, m, mtu)
            )
    for direction in (None, *DIRECTIONS):
        if direction != m.direction:
            what = m._replace(direction=direction)
            value = at(matrix_of(total, what), what)
            name = f"only {direction} is measured" if direction else "dispatch and combine are both measured"
            yield Mistake(name, value, value + overhead(total, what, mtu))
    for name, factor in UNITS.items():
        yield Mistake(name, counted * factor, (counted + extra) * factor)


def _added(m: Measurement, total: Volumes) -> Iterator[tuple[str, float]]:
    """Bytes that are not among those counted."""
    if m.quantity.startswith("nic") and total.dispatch in ("normal", "elastic"):
        yield "rows for the own node are included, as in DeepEP's metric", at(_own_node_rows(total, m.direction), m)
    if m.quantity.startswith("nic"):
        yield "traffic by NVLink is included", at(total.matrix(m.direction, "nvlink"), m)
    if m.quantity != "pair":
        yield "the own rank's traffic is included", at(total.matrix(m.direction, "local"), m)
    if total.dispatch == "low_latency":
        slots = total.counts.tokens.sum() * total.counts.top_k
        none = slots - total.counts.slots_to_rank.sum()
        yield "padding is counted: ids of -1 are sent", at(matrix_of(total, m), m) * none / max(slots - none, 1)


def _left_out(m: Measurement, total: Volumes) -> Iterator[tuple[str, float]]:
    for name, classes in MISSING.items():
        yield name, -at(matrix_of(total, m, classes), m)


def _targets(total: Volumes) -> list[tuple[str, float]]:
    """9 targets instead of 8 where the shared expert is dispatched too, and the reverse."""
    k = total.counts.top_k
    return [(f"{other} targets per token instead of {k}", other / k) for other in (k + 1, k - 1)]


def _own_node_rows(total: Volumes, direction) -> np.ndarray:
    """Bytes of one row per token whose experts stand on the own node, on the diagonal: int64 [R, R]."""
    rank = np.arange(total.topology.num_ranks)
    rows = total.counts.tokens_to_node[rank, total.topology.node(rank)]
    sizes = [sum(h.row_bytes.classes.values()) for h in _one_hop_each(total) if direction in (None, h.direction)]
    return np.diag(rows * sum(sizes))


def _one_hop_each(total: Volumes):
    return [next(hop for hop in total.hops if hop.direction == direction) for direction in DIRECTIONS]


def metric_cause(m: Measurement, volumes: Volumes, low: float, high: float) -> str | None:
    """The first mistake that brings a figure of DeepEP's tests into the counted interval; None if none does."""
    hidden, scales = volumes.hidden, 4 * -(-volumes.hidden // 128)
    row = hidden + scales if volumes.payload == "fp8" and m.direction == "dispatch" else 2 * hidden
    header = 16 if m.quantity == "num_dispatch_comm_bytes" else 0
    topology = volumes.topology
    factors = [
        ("the own rank's traffic is left out", (topology.num_ranks - 1) / topology.num_ranks),
        ("rows for the own node are left out", (topology.num_nodes - 1) / topology.num_nodes),
        ("scales are left out", (row + header - scales) / (row + header)),
        ("the header is left out", row / (row + header)),
        *_targets(volumes),
        (_LOGFMT, row_bounds(hidden)[0] / row if m.quantity == "num_combine_comm_bytes" else 1),
        ("rows travel as bf16 instead of fp8", (2 * hidden + header) / (row + header)),
        ("rows travel as fp8 instead of bf16", (hidden + scales + header) / (row + header)),
        *UNITS.items(),
    ]
    for name, factor in factors:
        if factor != 1 and m.high >= low * factor * 0.999 and m.low <= high * factor * 1.001:
            return name
    return None

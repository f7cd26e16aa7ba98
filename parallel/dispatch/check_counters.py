"""Holds measured bytes against counted ones, with an interval for what the transport adds, and names a likely cause."""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.counter_model import Options, allowed, at, matrix_of
from parallel.dispatch.likely_causes import counter_cause, metric_cause
from parallel.dispatch.measurements import RANK_QUANTITIES, Measurement
from parallel.dispatch.volumes import DIRECTIONS, Volumes, volumes_of


class Finding(NamedTuple):
    """One measurement beside the count: measured and allowed intervals in bytes (rows for splits)."""

    measurement: Measurement
    measured: tuple[float, float]
    counted: float
    allowed: tuple[float, float]
    holds: bool
    cause: str | None

    @property
    def ratio(self) -> float | None:
        """Measured over counted."""
        return sum(self.measured) / 2 / self.counted if self.counted else None


def check_measurements(measurements, layers: list[Volumes], options: Options | None = None) -> list[Finding]:
    """One finding per measurement, in their order.

    layers: the volumes of each layer of one step. Counters are held to their sum times `options.repeat`; DeepEP's test
    figures to the range over layers (and ranks, where the log does not name one); split sizes to the layers in order.
    Raises ValueError for places that do not exist, and for figures that the dialect does not have."""
    options = options or Options()
    total = layers[0]
    for layer in layers[1:]:
        total = total + layer
    exchanges = [layer.matrix(direction, unit="rows") for layer in layers for direction in DIRECTIONS] * options.repeat
    unseen: dict = {}  # rank of a trace -> exchanges that it has not shown yet
    findings = []
    for m in measurements:
        _check_place(m, total)
        if m.quantity == "splits":
            findings.append(_check_splits(m, unseen.setdefault(m.place, exchanges.copy())))
        elif m.quantity in ("pair", *RANK_QUANTITIES):
            findings.append(_check_counter(m, total, options))
        else:
            findings.append(_check_metric(m, layers))
    return findings


def _check_place(m: Measurement, volumes: Volumes) -> None:
    ranks = volumes.topology.num_ranks
    for rank in m.place if isinstance(m.place, tuple) else (m.place,):
        if rank is not None and not 0 <= rank < ranks:
            raise ValueError(f"{m.where}: rank {rank}, but there are {ranks} ranks")


def _check_counter(m: Measurement, total: Volumes, options: Options) -> Finding:
    counted = at(matrix_of(total, m), m) * options.repeat
    low, high = allowed(total, m, options)
    holds = bool(m.high >= low and m.low <= high)
    return Finding(m, (m.low, m.high), counted, (low, high), holds, None if holds else counter_cause(m, total, options))


def _check_metric(m: Measurement, layers: list[Volumes]) -> Finding:
    name, _, payload = m.quantity.partition(":")
    if payload and m.direction == "dispatch":
        layers = [volumes_of(v.counts, v.hidden, v.dispatch, payload, v.mode) for v in layers]
    metrics = [layer.deepep() for layer in layers]
    if name not in metrics[0]:
        raise ValueError(
            f"{m.where}: {name} is no figure of {layers[0].dispatch} dispatch over "
            f"{layers[0].topology.num_nodes} node(s); those are {', '.join(metrics[0])}"
        )
    values = np.array([metric[name] for metric in metrics])  # [L, R]
    values = values if m.place is None else values[:, m.place]
    low, high = float(values.min()), float(values.max())
    holds = bool(m.high >= low and m.low <= high)
    cause = None if holds else metric_cause(m, layers[0], low, high)
    return Finding(m, (m.low, m.high), float(values.mean()), (low, high), holds, cause)


def _check_splits(m: Measurement, expected: list[np.ndarray]) -> Finding:
    """Exchanges come in order: what a trace shows must be one of those not yet seen; what was passed over is gone."""
    measured = (float(m.low.sum()),) * 2
    ranks = range(len(expected[0])) if expected else ()
    places = ranks if m.place is None else (m.place,)
    if not expected:
        return Finding(m, measured, 0.0, (0.0, 0.0), False, "more exchanges than the layers have")
    if len(m.low) != len(ranks):
        cause = f"{len(m.low)} split sizes for {len(ranks)} ranks: another group of ranks"
        return Finding(m, measured, 0.0, (0.0, 0.0), False, cause)
    for position, rows in enumerate(expected):
        if any(np.array_equal(rows[rank], m.low) for rank in places):
            del expected[: position + 1]
            return Finding(m, measured, measured[0], measured, True, None)
    nearest = min((rows[rank] for rows in expected for rank in places), key=lambda rows: np.abs(rows - m.low).sum())
    counted = float(nearest.sum())
    return Finding(m, measured, counted, (counted, counted), False, _split_cause(m.low, expected, places, nearest))


def _split_cause(splits: np.ndarray, expected, places, nearest: np.ndarray) -> str:
    for rows in (rows[rank] for rows in expected for rank in places):
        if splits.sum() and rows.sum() and np.array_equal(splits * rows.sum(), rows * splits.sum()):
            return f"every split is {splits.sum() / rows.sum():g} times the rows: elements or bytes instead of rows"
    dst = int(np.argmax(nearest != splits))
    return f"to rank {dst}: {splits[dst]} rows measured, {nearest[dst]} counted"

"""A fleet of prefill and decode deployments through a day, as a fluid: tokens per second against rates per node.

A prefill deployment is 4 nodes, a decode deployment 18 (DeepSeek open-infra-index, day_6). Every step of the published
node chart is 30 nodes, one decode deployment with three prefill ones, above a base of 8 nodes, two prefill deployments:
that reading gives the unit in which the autoscaler moves.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel.serving.economics import Traffic

PREFILL_NODES, DECODE_NODES = 4, 18
PREFILLS_PER_UNIT, BASE_PREFILLS = 3, 2
UNIT_NODES = DECODE_NODES + PREFILLS_PER_UNIT * PREFILL_NODES
BASE_NODES = BASE_PREFILLS * PREFILL_NODES
_TOKEN_COLUMNS = ("input_tokens", "hit_tokens", "output_tokens")


@dataclass(frozen=True)
class Day:
    """Intervals in order: start (hours, counting on past 24), length (hours), traffic, and nodes where recorded."""

    start_hour: np.ndarray
    hours: np.ndarray
    traffic: Traffic
    nodes: np.ndarray | None = None

    def per_second(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of each interval as a rate."""
        return tokens / (self.hours * 3600)


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one node: prefill counts every input token, hits included; decode counts output.

    The defaults are the published averages, which hold at the published hit rate. Raises ValueError for rates <= 0.
    """

    prefill: float = 73_700.0
    decode: float = 14_800.0

    def __post_init__(self):
        for name in ("prefill", "decode"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rate {name} = {getattr(self, name)}: tokens per second and node must be positive")


class Need(NamedTuple):
    """Nodes that the traffic of each interval occupies at the given rates, as real numbers."""

    prefill: np.ndarray
    decode: np.ndarray


class Split(NamedTuple):
    """Whole deployments of each interval, as the units of the autoscaler divide the nodes."""

    prefill_nodes: np.ndarray
    decode_nodes: np.ndarray


def need(day: Day, rates: Rates = Rates()) -> Need:
    """Fluid need of each interval."""
    return Need(day.per_second(day.traffic.input) / rates.prefill, day.per_second(day.traffic.output) / rates.decode)


def prefill_without_cache(day: Day, rates: Rates = Rates()) -> np.ndarray:
    """Prefill nodes if every input token had to be computed, at the speed at which misses are computed now.

    Reading a hit is taken as free, as the published rate counts it: rate * (1 - hit rate) tokens are computed.
    """
    computed = rates.prefill * (1 - day.traffic.hit_rate)
    if computed <= 0:
        raise ValueError("every input token was a hit: the speed of computing a miss does not follow from this day")
    return day.per_second(day.traffic.input) / computed


def autoscale(needed: Need, min_units: int = 2, max_nodes: int | None = None) -> np.ndarray:
    """Nodes of each interval: the fewest units that cover both phases, at least `min_units`, within `max_nodes`.

    A unit is 18 decode and 12 prefill nodes, above a base of 8 prefill nodes. Raises ValueError for bounds that leave
    no choice.
    """
    most = None if max_nodes is None else (max_nodes - BASE_NODES) // UNIT_NODES
    if min_units < 0 or (most is not None and most < min_units):
        raise ValueError(f"{min_units=} and {max_nodes=}: a fleet of n units has {BASE_NODES} + n * {UNIT_NODES} nodes")
    decode = np.ceil(needed.decode / DECODE_NODES - 1e-9)
    prefill = np.ceil((needed.prefill - BASE_NODES) / (PREFILLS_PER_UNIT * PREFILL_NODES) - 1e-9)
    units = np.maximum(np.maximum(decode, prefill), min_units)
    return BASE_NODES + UNIT_NODES * (units if most is None else np.minimum(units, most))


def split(nodes: np.ndarray) -> Split:
    """Nodes by phase, for node counts of whole units. Raises ValueError for others."""
    units = (np.asarray(nodes) - BASE_NODES) / UNIT_NODES
    if (units < 0).any() or (units != np.floor(units)).any():
        raise ValueError(f"node counts must be {BASE_NODES} + n * {UNIT_NODES}, not {np.asarray(nodes).tolist()}")
    return Split(BASE_NODES + units * PREFILLS_PER_UNIT * PREFILL_NODES, units * DECODE_NODES)


def time_mean(day: Day, values: np.ndarray) -> float:
    """Mean over the day of a value per interval, weighted by the intervals' lengths."""
    return float((values * day.hours).sum() / day.hours.sum())


def load_day(path) -> Day:
    """A day from a CSV file with columns time (HH:MM), input_tokens, hit_tokens, output_tokens and, if known, nodes.

    A row holds until the next row's time, the last as long as the one before it; times may pass midnight once and
    more. Raises ValueError naming line, value and rule.
    """
    path = Path(path)
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    missing = [name for name in ("time", *_TOKEN_COLUMNS) if name not in columns]
    if missing or len(rows) < 2:
        raise ValueError(
            f"{path} needs at least two rows and the columns time, {', '.join(_TOKEN_COLUMNS)}; {columns=}"
        )
    start = np.array([_hour(path, line, row["time"]) for line, row in enumerate(rows, 2)])
    start += 24 * np.cumsum(np.diff(start, prepend=start[0]) < 0)
    hours = np.diff(start)
    if not (hours > 0).all():
        line = int(np.flatnonzero(hours <= 0)[0]) + 3
        raise ValueError(f"{path} line {line}: time {rows[line - 2]['time']} repeats the one before it")
    total, hit, output = (
        np.array([_number(path, line, row, name) for line, row in enumerate(rows, 2)]) for name in _TOKEN_COLUMNS
    )
    if (hit > total).any():
        line = int(np.flatnonzero(hit > total)[0])
        raise ValueError(f"{path} line {line + 2}: hit_tokens {hit[line]:g} exceed input_tokens {total[line]:g}")
    nodes = (
        np.array([_number(path, line, row, "nodes") for line, row in enumerate(rows, 2)])
        if "nodes" in columns
        else None
    )
    return Day(start, np.append(hours, hours[-1]), Traffic(hit, total - hit, output), nodes)


def _hour(path, line: int, text: str | None) -> float:
    parts = (text or "").split(":")
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[0]) > 23 or int(parts[1]) > 59:
        raise ValueError(f"{path} line {line}: time {text!r} is not HH:MM from 00:00 to 23:59")
    return int(parts[0]) + int(parts[1]) / 60


def _number(path, line: int, row: dict, name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < np.inf:
        raise ValueError(f"{path} line {line}: {name} {row[name]!r} is not a number of at least 0")
    return value

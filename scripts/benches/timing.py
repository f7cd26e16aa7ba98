"""How things are timed: candidates interleaved in one run, medians, process CPU time beside wall time."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Timing(NamedTuple):
    cpu: float  # seconds of process CPU time, median over repeats
    wall: float  # seconds


class Row(NamedTuple):
    """One line of a report: `value` in `unit`; `ratio` to what `against` names, and the limit it is held to."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    limit: str = ""  # like ">= 0.6"; empty where nothing is promised

    @property
    def holds(self) -> bool | None:
        """Whether the ratio (or the value, without one) is within the limit."""
        if not self.limit:
            return None
        sign, bound = self.limit.split()
        number = self.value if self.ratio is None else self.ratio
        return number >= float(bound) if sign == ">=" else number <= float(bound)


def interleave(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Time every candidate `repeats` times in turn, after one warm-up round, so that all meet the same machine."""
    for run in candidates.values():
        run()
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start, began = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - began)
            wall[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(cpu[name]), statistics.median(wall[name])) for name in candidates}


def slope(sizes, seconds) -> float:
    """Least-squares slope of log(seconds) over log(size): 1 is linear growth."""
    import math

    xs, ys = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)

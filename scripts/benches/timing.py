"""How things are timed: candidates interleaved in one run, medians, process CPU time beside wall time."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.benches.environment import threads_at_work

_TURN = 0.05  # seconds that a candidate's turn takes at least
_REST = 0.05  # seconds before a turn on several threads: those of the one before spin for some while


class Timing(NamedTuple):
    """Medians over repeats, in seconds; `spread` is (slowest - fastest) / median of what `seconds` is."""

    cpu: float  # of the process, all its threads together
    wall: float
    spread: float = 0.0
    threads: int = 1

    @property
    def seconds(self) -> float:
        """What is compared: CPU time on one thread, which other load hardly disturbs; wall time on several."""
        return self.cpu if self.threads == 1 else self.wall


class Row(NamedTuple):
    """One line of a report: `value` in `unit`; `ratio` to what `against` names, and the limit it is held to."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    limit: str = ""  # like ">= 0.6"; empty where nothing is promised
    spread: float | None = None  # of the time behind `value`, as in Timing

    @property
    def holds(self) -> bool | None:
        """Whether the ratio (or the value, without one) is within the limit."""
        if not self.limit:
            return None
        sign, bound = self.limit.split()
        number = self.value if self.ratio is None else self.ratio
        return number >= float(bound) if sign == ">=" else number <= float(bound)


@dataclass(frozen=True)
class Session:
    """How a run of the benchmarks was asked for.

    quick: sizes of a few milliseconds that show that everything runs; no limit is stated. vendor: a folder with the
    publisher's own inference code. note: told what is being timed.
    """

    repeats: int = 3
    quick: bool = False
    vendor: Path | None = None
    note: Callable[[str], None] = lambda text: None

    def __post_init__(self):
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: a median needs at least one")

    def interleave(self, candidates: dict[str, Callable[[], object]]) -> dict[str, Timing]:
        """Time every candidate `repeats` times in turn, after one warm-up round, so that all meet the same machine.

        One that takes less than _TURN is run again until its turn has taken as long: decode steps follow each other.
        """
        for name, run in candidates.items():
            self.note(f"{name} (warm-up)")
            run()
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        for _ in range(self.repeats):
            for name, run in candidates.items():
                self.note(name)
                if threads_at_work() > 1:
                    time.sleep(_REST)
                rounds[name].append(_turn(run, 0 if self.quick else _TURN))
        return {name: summarise(pairs) for name, pairs in rounds.items()}

    def limit(self, text: str) -> str:
        """A limit that is stated at full size only."""
        return "" if self.quick else text


def _turn(run, least: float) -> tuple[float, float]:
    """(CPU, wall) seconds of one run, the mean over as many as fill `least` seconds."""
    start, began, runs = time.perf_counter(), time.process_time(), 0
    while True:
        run()
        runs += 1
        wall = time.perf_counter() - start
        if wall >= least:
            return (time.process_time() - began) / runs, wall / runs


def summarise(rounds: list[tuple[float, float]]) -> Timing:
    """Medians of (CPU seconds, wall seconds)."""
    threads = threads_at_work()
    cpu, wall = zip(*rounds)
    compared = cpu if threads == 1 else wall
    middle = statistics.median(compared)
    return Timing(
        statistics.median(cpu), statistics.median(wall), (max(compared) - min(compared)) / max(middle, 1e-9), threads
    )


def slope(sizes, seconds) -> float:
    """Least-squares slope of log(seconds) over log(size): 1 is linear growth."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(second, 1e-9)) for second in seconds]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)

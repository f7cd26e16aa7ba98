"""When every operation of a schedule runs: one compute and one communication stream per rank.

An operation of the compute stream starts when the operation before it in the program has ended. The transfer of an
exchange starts when its send has been issued and the communication stream is free. A receive waits for the transfers
of every rank, because every rank sends to every rank, zero rows included.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel.schedule.executor import execute
from parallel.schedule.ops import Op, exchange_of
from parallel.schedule.pipeline import Durations, duration, simulate

COMPUTE, COMM = "compute", "comm"


class Span(NamedTuple):
    """Seconds from `start` to `end` on a stream of a rank. name: a stage, or `dispatch` and `combine` on `comm`."""

    rank: int
    stream: str
    start: float
    end: float
    name: str
    op: Op


class Timeline(NamedTuple):
    """spans: in the order in which they were placed. makespan [s]. exposed [s]: per rank, time spent in receives
    that waited for a transfer while nothing computed."""

    spans: list[Span]
    makespan: float
    exposed: list[float]

    def of_rank(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank]

    def busy(self, rank: int, stream: str) -> float:
        """Seconds in which a stream of a rank does something."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank and span.stream == stream)


class _Clock:
    """Places operations one after another; state of all ranks."""

    def __init__(self, ranks, compute, transfer, waits):
        self.compute, self.transfer, self.waits = compute, transfer, waits
        self.free = {COMPUTE: [0.0] * ranks, COMM: [0.0] * ranks}
        self.arrived, self.entered = {}, {}
        self.exposed = [0.0] * ranks
        self.spans, self.ranks = [], ranks

    def _place(self, op, stream, earliest, seconds, name):
        start = max(self.free[stream][op.rank], earliest)
        end = start + seconds
        self.free[stream][op.rank] = end
        if seconds > 0:
            self.spans.append(Span(op.rank, stream, start, end, name, op))
        return end

    def _hop_before(self, op):
        exchange = exchange_of(op.stage)
        return (f"{exchange}_{'send' if op.stage.endswith('forward') else 'forward'}", op.micro_batch, op.layer)

    def ready(self, op):
        if not op.stage.endswith(("_forward", "_recv")):
            return True
        return self.entered.get(self._hop_before(op), 0) == self.ranks

    def waits_for(self, op):
        return f"{self.ranks - self.entered.get(self._hop_before(op), 0)} ranks to enter {self._hop_before(op)[0]}"

    def run(self, op):
        hop = op.stage.rsplit("_", 1)[-1]
        if hop == "send":
            issued = self._place(op, COMPUTE, 0.0, self.compute(op), op.stage)
            self._enter(
                op, self._place(op, COMM, issued if self.waits else 0.0, self.transfer(op), exchange_of(op.stage))
            )
        elif hop == "forward":
            before = self.arrived[self._hop_before(op)] if self.waits else 0.0
            seconds = self.transfer(op)
            done = self._place(op, COMM, before, seconds, op.stage) if seconds > 0 else before
            self._enter(op, done)
        elif hop == "recv":
            arrived = self.arrived[self._hop_before(op)] if self.waits else 0.0
            self.exposed[op.rank] += max(0.0, arrived - self.free[COMPUTE][op.rank])
            self._place(op, COMPUTE, arrived, self.compute(op), op.stage)
            self.free[COMPUTE][op.rank] = max(self.free[COMPUTE][op.rank], arrived)
        else:
            self._place(op, COMPUTE, 0.0, self.compute(op), op.stage)

    def _enter(self, op, end):
        key = (op.stage, op.micro_batch, op.layer)
        self.entered[key] = self.entered.get(key, 0) + 1
        self.arrived[key] = max(self.arrived.get(key, 0.0), end)


def timeline(
    schedules: Sequence[Sequence[Op]],
    compute: Callable[[Op], float],
    transfer: Callable[[Op], float],
    waits: bool = True,
) -> Timeline:
    """Place every operation of every rank.

    compute(op): seconds on the compute stream (a send: the time to issue it; a receive: the time to copy out).
    transfer(op): seconds on the communication stream, of `*_send` and `*_forward` operations.
    waits: False drops every wait between the two streams, which gives the bound of perfect overlap.
    Raises DeadlockError where the schedules block each other.
    """
    clock = _Clock(len(schedules), compute, transfer, waits)
    execute(schedules, clock.run, clock.ready, clock.waits_for)
    makespan = max([0.0, *clock.free[COMPUTE], *clock.free[COMM]])
    return Timeline(clock.spans, makespan, clock.exposed)


PIPELINE_NAMES = {"chunk": "forward", "full": "backward", "input": "input", "weight": "weight", "pair": "pair"}


def pipeline_timeline(schedules: Sequence[Sequence[Op]], num_stages: int, times: Durations) -> Timeline:
    """A training pipeline as a timeline with one compute stream per rank; seconds are the unit of `times`."""
    result = simulate(schedules, num_stages, times)
    spans = [
        Span(op.rank, COMPUTE, start, start + duration(op, times), PIPELINE_NAMES[op.stage], op)
        for ops, starts in zip(schedules, result.start)
        for op, start in zip(ops, starts)
    ]
    return Timeline(spans, result.makespan, [0.0] * len(schedules))

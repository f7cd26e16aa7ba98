"""Runs schedules on emulated ranks, one operation at a time: no threads, so that a plain debugger steps through it."""

import random
from collections.abc import Callable, Iterator, Sequence

from parallel.schedule.ops import EXCHANGE_STAGES, Op


class DeadlockError(ValueError):
    """No rank can move. `waiting` maps each unfinished rank to its next operation and to what that waits for."""

    def __init__(self, waiting: dict[int, tuple[Op, str]]):
        self.waiting = waiting
        lines = [f"rank {rank}: {op} waits for {reason}" for rank, (op, reason) in sorted(waiting.items())]
        super().__init__("deadlock, no rank can move:\n  " + "\n  ".join(lines))


def execute(
    schedules: Sequence[Sequence[Op]],
    run: Callable[[Op], object],
    ready: Callable[[Op], bool],
    waits_for: Callable[[Op], str],
    order: str | int | Callable[[list[int]], int] = "rank",
) -> None:
    """Run every operation of every rank, each rank in its own program order.

    run(op) does an operation; the other arguments, and what is raised, as in `walk`.
    """
    for op in walk(schedules, ready, waits_for, order):
        run(op)


def walk(
    schedules: Sequence[Sequence[Op]],
    ready: Callable[[Op], bool],
    waits_for: Callable[[Op], str],
    order: str | int | Callable[[list[int]], int] = "rank",
) -> Iterator[Op]:
    """Every operation of every rank, one after the other; the caller does each before it asks for the next.

    ready(op) says whether an operation could run now; waits_for(op) says what is missing.
    order: `rank` lets a rank run as far as it can before the next one is tried, so that at most one rank holds what it
        has received; an int shuffles the picks by that seed, one operation at a time; a callable picks one rank from
        the list of ranks that can move.
    Raises DeadlockError when operations remain and none is ready, ValueError for an unknown order.
    """
    if isinstance(order, str):
        if order != "rank":
            raise ValueError(f"order = {order!r}: it is 'rank', a seed, or a callable that picks a rank")
        return _walk_rank_by_rank(schedules, ready, waits_for)
    return _walk_by_choice(schedules, ready, waits_for, order if callable(order) else random.Random(order).choice)


def _walk_by_choice(schedules, ready, waits_for, choose):
    position = [0] * len(schedules)
    while True:
        left = [rank for rank, ops in enumerate(schedules) if position[rank] < len(ops)]
        movable = [rank for rank in left if ready(schedules[rank][position[rank]])]
        if not movable:
            _finish(schedules, position, waits_for)
            return
        rank = choose(movable)
        yield schedules[rank][position[rank]]
        position[rank] += 1


def _walk_rank_by_rank(schedules, ready, waits_for):
    position = [0] * len(schedules)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedules):
            while position[rank] < len(ops) and ready(ops[position[rank]]):
                yield ops[position[rank]]
                position[rank] += 1
                moved = True
    _finish(schedules, position, waits_for)


def _finish(schedules, position, waits_for):
    """Nothing can move any more: either all is done, or it is a deadlock."""
    heads = {rank: ops[position[rank]] for rank, ops in enumerate(schedules) if position[rank] < len(ops)}
    if heads:
        raise DeadlockError({rank: (op, waits_for(op)) for rank, op in heads.items()})


def program_order(schedules: Sequence[Sequence[Op]]) -> list[Op]:
    """One order of all operations that every process can follow: all ranks enter an exchange stage before the next.

    Between two exchange stages the ranks follow each other by number. With this order each exchange stage can be one
    collective call. Raises ValueError where ranks would enter different exchange stages.
    """
    position = [0] * len(schedules)
    ordered = []
    while True:
        for rank, ops in enumerate(schedules):
            while position[rank] < len(ops) and ops[position[rank]].stage not in EXCHANGE_STAGES:
                ordered.append(ops[position[rank]])
                position[rank] += 1
        heads = [ops[position[rank]] if position[rank] < len(ops) else None for rank, ops in enumerate(schedules)]
        if not any(heads):
            return ordered
        entered = {head and (head.micro_batch, head.layer, head.stage) for head in heads}
        if len(entered) > 1:
            seen = ", ".join(f"rank {rank}: {head or 'its end'}" for rank, head in enumerate(heads))
            raise ValueError(f"ranks enter different exchange stages ({seen}): a collective would never complete")
        ordered += heads
        position = [place + 1 for place in position]

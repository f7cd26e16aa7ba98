"""Training pipelines: what each operation waits for, whether a program is legal, and how long it takes."""

from collections.abc import Sequence
from typing import NamedTuple

from parallel.schedule.check import ScheduleError
from parallel.schedule.executor import execute
from parallel.schedule.ops import Op


class Chunk(NamedTuple):
    """What an operation does to one micro-batch at one pipeline stage: kind `F`, `B` or `W`."""

    kind: str
    micro_batch: int
    stage: int


class Durations(NamedTuple):
    """Time of a forward, a full backward, a weight gradient, and an overlapped pair, in any one unit."""

    forward: float
    backward: float
    weight: float
    pair: float


class PipelineTime(NamedTuple):
    """start: per rank, the start of each operation. busy, bubble, activations, queue: per rank.

    bubble: makespan less busy time. activations: most chunks whose forward has run and whose backward has not ended.
    queue: most weight gradients put off at once.
    """

    makespan: float
    start: list[list[float]]
    busy: list[float]
    bubble: list[float]
    activations: list[int]
    queue: list[int]


def chunks(op: Op) -> tuple[Chunk, ...]:
    """The chunks that an operation completes; a full backward includes its weight gradient."""
    if op.kind == "F&B":
        (ahead, behind), (ahead_stage, behind_stage) = op.micro_batch, op.layer
        return (
            Chunk("F", ahead, ahead_stage),
            Chunk("B", behind, behind_stage),
            Chunk("W", behind, behind_stage),
        )
    if op.stage == "full":
        return Chunk("B", op.micro_batch, op.layer), Chunk("W", op.micro_batch, op.layer)
    return (Chunk(op.kind, op.micro_batch, op.layer),)


def reads(op: Op, num_stages: int) -> tuple[Chunk, ...]:
    """Chunks that must be done first: forward below, backward above, the own forward, the own input gradient."""
    done_here = set(chunks(op))
    needed = []
    for kind, micro_batch, stage in chunks(op):
        if kind == "F" and stage > 0:
            needed.append(Chunk("F", micro_batch, stage - 1))
        elif kind == "B":
            needed.append(Chunk("F", micro_batch, stage))
            if stage + 1 < num_stages:
                needed.append(Chunk("B", micro_batch, stage + 1))
        elif kind == "W":
            needed.append(Chunk("B", micro_batch, stage))
    return tuple(chunk for chunk in needed if chunk not in done_here)


def run(schedules: Sequence[Sequence[Op]], num_stages: int, step, order="rank") -> None:
    """Execute training programs: step(op) once what op reads is done. Raises DeadlockError where ranks block."""
    done = set()

    def do(op):
        step(op)
        done.update(chunks(op))

    def missing(op):
        return [chunk for chunk in reads(op, num_stages) if chunk not in done]

    def waits_for(op):
        return ", ".join(f"{kind}(m{micro_batch},s{stage})" for kind, micro_batch, stage in missing(op))

    execute(schedules, do, lambda op: not missing(op), waits_for, order)


def check_pipeline(schedules: Sequence[Sequence[Op]], num_stages: int, micro_batches: int) -> None:
    """Refuse a training program that is not legal.

    Every stage does forward, input gradient and weight gradient of every micro-batch once; weight gradients leave the
    queue in the order in which they entered; ranks do not block each other.
    Raises ScheduleError (rule `once` or `order`), DeadlockError where ranks block each other.
    """
    wanted = {Chunk(kind, m, s) for kind in "FBW" for m in range(micro_batches) for s in range(num_stages)}
    seen = set()
    for ops in schedules:
        queue = []
        for op in ops:
            for chunk in chunks(op):
                if chunk not in wanted or chunk in seen:
                    raise ScheduleError("once", f"{op} repeats or has no place in this pipeline", op)
                seen.add(chunk)
            if op.stage == "input":
                queue.append((op.micro_batch, op.layer))
            elif op.kind == "W" and (not queue or queue.pop(0) != (op.micro_batch, op.layer)):
                raise ScheduleError("order", f"{op} is not the oldest queued weight gradient", op)
    if seen != wanted:
        raise ScheduleError("once", f"{min(wanted - seen)} is missing")
    run(schedules, num_stages, lambda op: None)


def duration(op: Op, times: Durations) -> float:
    """Time of one operation; an input gradient is a full backward less the weight gradient."""
    if op.kind == "B":
        return times.backward if op.stage == "full" else times.backward - times.weight
    return {"F": times.forward, "W": times.weight, "F&B": times.pair}[op.kind]


def simulate(schedules: Sequence[Sequence[Op]], num_stages: int, times: Durations) -> PipelineTime:
    """Start every operation as soon as its rank is free and what it reads is done; messages take no time."""
    end, free = {}, [0.0] * len(schedules)
    start = [[] for _ in schedules]

    def step(op):
        begin = max([free[op.rank], *(end[chunk] for chunk in reads(op, num_stages))])
        start[op.rank].append(begin)
        free[op.rank] = begin + duration(op, times)
        end.update(dict.fromkeys(chunks(op), free[op.rank]))

    run(schedules, num_stages, step)
    busy = [sum(duration(op, times) for op in ops) for ops in schedules]
    makespan = max(free)
    peaks = [_peaks(ops) for ops in schedules]
    return PipelineTime(
        makespan,
        start,
        busy,
        [makespan - each for each in busy],
        [activations for activations, _ in peaks],
        [queue for _, queue in peaks],
    )


def _peaks(ops):
    """(most live activations, longest weight-gradient queue) along the program of one rank."""
    live = queued = most_live = most_queued = 0
    for op in ops:
        done = [chunk.kind for chunk in chunks(op)]
        live += done.count("F")
        most_live = max(most_live, live)  # a pair holds the new activations before it releases the old ones
        live -= done.count("B")
        queued += (op.stage == "input") - (op.kind == "W")
        most_queued = max(most_queued, queued)
    return most_live, most_queued


def dualpipe_bubble(pipeline: int, times: Durations) -> float:
    """The published bubble, (PP/2 - 1) (F&B + B - 3W). The largest bubble of any rank where B - W = F, else near it.

    Source: the table of deepseek-ai/DualPipe README.md. pipeline: PP, the number of stages.
    """
    return (pipeline // 2 - 1) * (times.pair + times.backward - 3 * times.weight)

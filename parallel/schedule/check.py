"""Refuses a schedule that is not legal, and names the rule that it breaks."""

from collections.abc import Iterable, Sequence

from parallel.schedule.ops import EXCHANGE_STAGES, LayerPlan, Op, exchange_of

RULES = {
    "once": "each rank runs every stage of every micro-batch exactly once, and nothing else",
    "order": "within a micro-batch a stage runs after the stages that it reads",
    "receive": "a hop of an exchange runs after the hop before it: no receive before its send",
    "stream": "the communication stream carries one exchange at a time: a send waits for the receive before it",
    "key": "a key is written (attn_proj of the earlier micro-batch) before it is read (attn_core of the later one)",
    "collective": "every rank enters the same exchanges in the same order, empty micro-batches included",
}


class ScheduleError(ValueError):
    """An illegal schedule. `rule` is a key of RULES, `op` the operation that breaks it (None where one is missing)."""

    def __init__(self, rule: str, detail: str, op: Op | None = None):
        self.rule = rule
        self.op = op
        super().__init__(f"illegal schedule: {detail} (rule '{rule}': {RULES[rule]})")


def check(
    schedules: Sequence[Sequence[Op]],
    layers: LayerPlan,
    micro_batches: int = 2,
    spans: Iterable[tuple[int, int, int]] = (),
) -> None:
    """Refuse an illegal schedule of inference.

    schedules: one program per rank. spans: (rank, earlier, later) for every two micro-batches that share a request on
    a rank; the later one reads keys that the earlier one writes in the same layer.
    Raises ScheduleError with the first rule broken: rank by rank in program order, then between ranks.
    """
    spans = tuple(spans)
    for rank, ops in enumerate(schedules):
        _check_once(rank, ops, layers, micro_batches)
        _check_rank(ops, layers, [(earlier, later) for span, earlier, later in spans if span == rank])
    _check_collective(schedules)


def _check_once(rank, ops, layers, micro_batches):
    wanted = {
        Op("F", rank, micro_batch, layer, stage)
        for micro_batch in range(micro_batches)
        for layer, stage in layers.program()
    }
    seen = set()
    for op in ops:
        if op not in wanted:
            raise ScheduleError("once", f"{op} has no place in the program of rank {rank}", op)
        if op in seen:
            raise ScheduleError("once", f"{op} runs twice", op)
        seen.add(op)
    if seen != wanted:
        raise ScheduleError("once", f"{min(wanted - seen)} is missing")


def _check_rank(ops, layers, spans):
    """Order, receives, the communication stream and keys, in one walk along the program of a rank."""
    done = set()
    in_flight = None
    for op in ops:
        for layer, stage in layers.reads(op.layer, op.stage):
            if (op.micro_batch, layer, stage) not in done:
                rule = "receive" if {op.stage, stage} <= set(EXCHANGE_STAGES) else "order"
                raise ScheduleError(rule, f"{op} runs before {stage} of layer {layer}", op)
        if op.stage.endswith("_send"):
            if in_flight is not None:
                raise ScheduleError("stream", f"{op} while {in_flight} is not received", op)
            in_flight = op
        elif op.stage.endswith("_recv"):
            in_flight = None
        for earlier, later in spans:
            if op.stage == "attn_core" and op.micro_batch == later and (earlier, op.layer, "attn_proj") not in done:
                raise ScheduleError("key", f"{op} reads keys that micro-batch {earlier} has not written", op)
        done.add((op.micro_batch, op.layer, op.stage))


def _check_collective(schedules):
    """With one exchange in flight, ranks that enter the same exchanges in the same order cannot block each other."""
    entered = [[op for op in ops if op.stage.endswith("_send")] for ops in schedules]
    for rank, sends in enumerate(entered):
        for mine, first in zip(sends, entered[0]):
            if (mine.micro_batch, mine.layer, mine.stage) != (first.micro_batch, first.layer, first.stage):
                what = f"rank {rank} enters {exchange_of(mine.stage)} with {mine}, rank 0 with {first}"
                raise ScheduleError("collective", what, mine)

"""Measured durations beside the model's: from a CSV of stages, or from a PyTorch profiler trace."""

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel.schedule.ops import DENSE_STAGES, EXCHANGES, HOPS, MOE_STAGES, Op, exchange_of

PRICED = {*DENSE_STAGES, *MOE_STAGES, *EXCHANGES, "embed", "mtp_embed", "final"}
KEYS = ("micro_batch", "layer", "rank")


class MeasuredStages:
    """Seconds of stages from a table; the most specific row counts: rank, layer and micro-batch may each be left out.

    `dispatch` and `combine` name the transfers; `dispatch_send` and so on the kernels on the compute stream.
    """

    def __init__(self, rows: Sequence[Mapping[str, str]], source: str = "table"):
        self._seconds = {}
        for number, row in enumerate(rows, start=2):  # row 1 is the header
            stage = (row.get("stage") or "").strip()
            if stage not in PRICED:
                raise ValueError(f"{source}, row {number}: stage {stage!r} is none of {', '.join(sorted(PRICED))}")
            try:
                seconds = float(row["seconds"])
                place = tuple(int(row[key]) if (row.get(key) or "").strip() else None for key in KEYS)
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{source}, row {number}: needs a number of seconds, and whole {', '.join(KEYS)}"
                ) from None
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"{source}, row {number}: seconds = {seconds} is not a duration")
            self._seconds[stage, *place] = seconds
        if not self._seconds:
            raise ValueError(f"{source} has no rows: give at least the columns stage and seconds")

    def _look_up(self, stage, op):
        for rank in (op.rank, None):
            for layer in (op.layer, None):
                for micro_batch in (op.micro_batch, None):
                    found = self._seconds.get((stage, micro_batch, layer, rank))
                    if found is not None:
                        return found
        return 0.0

    def compute(self, op: Op) -> float:
        """Seconds on the compute stream; 0 for a stage that the table does not name."""
        return self._look_up(op.stage, op)

    def transfer(self, op: Op) -> float:
        """Seconds on the communication stream, all of them at the send."""
        return self._look_up(exchange_of(op.stage), op) if op.stage.endswith(HOPS[0]) else 0.0


def read_csv(path) -> MeasuredStages:
    """A CSV with columns stage, seconds and optional micro_batch, layer, rank. Raises ValueError for a bad row."""
    with open(path, newline="", encoding="utf-8") as file:
        return MeasuredStages(list(csv.DictReader(file)), str(path))


class Kernel(NamedTuple):
    """One kernel of a profiler trace: name, stream, start [s] from the first one, seconds."""

    name: str
    stream: int
    start: float
    seconds: float


class Family(NamedTuple):
    """Kernels of one kind: count, seconds in all, mean seconds, streams on which they ran."""

    count: int
    seconds: float
    mean: float
    streams: tuple[int, ...]


# The first pattern that a kernel's name contains decides; order matters.
PATTERNS = (
    ("notify", "notify"),
    ("get_dispatch_layout", "notify"),
    ("internode::combine", "combine"),
    ("intranode::combine", "combine"),
    ("internode_ll::combine", "combine"),
    ("::dispatch<false, 8, true", "dispatch_cached"),
    ("internode::dispatch", "dispatch"),
    ("intranode::dispatch", "dispatch"),
    ("internode_ll::dispatch", "dispatch"),
    ("FlashAttnBwdPre", "attention_other"),
    ("FlashAttnBwdPost", "attention_other"),
    ("FlashAttnBwd", "attention_backward"),
    ("compute_attn", "attention_forward"),
    ("flash_fwd", "attention_forward"),
    ("flash_fwd_splitkv_mla", "attention_forward"),
    ("m_grouped", "grouped_gemm"),
    ("_acc::GemmKernel", "weight_gradient_gemm"),
    ("GemmKernel", "gemm"),
    ("gemm", "gemm"),
    ("cast", "cast"),
    ("layer_norm", "norm"),
)
EXCHANGE_FAMILIES = ("dispatch", "dispatch_cached", "combine", "notify")


def family_of(name: str) -> str:
    """The kind of a kernel by its name; `other` where no pattern fits."""
    return next((family for pattern, family in PATTERNS if pattern in name), "other")


def read_profile(path) -> list[Kernel]:
    """GPU kernels of a PyTorch profiler trace (Chrome trace JSON), by start.

    Raises ValueError where the file is not such a trace or holds no kernel.
    """
    with open(path, encoding="utf-8") as file:
        try:
            trace = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} has no list traceEvents: give a trace that torch.profiler exported")
    found = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    if not found:
        raise ValueError(f"{path} holds no GPU kernel: profile with CUDA activities")
    first = min(event["ts"] for event in found)
    kernels = [
        Kernel(
            event["name"],
            int(event.get("args", {}).get("stream", event.get("tid", 0))),
            (event["ts"] - first) * 1e-6,
            event["dur"] * 1e-6,
        )
        for event in found
    ]
    return sorted(kernels, key=lambda kernel: (kernel.start, kernel.stream))


def families(kernels: Sequence[Kernel]) -> dict[str, Family]:
    """Kernels grouped by kind, the longest total first."""
    groups = defaultdict(list)
    for kernel in kernels:
        groups[family_of(kernel.name)].append(kernel)
    result = {}
    for name, group in sorted(groups.items(), key=lambda item: -sum(kernel.seconds for kernel in item[1])):
        total = sum(kernel.seconds for kernel in group)
        result[name] = Family(len(group), total, total / len(group), tuple(sorted({kernel.stream for kernel in group})))
    return result


class Overlap(NamedTuple):
    """span: first start to last end. communication: time in which an exchange kernel runs. hidden: the part of it in
    which another kernel computes. computation: time in which one computes. All in seconds."""

    span: float
    computation: float
    communication: float
    hidden: float


def overlap(kernels: Sequence[Kernel]) -> Overlap:
    """How much communication a trace hides behind computation."""
    points = []
    for kernel in kernels:
        exchange = family_of(kernel.name) in EXCHANGE_FAMILIES
        points += [(kernel.start, 1, exchange), (kernel.start + kernel.seconds, -1, exchange)]
    points.sort()
    running = {True: 0, False: 0}
    computation = communication = hidden = 0.0
    before = points[0][0]
    for time, change, exchange in points:
        step = time - before
        computation += step * (running[False] > 0)
        communication += step * (running[True] > 0)
        hidden += step * (running[False] > 0 and running[True] > 0)
        running[exchange] += change
        before = time
    return Overlap(points[-1][0] - points[0][0], computation, communication, hidden)

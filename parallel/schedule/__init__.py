"""Schedules as data: lists of operations per rank, built from published tables, checked, and run."""

from parallel.schedule import decode_overlap, prefill_overlap, sequential
from parallel.schedule.check import RULES, ScheduleError, check
from parallel.schedule.decode_overlap import build_vllm
from parallel.schedule.executor import DeadlockError, execute, program_order, walk
from parallel.schedule.ops import LayerPlan, Op

BUILDERS = {
    "sequential": sequential.build,
    "prefill_overlap": prefill_overlap.build,
    "decode_overlap": decode_overlap.build,
    "vllm_dbo": build_vllm,
}

__all__ = [
    "BUILDERS",
    "RULES",
    "DeadlockError",
    "LayerPlan",
    "Op",
    "ScheduleError",
    "check",
    "execute",
    "program_order",
    "walk",
]

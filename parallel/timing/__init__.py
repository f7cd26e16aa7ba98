"""What schedules cost: hardware as data, stages priced from counts, timelines, and estimates with their formulas."""

from parallel.timing.costs import V3, Batch, Efficiency, ModelShape, Work, roofline, stage_work
from parallel.timing.estimate import evaluate, solve
from parallel.timing.gap import GapInputs, decompose, gap_range
from parallel.timing.hardware import HARDWARE, Hardware, hardware
from parallel.timing.imbalance import Loads, loads_of_routing, loads_of_vector
from parallel.timing.prices import PRESETS, Scenario, decode_scenario, prefill_scenario, time_of
from parallel.timing.render import chrome_trace, gantt, svg, write_trace
from parallel.timing.timeline import Span, Timeline, timeline

__all__ = [
    "HARDWARE",
    "PRESETS",
    "V3",
    "Batch",
    "Efficiency",
    "GapInputs",
    "Hardware",
    "Loads",
    "ModelShape",
    "Scenario",
    "Span",
    "Timeline",
    "Work",
    "chrome_trace",
    "decode_scenario",
    "decompose",
    "evaluate",
    "gantt",
    "gap_range",
    "hardware",
    "loads_of_routing",
    "loads_of_vector",
    "prefill_scenario",
    "roofline",
    "solve",
    "stage_work",
    "svg",
    "time_of",
    "timeline",
    "write_trace",
]

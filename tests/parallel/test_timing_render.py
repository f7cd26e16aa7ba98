"""Timelines as text, drawing and trace."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from parallel.schedule import BUILDERS, LayerPlan, Op
from parallel.schedule.dualpipe import build
from parallel.schedule.pipeline import Durations
from parallel.timing.prices import PRESETS, time_of
from parallel.timing.render import chrome_trace, gantt, svg, write_trace
from parallel.timing.timeline import COMM, COMPUTE, Span, Timeline, pipeline_timeline, timeline


def hand_made():
    core, sent, later = (
        Op("F", 0, 0, 3, "attn_core"),
        Op("F", 0, 0, 3, "dispatch_send"),
        Op("F", 0, 1, 3, "experts"),
    )
    spans = [
        Span(0, COMPUTE, 0.0, 2e-3, "attn_core", core),
        Span(0, COMM, 2e-3, 5e-3, "dispatch", sent),
        Span(0, COMPUTE, 5e-3, 6e-3, "experts", later),
    ]
    return Timeline(spans, 6e-3, [3e-3])


def test_gantt_by_hand():
    lines = gantt(hand_made(), [0], width=12).splitlines()
    assert lines[0] == "0 to 6 ms, 0.5 ms per column"
    assert lines[1] == "rank   0 compute |AAAA......ee|"
    assert lines[2] == "rank   0 comm    |....DDDDDD..|"
    assert gantt(hand_made(), [0], window=(4e-3, 6e-3), width=4).splitlines()[1].endswith("|..ee|")
    with pytest.raises(ValueError, match="must come after"):
        gantt(hand_made(), [0], window=(1.0, 1.0))


def test_svg_is_a_drawing_of_every_span_in_the_window():
    root = ElementTree.fromstring(svg(hand_made(), [0], "a < b"))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "r0 F attn_core(m0,l3): 2000.0 us",
        "r0 F dispatch_send(m0,l3): 3000.0 us",
        "r0 F experts(m1,l3): 1000.0 us",
    ]
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b"
    assert {"ATTN-1 3", "DISPATCH 3", "MLP 3"} <= set(texts)
    boxes = [
        float(e.get("width")) for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.find("{*}title") is not None
    ]
    assert boxes == pytest.approx([2 / 6 * 1120, 3 / 6 * 1120, 1 / 6 * 1120], abs=0.01)


def check_trace(trace, ranks):
    """What Perfetto needs: names of tracks, complete events with times, no overlap within a track."""
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {pid for pid, _ in named} == set(ranks)
    tracks = {}
    for event in events:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert event["name"]
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for slices in tracks.values():
        for (start, length), (following, _) in pairwise(sorted(slices)):
            assert start + length <= following * (1 + 1e-12)
    return sum(event["ph"] == "X" for event in events)


def test_trace_of_a_small_timeline(tmp_path):
    layers = LayerPlan.of(2, 1)
    result = timeline(
        [BUILDERS["prefill_overlap"](layers, rank) for rank in range(2)],
        compute=lambda op: 2.0 if op.stage in ("attn_core", "experts") else 0.0,
        transfer=lambda op: 1.0 if op.stage.endswith("_send") else 0.0,
    )
    count = write_trace(result, [0, 1], "small", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert check_trace(trace, [0, 1]) == len(result.spans)
    assert count == len(trace["traceEvents"]) == len(result.spans) + 2 * 4
    first = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    assert first["args"] == {"stage": "attn_core", "layer": 0, "micro_batch": 0}
    assert first["dur"] == 2e6


@pytest.mark.parametrize(("phase", "ranks"), [("decode", 144), ("prefill", 32)])
def test_traces_of_the_published_deployments_load(phase, ranks):
    result = time_of(PRESETS[phase].build(), PRESETS[phase].schedule)
    trace = chrome_trace(result, range(ranks), phase)
    assert check_trace(trace, range(ranks)) == len(result.spans)


def test_training_pipelines_are_drawn():
    result = pipeline_timeline(build(2, 4), 2, Durations(1.0, 2.0, 1.0, 2.5))
    text = gantt(result, [0, 1], width=23, unit=("F", 1.0)).splitlines()
    assert text[0] == "0 to 11.5 F, 0.5 F per column"
    assert text[1] == "rank   0 compute |FFFFFFBBBBXXXXXBBBBbbWW|"
    assert "grey" not in text[-1]
    root = ElementTree.fromstring(svg(result, [0, 1], "pipe", unit=("F", 1.0)))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "3+0" in texts
    assert "rank 0 comm" not in texts

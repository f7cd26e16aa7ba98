"""The `refmodel timeline` command."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from parallel.schedule import BUILDERS, LayerPlan
from scripts.main import main

SMALL = ("--ranks", "16", "--layers", "5")


def timeline(capsys, *arguments):
    assert main(["timeline", *arguments]) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments):
    return json.loads(timeline(capsys, *arguments, "--json"))


def test_without_arguments_it_prices_decode_on_144_gpus(capsys):
    content = as_json(capsys)
    assert content["name"] == "decode EP144 on h800"
    assert content["schedule"] == "decode_overlap"
    assert content["perfect_overlap"] < content["makespan"] < 0.06
    assert content["left_out"]


def test_print_lists_the_program_that_the_builder_gives(capsys):
    lines = timeline(capsys, *SMALL, "--drafts", "0", "--print", "--show-ranks", "3").splitlines()
    expected = BUILDERS["decode_overlap"](LayerPlan.of(5, 3), 3)
    assert [line.split("  ", 1)[1].strip() for line in (" " + each.strip() for each in lines)] == [
        str(op) for op in expected
    ]
    programs = json.loads(timeline(capsys, *SMALL, "--print", "--show-ranks", "0,1", "--json"))
    assert set(programs) == {"0", "1"}


@pytest.mark.parametrize("schedule", ["sequential", "prefill_overlap", "decode_overlap", "vllm_dbo"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_schedule_can_be_priced(capsys, phase, schedule):
    content = as_json(capsys, "--phase", phase, "--schedule", schedule, *SMALL)
    assert content["schedule"] == schedule
    assert content["makespan"] >= content["perfect_overlap"] > 0


def test_text_has_a_gantt_and_what_is_left_out(capsys):
    text = timeline(capsys, *SMALL, "--show-ranks", "0,15")
    assert "rank   0 compute |" in text
    assert "rank  15 comm    |" in text
    assert "left out: sampling" in text


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_drawings_and_traces_are_written(capsys, tmp_path, phase):
    svg, trace = tmp_path / "new/drawing.svg", tmp_path / "new/deep/trace.json"
    content = as_json(capsys, "--phase", phase, *SMALL, "--svg", str(svg), "--trace", str(trace))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == content["trace"]["events"]
    assert {event["pid"] for event in events} == set(range(16))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_drawings_in_the_documentation_are_what_the_command_makes(capsys, tmp_path, phase):
    name = f"timeline_{phase}.svg"
    timeline(capsys, "--phase", phase, "--svg", str(tmp_path / name))
    committed = Path(__file__).parents[2] / "docs" / name
    assert (tmp_path / name).read_text() == committed.read_text(), (
        f"refmodel timeline --phase {phase} --svg docs/{name}"
    )


def test_imbalance_with_and_without_the_balancer(capsys, tmp_path):
    even = as_json(capsys, *SMALL, "--redundant-experts", "32")["makespan"]
    balanced = as_json(capsys, *SMALL, "--spread", "0.5")
    plain = as_json(capsys, *SMALL, "--spread", "0.5", "--no-balancer")
    assert even < balanced["makespan"] < plain["makespan"]
    assert balanced["layer"]["combine"]["max"] > balanced["layer"]["combine"]["mean"]
    (tmp_path / "loads.csv").write_text(",".join(["8"] + ["1"] * 255))
    given = as_json(capsys, *SMALL, "--loads", str(tmp_path / "loads.csv"), "--no-balancer")
    assert given["makespan"] > even


def test_losses_slow_it_down(capsys):
    base = as_json(capsys, *SMALL)["makespan"]
    assert as_json(capsys, *SMALL, "--link", "0.78")["makespan"] > base
    assert as_json(capsys, *SMALL, "--sync", "1e-5")["makespan"] > base
    assert as_json(capsys, *SMALL, "--hardware", "gb200_nvl72")["makespan"] < base
    bound = as_json(capsys, *SMALL, "--no-waits")
    assert bound["makespan"] == bound["perfect_overlap"] < base


@pytest.mark.parametrize(("name", "ranks"), [("dualpipe", "8"), ("dualpipev", "4")])
def test_training_pipelines(capsys, tmp_path, name, ranks):
    content = as_json(capsys, "--schedule", name, "--ranks", ranks, "--svg", str(tmp_path / "pipe.svg"))
    assert max(content["bubble"]) == content["bubble_formula"] == 4.5
    assert set(content["peak_activations"]) == {9}
    assert max(content["peak_weight_queue"]) == 4
    assert "F&B" not in (tmp_path / "pipe.svg").read_text()
    text = timeline(capsys, "--schedule", name, "--ranks", ranks)
    assert "largest bubble 4.5, formula 4.5" in text
    assert "F chunk(m0,s0)" in timeline(capsys, "--schedule", name, "--ranks", ranks, "--print").replace("l0)", "s0)")


def test_measured_stages_beside_the_model(capsys, tmp_path):
    path = tmp_path / "stages.csv"
    path.write_text("stage,seconds\nattn_core,150e-6\nexperts,60e-6\nshared,20e-6\ndispatch,192e-6\ncombine,369e-6\n")
    content = as_json(capsys, *SMALL, "--measured", str(path))["measured"]
    assert content["stages"]["dispatch"]["measured"] == pytest.approx(192e-6 * 2 * 3)
    assert content["stages"]["dispatch"]["model"] > 0
    assert content["makespan"] > 0
    assert "model | measured" in timeline(capsys, *SMALL, "--measured", str(path))


def test_a_profiler_trace_beside_the_training_model(capsys, tmp_path):
    path = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "internode::combine<>", "ts": 5, "dur": 7000, "args": {"stream": 27}}
    path.write_text(json.dumps({"traceEvents": [kernel]}))
    content = as_json(capsys, "--measured", str(path))
    assert content["families"]["combine"]["mean"] == pytest.approx(7e-3)
    assert content["families"]["combine"]["model"] == pytest.approx(3.729e-3, rel=1e-3)
    assert "1 kernels in 7.00 ms" in timeline(capsys, "--measured", str(path))
    assert main(["timeline", "--measured", str(path), "--svg", str(tmp_path / "a.svg")]) == 2
    assert "--svg and --trace draw schedules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "12"), "ranks_per_node"),
        (("--ranks", "0"), "start at 1"),
        (("--show-ranks", "144"), "ranks are 0 to 143"),
        (("--show-ranks", "a"), "whole numbers"),
        (("--window", "1"), "two times in milliseconds"),
        (("--link", "0"), "fraction above 0"),
        (("--phase", "prefill", "--prompts", "12,x"), "--prompts"),
        (("--schedule", "dualpipe", "--ranks", "3"), "P must be even"),
        (("--schedule", "dualpipe", "--micro-batches", "6"), "at least two per rank"),
        (("--measured", "missing.csv"), "missing.csv"),
        (("--spread", "-1"), "cannot be negative"),
    ],
)
def test_bad_input_exits_2_with_one_line(capsys, arguments, text):
    assert main(["timeline", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1

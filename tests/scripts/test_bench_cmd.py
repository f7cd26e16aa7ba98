"""The `refmodel bench` command: every group runs, the report is well formed, a missed limit is an exit code."""

import json
import sys

import pytest

from scripts.bench import GROUPS
from scripts.benches import start
from scripts.benches.children import in_child, peak_memory, run_python
from scripts.benches.environment import environment, notice
from scripts.benches.report import print_report, progress, quantity
from scripts.benches.timing import Row, Session, slope, summarise
from scripts.benches.vendor_peer import load
from scripts.main import main


def bench(capsys, *arguments):
    code = main(["bench", *arguments])
    return code, capsys.readouterr()


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_runs_at_tiny_sizes_and_states_no_limit(group, capsys):
    code, output = bench(capsys, group, "--quick", "--repeats", "1", "--json")
    content = json.loads(output.out)
    assert code == 0
    assert (content["quick"], content["repeats"], content["missed"]) == (True, 1, [])
    assert list(content["groups"]) == [group]
    rows = content["groups"][group]
    assert rows
    for row in rows:
        assert row["name"]
        assert row["value"] >= 0
        assert (row["limit"], row["holds"]) == ("", None)
        assert row["ratio"] is None or row["against"]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) or group in ("model", "fp8")  # there a name stands once for each peer


def test_environment_names_what_the_figures_depend_on(capsys, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "17179869184")
    found = environment()
    for name in ("python", "numpy", "ml_dtypes", "blas kernel", "blas threads", "processor", "load average"):
        assert found[name]
    assert found["MALLOC_TRIM_THRESHOLD_"] == "17179869184"


def test_a_forced_kernel_is_named_as_a_reason(capsys, monkeypatch):
    monkeypatch.delenv("NPY_DISABLE_CPU_FEATURES", raising=False)
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert notice(environment()) == ""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setattr(start, "measure", lambda session: [])
    _, output = bench(capsys, "start")
    assert "OPENBLAS_CORETYPE=Haswell in the environment: an older kernel" in output.out
    _, output = bench(capsys, "start", "--json")
    assert json.loads(output.out)["notice"].startswith("OPENBLAS_CORETYPE=Haswell")


def test_a_missed_limit_is_exit_code_1(capsys, monkeypatch):
    missed = Row("help", 0.3, "s", None, "", "<= 0.2")
    monkeypatch.setattr(start, "measure", lambda session: [missed, missed._replace(name="run", value=0.1)])
    code, output = bench(capsys, "start", "--json")
    assert code == 1
    content = json.loads(output.out)
    assert content["missed"] == ["start: help"]
    assert [row["holds"] for row in content["groups"]["start"]] == [False, True]
    code, output = bench(capsys, "start")
    assert code == 1
    assert "misses" in output.out
    assert "1 of 2 limits hold" in output.out
    assert "300 ms" in output.out


def test_a_limit_holds_for_the_ratio_where_there_is_one():
    assert Row("a", 5.0, "s", 1.2, "b", "<= 1.25").holds is True
    assert Row("a", 1.0, "s", 1.3, "b", "<= 1.25").holds is False
    assert Row("a", 1.0, "s", 1.3, "b", ">= 1.25").holds is True
    assert Row("a", 0.3, "s", None, "", "<= 0.2").holds is False
    assert Row("a", 0.3, "s").holds is None


def test_quick_states_no_limit():
    assert Session(quick=True).limit("<= 1") == ""
    assert Session().limit("<= 1") == "<= 1"


def test_candidates_take_turns_after_a_warm_up():
    calls = []
    times = Session(2, quick=True).interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert set(times) == {"a", "b"}
    with pytest.raises(ValueError, match="repeats = 0"):
        Session(repeats=0)


def test_a_short_candidate_is_run_again_until_its_turn_is_over(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr("scripts.benches.timing.time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr("scripts.benches.timing.time.process_time", lambda: clock["now"] / 2)
    runs = {"short": 0, "long": 0}

    def takes(name, seconds):
        def run():
            runs[name] += 1
            clock["now"] += seconds

        return run

    times = Session(1).interleave({"short": takes("short", 0.02), "long": takes("long", 0.3)})
    assert runs == {"short": 4, "long": 2}  # warm-ups, then three short ones and a long one
    assert times["short"].wall == pytest.approx(0.02)
    assert times["short"].cpu == pytest.approx(0.01)
    assert times["long"].wall == pytest.approx(0.3)


def test_medians_and_spread(monkeypatch):
    monkeypatch.setattr("scripts.benches.timing.threads_at_work", lambda: 1)
    timing = summarise([(1.0, 10.0), (2.0, 30.0), (4.0, 20.0)])
    assert (timing.cpu, timing.wall, timing.spread, timing.seconds) == (2.0, 20.0, 1.5, 2.0)
    monkeypatch.setattr("scripts.benches.timing.threads_at_work", lambda: 2)
    timing = summarise([(1.0, 10.0), (2.0, 30.0), (4.0, 20.0)])
    assert (timing.spread, timing.seconds) == (1.0, 20.0)


def test_slope_is_the_exponent():
    sizes = [1, 2, 4, 8]
    assert slope(sizes, [3.0 * size**2 for size in sizes]) == pytest.approx(2.0)
    assert slope(sizes, [0.5] * 4) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5e9, "FLOP/s", "2.5 GFLOP/s"),
        (1.0, "s", "1 s"),
        (0.0, "s", "0 ns"),
        (0.1234, "", "0.123"),
    ],
)
def test_quantities_have_decimal_prefixes(value, unit, text):
    assert quantity(value, unit) == text


def test_unknown_group_and_folder_without_the_code(capsys, tmp_path):
    code, output = bench(capsys, "speed")
    assert code == 2
    assert "no group 'speed': there are model, fp8" in output.err
    code, output = bench(capsys, "model", "--vendor", str(tmp_path))
    assert code == 2
    assert "there is no model.py in it" in output.err


def test_a_bar_where_standard_error_is_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(["fp8"]) as (begin, note):
        begin("fp8")
        note("encode [warm-up]")
    assert "encode [warm-up]" in capsys.readouterr().err


def test_a_report_without_limits_says_so(capsys):
    print_report({"numpy": "[2]"}, {"fp8": [Row("encode", 1e9, "elements/s", spread=0.25)]}, GROUPS, 1.0, 3)
    out = capsys.readouterr().out
    assert "no limits are stated" in out
    assert "25 %" in out
    assert "numpy: [2]" in out


def test_a_child_that_fails_is_named():
    with pytest.raises(ValueError, match=r"-c import sys; sys.exit\('no'\) ended with 1: no"):
        run_python(["-c", "import sys; sys.exit('no')"])


def test_peak_memory_is_a_processs_own():
    child = in_child("scripts.benches.memory_once", "quick", 2, 0, "none")
    assert 10e6 < child["peak"] < 500e6
    assert peak_memory() > 10e6


def test_the_publishers_code_is_read_in_float32_with_kernels_that_refuse(tmp_path):
    torch_like = "class torch:\n    bfloat16, float32 = 'bfloat16', 'float32'\n"
    (tmp_path / "model.py").write_text(f"from kernel import fp8_gemm\n{torch_like}dtype = torch.bfloat16\n")
    before = sys.modules.get("kernel")
    module = load(tmp_path)
    assert module.dtype == "float32"
    with pytest.raises(ValueError, match="GPU kernel"):
        module.fp8_gemm()
    assert sys.modules.get("kernel") is before

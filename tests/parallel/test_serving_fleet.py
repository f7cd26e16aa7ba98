"""Nodes by phase and by hour: the published day, the autoscaler, days from a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.serving.day_report import day_figures, decode_ranges
from parallel.serving.economics import Market, Traffic
from parallel.serving.fleet import Day, Need, Rates, autoscale, load_day, need, prefill_without_cache, split, time_mean
from parallel.serving.published import HOURLY_INCOME, published_day


def test_published_nodes_by_phase():
    day = published_day()
    assert time_mean(day, day.nodes) == 226.75
    assert day.nodes.max() == 278
    needed = need(day)
    assert time_mean(day, needed.prefill) == pytest.approx(608e9 / 86400 / 73700)  # 95.48
    assert round(time_mean(day, needed.prefill), 2) == 95.48
    assert round(time_mean(day, needed.decode), 2) == 131.38
    phases = split(day.nodes)
    assert (time_mean(day, phases.prefill_nodes), time_mean(day, phases.decode_nodes)) == (95.5, 131.25)
    assert (phases.prefill_nodes.max(), phases.decode_nodes.max()) == (116, 162)
    assert (phases.prefill_nodes.min(), phases.decode_nodes.min()) == (32, 36)


def test_prefill_without_the_cache():
    day = published_day()
    assert round(time_mean(day, prefill_without_cache(day)), 1) == 218.2
    assert time_mean(day, prefill_without_cache(day)) == pytest.approx(608e9 / 86400 / (73700 * 0.4375))


def test_hourly_income_adds_up_to_the_published_one():
    assert sum(HOURLY_INCOME) == pytest.approx(562_027, abs=2)
    day = published_day()
    assert day.traffic.input.sum() == pytest.approx(608e9)
    assert day.traffic.output.sum() == pytest.approx(168e9)


def test_the_autoscaler_follows_the_published_chart():
    day = published_day()
    nodes = autoscale(need(day), max_nodes=278)
    assert time_mean(day, nodes) == 228.0
    assert (nodes.min(), nodes.max()) == (68, 278)
    assert (nodes == day.nodes).mean() > 0.85
    assert np.abs(nodes - day.nodes).max() == 30  # never more than one unit apart


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(0, 400)), min_size=1, max_size=6))
def test_autoscaled_nodes_carry_both_phases_and_one_unit_less_does_not(pairs):
    needed = Need(*np.array(pairs).T)
    phases = split(autoscale(needed, min_units=0))
    assert (phases.prefill_nodes >= needed.prefill - 1e-6).all()
    assert (phases.decode_nodes >= needed.decode - 1e-6).all()
    units = phases.decode_nodes / 18
    too_few = (phases.prefill_nodes - 12 < needed.prefill) | (phases.decode_nodes - 18 < needed.decode) | (units == 0)
    assert too_few.all()


def test_output_speed_as_a_range():
    ranges = decode_ranges((20.0, 22.0), Rates(), 4989, 1.8)
    assert ranges["requests_per_gpu"] == pytest.approx([84.0909, 92.5], abs=1e-4)
    assert ranges["step_seconds"] == pytest.approx([0.081818, 0.09], abs=1e-6)
    middle = decode_ranges((21.0, 21.0), Rates(), 4989, 1.8)
    assert middle["requests_per_gpu"][0] == pytest.approx(88.095, abs=1e-3)
    assert middle["latent_bytes_per_gpu"][0] == pytest.approx(30.885e9, rel=1e-4)
    assert middle["step_seconds"][0] == pytest.approx(0.0857143, abs=1e-7)


CSV = "time,input_tokens,hit_tokens,output_tokens\n23:00,36e9,18e9,3.6e9\n00:30,0,0,0\n01:00,7.2e9,0,7.2e9\n"


def test_a_day_from_a_file(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text(CSV)
    day = load_day(path)
    assert day.start_hour.tolist() == [23.0, 24.5, 25.0]
    assert day.hours.tolist() == [1.5, 0.5, 0.5]
    assert day.traffic.miss.tolist() == [18e9, 0, 7.2e9]
    assert day.nodes is None
    needed = need(day, Rates(prefill=1e5, decode=1e4))
    np.testing.assert_allclose(needed.prefill, [36e9 / 5400 / 1e5, 0, 40.0])  # 66.7, 0, 40
    np.testing.assert_allclose(needed.decode, [3.6e9 / 5400 / 1e4, 0, 400.0])
    figures = day_figures(day, Rates(prefill=1e5, decode=1e4), Market())
    # 66.7 prefill nodes: 5 units; nothing: the least, 2 units; 400 decode nodes: 23 units
    assert autoscale(needed).tolist() == [158, 68, 698]
    assert not figures["nodes_recorded"]
    assert figures["mean_nodes"] == pytest.approx((158 * 1.5 + 68 * 0.5 + 698 * 0.5) / 2.5)
    assert [row["hour"] for row in figures["hours"]] == [23, 0, 1]
    assert sum(row["cost_dollars"] for row in figures["hours"]) == pytest.approx(figures["cost_dollars"])
    assert figures["hit_rate"] == pytest.approx(18 / 43.2)


def test_recorded_nodes_are_taken(tmp_path):
    path = tmp_path / "day.csv"
    lines = CSV.splitlines()
    path.write_text("\n".join([lines[0] + ",nodes", *(f"{line},{n}" for line, n in zip(lines[1:], (10, 20, 30)))]))
    figures = day_figures(load_day(path), Rates(), Market())
    assert figures["mean_nodes"] == (15 + 10 + 15) / 2.5
    assert figures["prefill_nodes_by_units"] is None  # 10 nodes are no whole units
    assert figures["freed_node_hours"] == 20 * 1.5 + 10 * 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least two rows"),
        ("time,input_tokens,hit_tokens\n00:00,1,1\n01:00,1,1\n", "output_tokens"),
        (CSV.replace("00:30", "24:30"), "line 3: time '24:30'"),
        (CSV.replace("00:30", "23:00"), "line 3: time 23:00 repeats"),
        (CSV.replace("18e9", "37e9"), "line 2: hit_tokens 3.7e.10 exceed"),
        (CSV.replace("7.2e9,0,", "x,0,"), "line 4: input_tokens 'x'"),
        (CSV.replace("7.2e9,0,", "-1,0,"), "line 4: input_tokens '-1'"),
    ],
)
def test_a_bad_file_is_named_by_line(tmp_path, text, message):
    path = tmp_path / "day.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_day(path)


def test_bad_input():
    with pytest.raises(ValueError, match="rate decode = 0"):
        Rates(decode=0)
    with pytest.raises(ValueError, match="max_nodes=60"):
        autoscale(Need(np.ones(1), np.ones(1)), max_nodes=60)
    with pytest.raises(ValueError, match=r"8 \+ n \* 30"):
        split(np.array([70]))
    all_hits = Day(np.zeros(1), np.ones(1), Traffic(np.ones(1), np.zeros(1), np.ones(1)))
    with pytest.raises(ValueError, match="every input token was a hit"):
        prefill_without_cache(all_hits)

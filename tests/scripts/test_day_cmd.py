"""`refmodel day`: no arguments, figures as published, charts, other days."""

import argparse
import json
import re
import time
import xml.etree.ElementTree as ET

import pytest

from scripts import day


def call(capsys, *arguments) -> str:
    parser = argparse.ArgumentParser()
    day.add_arguments(parser)
    assert day.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def test_every_published_figure_is_printed_in_less_than_five_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = time.perf_counter()
    text = call(capsys)
    assert time.perf_counter() - start < 5
    for figure in (
        *("226.75", "278", "$87,072", "$562,100", "$562,027", "545.56%", "545.47%", "0.5625", "56.3%"),
        *("95.48", "131.38", "218.2", "1,230", "$19,680", "20 to 22", "84.1 to 92.5", "228.00"),
        *("81.8 to 90.0 ms", "rounded to a billion", "12:00 │ 278.0", "03:00 │  83.0", "0.5183"),
    ):
        assert figure in text, figure
    assert len(re.findall(r"\d\d:00 │", text)) == 24
    for name in ("nodes.svg", "cost_income.svg"):
        root = ET.parse(tmp_path / "out/day" / name).getroot()
        assert root.tag.endswith("svg")


def test_json_is_in_base_units(tmp_path, capsys):
    figures = json.loads(call(capsys, "--json", "--charts", str(tmp_path)))
    assert figures["cost_dollars"] == pytest.approx(87_072)
    assert figures["income_list_dollars"] == pytest.approx(562_100)
    assert figures["hit_rate"] == 0.5625
    assert figures["margin_list"] == pytest.approx(5.455577, abs=1e-6)
    assert figures["decode"]["step_seconds"] == pytest.approx([1.8 / 22, 1.8 / 20])
    assert len(figures["hours"]) == 24
    assert len(figures["nodes"]) == 96


def test_what_remains(tmp_path, capsys):
    options = ("--paid-share", "0.2", "--v3-share", "0.5", "--off-peak", "--json", "--charts", str(tmp_path))
    figures = json.loads(call(capsys, *options))
    day_list, night = 0.5 * (562_100 + 280_560), 168e3 * 0.55 + 266e3 * 0.135 + 342e3 * 0.035  # all tokens, $
    hours = day.published.HOURLY_INCOME
    dark = (hours[12] / 2 + sum(hours[13:20]) + hours[20] / 2) / sum(hours)
    assert figures["income_dollars"] == pytest.approx(0.2 * ((1 - dark) * day_list + dark * night))
    assert figures["income_list_dollars"] == pytest.approx(562_100)


def test_another_day(tmp_path, capsys):
    path = tmp_path / "day.csv"
    path.write_text("time,input_tokens,hit_tokens,output_tokens\n08:00,1e9,5e8,1e8\n20:00,2e9,5e8,2e8\n")
    text = call(capsys, "--csv", str(path), "--charts", str(tmp_path))
    assert "published" not in text
    assert "0.3333" in text
    assert "08:00" in text
    assert "68.00" in text  # the least fleet carries it
    ET.parse(tmp_path / "cost_income.svg")


def test_bad_arguments(tmp_path):
    parser = argparse.ArgumentParser()
    day.add_arguments(parser)
    for arguments, message in (
        (["--paid-share", "2"], "paid_share = 2.0"),
        (["--gpu-hour", "0"], "gpu-hour"),
        (["--decode-rate", "-1"], "rate decode"),
        (["--max-nodes", "5"], "max_nodes=5"),
    ):
        with pytest.raises(ValueError, match=message):
            day.run(parser.parse_args([*arguments, "--charts", str(tmp_path)]))
    with pytest.raises(OSError, match=r"none\.csv"):
        day.run(parser.parse_args(["--csv", str(tmp_path / "none.csv")]))

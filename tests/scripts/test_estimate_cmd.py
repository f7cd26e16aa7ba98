"""The `refmodel estimate` command."""

import json

import numpy as np
import pytest

from parallel.timing.inputs import INPUTS
from scripts.main import main


def estimate(capsys, *arguments):
    assert main(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments):
    return json.loads(estimate(capsys, *arguments, "--json"))


def test_without_arguments_it_gives_the_notebooks_numbers(capsys):
    content = as_json(capsys)
    values = {name: entry["value"] for name, entry in content["quantities"].items()}
    assert values["requests"] == 1850 / 21
    assert values["cost"] == 87072.0
    assert values["revenue"] == 562100.0
    assert values["gap"] == pytest.approx(2.25704052, rel=1e-8)
    assert content["bottleneck"] == "network"
    assert content["inputs"]["nic"] == 50e9
    assert content["quantities"]["step_bound"]["formula"] == "step_layers * max(attn + moe, comm)"
    assert "left out" in content["quantities"]["step_bound"]["note"]


def test_flags_change_inputs_and_hardware_changes_several(capsys):
    content = as_json(capsys, "--nic", "100e9", "--mtp", "1.6")
    assert content["bottleneck"] == "computation"
    assert content["quantities"]["step_published"]["value"] == 1.6 / 21
    content = as_json(capsys, "--hardware", "h20", "--memory", "80e9")
    assert (content["inputs"]["bf16"], content["inputs"]["memory"]) == (148e12, 80e9)


def test_every_input_is_a_flag_that_changes_what_follows_from_it(capsys):
    plain = as_json(capsys)
    for name, entry in INPUTS.items():
        content = as_json(capsys, f"--{name.replace('_', '-')}", repr(entry.value * 1.37))
        assert content["inputs"] == {**plain["inputs"], name: entry.value * 1.37}
        assert content["quantities"] != plain["quantities"], name


def test_text_shows_every_formula_with_its_inputs_and_what_is_left_out(capsys):
    text = estimate(capsys, "--section", "step")
    assert "step_bound = step_layers * max(attn + moe, comm) = 62 * max(0.000247553 + 7.05118e-05, 0.000612523)" in text
    assert "37.976 ms" in text
    assert "note: left out: gate" in text
    assert "The bound is set by the network." in text
    assert "Exercise" not in text
    assert "weights of the MTP layer, its projection at 1 byte: 421.76 MB" in estimate(capsys, "--section", "memory")
    whole = estimate(capsys)
    for word in (
        "$87,072",
        "$562,100",
        "545.6 %",
        "$0.52",
        "56.25 %",
        "348.5 TFLOPS",
        "17.61 %",
        "35.24 %",
        "51.801 GB",
    ):
        assert word in whole, word


def test_the_batch_for_a_target(capsys):
    found = as_json(capsys, "--target-tps", "20")["target"]
    assert found["step"] == 0.09
    assert found["bound"]["requests"] == pytest.approx(208.776248, rel=1e-8)
    assert found["bound"]["limited_by"] == "memory"
    assert found["published_gap"]["requests"] == pytest.approx(92.5)
    assert found["published_gap"]["tokens_per_second_and_node"] == pytest.approx(14800)
    assert found["bound"]["requests_that_fit"] == found["memory_allows"]
    text = estimate(capsys, "--target-tps", "20", "--section", "isca")
    assert "208.8 requests per GPU" in text


def test_the_gap_is_a_range_with_a_residual(capsys):
    found = as_json(capsys, "--gap")["gap"]
    assert found["balanced"]["bound"] == pytest.approx(37.9764053e-3, rel=1e-8)
    assert found["published"] == pytest.approx([1.8 / 22, 1.8 / 20])
    assert found["imbalance"]["unbalanced"] > 2 > found["imbalance"]["balanced"]
    low, high = found["residual"]
    assert 1.2 < low < high < 1.7
    text = estimate(capsys, "--gap", "--section", "isca")
    assert "mean over orders" in text
    assert "not identified by the data" in text


def test_the_gap_takes_loads_from_a_file(capsys, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(256 * 8).reshape(-1, 8) % 256)
    found = as_json(capsys, "--gap", "--loads", str(tmp_path / "ids.npy"))["gap"]
    assert found["imbalance"]["source"].endswith("ids.npy, mean over 1 layers")
    # 256 equal experts, 32 of them copied: some rank has two single ones, 2 of 16/9, wherever they stand
    assert found["imbalance"]["unbalanced"] == found["imbalance"]["balanced"] == 2 / (256 / 144)


def test_other_published_throughputs(capsys):
    rows = as_json(capsys, "--published")["published"]
    assert len(rows) == 8
    assert all(row["bound"] > row["published"] for row in rows)
    assert "SGLang decode EP72, 2K" in estimate(capsys, "--published", "--section", "isca")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nic", "0"), "divides by zero"),
        (("--nic", "-1"), "--nic -1.0"),
        (("--target-tps", "0"), "a speed is above 0"),
        (("--target-tps", "1e9"), "however small"),
        (("--gap", "--link", "2"), "fractions of the peak"),
        (("--gap", "--loads", "missing.npy"), "missing.npy"),
    ],
)
def test_bad_input_exits_2_with_one_line(capsys, arguments, text):
    assert main(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1

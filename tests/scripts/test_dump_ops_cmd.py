"""`refmodel dump --ops fp8`: what the files say of themselves, and what a comparison with them looks at."""

import json

import numpy as np
import pytest

from fp8.goldens import GoldenCase
from refmodel.tensor_file import TensorFile, load_tensors, save_tensors
from scripts.main import main

CASES = tuple(GoldenCase(f"tiny.{kind}", kind, 100, 130, 300, 3, seed=1) for kind in ("contiguous", "masked"))


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """The small cases, written by the command: folder."""
    monkeypatch.setattr("fp8.goldens.v3_cases", lambda: CASES)
    assert main(["dump", "--ops", "fp8", "--case", "tiny", "--out", str(tmp_path / "deep/ops")]) == 0
    return tmp_path / "deep/ops"


def compared(folder, case, tensors):
    save_tensors(folder / "kernel.safetensors", tensors)
    return main(["compare", str(folder / f"{case.name}.safetensors"), str(folder / "kernel.safetensors")])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_rows_that_no_group_owns_are_ignored_and_no_others(dumped, case):
    # deepseek-ai/DeepGEMM#20, #34: a kernel may leave anything in padding rows
    golden = load_tensors(dumped / f"{case.name}.safetensors")
    name, defined = f"{case.name}.d", golden[f"{case.name}.defined"]
    out = golden[name].copy()
    out[~defined] = np.nan
    assert np.isnan(out[~defined].astype(np.float32)).sum() >= 130 * case.n
    assert compared(dumped, case, golden | {name: out}) == 0
    for row in (np.argwhere(defined)[0], np.argwhere(defined)[-1]):
        wrong = out.copy()
        wrong[tuple(row)] = np.nan
        assert compared(dumped, case, golden | {name: wrong}) == 1


def test_a_file_says_how_it_came_about(dumped):
    # deepseek-ai/DeepSeek-V3 inference/kernel.py: the floor under amax cannot be seen in the tensors
    extra = json.loads(TensorFile(dumped / "tiny.masked.safetensors").metadata["extra"])
    assert (extra["case"], extra["kind"], extra["amax_floor"]) == ("tiny.masked", "masked", "0.0001")
    assert (extra["recipe"], extra["accumulator"], extra["promotion"]) == ("deepseek_v3", "exact", "mul_add")


def test_list_names_the_cases_at_v3_s_shapes_and_their_bytes(capsys):
    assert main(["dump", "--ops", "fp8", "--list", "--json"]) == 0
    files = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["files"]}
    assert len(files) == 32
    codes, scales = 64 * 7168 + 2112 * 7168, 4 * (64 * 56 + 17 * 56)
    assert files["q_a_kv_a.m64"]["bytes"] == codes + scales + 2 * 64 * 2112
    assert files["down.masked.g9"]["tensors"] == 7


def test_bad_input_exits_2_with_one_line(tmp_path, capsys):
    for arguments, words in ((["--case", "no such"], "matches none of"), ([], "--out DIR is needed")):
        assert main(["dump", "--ops", "fp8", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

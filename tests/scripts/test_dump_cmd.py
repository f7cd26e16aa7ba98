"""`refmodel dump`: the published operators, decode steps, and what is refused."""

import json

import numpy as np
import pytest

from refmodel.golden import read_bundle
from refmodel.golden.published import LISTED, build
from refmodel.tensor_file import load_tensors, save_tensors
from scripts.main import main

LISTING = json.loads(LISTED.read_text())


def test_list_names_all_cases_without_making_one(capsys, monkeypatch):
    monkeypatch.setattr("refmodel.golden.published.build", lambda name: pytest.fail("made"))
    sizes = {}
    for ops in ("fp8", "model", "all"):
        assert main(["dump", "--ops", ops, "--list", "--json"]) == 0
        sizes[ops] = {entry["name"]: entry["bytes"] for entry in json.loads(capsys.readouterr().out)["files"]}
    assert sizes["all"] == sizes["fp8"] | sizes["model"]
    assert sizes["model"] == {name: entry["bytes"] for name, entry in LISTING.items()}
    assert sizes["model"]["rms_norm.v3_rows_64"] == 2 * (2 * 64 * 7168 + 7168)


def test_operators_are_written_as_published(tmp_path, capsys):
    arguments = ["--ops", "model", "--case", r"rope\.(v3_k_pe|rows_1)$", "--out", str(tmp_path / "ops")]
    assert main(["dump", *arguments, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [entry["name"].rsplit("/", 1)[1] for entry in files] == [
        "rope.rows_1.safetensors",
        "rope.v3_k_pe.safetensors",
    ]
    golden = read_bundle(tmp_path / "ops/rope.v3_k_pe.safetensors")
    assert golden.extra == {"set": "rope.v3_k_pe"}
    expected = build("rope.v3_k_pe")[1]
    assert {name: np.asarray(x).tobytes() for name, x in golden.tensors.items()} == {
        name: x.tobytes() for name, x in expected.items()
    }
    first = (tmp_path / "ops/rope.v3_k_pe.safetensors").read_bytes()
    assert main(["dump", *arguments]) == 0
    assert (tmp_path / "ops/rope.v3_k_pe.safetensors").read_bytes() == first


# deepseek-ai/DeepGEMM#38: rows past masked_m may hold anything
def test_rows_that_nothing_defines_are_not_compared(tmp_path):
    case = "grouped_gemm_masked.a_group_without_rows"
    assert main(["dump", "--ops", "model", "--case", case, "--out", str(tmp_path)]) == 0
    golden = tmp_path / f"{case}.safetensors"
    tensors = load_tensors(golden)
    out, defined = tensors["outputs.out"].copy(), tensors["valid.out"]
    assert defined.sum(axis=1).tolist() == [2, 0, 64]
    for row, code in ((~defined, 0), (np.argwhere(defined)[0], 1)):
        out[row if code == 0 else tuple(row)] = np.nan
        save_tensors(tmp_path / "kernel.safetensors", {"outputs.out": out})
        assert main(["compare", str(golden), str(tmp_path / "kernel.safetensors"), "--ignore-missing"]) == code


def test_steps_are_greedy_and_stated(tmp_path):
    path = tmp_path / "steps.safetensors"
    prompts = ["--prompt", "6 * 7 = ", "--prompt", "ab"]
    assert main(["dump", "--numerics", "bfloat16", *prompts, "--steps", "2", "--out", str(path)]) == 0
    golden = read_bundle(path)
    assert (golden.extra["steps"], golden.extra["mtp"]) == (2, False)
    for request, row in ((0, 7), (1, 9)):  # the last row of each prompt
        tokens = golden.tensors[f"request.{request}.tokens"]
        logits = [golden.tensors["final.logits"][row]]
        logits += [golden.tensors[f"step.{s}.final.logits"][request] for s in (1, 2)]
        assert tokens.tolist() == [int(x.argmax()) for x in logits]
    assert not any(name.startswith("layers.3.") for name in golden.tensors)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "-1", "--out", "x"], "--steps -1: must be 0 or more"),
        (["--ops", "model", "--case", "no such"], "--case 'no such' matches none of"),
        (["--ops", "all", "--case", "rope"], "--out DIR is needed"),
        (["--prompt", "a"], "--out FILE is needed"),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments, words, capsys):
    assert main(["dump", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert len(error) < 400

import argparse
import json

import ml_dtypes
import numpy as np
import pytest

from refmodel.golden import write_bundle
from refmodel.tensor_file import load_tensors, save_tensors
from scripts import compare


def run(*arguments):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return compare.run(parser.parse_args([str(a) for a in arguments]))


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "embed.hidden": rng.standard_normal((4, 8)).astype(np.float32),
        "layers.0.attn_core.out": rng.standard_normal((4, 8)).astype(np.float32),
    }
    write_bundle(tmp_path / "golden.safetensors", tensors, None, "float32")
    np.savez(tmp_path / "same.npz", **tensors)
    tensors["layers.0.attn_core.out"] = tensors["layers.0.attn_core.out"] * np.float32(2.5)
    np.savez(tmp_path / "scaled.npz", **tensors)
    return tmp_path


def test_exit_codes_and_headline(files, capsys):
    assert run(files / "golden.safetensors", files / "same.npz") == 0
    assert capsys.readouterr().out.startswith("equal: 2 tensors, 2 bit for bit")
    assert run(files / "golden.safetensors", files / "scaled.npz") == 1
    out = capsys.readouterr().out
    assert out.startswith("layers.0.attn_core.out diverges first: 32 of 32 elements outside tolerance")
    assert "looks: scaled by 2.5" in out.splitlines()[0]


def test_json_is_valid_even_with_nan(files, capsys):
    np.savez(files / "nan.npz", **{"embed.hidden": np.full((4, 8), np.nan, np.float32)})
    assert run(files / "golden.safetensors", files / "nan.npz", "--json") == 1
    values = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert values["exit_code"] == 1
    assert values["counts"] == {"differs": 1, "missing": 1}
    assert values["tensors"][0]["metrics"]["nan_actual"] == 32


def test_rules_by_pattern(files, capsys):
    pair = (files / "golden.safetensors", files / "scaled.npz")
    assert run(*pair, "--rule", "attn=rtol:2") == 0
    assert run(*pair, "--rule", "attn=exact") == 1
    assert run(*pair, "--rule", "embed=rtol:2") == 1
    assert run(*pair, "--rtol", 1.6) == 0
    assert run(*pair, "--atol", 0.001) == 1
    assert run(*pair, "--only", "embed") == 0
    assert run(*pair, "--mode", "exact") == 1
    capsys.readouterr()


def test_missing_extra_and_dtype_can_be_ignored(files, capsys):
    wide = np.load(files / "same.npz")["embed.hidden"].astype(np.float64)
    np.savez(files / "part.npz", **{"embed.hidden": wide, "more": wide})
    pair = (files / "golden.safetensors", files / "part.npz")
    assert run(*pair) == 1
    assert run(*pair, "--ignore-missing", "--ignore-extra") == 1
    assert run(*pair, "--ignore-missing", "--ignore-extra", "--ignore-dtype") == 0
    assert "note: 1 missing tensors were not compared" in capsys.readouterr().out


def test_rows_that_are_not_valid(tmp_path, capsys):
    rows = np.ones((2, 3, 4), ml_dtypes.bfloat16)
    save_tensors(tmp_path / "a.safetensors", {"out": rows, "masked_m": np.int32([1, 2])})
    rows = rows.copy()
    rows[0, 1:] = np.nan
    save_tensors(tmp_path / "b.safetensors", {"out": rows, "masked_m": np.int32([1, 2])})
    pair = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert run(*pair) == 1
    assert run(*pair, "--valid", "^out$=masked_m") == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--rule", "attn"], "REGEX=rtol"),
        (["--rule", "attn=rtol:x"], "'rtol:x' is not one of"),
        (["--rule", "attn=speed:1"], "'speed:1' is not one of"),
        (["--rule", "(=exact"], "not a regular expression"),
        (["--rule", "a=exact", "--mode", "exact"], "give one"),
        (["--rule", "a=exact", "--rtol", "1"], "--rtol/--atol"),
        (["--valid", "x"], "REGEX=TENSOR"),
        (["--rtol", "-1"], "0 or more"),
        (["--rtol", "nan"], "0 or more"),
        (["--tie-margin", "-1"], "0 or more"),
        (["--only", "nothing"], "nothing was compared"),
        (["--only", "("], "not a regular expression"),
    ],
)
def test_bad_arguments_are_value_errors(files, extra, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        run(files / "golden.safetensors", files / "same.npz", *extra)


def test_bad_files_are_clear_errors(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.npz"):
        run(files / "golden.safetensors", files / "gone.npz")
    np.savez(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="holds no tensor"):
        run(files / "golden.safetensors", tmp_path / "none.npz")
    (tmp_path / "cut.safetensors").write_bytes((files / "golden.safetensors").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        run(files / "golden.safetensors", tmp_path / "cut.safetensors")


def test_html_is_written_beside_the_text(files, capsys):
    assert run(files / "golden.safetensors", files / "scaled.npz", "--html", files / "page.html") == 1
    assert "diverges first" in capsys.readouterr().out
    assert "layers.0.attn_core.out diverges first" in (files / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example_golden(tmp_path_factory):
    from refmodel import Model, record
    from refmodel.presets import EXAMPLE

    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    ids = np.frombuffer(b"to be or not to be", np.uint8).astype(np.int64)
    with record() as tensors:
        model.forward(ids)
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    write_bundle(path, {**tensors, "request.0.prompt": ids}, model.config, "bfloat16", extra={"phase": "prefill"})
    return path


def test_replay_names_the_operator_and_the_mistake(example_golden, tmp_path, capsys):
    assert run(example_golden, example_golden, "--replay", "example") == 0
    assert capsys.readouterr().out.startswith("every operator holds on its own inputs")
    tensors = load_tensors(example_golden)
    residual = tensors["layers.1.merge.residual"]
    residual[:] = (residual.astype(np.float32) + tensors["layers.1.merge.moe"].astype(np.float32)).astype(
        residual.dtype
    )
    save_tensors(tmp_path / "bad.safetensors", tensors)
    assert run(example_golden, tmp_path / "bad.safetensors", "--replay", "example", "--json") == 1
    values = json.loads(capsys.readouterr().out)
    assert values["first"] == "layers.1.merge.residual"
    assert values["findings"][0]["mistake"] == "branch_twice"
    with pytest.raises(ValueError, match="do not go with it"):
        run(example_golden, example_golden, "--replay", "example", "--rtol", "1")


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    from scripts.main import main

    path = tmp_path_factory.mktemp("steps") / "golden.safetensors"
    prompts = ["--prompt", "6 * 7 = 42", "--prompt", "def f("]
    assert main(["dump", "--numerics", "fp8", *prompts, "--mtp", "--steps", "3", "--out", str(path)]) == 0
    return path


# vllm-project/vllm#47448: faults that show only in decode
@pytest.mark.parametrize(
    "name",
    [
        "layers.1.attn_proj.k_pe",
        "layers.3.attn_core.heads",  # of the MTP layer, whose keys reach back to the prompt
        "step.2.layers.1.attn_core.heads",
        "step.1.layers.3.mtp_embed.enorm",
        "step.3.layers.3.attn_core.heads",
    ],
)
def test_replay_reaches_decode_steps_and_the_mtp_layer(stepped, name, tmp_path, capsys):
    assert run(stepped, stepped, "--replay", "example") == 0
    out = capsys.readouterr().out
    assert "not replayed" not in out
    assert int(out.split("bit for bit")[0].split()[-1]) > 400
    tensors = load_tensors(stepped)
    tensors[name] = (tensors[name].astype(np.float32) * 1.5).astype(tensors[name].dtype)
    save_tensors(tmp_path / "bad.safetensors", tensors)
    assert run(stepped, tmp_path / "bad.safetensors", "--replay", "example", "--json") == 1
    assert json.loads(capsys.readouterr().out)["first"] == name


def test_a_golden_that_states_fewer_tokens_than_steps_is_refused(stepped, tmp_path):
    from refmodel.golden import read_bundle

    golden = read_bundle(stepped)
    tensors = dict(golden.tensors)
    tensors["request.1.tokens"] = tensors["request.1.tokens"][:3]
    write_bundle(tmp_path / "short.safetensors", tensors, golden.config, "fp8", extra=golden.extra)
    with pytest.raises(ValueError, match=r"states 3 steps; request\.N\.tokens must hold 4"):
        run(tmp_path / "short.safetensors", stepped, "--replay", "example")


def test_a_fault_is_planted_in_the_first_pass_of_a_golden_with_steps(stepped, tmp_path, capsys):
    from refmodel.golden import mutants

    name, out = "layers.1.attn_proj.k_pe", tmp_path / "engine.safetensors"
    mutants.main(["--golden", str(stepped), "--plant", "rope_missing", "--at", name, "--out", str(out)])
    assert run(stepped, out, "--replay", "example", "--json") == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["first"], values["findings"][0]["mistake"]) == (name, "rope_missing")

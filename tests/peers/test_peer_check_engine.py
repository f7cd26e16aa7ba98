"""`refmodel check-engine hf` from end to end: the adapter in a process of its own, on the packaged example."""

import argparse
import json
import sys

import pytest

REASON = "not installed; tests/peers/run makes an environment that has it"
pytest.importorskip("torch", reason=f"torch is {REASON}")
pytest.importorskip("transformers", reason=f"transformers is {REASON}")

from checkpoints import ENGINE_SPECS, write_checkpoint  # noqa: E402

from scripts import check_engine  # noqa: E402


def check(capsys, *words) -> tuple[int, dict]:
    parser = argparse.ArgumentParser()
    check_engine.add_arguments(parser)
    code = check_engine.run(parser.parse_args(["hf", *words, "--json", "--python", sys.executable]))
    return code, json.loads(capsys.readouterr().out)


def test_the_example_agrees(capsys):
    code, found = check(capsys, "--mtp", "--new-tokens", "8")
    assert code == 0, found["headline"]
    assert found["headline"].startswith("equal: 75 tensors")
    assert max(part["of_rms"] for part in found["worst"].values()) < 1e-4


@pytest.mark.parametrize("spec", ENGINE_SPECS, ids=lambda spec: spec.name)
def test_random_checkpoints_agree(capsys, tmp_path, spec):
    code, found = check(capsys, str(write_checkpoint(spec, tmp_path / spec.name)), "--mtp")
    assert code == 0, found["headline"]


def test_a_config_that_the_engine_reads_otherwise_is_found(capsys, tmp_path):
    """Hugging Face fixes the epsilon of the inner norms at 1e-6, vLLM takes rms_norm_eps."""
    spec = next(spec for spec in ENGINE_SPECS if spec.config.get("q_lora_rank", 1))
    folder = write_checkpoint(spec, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    code, found = check(capsys, str(folder), "--like", "vllm")
    assert code == 1
    assert found["first"] == "layers.0.attn_proj.q_a_norm"
    assert found["mistake"] == "inner_eps_fixed"
    assert found["cause"] == "with an epsilon of 1e-6 instead of rms_norm_eps"


def test_in_bfloat16_every_operator_holds(capsys):
    code, found = check(capsys, "--mtp", "--dtype", "bfloat16")
    assert code == 0, found["headline"]
    assert found["headline"].startswith("every operator holds on its own inputs: 75 tensors")

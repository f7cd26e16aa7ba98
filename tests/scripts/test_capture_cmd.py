import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_oracle import CONFIG, write_small_checkpoint

from refmodel.checkpoint import EXAMPLE, Checkpoint
from refmodel.config import ModelConfig
from refmodel.tensor_file import load_tensors
from scripts import capture, check_engine, engines
from scripts.adapters.request import Request
from scripts.engine_copy import plain_copy

# An engine that computes nothing: it writes what it was asked as two ranks' tensors, as an adapter does.
IMITATION = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import numpy as np
from refmodel.tensor_file import save_tensors
request = json.loads(Path(sys.argv[1]).read_text())
print("talkative engine")
if request["engine_args"].get("fail"):
    print("Traceback ...", file=sys.stderr)
    print("KeyError: 'model.layers.1.foo'", file=sys.stderr)
    print("EngineDeadError: EngineCore encountered an issue", file=sys.stderr)
    sys.exit(1)
if request["engine_args"].get("sleep"):
    import time
    time.sleep(request["engine_args"]["sleep"])
tokens = np.array(request["tokens"][0], np.float32)
for rank in range(2):
    tensors = {{"embed.hidden": tokens[:, None], "layers.0.attn_proj.q": np.full((len(tokens), 1, 2), rank, np.float32),
               "layers.1.shared.out": tokens[:, None] * (rank + 1)}}
    save_tensors(f"{{request['out']}}/rank.{{rank}}.safetensors", tensors)
answer = dict(engine="imitation 1.0", generated=[[7, 8]] * len(request["tokens"]), notes=[request["model"]],
              joins={{"layers.0.attn_proj.q": "concat:1", "layers.1.shared.out": "sum"}}, logprobs=[-1.0, -2.0])
Path(request["out"], "result.json").write_text(json.dumps(answer))
"""


@pytest.fixture
def imitation(tmp_path, monkeypatch):
    """An engine called `hf` that needs nothing but this interpreter."""
    script = tmp_path / "imitation.py"
    script.write_text(IMITATION.format(root=str(Path(__file__).parents[2])))
    monkeypatch.setitem(engines.ENGINES, "hf", replace(engines.ENGINES["hf"], adapter=str(script)))
    return tmp_path


def run(module, *words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([*words, "--python", sys.executable]))


def test_capture_joins_ranks_and_writes_the_file(imitation, capsys):
    out = imitation / "out.safetensors"
    assert run(capture, "hf", "--tokens", "3,4,5", "--new-tokens", "2", "--out", str(out), "--json") == 0
    tensors = load_tensors(out)
    assert tensors["embed.hidden"].tolist() == [[3], [4], [5]]
    assert tensors["layers.0.attn_proj.q"].tolist() == [[[0, 0], [1, 1]]] * 3
    assert tensors["layers.1.shared.out"].tolist() == [[9], [12], [15]]
    assert tensors["engine.logprobs"].tolist() == [-1, -2]
    summary = json.loads(capsys.readouterr().out)
    assert summary["engine"] == "imitation 1.0"
    assert summary["ranks"] == 2
    assert summary["generated"] == [[7, 8]]


def test_an_engine_that_fails_is_quoted(imitation):
    arguments = ("hf", "--tokens", "3,4", "--out", str(imitation / "x.safetensors"))
    with pytest.raises(ValueError, match=r"hf stopped with status 1: KeyError: 'model.layers.1.foo'"):
        run(capture, *arguments, "--engine-args", "fail=true")
    with pytest.raises(ValueError, match=r"no answer in 0.5 s"):
        run(capture, *arguments, "--timeout", "0.5", "--engine-args", "sleep=30")
    assert not (imitation / "x.safetensors").exists()


def test_check_engine_reports_a_difference(imitation, capsys):
    code = run(check_engine, "hf", "--tokens", "3,4,5")
    out = capsys.readouterr().out
    assert code == 1
    assert "embed.hidden diverges first: shape" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "1,x"), "integers separated by commas"),
        (("--tokens", "1,258"), "token 258 is outside the vocabulary of 258"),
        (("--tokens", "1,-1"), "token -1 is outside the vocabulary"),
        (("--tokens", "1"), "has 1 tokens: 2 or more"),
        (("--new-tokens", "-1"), "must be 0 or more"),
        (("--engine-args", "tensor_parallel_size"), "must be name=value"),
        (("--prompts", "nothing.json"), "nothing.json"),
    ],
)
def test_bad_arguments_are_refused(imitation, words, message):
    with pytest.raises((ValueError, OSError), match=message):
        run(capture, "hf", "--out", str(imitation / "x.safetensors"), *words)


def test_mtp_is_refused_where_the_engine_has_none(tmp_path):
    with pytest.raises(ValueError, match="MLX-LM has no MTP layer"):
        run(capture, "mlx", "--mtp", "--out", str(tmp_path / "x.safetensors"))


def test_text_is_refused_where_the_vocabulary_is_not_bytes(imitation, monkeypatch):
    wide = replace(ModelConfig.from_pretrained(EXAMPLE), vocab_size=129280)
    monkeypatch.setattr(ModelConfig, "from_pretrained", classmethod(lambda cls, path: wide))
    with pytest.raises(ValueError, match="a vocabulary of 129280 is not bytes"):
        run(capture, "hf", "--prompt", "class", "--out", str(imitation / "x.safetensors"))


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "p.json"
    args = argparse.Namespace(tokens=None, prompt=None, prompts=str(file), directory=None)
    config = ModelConfig.from_pretrained(EXAMPLE)
    file.write_text('{"prompts": ["if", [1, 2, 3]]}')
    assert capture.read_prompts(args, config) == [[105, 102], [1, 2, 3]]
    for content, message in (
        ("{}", "a JSON list"),
        ("[1]", "every prompt"),
        ("[[true]]", "every prompt"),
        ("[", "not J"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            capture.read_prompts(args, config)


def test_the_default_prompt_is_the_same_every_time():
    args = argparse.Namespace(tokens=None, prompt=None, prompts=None, directory=None)
    config = ModelConfig.from_pretrained(EXAMPLE)
    assert bytes(capture.read_prompts(args, config)[0]).startswith(b"class Stack:\n\tdef")
    args.directory = "somewhere"
    first = capture.read_prompts(args, replace(config, vocab_size=1000))
    assert first == capture.read_prompts(args, replace(config, vocab_size=1000))
    assert len(first[0]) == 48


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (
            ["tensor_parallel_size=2", "enable_expert_parallel=true"],
            dict(tensor_parallel_size=2, enable_expert_parallel=True),
        ),
        (["a=True", "b=None", "c=text", 'd={"x": 1}', "e=1=2"], dict(a=True, b=None, c="text", d={"x": 1}, e="1=2")),
        ([], {}),
    ],
)
def test_engine_args(pairs, expected):
    assert engines.parse_engine_args(pairs) == expected


def test_python_of_an_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REFMODEL_VLLM_PYTHON", raising=False)
    with pytest.raises(ValueError, match=r"scripts/adapters/make_venv.sh vllm .venv-vllm"):
        engines.find_python("vllm", None)
    monkeypatch.setenv("REFMODEL_VLLM_PYTHON", sys.executable)
    assert engines.find_python("vllm", None) == sys.executable


def test_the_engine_does_not_see_our_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    request = Request(model="m", out="o", tokens=[[1, 2]], engine_args={"tensor_parallel_size": 2})
    env = engines._environment(request)
    assert "PYTHONPATH" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


def test_plain_copy_multiplies_codes_out(tmp_path):
    plain_copy(EXAMPLE, tmp_path)
    before, after = Checkpoint.open(EXAMPLE), Checkpoint.open(tmp_path)
    assert after.dtype_of_weights != "fp8"
    assert after.config.num_nextn_predict_layers == 1
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"  # 576 rows: the last scale covers 64 of them
    scaled, plain = before.block_scaled(name), after.array(name)
    assert plain.dtype == np.float32
    for row, column in ((0, 0), (127, 128), (128, 127), (575, 255)):
        code, scale = scaled.codes[row, column].astype(np.float64), scaled.scale[row // 128, column // 128]
        assert plain[row, column] == np.float32(code * np.float64(scale))
    norm = "model.layers.2.input_layernorm.weight"
    assert after.array(norm).tobytes() == before.array(norm).tobytes()


def test_plain_copy_in_bfloat16_and_without_the_mtp_layer(tmp_path):
    plain_copy(EXAMPLE, tmp_path, dtype="bfloat16", mtp=False)
    copy = Checkpoint.open(tmp_path)
    assert copy.dtype_of_weights == "bfloat16"
    assert not copy.has_mtp
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        plain_copy(EXAMPLE, tmp_path / "other", dtype="float16")


def test_only_what_an_engine_cannot_read_is_copied(tmp_path):
    small = write_small_checkpoint(tmp_path / "small")
    assert engines.readable_copy("hf", small, tmp_path, "float32", True) == small
    without = engines.readable_copy("mlx", small, tmp_path, "float32", False)
    assert without != small
    assert not Checkpoint.open(without).has_mtp
    assert Checkpoint.open(small).config.num_hidden_layers == CONFIG.num_hidden_layers

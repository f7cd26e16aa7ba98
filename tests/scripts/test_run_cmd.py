"""`refmodel run`, and bad input to it: exit code 2 and one line."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from parallel.dispatch.low_latency import LowLatencyExchange
from refmodel.presets import EXAMPLE
from refmodel.tensor_file import load_tensors
from scripts.main import main

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *args):
    code = main(["run", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, tmp_path, *args):
    code, out, _ = run(capsys, "--json", "--out", str(tmp_path / "g.safetensors"), *args)
    return code, json.loads(out)


def test_default_run(capsys, tmp_path):
    out = tmp_path / "deep" / "golden.safetensors"
    code, text, _ = run(capsys, "--new-tokens", "6", "--out", str(out))
    assert code == 0
    assert "identical to the single-rank run: yes" in text
    assert "class Stack:" in text
    assert "MTP drafts accepted" in text
    tensors = load_tensors(out)
    assert tensors["embed.hidden"].shape == (184, 256)
    assert tensors["request.0.tokens"].shape == (6,)


@pytest.mark.parametrize("numerics", ["float64", "float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(r, marks=pytest.mark.long) for r in (2, 8, 16, 32))])
def test_ranks_and_numerics(capsys, tmp_path, ranks, numerics):
    args = ["--ranks", str(ranks), "--numerics", numerics, "--new-tokens", "12" if ranks > 4 else "4"]
    code, result = run_json(capsys, tmp_path, *args)
    assert code == 0
    assert result["identical"] is True
    assert result["reference"] == "the single-rank run"


@pytest.mark.parametrize("kernel", ["Haswell", "SkylakeX"])
def test_identical_under_other_blas_kernels(tmp_path, kernel):
    env = {**os.environ, "OPENBLAS_CORETYPE": kernel, "PYTHONPATH": str(ROOT)}
    args = [
        "--numerics",
        "float32",
        "--compute",
        "float32",
        "--new-tokens",
        "4",
        "--json",
        "--out",
        str(tmp_path / "g"),
    ]
    done = subprocess.run([sys.executable, "-m", "refmodel", "run", *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"]


@pytest.mark.parametrize("dispatch", ["normal", "elastic", "allgather", "alltoallv"])
def test_dialects(capsys, tmp_path, dispatch):
    args = ["--dispatch", dispatch, "--ranks", "4", "--ranks-per-node", "2", "--redundant-experts", "16"]
    code, result = run_json(capsys, tmp_path, *args, "--new-tokens", "3", "--schedule", "decode_overlap")
    assert code == 0
    assert result["identical"]
    assert result["reference"].endswith(dispatch)


def test_volumes_add_up(capsys, tmp_path):
    _, result = run_json(capsys, tmp_path, "--ranks", "4", "--new-tokens", "2", "--greedy", "--drafts", "0")
    by_class = sum(
        count for links in result["bytes"].values() for classes in links.values() for count in classes.values()
    )
    assert by_class == sum(map(sum, result["matrix_bytes"]))
    # 184 prompt tokens and 8 decoded ones, 2 MoE layers, 8 experts each: 256 bytes of FP8 each
    assert sum(result["bytes"]["dispatch"][link]["payload"] for link in ("local", "nvlink")) == 192 * 2 * 8 * 256


def test_a_difference_exits_1(capsys, tmp_path, monkeypatch):
    send = LowLatencyExchange.combine_send

    def faulty(self, rows):
        if self.rank == 1 and self.layer == 2 and len(rows):
            rows = rows.copy()
            rows.view(np.uint16)[:, 0] ^= 64  # the first fraction bit of one column
        send(self, rows)

    monkeypatch.setattr(LowLatencyExchange, "combine_send", faulty)
    code, result = run_json(capsys, tmp_path, "--ranks", "2", "--new-tokens", "2", "--prompt", "x = ", "--greedy")
    assert code == 1
    assert not result["identical"]
    assert result["first_difference"] == "layers.2.combine_recv.routed"


def one_line(err):
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "0"], "num_ranks = 0"),
        (["--ranks", "-2"], "num_ranks = -2"),
        (["--ranks", "3"], "256 physical experts do not divide over 3 ranks"),
        (["--ranks", "12"], "12"),
        (["--ranks", "two"], "--ranks"),
        (["--redundant-experts", "7"], "263 physical experts"),
        (["--numerics", "int4"], "numerics = 'int4'"),
        (["--dispatch", "ib"], "dispatch = 'ib'"),
        (["--schedule", "x"], "schedule = 'x'"),
        (["--tokens", "1,2,258"], "token id 258 at position 2 is outside the vocabulary of 258"),
        (["--tokens", "1,x"], "--tokens '1,x'"),
        (["--tokens", ""], "prompt 0 is empty"),
        (["--new-tokens", "0"], "max_new_tokens = 0"),
        (["--checkpoint", "/no/such/directory"], "/no/such/directory"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_exits_2_with_one_line(capsys, args, words, tmp_path):
    try:
        code, _, err = run(capsys, "--out", str(tmp_path / "g"), *args)
    except SystemExit as stop:
        code, err = stop.code, capsys.readouterr().err
    assert code == 2
    assert words in one_line(err)
    assert not (tmp_path / "g").exists()


def copy_of_example(tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(EXAMPLE, copy)
    return copy


def damaged(tmp_path, how):
    copy = copy_of_example(tmp_path)
    shard = copy / "model-00002-of-00002.safetensors"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-5000])
    elif how == "missing":
        shard.unlink()
    elif how == "dtype":
        data = shard.read_bytes()
        shard.write_bytes(data.replace(b'"F8_E4M3"', b'"F8_E4M9"', 1))
    else:
        config = json.loads((copy / "config.json").read_text())
        config[how[0]] = how[1]
        (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", ("model-00002-of-00002.safetensors",)),
        ("missing", ("model-00002-of-00002.safetensors",)),
        ("dtype", ("F8_E4M9",)),
        (("kv_lora_rank", 256), ("kv_lora_rank",)),
        (("hidden_size", 128), ("hidden_size",)),
        (("n_routed_experts", 320), ("experts",)),
        (("qk_rope_head_dim", 7), ("qk_rope_head_dim = 7",)),
    ],
)
def test_bad_checkpoints_exit_2_before_any_compute(capsys, tmp_path, how, words):
    code, out, err = run(capsys, "--checkpoint", str(damaged(tmp_path, how)), "--out", str(tmp_path / "g"))
    assert code == 2
    assert out == ""
    for word in words:
        assert word in one_line(err)


def test_text_prompts_need_a_byte_level_model(capsys, tmp_path):
    from dataclasses import replace

    from refmodel import ModelConfig
    from refmodel.checkpoint_writer import write_checkpoint
    from refmodel.random_weights import RandomTensors
    from refmodel.schema import needed_tensors

    config = replace(ModelConfig.preset("example"), vocab_size=300, num_hidden_layers=1, n_routed_experts=16, n_group=2,
                     topk_group=1, quantization_config=None, num_nextn_predict_layers=0, hidden_size=64)  # fmt: skip
    source = RandomTensors(config, 0)
    write_checkpoint(tmp_path / "m", config, {name: source.array(name) for name, _ in needed_tensors(config)})
    for args in (["--prompt", "hello"], []):
        code, _, err = run(capsys, "--checkpoint", str(tmp_path / "m"), "--out", str(tmp_path / "g"), *args)
        assert code == 2
        assert "--tokens" in one_line(err)
    code, _, _ = run(
        capsys, "--checkpoint", str(tmp_path / "m"), "--tokens", "1 2 299", "--ranks", "2", "--new-tokens", "3",
        "--out", str(tmp_path / "g"),
    )  # fmt: skip
    assert code == 0
    assert load_tensors(tmp_path / "g")["request.0.prompt"].tolist() == np.array([1, 2, 299]).tolist()


_GRID = """
import json, sys
import numpy as np
from parallel import Deployment, Topology
from refmodel import Model
from refmodel.presets import EXAMPLE
prompts = [np.frombuffer(p.encode(), np.uint8) for p in json.loads((EXAMPLE / "prompts.json").read_text())["prompts"]]
same = lambda a, b: a.tokens == b.tokens and all(
    x.rows(l, x.written[l]).tobytes() == y.rows(l, y.written[l]).tobytes()
    for x, y in zip(a.caches, b.caches) for l in range(4))
for numerics, compute in [("float64", "float64"), ("float32", "float64"), ("float32", "float32"),
                          ("bfloat16", "float64"), ("fp8", "float64")]:
    model = Model.from_pretrained(EXAMPLE, numerics=numerics, compute=compute)
    settings = dict(speculative=True, temperature=0.7, top_p=0.95)
    alone = model.generate_batch(prompts, 8, **settings)
    for ranks in (1, 2, 4, 8, 16, 32):
        spread = Deployment(model, Topology(ranks, 8)).generate_batch(prompts, 8, **settings)
        assert same(alone, spread), (numerics, compute, ranks)
print("identical")
"""


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["Haswell", "SkylakeX"])
def test_every_number_of_ranks_and_numerics_under_both_kernels(kernel):
    env = {**os.environ, "OPENBLAS_CORETYPE": kernel, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _GRID], env=env, capture_output=True, text=True)
    assert done.stdout == "identical\n", done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "redundant", "dispatch"), [
    (144, 32, "low_latency"), (144, 32, "normal"), (144, 32, "elastic"), (144, 32, "allgather"),
    (144, 32, "alltoallv"), (64, 0, "normal"), (320, 64, "low_latency"),
])  # fmt: skip
def test_many_ranks(capsys, tmp_path, ranks, redundant, dispatch):
    args = ["--ranks", str(ranks), "--redundant-experts", str(redundant), "--dispatch", dispatch]
    begun = time.process_time()
    code, result = run_json(capsys, tmp_path, *args, "--new-tokens", "2")
    assert time.process_time() - begun < 60
    assert code == 0
    assert result["identical"]

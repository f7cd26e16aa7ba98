"""What the torch adapters do around an engine, shown on stand-ins for the engine's modules."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; tests/peers/run makes an environment that has it")
pytest.importorskip("safetensors", reason="safetensors is not installed; tests/peers/run makes such an environment")

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "adapters"))

import sglang_hooks  # noqa: E402
from names import LAYER_POINTS  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

CONFIG = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "q_lora_rank": 3}


def test_sglang_entries_name_every_point_that_it_shows():
    entries = sglang_hooks.hook_entries(CONFIG, 4, "file")
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    assert entries[-1]["config"]["file"] == "file"
    assert [e["target_modules"][0] for e in entries if e["name"] == "layers.1.merge.residual"] == ["model.layers.1"]
    unseen = {"q", "k_pe", "attention", "routed", "shared"}
    dense = {"mlp", "dense_hidden"}
    moe = {"router_logits", "topk_idx", "topk_weights", "moe", "hidden"}
    for layer, absent in ((0, unseen | moe), (1, unseen | dense)):
        for point, name in LAYER_POINTS.items():
            assert (f"layers.{layer}.{name}" in names) == (point not in absent), (layer, point)


def test_sglang_hooks_keep_the_prefill_and_write_it(tmp_path):
    sglang_hooks.SEEN.clear()
    file = str(tmp_path / "rank.0.safetensors")
    outputs = {
        "q_a": (torch.arange(20.0).reshape(4, 5), None),
        "attn_residual": (torch.zeros(4, 2), torch.ones(4, 2)),
        "hidden": (torch.ones(4, 2), torch.ones(4, 2)),
        "topk_idx": SimpleNamespace(topk_ids=torch.tensor([[1], [2], [3], [0]], dtype=torch.int32)),
    }
    entries = {entry["name"]: entry["config"] for entry in sglang_hooks.hook_entries(CONFIG, 4, file)}
    for point, output in outputs.items():
        hook = sglang_hooks.keep(entries[f"layers.1.{LAYER_POINTS[point]}"])
        assert hook(None, (), output) is None
    last = sglang_hooks.keep(entries["final.norm"])
    last(None, (), torch.full((1, 2), 9.0))  # a decode step: another number of rows
    assert not Path(file).exists()
    last(None, (), torch.full((4, 2), 3.0))
    last(None, (), torch.full((4, 2), 4.0))  # a later pass does not replace the first
    tensors = load_file(file)
    assert tensors["layers.1.attn_proj.q_a"].tolist() == [[0, 1, 2], [5, 6, 7], [10, 11, 12], [15, 16, 17]]
    assert tensors["layers.1.attn_core.residual"].tolist() == [[1, 1]] * 4
    assert tensors["layers.1.merge.residual"].tolist() == [[2, 2]] * 4
    assert tensors["layers.1.attn_core.router.topk_idx"].dtype == torch.int64
    assert tensors["final.norm"].tolist() == [[3, 3]] * 4

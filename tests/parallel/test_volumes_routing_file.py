"""Recorded routing: every format, what was never written, and files that cannot be read."""

import base64
import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from parallel.dispatch.routing_file import load_expert_loads, load_routing
from parallel.dispatch.torch_file import load_torch
from refmodel.tensor_file import save_tensors

DATA = Path(__file__).parent / "data"
IDS = np.array([[[0, 5], [1, 2]], [[3, 4], [5, 0]], [[2, 1], [4, 3]]])  # [3 tokens, 2 layers, top-2]
BY_LAYER = IDS.transpose(1, 0, 2)


def sglang_answer(ids):
    return {"text": "", "meta_info": {"routed_experts": base64.b64encode(ids.astype(np.int32).tobytes()).decode()}}


def write(path, kind):
    if kind == "npy":  # vLLM's CompletionOutput.routed_experts
        np.save(path / "a.npy", IDS.astype(np.int16))
        return path / "a.npy"
    if kind == "npz by layer":
        np.savez(path / "a.npz", layer_10=IDS[:, 1], layer_9=IDS[:, 0])
        return path / "a.npz"
    if kind == "safetensors":
        names = {"layers.3.attn_core.router.topk_idx": IDS[:, 0], "layers.12.attn_core.router.topk_idx": IDS[:, 1]}
        save_tensors(path / "a.safetensors", {**names, "layers.3.attn_core.router.topk_weights": np.ones((3, 2), "f4")})
        return path / "a.safetensors"
    if kind == "json":  # one request of two tokens and one of one
        text = json.dumps([sglang_answer(IDS[:2]), sglang_answer(IDS[2:])])
        (path / "a.json").write_text(text)
        return path / "a.json"
    lines = "\n".join(json.dumps(sglang_answer(part)) for part in (IDS[:2], IDS[2:]))
    (path / "a.jsonl").write_text(lines + "\n")
    return path / "a.jsonl"


@pytest.mark.parametrize("kind", ["npy", "npz by layer", "safetensors", "json", "jsonl"])
def test_every_format_gives_the_same_table(tmp_path, kind):
    recorded = load_routing(write(tmp_path, kind), num_experts=6, layers=2, top_k=2)
    np.testing.assert_array_equal(recorded.ids, BY_LAYER)
    assert (recorded.rank, recorded.phy2log, recorded.notices) == (None, None, ())
    assert [table.tolist() for table in recorded.tables(1, 2)] == [[[1, 2], [5, 0]], [[4, 3]]]


def test_one_layer_and_several_files(tmp_path):
    np.save(tmp_path / "a.npy", IDS[:, 0])
    np.save(tmp_path / "b.npy", IDS[:1, 1])
    recorded = load_routing([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert recorded.ids.tolist() == [[[0, 5], [3, 4], [2, 1], [1, 2]]]


def test_records_of_sglang_s_recorder_written_by_torch():
    """Two ranks, a prefill of 3 tokens and a decode step of 2 each."""
    recorded = load_routing([DATA / f"expert_distribution_recorder_{rank}.pt" for rank in (0, 1)], num_experts=6)
    assert recorded.ids.shape == (2, 10, 2)
    assert recorded.rank.tolist() == [0] * 5 + [1] * 5
    assert recorded.phy2log.tolist() == [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 2, 0]]
    assert [table.tolist() for table in recorded.tables(0, 2)] == [
        [[2, 5], [3, 0], [5, 2], [1, 3], [3, 0]],
        [[4, 5], [2, 4], [1, 2], [2, 5], [5, 0]],
    ]
    with pytest.raises(ValueError, match="recorded on rank 1, but there are 1 ranks"):
        recorded.tables(0, 1)


def test_loads(tmp_path):
    assert load_expert_loads(DATA / "expert_distribution_recorder_stat.pt").tolist() == [
        [24, 27, 30, 33],
        [36, 39, 42, 45],
    ]
    np.save(tmp_path / "a.npy", np.arange(4))
    assert load_expert_loads(tmp_path / "a.npy").tolist() == [[0, 1, 2, 3]]
    (tmp_path / "a.csv").write_text("# layer 0, 1\n1,2,3\n4,5,6.5\n")
    assert load_expert_loads(tmp_path / "a.csv").tolist() == [[1, 2, 3], [4, 5, 6.5]]
    with pytest.raises(ValueError, match="no logical_count"):
        load_expert_loads(DATA / "expert_distribution_recorder_0.pt")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(ValueError, match="2 arrays"):
        load_expert_loads(tmp_path / "two.npz")


@pytest.mark.parametrize(
    ("table", "experts"),
    [
        (np.where(np.arange(3)[:, None, None] == 1, -1, IDS).astype(np.int16), 6),
        (np.where(np.arange(3)[:, None, None] == 1, 255, IDS).astype(np.uint8), 256),  # two of 255 are no top-2
        (np.where(np.arange(3)[:, None, None] == 1, 255, IDS).astype(np.uint8), 6),
        (np.where(np.arange(3)[:, None, None] == 1, 0, IDS).astype(np.int16), 6),
    ],
)
def test_rows_never_written_are_refused_or_skipped(tmp_path, table, experts):
    np.save(tmp_path / "a.npy", table)
    with pytest.raises(ValueError, match=r"2 of 6 .* never written, first token 1, layer 0"):
        load_routing(tmp_path / "a.npy", experts)
    recorded = load_routing(tmp_path / "a.npy", experts, unwritten="skip")
    assert recorded.ids[:, 1].tolist() == [[-1, -1], [-1, -1]]
    np.testing.assert_array_equal(recorded.ids[:, [0, 2]], BY_LAYER[:, [0, 2]])
    assert "skipped" in recorded.notices[0]


def test_layers_never_written_are_left_out_and_expert_255_is_an_expert(tmp_path):
    table = np.zeros((3, 3, 2), np.uint8)
    table[:, 1:] = IDS
    table[0, 1] = [255, 3]
    np.save(tmp_path / "a.npy", table)
    recorded = load_routing(tmp_path / "a.npy", 256, unwritten="skip")
    assert recorded.ids.shape == (2, 3, 2)
    assert recorded.ids[0, 0].tolist() == [255, 3]
    assert "layers 0 were never written" in recorded.notices[1]
    recorded = load_routing(tmp_path / "a.npy", 200, unwritten="skip")
    assert recorded.ids[0, 0].tolist() == [-1, 3]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": IDS + 1}, "token 0, layer 0, slot 1: id 6 is not below 6"),
        ({"a": IDS.astype(float)}, "float64: must be integers"),
        ({"a": IDS[0, 0]}, "shape \\[2\\]"),
        ({"layer1": IDS[:, 0], "layer2": IDS[:2, 0]}, "layers of shapes"),
        ({"first": IDS[:, 0], "second": IDS[:, 1]}, "must hold their layer's number"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        load_routing(tmp_path / "a.npz", 6)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "bad.pt").write_bytes(b"no zip")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "bad.npy").write_bytes(b"")
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "odd.json").write_text(json.dumps(sglang_answer(IDS[:, 0])))
    np.save(tmp_path / "a.npy", IDS)
    np.save(tmp_path / "b.npy", IDS[:, :1])
    for paths, words in (
        ("a.txt", "unknown kind of file"),
        ("bad.pt", "no zip archive"),
        ("bad.npz", "bad.npz cannot be read"),
        ("bad.npy", "bad.npy cannot be read"),
        ("none.json", "answer 0 has no meta_info.routed_experts"),
        ("odd.json", "holds 6 ids, no multiple of 2 layers x top-2"),
        ("a.npy b.npy", "differ from"),
    ):
        with pytest.raises(ValueError, match=words):
            load_routing([tmp_path / name for name in paths.split()], layers=2, top_k=2)
    with pytest.raises(ValueError, match="carry no shape"):
        load_routing(tmp_path / "odd.json")
    with pytest.raises(ValueError, match="unwritten = 'keep'"):
        load_routing(tmp_path / "a.npy", unwritten="keep")
    with pytest.raises(ValueError, match="no routing file"):
        load_routing([])
    with pytest.raises(ValueError, match="per_token mode"):
        load_routing(DATA / "expert_distribution_recorder_stat.pt")


def torch_archive(path, pickled, storage=b""):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)
    return path


def test_nothing_pickled_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    with pytest.raises(ValueError, match=r"holds a pathlib.*only plain data"):
        load_torch(torch_archive(tmp_path / "a.pt", pickle.dumps({"records": Evil()})))
    assert not (tmp_path / "touched").exists()


def tensor_pickle(offset, size, stride, count):
    """{"t": tensor} as torch.save writes it, assembled opcode by opcode."""
    out = io.BytesIO()
    out.write(
        b"\x80\x02}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nIntStorage\n"
    )
    out.write(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK" + bytes([count]) + b"tQK" + bytes([offset]))
    for values in (size, stride):
        out.write(b"(" + b"".join(b"K" + bytes([v]) for v in values) + b"t")
    out.write(b"\x89ccollections\nOrderedDict\n)RtRs.")
    return out.getvalue()


def test_tensors_stay_within_their_storage(tmp_path):
    storage = np.arange(6, dtype=np.int32).tobytes()
    good = torch_archive(tmp_path / "good.pt", tensor_pickle(1, [2, 2], [1, 2], 6), storage)
    assert load_torch(good)["t"].tolist() == [[1, 3], [2, 4]]
    empty = torch_archive(tmp_path / "empty.pt", tensor_pickle(0, [0, 3], [3, 1], 6), storage)
    assert load_torch(empty)["t"].shape == (0, 3)
    with pytest.raises(ValueError, match="reaches beyond its storage"):
        load_torch(torch_archive(tmp_path / "a.pt", tensor_pickle(1, [2, 3], [1, 2], 6), storage))
    with pytest.raises(ValueError, match="holds 24 bytes, not 7 numbers"):
        load_torch(torch_archive(tmp_path / "b.pt", tensor_pickle(0, [2], [1], 7), storage))
    with pytest.raises(ValueError, match="cannot be read"):
        load_torch(torch_archive(tmp_path / "c.pt", b"\x80\x02}"))
    with zipfile.ZipFile(tmp_path / "d.pt", "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ValueError, match=r"no data\.pkl"):
        load_torch(tmp_path / "d.pt")

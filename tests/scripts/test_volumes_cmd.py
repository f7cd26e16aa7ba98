"""`refmodel volumes`: published figures, every source of routing, plots, files, checks, and errors."""

import json
import re
import sys
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from scripts import main, volumes

SMALL = [
    "--ranks",
    "4",
    "--ranks-per-node",
    "2",
    "--tokens",
    "30",
    "--experts",
    "16",
    "--top-k",
    "3",
    "--hidden",
    "256",
    "--layers",
    "2",
    "--num-groups",
    "4",
    "--topk-group",
    "2",
]


def call(capsys, *arguments, code=0):
    assert main.main(["volumes", *map(str, arguments)]) == code
    return capsys.readouterr().out


def figures(capsys, *arguments, code=0):
    return json.loads(call(capsys, *arguments, "--json", code=code))


def test_without_arguments_it_is_the_published_decode_in_six_seconds(capsys):
    start = time.process_time()
    text = call(capsys)
    assert time.process_time() - start < 6
    for figure in (
        "10,430,464",
        "20,185,088",
        "7.902439 ranks",
        "6.671959 nodes",
        "2,952,071,552",
        "144 ranks on 18 nodes",
    ):
        assert figure in text, figure
    assert {"wire", "DeepEP's tests", "NIC"} <= set(re.findall(r"│ (wire|DeepEP's tests|NIC) ", text))


def test_exact_totals_of_58_layers_by_pair(capsys):
    content = figures(capsys, "decode-ep144")
    data = {d: sum(c for k in v.values() for n, c in k.items() if n != "control") for d, v in content["bytes"].items()}
    assert data == {"dispatch": 58 * 144 * 10_430_464, "combine": 58 * 144 * 20_185_088}
    matrix = np.array(content["matrix"]["dispatch"])
    assert matrix.shape == (144, 144)
    assert matrix.sum() == sum(sum(k.values()) for k in content["bytes"]["dispatch"].values())
    assert content["views"]["wire"]["dispatch"] == matrix.sum(axis=1).tolist()
    assert content["reach"]["ranks_per_token"] == pytest.approx(7.902439, abs=2e-3)
    assert content["reach"]["nodes_per_token"] == pytest.approx(6.671959, abs=3e-3)


def test_prefill_says_which_policy_placed_the_redundant_experts(capsys):
    content = figures(capsys, "prefill-ep32", "--tokens", 128, "--layers", 4)
    assert "32 redundant experts placed by the hierarchical policy" in content["notices"][0]
    assert content["reach"]["expected_nodes_per_token"] == pytest.approx(2.928210, abs=1e-6)
    assert content["reach"]["nodes_per_token"] == pytest.approx(2.928210, abs=0.03)
    assert "global policy" in figures(capsys, "prefill-ep32", "--tokens", 8, "--layers", 1, "--ranks", 24)["notices"][0]


# vllm-project/vllm#42254: all dialects beside each other
def test_every_dialect_of_one_routing(capsys):
    content = figures(capsys, *SMALL, "--ranks-per-node", 4)
    rows = {d: p["dispatch"]["rows_per_token"]["nvlink"] for d, p in content["dialects"].items()}
    assert rows["allgather"] == 3
    assert rows["normal"] == rows["alltoallv"] < rows["low_latency"]


def test_files_logical_or_physical(tmp_path, capsys):
    ids = np.array([[[0, 5], [1, 2]], [[3, 4], [5, 0]], [[2, 1], [4, 3]]], np.int16)
    np.save(tmp_path / "a.npy", ids)
    common = [
        "--routing",
        tmp_path / "a.npy",
        "--ranks",
        2,
        "--experts",
        6,
        "--hidden",
        128,
        "--dispatch",
        "low_latency",
    ]
    content = figures(capsys, *common, "--ids", "logical")
    assert (content["deployment"]["layers"], content["deployment"]["top_k"]) == (2, 2)
    assert content["deployment"]["routing"] == "recorded"
    assert content["rows"]["dispatch"] == {"local": 6, "nvlink": 6, "rdma": 0}
    content = figures(capsys, *common, "--redundant", 6, "--ids", "physical")  # all six ids stand on rank 0
    assert content["rows"]["dispatch"] == {"local": 8, "nvlink": 4, "rdma": 0}
    assert main.main(["volumes", *map(str, common)]) == 2
    assert "--ids logical or --ids physical" in capsys.readouterr().err
    ids[1, 0] = -1
    np.save(tmp_path / "a.npy", ids)
    assert main.main(["volumes", *map(str, common), "--ids", "logical"]) == 2
    assert "never written" in capsys.readouterr().err
    assert "skipped" in figures(capsys, *common, "--ids", "logical", "--unwritten", "skip")["notices"][0]


def test_recorder_files_bring_ranks_and_placement(capsys):
    files = [f"tests/parallel/data/expert_distribution_recorder_{rank}.pt" for rank in (0, 1)]
    content = figures(capsys, "--routing", *files, "--ids", "physical", "--ranks", 2, "--hidden", 128)
    assert (content["deployment"]["experts"], content["deployment"]["redundant"]) == (4, 2)
    assert content["tokens_per_layer"] == 10
    assert main.main(["volumes", "--routing", *files, "--ids", "physical", "--experts", "4", "--ranks", "2"]) == 2
    assert "id 5, but there are 4 physical experts" in capsys.readouterr().err


def test_the_model_s_own_routing(capsys):
    content = figures(capsys, "--routing", "model", "--prompt", "int main", "--prompt", "def f", "--ranks", 4)
    assert content["deployment"]["routing"] == "model"
    assert (content["deployment"]["layers"], content["tokens_per_layer"]) == (3, 13)
    assert "the last layer is the MTP layer" in content["notices"][0]
    assert content["views"]["deepep"]["nvl_recv_bytes"]
    assert sum(content["rows"]["dispatch"].values()) <= 13 * 3 * 4
    content = figures(capsys, "--routing", "model", "--prompt", "int main", "--ranks", 4, "--no-mtp")
    assert (content["deployment"]["layers"], content["notices"]) == (2, [])


def test_plots_and_arrays(tmp_path, capsys):
    call(capsys, *SMALL, "--plot", tmp_path / "new/a.svg", "--out", tmp_path / "a.npz")
    root = ET.parse(tmp_path / "new/a.svg").getroot()
    assert root.tag.endswith("svg")
    pictures = [e for e in root if e.tag.endswith("image")]
    assert len(pictures) == 4  # two matrices, two scales
    arrays = np.load(tmp_path / "a.npz")
    assert arrays["dispatch.rdma.bytes"].shape == (2, 4, 4)
    content = figures(capsys, *SMALL)
    assert arrays["dispatch.rdma.rows"].sum() == content["rows"]["dispatch"]["rdma"]
    assert main.main(["volumes", *SMALL, "--plot", str(tmp_path / "a.jpg")]) == 2
    assert "must end in .svg or .png" in capsys.readouterr().err


def test_png_without_matplotlib_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main.main(["volumes", *SMALL, "--plot", str(tmp_path / "a.png")]) == 2
    assert "refmodel[plot]" in capsys.readouterr().err


def test_png_with_matplotlib(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    call(capsys, *SMALL, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_colours_of_the_picture():
    from scripts.heatmap import _colours, _png_bytes

    pixels = _colours(np.array([[0, 1], [2, 4]]), 4.0)
    assert pixels.tolist() == [[[68, 1, 84], [59, 82, 139]], [[33, 145, 140], [253, 231, 37]]]
    assert _png_bytes(pixels).startswith(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x02\x00\x00\x00\x02\x08\x02")


def test_check_names_the_place_and_the_cause(tmp_path, capsys):
    views = figures(capsys, *SMALL)["views"]
    sent = [a + b for a, b in zip(views["nic"]["dispatch"], views["nic"]["combine"])]
    good = "rank,nic_sent_bytes\n" + "".join(f"{rank},{value}\n" for rank, value in enumerate(sent))
    (tmp_path / "a.csv").write_text(good)
    assert "4 of 4 measurements lie within" in call(capsys, *SMALL, "--check", tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text(good.replace(f"2,{sent[2]}", f"2,{sent[2] // 4}"))
    text = call(capsys, *SMALL, "--check", tmp_path / "a.csv", code=1)
    assert "3 of 4 measurements lie within" in text
    assert "a.csv, line 4: nic_sent rank 2: " in text
    assert "words of 4 bytes were taken for bytes" in text
    checked = figures(capsys, *SMALL, "--check", tmp_path / "a.csv", code=1)["check"]
    assert [c["holds"] for c in checked] == [True, True, False, True]
    assert main.main(["volumes", *SMALL, "--check", str(tmp_path / "a.csv"), "--repeat", "0"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--ranks", "5", "--ranks-per-node", "5"],
            "256 physical experts do not divide over 5 ranks: with 256 logical experts the nearest",
        ),
        (["--ranks", "16", "--ranks-per-node", "6"], "num_ranks = 16 is not a multiple"),
        (["--routing", "uniform", "balanced"], "give one of"),
        (["--routing", "nowhere.npy", "--ids", "logical"], "nowhere.npy"),
        (["--tokens", "-1"], "tokens = -1"),
        (["--top-k", "300"], "top-300 of 256"),
        (["--check", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert main.main(["volumes", "--tokens", "4", "--layers", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_help_shows_an_example():
    assert "Example: refmodel volumes" in volumes.__doc__

"""`refmodel experts`: plans from load tables, recorded routing and the model's own run."""

import json
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from parallel.eplb import gpu_loads
from scripts import experts, main

README = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_SIZES = ["--ranks", "8", "--ranks-per-node", "4", "--redundant", "4", "--groups", "4"]


def call(capsys, *arguments, code=0):
    assert main.main(["experts", *map(str, arguments)]) == code
    return capsys.readouterr().out


@pytest.fixture
def table(tmp_path):
    np.save(tmp_path / "loads.npy", README)
    return tmp_path / "loads.npy"


# deepseek-ai/EPLB README
def test_the_documented_example(table, capsys):
    content = json.loads(call(capsys, table, *README_SIZES, "--json"))
    assert content["phy2log"][0] == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert content["groups_policy"] == "hierarchical"
    assert content["after"]["max_load"] == [156, 179.5]
    assert content["after"]["mean_over_max"] == pytest.approx([0.82772, 0.80501], abs=5e-6)
    before = np.tile(np.arange(16) % 12, (2, 1))
    assert content["before"]["max_load"] == gpu_loads(README, before, 8).max(axis=1).tolist()


def test_the_table_names_the_policy_and_the_bytes(table, capsys):
    text = call(capsys, table, *README_SIZES)
    assert "policy deepseek: hierarchical (groups stay within nodes)" in text
    assert "experts of 44,050,944 bytes move between ranks" in text
    text = call(capsys, table, "--ranks", 6, "--ranks-per-node", 2, "--redundant", 0, "--groups", 4)
    assert "policy deepseek: global (nodes do not divide the groups" in text


def test_a_plan_that_is_in_use_moves_nothing(table, tmp_path, capsys):
    call(capsys, table, *README_SIZES, "--policy", "balanced", "--out", tmp_path / "plan.npz")
    stored = np.load(tmp_path / "plan.npz")
    assert set(stored) == {"phy2log", "log2phy", "logcnt", "loads"}
    again = [table, *README_SIZES, "--policy", "balanced", "--json", "--current", tmp_path / "plan.npz"]
    content = json.loads(call(capsys, *again))
    assert content["moved"]["bytes"] == {"local": 0, "nvlink": 0, "rdma": 0}
    assert content["before"] == content["after"]
    assert sum(content["after"]["duplicates"]) == 0


def test_moved_bytes_are_whole_experts_with_scales(table, capsys):
    sizes = ["--hidden", "256", "--intermediate", "128"]
    content = json.loads(call(capsys, table, *README_SIZES, *sizes, "--json"))
    moved = content["moved"]
    assert moved["expert_bytes"] == 3 * 256 * 128 + 3 * 4 * 2
    assert moved["bytes"]["nvlink"] + moved["bytes"]["rdma"] == moved["received_experts"] * moved["expert_bytes"]


def test_loads_from_recorded_routing(capsys):
    files = [f"tests/parallel/data/expert_distribution_recorder_{rank}.pt" for rank in (0, 1)]
    content = json.loads(call(capsys, "--routing", *files, "--ranks", 2, "--redundant", 2, "--groups", 1, "--json"))
    assert (content["layers"], content["experts"]) == (2, 4)
    assert sum(content["after"]["mean_load"]) == 2 * 10  # tokens x top-2 over 2 ranks, by layer
    stat = "tests/parallel/data/expert_distribution_recorder_stat.pt"
    content = json.loads(call(capsys, stat, "--ranks", 2, "--redundant", 0, "--groups", 1, "--json"))
    assert content["after"]["max_load"] == [57, 81]


def test_loads_from_the_model_s_own_run(tmp_path, capsys):
    sizes = ["--prompt", "int main", "--ranks", 8, "--redundant", 0]
    content = json.loads(call(capsys, *sizes, "--json", "--out", tmp_path / "all.npz"))
    assert (content["layers"], content["mtp_layers"], content["experts"], content["groups"]) == (3, 1, 256, 8)
    assert content["after"]["mean_load"] == [8.0] * 3  # 8 bytes x top-8 over 8 ranks
    assert content["moved"]["expert_bytes"] == 3 * 256 * 32 + 3 * 4 * 2
    assert "3 layers, the last one the MTP layer" in call(capsys, *sizes)
    content = json.loads(call(capsys, *sizes, "--no-mtp", "--json", "--out", tmp_path / "main.npz"))
    assert (content["layers"], content["mtp_layers"]) == (2, 0)
    loads = {name: np.load(tmp_path / f"{name}.npz")["loads"] for name in ("all", "main")}
    np.testing.assert_array_equal(loads["all"][:2], loads["main"])
    assert (loads["all"][2] != loads["main"]).any(axis=1).all()


# vllm-project/vllm-ascend#8710: the MTP layer's experts are placed by a row of their own
def test_the_plan_of_the_model_s_own_run_places_every_layer_of_a_deployment(tmp_path, capsys):
    from parallel import Deployment, Topology
    from parallel.placement import Placement
    from refmodel import Model
    from refmodel.checkpoint import EXAMPLE

    sizes = ["--prompt", "int main", "--ranks", 4, "--redundant", 8, "--policy", "balanced"]
    call(capsys, *sizes, "--out", tmp_path / "plan.npz")
    model = Model.from_pretrained(EXAMPLE, numerics="float32")
    rows = np.load(tmp_path / "plan.npz")["phy2log"]
    plan = {layer: Placement(row, 4) for layer, row in zip(range(1, 4), rows, strict=True)}
    prompt = np.frombuffer(b"int main", np.uint8)
    spread = Deployment(model, Topology(4), placement=plan).generate([[prompt], [], [], []], 4, speculative=True)
    assert spread == [[model.generate(prompt, 4)], [], [], []]


def bars(path):
    """(bars by tooltip: (width, height), texts) of a plot."""
    root = ET.parse(path).getroot()
    space = root.tag.removesuffix("svg")
    found = [
        (element.find(f"{space}title").text, float(element.get("width")), float(element.get("height")))
        for element in root.iter(f"{space}rect")
        if element.find(f"{space}title") is not None
    ]
    return found, [element.text for element in root.iter(f"{space}text")]


# deepseek-ai/EPLB README
def test_the_plot_holds_the_loads_of_experts_by_id_and_of_ranks_before_and_after(table, tmp_path, capsys):
    content = json.loads(call(capsys, table, *README_SIZES, "--json", "--plot", tmp_path / "new/a.svg"))
    found, texts = bars(tmp_path / "new/a.svg")
    phy2log = {"before": np.tile(np.arange(16) % 12, (2, 1)), "after": np.array(content["phy2log"])}
    expected = []
    for layer, loads in enumerate(README):
        expected += [(f"expert {expert}, load: {load}", load / max(loads)) for expert, load in enumerate(loads)]
        by_rank = {}
        for when, plan in phy2log.items():
            slots = plan[layer].tolist()
            share = [loads[expert] / slots.count(expert) for expert in slots]
            by_rank[when] = [share[2 * rank] + share[2 * rank + 1] for rank in range(8)]
        top = max(map(max, by_rank.values()))
        for when, values in by_rank.items():
            expected += [(f"rank {rank}, {when}: {value:.10g}", value / top) for rank, value in enumerate(values)]
    # every load here is whole or a half
    assert [name for name, _, _ in found] == [name + "0" if name.endswith(".5") else name for name, _ in expected]
    assert [height for _, _, height in found] == pytest.approx([100 * part for _, part in expected], abs=0.006)
    assert "12 experts + 4 redundant on 8 ranks, policy deepseek: hierarchical" in texts
    assert {"layer 1 of 2: tokens by expert", "layer 2 of 2: tokens by rank"} <= set(texts)
    assert {"load: max 183, mean 86.08", "after: max 179.50, mean 144.50"} <= set(texts)
    assert {"expert 0", "rank 0", "11", "7"} <= set(texts)


def test_the_plot_names_the_mtp_layer_and_draws_layers_without_load(tmp_path, capsys):
    sizes = ["--ranks", 8, "--redundant", 0, "--plot", tmp_path / "a.svg"]
    call(capsys, "--prompt", "int main", *sizes)
    assert sum("layer 3 of 3, MTP: " in text for text in bars(tmp_path / "a.svg")[1]) == 2
    np.save(tmp_path / "idle.npy", np.zeros((1, 8), np.int64))
    call(capsys, tmp_path / "idle.npy", *sizes)
    found, _ = bars(tmp_path / "a.svg")
    assert [height for _, _, height in found] == [0.0] * (8 + 2 * 8)


def test_png_of_loads_without_matplotlib_says_what_to_do(table, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "plan.npz")]
    assert main.main(["experts", str(table), *README_SIZES, *arguments]) == 2
    assert "pip install 'refmodel[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "plan.npz").exists()


def test_png_of_loads_with_matplotlib(table, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    call(capsys, table, *README_SIZES, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "5", "--ranks-per-node", "5"], "the nearest redundant count that does is"),
        (["--redundant", "-1"], "--redundant -1"),
        (["--groups", "5", "--ranks", "16", "--ranks-per-node", "16"], "12 experts do not divide into num_groups = 5"),
        (["--routing", "x.npy"], "not both"),
        (["--plot", "loads.jpg"], "loads.jpg: a plot must end in .svg or .png"),
        (["--current", "{loads}"], "phy2log of shape [2, 12]"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(table, capsys, arguments, words):
    assert main.main(["experts", str(table), *README_SIZES, *(a.format(loads=table) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_help_shows_an_example():
    assert "Example: refmodel experts" in experts.__doc__

import json

import ml_dtypes
import numpy as np
import pytest

from refmodel.golden import Tolerance, compare, open_dump
from refmodel.tensor_file import save_tensors

BF16 = ml_dtypes.bfloat16


def dump(**changes):
    rng = np.random.default_rng(5)
    tensors = {
        "embed.out": rng.standard_normal((6, 16)).astype(np.float32),
        "layers.0.attn_proj.q_a": rng.standard_normal((6, 8)).astype(np.float32),
        "layers.0.attn_core.out": rng.standard_normal((6, 16)).astype(np.float32),
        "layers.10.attn_core.out": rng.standard_normal((6, 16)).astype(np.float32),
        "final.logits": rng.standard_normal((6, 32)).astype(np.float32),
    }
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensors[name] = change(tensors[name].copy())
    return tensors


def poke(index, value):
    def change(x):
        x[index] = value
        return x

    return change


def test_equal_dumps_say_so():
    report = compare(dump(), dump())
    assert (report.ok, report.exit_code, report.first) == (True, 0, None)
    assert report.headline == "equal: 5 tensors, 5 bit for bit, 0 within tolerance"
    assert report.counts() == {"identical": 5}


def test_the_headline_is_the_first_in_execution_order_not_the_worst():
    actual = dump(layers__10__attn_core__out=lambda x: x * 100, layers__0__attn_core__out=poke((2, 3), 9.0))
    report = compare(dump(), dict(sorted(actual.items(), reverse=True)))
    assert report.exit_code == 1
    assert report.first.name == "layers.0.attn_core.out"
    assert report.first.difference.worst_abs.index == (2, 3)
    assert report.headline.startswith("layers.0.attn_core.out diverges first: 1 of 96 elements outside tolerance")
    assert "9 at [2, 3]" in report.headline
    assert [r.name for r in report.results if not r.ok] == ["layers.0.attn_core.out", "layers.10.attn_core.out"]
    assert report["layers.10.attn_core.out"].note == "looks: scaled by 100"


def test_files_without_an_order_are_ordered_by_layer_and_stage(tmp_path):
    save_tensors(tmp_path / "a.safetensors", dump())
    bad = dump(layers__10__attn_core__out=lambda x: x + 1, final__logits=lambda x: x + 1)
    save_tensors(tmp_path / "b.safetensors", bad)
    report = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [r.name for r in report.results] == list(dump())
    assert report.first.name == "layers.10.attn_core.out"
    assert "shifted by a constant 1" in report.headline


def test_missing_extra_shape_and_dtype_are_faults():
    actual = dump(layers__0__attn_proj__q_a=lambda x: x[:, :4], final__logits=lambda x: x.astype(np.float64))
    del actual["embed.out"]
    actual["more"] = np.zeros(1)
    report = compare(dump(), actual)
    assert [(r.name, r.status) for r in report.results if not r.ok] == [
        ("embed.out", "missing"),
        ("layers.0.attn_proj.q_a", "shape"),
        ("final.logits", "dtype"),
        ("more", "extra"),
    ]
    assert report.headline.startswith("layers.0.attn_proj.q_a diverges first: shape [6, 4], [6, 8] is expected")
    assert report.headline.endswith("2 names are on one side only")
    lax = compare(dump(), actual, missing="ignore", extra="ignore", dtypes="ignore")
    assert [r.name for r in lax.results if not r.ok] == ["layers.0.attn_proj.q_a"]
    assert lax.notes == ("1 missing tensors were not compared", "1 extra tensors were not compared")


def test_a_partial_dump_alone_fails():
    actual = dump()
    del actual["layers.0.attn_core.out"], actual["final.logits"]
    report = compare(dump(), actual)
    assert report.exit_code == 1
    assert report.headline == "layers.0.attn_core.out is missing from the actual dump, and 1 more names are"


# sgl-project/sglang#26269: a dump that is silently empty
def test_an_empty_dump_and_no_common_name_are_refused():
    with pytest.raises(ValueError, match="holds no tensor"):
        compare(dump(), {})
    with pytest.raises(ValueError, match="no tensor name in common"):
        compare(dump(), {"other": np.zeros(3)})
    with pytest.raises(ValueError, match="no tensor name in common that matches 'nothing'"):
        compare(dump(), dump(), only="nothing")


def test_nan_on_one_side_fails_under_any_tolerance_and_on_both_sides_is_counted():
    report = compare(dump(), dump(embed__out=poke((1, 2), np.nan)), rtol=1e9)
    assert report.first.difference.first_violation == (1, 2)
    assert "NaN on one side at 1 elements (in the actual)" in report.headline
    both = dump(embed__out=poke((1, 2), np.nan))
    assert compare(both, dump(embed__out=poke((1, 2), np.nan))).first is None
    assert compare(both, both)["embed.out"].difference.nan_both == 1


# NovaSky-AI/SkyRL#1987, ROCm/aiter#5031: one constant is too loose and too strict at once
def test_suggested_tolerance_passes_noise_and_fails_a_one_percent_fault():
    rng = np.random.default_rng(3)
    r = dump(embed__out=poke((0, 0), 1e-9))
    noisy = {name: (x + 1e-6 * rng.standard_normal(x.shape)).astype(np.float32) for name, x in r.items()}
    report = compare(r, noisy)
    assert report.ok
    assert "float32 (unit roundoff 2^-24)" in report["embed.out"].tolerance.reason
    for dtype in (np.float32, BF16):
        big = {"layers.0.x": rng.standard_normal((64, 128)).astype(dtype)}
        fault = {"layers.0.x": (big["layers.0.x"].astype(np.float32) * 1.01).astype(dtype)}
        assert not compare(big, fault).ok, dtype
        assert compare(big, big).ok


def test_rules_by_pattern_by_name_and_by_numbers():
    r, a = dump(), dump(embed__out=lambda x: x * np.float32(1.001), final__logits=poke((0, 0), 50))
    assert compare(r, a, Tolerance(rtol=2e-3)).first.name == "final.logits"
    assert compare(r, a, {"embed": Tolerance(rtol=2e-3), "final": {"atol": 100}}).ok
    assert compare(r, a, {"^final": {"atol": 100}}).first.name == "embed.out"
    assert compare(r, a, rtol=2e-3, atol=100.0).ok
    assert not compare(r, dump(embed__out=lambda x: np.nextafter(x, np.float32(9))), "exact").ok
    assert not compare(r, dump(embed__out=lambda x: np.nextafter(x, np.float32(9))), "reproduce").ok
    for bad in ({"(": {"atol": 1}}, {"x": {"what": 1}}, {"x": 3}, "loose", 5, {"x": {"rtol": -1}}):
        with pytest.raises(ValueError, match=r"tolerance|Tolerance"):
            compare(r, a, bad)
    with pytest.raises(ValueError, match="both given"):
        compare(r, a, Tolerance(), rtol=1.0)


def test_integers_are_exact_under_a_blanket_tolerance():
    assert not compare({"n": np.int64([1, 2])}, {"n": np.int64([1, 3])}, rtol=10.0).ok
    assert compare({"n": np.int64([1, 2])}, {"n": np.int64([1, 3])}, {"n": {"atol": 1}}).ok


def routing(ids, weights, margin=None):
    out = {"layers.3.attn_core.router.topk_idx": np.int64(ids)}
    out["layers.3.attn_core.router.topk_weights"] = np.float32(weights)
    if margin is not None:
        out["layers.3.attn_core.router.margin"] = np.float32(margin)
    return out


def test_topk_ids_are_sets_and_weights_follow_their_expert():
    r = routing([[3, 1, 2], [0, 5, 7]], [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]])
    report = compare(r, routing([[2, 3, 1], [0, 5, 7]], [[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]))
    assert report.ok
    swapped = compare(r, routing([[2, 3, 1], [0, 5, 7]], [[0.5, 0.2, 0.3], [0.6, 0.3, 0.1]]))
    assert swapped.first.name.endswith("topk_weights")


def test_a_flip_is_forgiven_only_at_a_tie():
    r = routing([[3, 1], [0, 5]], [[0.5, 0.5], [0.6, 0.4]], [1e-7, 0.25])
    at_tie = routing([[3, 2], [0, 5]], [[0.5, 0.5], [0.6, 0.4]], [1e-7, 0.25])
    report = compare(r, at_tie)
    assert report.ok
    assert report["layers.3.attn_core.router.topk_idx"].status == "tie"
    assert "routing flips at ties in 1, first layers.3.attn_core.router.topk_idx" in report.headline
    assert report["layers.3.attn_core.router.topk_weights"].note == "1 rows with other experts not compared"
    elsewhere = compare(r, routing([[3, 1], [0, 4]], [[0.5, 0.5], [0.6, 0.4]], [1e-7, 0.25]))
    assert elsewhere.first.name.endswith("topk_idx")
    assert "1 of 2 rows choose other experts, first [1] at a margin of 0.25" in elsewhere.headline
    assert compare(r, routing([[3, 1], [0, 4]], [[0.5, 0.5], [0.6, 0.4]], [1e-7, 0.25]), tie_margin=0.3).ok
    assert not compare(r, at_tie, tie_margin=0.0).ok
    bare = compare(*(routing(i, [[0.5, 0.5]]) for i in ([[3, 1]], [[3, 2]])))
    assert not bare.ok


def test_rows_of_experts_follow_their_slot():
    rows = np.float32([[1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6]])
    name = "layers.3.experts.out"
    r = routing([[3, 1], [0, 5], [7, 8]], [[0.5, 0.3], [0.6, 0.4], [0.6, 0.4]], [1, 1, 0]) | {name: rows}
    a = routing([[1, 3], [0, 5], [7, 9]], [[0.3, 0.5], [0.6, 0.4], [0.6, 0.4]], [1, 1, 0]) | {
        name: rows[[1, 0, 2, 3, 4, 5]]
    }
    a[name][5] = 99  # of another expert, chosen at a tie
    report = compare(r, a)
    assert report.ok
    assert report[name].note == "slots by expert, 2 of 6 rows not compared"
    a[name][0] = 7
    assert compare(r, a).first.difference.first_violation == (1, 0)


def test_a_divergence_after_a_flip_names_the_flip():
    r = routing([[3, 1]], [[0.5, 0.5]], [1e-8]) | {"layers.3.merge.out": np.float32([[1, 2]])}
    a = routing([[3, 2]], [[0.5, 0.5]], [1e-8]) | {"layers.3.merge.out": np.float32([[1, 3]])}
    headline = compare(r, a).headline
    assert headline.startswith("layers.3.merge.out diverges first")
    assert "before it routing flips at a tie in layers.3.attn_core.router.topk_idx" in headline


# vllm-project/vllm#41249: padding rows with NaN; deepseek-ai/DeepGEMM#268: rows beyond masked_m are not written
def test_padding_and_unwritten_rows_are_ignored_when_told():
    r = {
        "x": np.ones((4, 3), np.float32),
        "groups.out": np.ones((3, 4, 2), np.float32),
        "groups.masked_m": np.int32([2, 0, 4]),
    }
    a = {k: v.copy() for k, v in r.items()}
    a["x"][3] = np.nan
    a["groups.out"][0, 2:] = np.nan
    a["groups.out"][1] = 1e30
    assert {x.name for x in compare(r, a).results if not x.ok} == {"x", "groups.out"}
    valid = {"^x$": np.array([1, 1, 1, 0], bool), "groups.out": "groups.masked_m"}
    report = compare(r, a, valid=valid)
    assert report.ok
    assert report["groups.out"].difference.total == 12
    assert "6 rows not valid" in report["groups.out"].note
    a["groups.out"][2, 3, 1] = 5
    assert compare(r, a, valid=valid).first.difference.first_violation == (2, 3, 1)
    with pytest.raises(ValueError, match="no tensor 'gone'"):
        compare(r, a, valid={"x": "gone"})


def test_zero_elements_and_scalars_pass():
    r = {"none": np.zeros((0, 7), np.float32), "one": np.float64(3.5)}
    report = compare(r, r)
    assert report.ok
    assert "0 elements" in report.to_text(verbose=True)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda x: -x, "the sign is flipped"),
        (lambda x: x * 0, "all zeros"),
        (lambda x: x * np.float32(2.5), "scaled by 2.5"),
        (lambda x: x + np.float32(0.5), "shifted by a constant 0.5"),
        (lambda x: np.roll(x, 1, axis=0), "row i holds what row i - 1 should"),
        (lambda x: x[::-1], "the same rows in another order"),
        (lambda x: np.concatenate([x[:, 0::2], x[:, 1::2]], axis=1), "half-split order"),
        (lambda x: np.stack([x[:, :8], x[:, 8:]], axis=2).reshape(6, 16), "interleaved order"),
        (lambda x: np.roll(x, 3, axis=1), "each row holds the same values in another order"),
        (lambda x: np.where(np.arange(6)[:, None] >= 4, x * 3 + 1, x), "only rows 4 to the last differ"),
        (lambda x: np.where(np.arange(16) == 5, x * 3 + 1, x), "only column 5 differ"),
    ],
)
def test_the_headline_says_what_it_looks_like(change, phrase):
    report = compare(dump(), dump(embed__out=change))
    assert phrase in report.headline


def test_json_is_plain_and_complete():
    report = compare(dump(), dump(embed__out=lambda x: x * 2))
    values = json.loads(json.dumps(report.to_json()))
    assert values["first"] == "embed.out"
    assert values["exit_code"] == 1
    first = values["tensors"][0]
    assert first["metrics"]["scale"] == 2.0
    assert first["tolerance"]["rtol"] > 0
    text = report.to_text()
    for word in (
        "fitted scale 2",
        "worst ulp",
        "cosine 1",
        "difference 0.2",
        "tolerance rtol",
    ):
        assert word in text


@pytest.mark.parametrize("kind", ["npz", "npy", "folder"])
def test_numpy_files_read_alike(tmp_path, kind):
    if kind == "npz":
        path = tmp_path / "d.npz"
        np.savez(path, **dump(), bf=np.ones(3, BF16))
        assert open_dump(path)["bf"].dtype == BF16
        assert compare(dump(), path, extra="ignore").ok
        return
    path = tmp_path
    for name, array in dump().items():
        np.save(tmp_path / f"{name}.npy", array)
    if kind == "npy":
        assert compare({"embed.out": dump()["embed.out"]}, tmp_path / "embed.out.npy").ok
    else:
        assert compare(dump(), path).ok


def test_unreadable_files_say_why(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"not a zip")
    (tmp_path / "a.npy").write_bytes(b"not an array")
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "lost.npz", x=np.ones(3, ml_dtypes.float8_e4m3fn))
    for name, words in (("a.npz", "not a readable"), ("a.txt", "unknown kind"), ("empty", "no tensor file")):
        with pytest.raises(ValueError, match=words):
            open_dump(tmp_path / name)
    with pytest.raises(ValueError, match="lost its name"):
        compare({"x": np.ones(3)}, tmp_path / "lost.npz")
    with pytest.raises(ValueError):  # noqa: PT011 - the text is NumPy's
        compare({"a": np.ones(3)}, tmp_path / "a.npy")
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_dump(tmp_path / "gone.npz")

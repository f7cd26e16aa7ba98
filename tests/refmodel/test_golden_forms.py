"""Dumps of other engines and of many ranks, brought into our form."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.golden import compare, open_dump
from refmodel.golden.dump import from_arrays
from refmodel.golden.names import find, interleave_rope, translate
from refmodel.golden.unshard import parse_layout, unshard

BF16 = ml_dtypes.bfloat16


def ours():
    rng = np.random.default_rng(2)

    def x(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    out = {"embed.hidden": x(5, 8)}
    for L in range(2):
        out |= {
            f"layers.{L}.attn_proj.norm": x(5, 8),
            f"layers.{L}.attn_proj.q_a": x(5, 6),
            f"layers.{L}.attn_proj.q": x(5, 2, 7),
            f"layers.{L}.attn_proj.kv_a": x(5, 9),
            f"layers.{L}.attn_proj.k_pe": x(5, 4),
            f"layers.{L}.attn_core.out": x(5, 8),
            f"layers.{L}.attn_core.residual": x(5, 8),
            f"layers.{L}.attn_core.norm": x(5, 8),
        }
        kind = "mlp" if L == 0 else "shared"
        out |= {f"layers.{L}.{kind}.gate": x(5, 3), f"layers.{L}.{kind}.up": x(5, 3), f"layers.{L}.{kind}.out": x(5, 8)}
        if L:
            out |= {"layers.1.attn_core.router.logits": x(5, 4), "layers.1.merge.moe": x(5, 8)}
        out[f"layers.{L}.{'merge' if L else 'mlp'}.residual"] = x(5, 8)
    return out | {"final.norm": x(5, 8), "final.logits": x(5, 11)}


def vllm_dump(t):
    out = {"model.embed_tokens.output": t["embed.hidden"]}
    before = t["embed.hidden"]
    for L in range(2):
        p, a = f"model.layers.{L}.", f"layers.{L}.attn_proj."
        out |= {
            p + "input_layernorm.output.0": t[a + "norm"],
            p + "input_layernorm.output.1": before,
            p + "self_attn.fused_qkv_a_proj.output.0": np.concatenate([t[a + "q_a"], t[a + "kv_a"]], axis=1),
            p + "self_attn.o_proj.output.0": t[f"layers.{L}.attn_core.out"],
            p + "post_attention_layernorm.output.0": t[f"layers.{L}.attn_core.norm"],
            p + "post_attention_layernorm.output.1": t[f"layers.{L}.attn_core.residual"],
        }
        before = t[f"layers.{L}.{'merge' if L else 'mlp'}.residual"]
    both = np.concatenate([t["layers.0.mlp.gate"], t["layers.0.mlp.up"]], axis=1)
    shared = np.concatenate([t["layers.1.shared.gate"], t["layers.1.shared.up"]], axis=1)
    out |= {
        "model.layers.0.mlp.gate_up_proj.output": both,
        "model.layers.1.mlp.shared_experts.gate_up_proj.output": shared,
        "model.layers.1.mlp.gate.output": t["layers.1.attn_core.router.logits"],
        "model.layers.1.mlp.output": t["layers.1.merge.moe"],
        "model.norm.output.0": t["final.norm"],
        "model.norm.output.1": before,
        "lm_head.output": t["final.logits"],
        "model.rotary.output": np.zeros(3),
    }
    return out


def test_a_fused_engine_is_taken_apart_by_the_widths_of_the_reference():
    t = ours()
    report = compare(t, vllm_dump(t), "exact", names="vllm", missing="ignore")
    assert report.ok, report.headline
    compared = {r.name for r in report.results}
    assert {
        "layers.0.attn_proj.q_a",
        "layers.1.attn_proj.kv_a",
        "layers.0.mlp.up",
        "layers.1.shared.gate",
        "layers.0.mlp.residual",
        "layers.1.merge.residual",
        "layers.1.merge.moe",
        "layers.1.attn_core.residual",
        "final.logits",
    } <= compared
    assert "1 names have no counterpart and were left out, the first is model.rotary.output" in report.notes[1]


def test_a_fault_in_a_fused_tensor_is_named_by_its_part():
    t = ours()
    dump = vllm_dump(t)
    fused = "model.layers.1.self_attn.fused_qkv_a_proj.output.0"
    dump[fused] = dump[fused].copy()
    dump[fused][3, 7] += 1  # the second column of kv_a
    report = compare(t, dump, names="vllm", missing="ignore")
    assert report.first.name == "layers.1.attn_proj.kv_a"
    assert report.first.difference.first_violation == (3, 1)
    dump[fused] = dump[fused][:, :-1]
    with pytest.raises(ValueError, match=r"14 wide.*are 15: no fusion"):
        compare(t, dump, names="vllm", missing="ignore")


def test_hugging_face_names_batch_axis_and_flat_heads():
    t = ours()
    dump = {
        "model.embed_tokens": t["embed.hidden"][None],
        "model.layers.0.self_attn.q_a_proj": t["layers.0.attn_proj.q_a"][None],
        "model.layers.0": t["layers.0.mlp.residual"][None],
        "model.layers.1.0": t["layers.1.merge.residual"][None],
        "model.layers.0.mlp.gate_proj": t["layers.0.mlp.gate"],
        "model.layers.1.mlp.gate": t["layers.1.attn_core.router.logits"],
        "lm_head": t["final.logits"][None],
    }
    report = compare(t, dump, "exact", names="huggingface", missing="ignore")
    assert report.ok
    assert len(report.results) == len(dump)


# deepseek-ai/DeepSeek-V3 inference/convert.py: `gate` and `gate_proj` share their beginning
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.mlp.gate", "layers.1.attn_core.router.logits"),
        ("model.layers.0.mlp.gate_proj", "layers.0.mlp.gate"),
        ("step.2.model.layers.0.mlp.gate_proj.output", None),
        ("model.layers.1.mlp.gate_proj", None),
        ("model.layers.9.mlp", None),
        ("layers.1.model.layers.1.mlp", "layers.1.merge.moe"),
    ],
)
def test_names_match_as_a_whole(name, expected):
    from refmodel.golden.names import TABLES

    found = find(name, ours(), TABLES["sglang"], 1)
    assert (found.names[0] if found else None) == expected


def test_unknown_engine_and_hopeless_names_are_refused():
    reference = from_arrays(ours())
    with pytest.raises(ValueError, match="tables for huggingface, vllm, sglang"):
        translate(reference, reference, "tensorflow")
    with pytest.raises(ValueError, match="none of its 1 names fits"):
        translate(from_arrays({"x": np.zeros(3)}), reference, "vllm")


# vllm-project/vllm#26995, huggingface/transformers#35926: [a0 b0 a1 b1] cached as [a0 a1 b0 b1]
def test_permuted_k_pe_is_accepted_only_when_told_and_is_named():
    reference = {
        "layers.0.attn_proj.q": np.arange(12, dtype=np.float32).reshape(1, 2, 6),
        "layers.0.attn_proj.k_pe": np.float32([[-1.1426397, 1.9220756, 2.9598507, 4.0297996]]),
    }
    actual = {
        "layers.0.attn_proj.q": reference["layers.0.attn_proj.q"][..., [0, 1, 2, 4, 3, 5]],
        "layers.0.attn_proj.k_pe": np.float32([[-1.1426397, 2.9598507, 1.9220756, 4.0297996]]),
    }
    report = compare(reference, actual)
    assert not report.ok
    assert "half-split order (RoPE pairs de-interleaved)" in report["layers.0.attn_proj.k_pe"].note
    told = compare(reference, actual, half_split_rope=True)
    assert told.ok
    assert told.notes == ("rotated parts of 2 tensors were taken from half-split to interleaved order",)
    wrong = {**actual, "layers.0.attn_proj.k_pe": np.float32([[-1.9841106, 1.9599007, 2.4623779, 4.0197997]])}
    assert not compare(reference, wrong, half_split_rope=True).ok
    dump, _ = interleave_rope(from_arrays(actual), from_arrays(reference))
    np.testing.assert_array_equal(dump["layers.0.attn_proj.q"], reference["layers.0.attn_proj.q"])


@st.composite
def sharded(draw):
    """A whole tensor, a layout, and its parts by plain slicing."""
    dp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x = np.arange(6 * 6 * 2, dtype=np.float32).reshape(6, 6, 2)
    where = draw(st.sampled_from(["t[dp] h[tp] d", "t[dp,tp] h d", "t h[dp] d", "t[tp] h[dp] d", "t h d"]))
    parts = []
    for i in range(dp):
        for j in range(tp):
            rows = {"t[dp]": (i, dp), "t[dp,tp]": (i * tp + j, dp * tp), "t[tp]": (j, tp), "t": (0, 1)}[
                where.split()[0]
            ]
            heads = {"h[tp]": (j, tp), "h[dp]": (i, dp), "h": (0, 1)}[where.split()[1]]
            part = np.array_split(x, rows[1], axis=0)[rows[0]]
            parts.append(np.array_split(part, heads[1], axis=1)[heads[0]].astype(BF16))
    return x.astype(BF16), f"dp{dp} tp{tp} : {where}", parts


@given(sharded())
@settings(max_examples=60, deadline=None)
def test_unshard_undoes_slicing(case):
    whole, layout, parts = case
    assert unshard(parts, layout).tobytes() == whole.tobytes()


def test_experts_and_partial_sums_by_hand():
    parts = [np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]])]
    np.testing.assert_array_equal(unshard(parts, "ep2 : e[ep] d"), [[1, 2], [3, 4], [5, 6]])
    a, b = np.array([[256.0, 1]], BF16), np.array([[1.0, 1]], BF16)
    assert unshard([a, b], "tp2 : t d +tp").astype(float).tolist() == [[256.0, 2.0]]  # 257 is a tie in bfloat16
    with pytest.raises(ValueError, match="replicas over tp differ between index 0 and 1"):
        unshard([a, b], "tp2 : t d")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp2", "no colon"),
        ("dp : t", "no group with its size"),
        ("dp2 dp2 : t", "occurs twice"),
        ("dp2 : t[tp]", "not declared"),
        ("dp2 : t[dp] h[dp]", "used twice"),
        ("dp2 : t[", "no axis"),
        ("dp0 : t", "no group"),
        (" : t", "no groups"),
    ],
)
def test_bad_layouts_say_what_is_wrong(layout, words):
    with pytest.raises(ValueError, match=words):
        parse_layout(layout)


def test_wrong_parts_are_refused():
    with pytest.raises(ValueError, match="1 ranks hold a part; the layout has 2"):
        unshard([np.zeros(2)], "dp2 : t[dp]")
    with pytest.raises(ValueError, match=r"rank 1 has shape \(2, 2\)"):
        unshard([np.zeros(2), np.zeros((2, 2))], "dp2 : t[dp]")


def test_a_dump_of_ranks_is_compared_with_a_whole_one():
    t = ours()
    q = t["layers.0.attn_proj.q"]
    reference = {"layers.0.attn_proj.q": q, "final.logits": t["final.logits"]}
    actual = {f"rank.{r}.layers.0.attn_proj.q": q[:3] if r < 2 else q[3:] for r in range(4)}
    actual = {n: x[:, r % 2 : r % 2 + 1] for r, (n, x) in enumerate(actual.items())}
    actual["final.logits"] = t["final.logits"]
    layouts = {r"\.q$": "dp2 tp2 : t[dp] h[tp] d"}
    assert compare(reference, actual, ranks=layouts).ok
    actual["rank.2.layers.0.attn_proj.q"] = actual["rank.2.layers.0.attn_proj.q"] + 1
    assert compare(reference, actual, ranks=layouts).first.difference.first_violation == (3, 0, 0)
    del actual["rank.3.layers.0.attn_proj.q"]
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 2\]; the layout has 4"):
        compare(reference, actual, ranks=layouts)
    with pytest.raises(ValueError, match="joins nothing"):
        compare(reference, actual, ranks={"nothing": "dp2 : t[dp]"})


def received(order, **changes):
    """Rows as a dispatch delivers them, in some order: the value of a row tells where it came from."""
    source = np.array([(0, 0, 4), (0, 2, 4), (1, 0, 4), (0, 2, 5), (1, 1, 5)])[order]
    rows = (source[:, 0] * 100 + source[:, 1] * 10 + source[:, 2])[:, None] * np.ones((1, 3), np.float32)
    columns = {"src_rank": source[:, 0], "src_token": source[:, 1], "expert": source[:, 2]} | changes
    return {"layers.1.recv.x": rows.astype(np.float32)} | {f"layers.1.recv.{k}": v for k, v in columns.items()}


# deepseek-ai/DeepEP#48, #441: the order of received rows is the implementation's
def test_rows_are_matched_by_source():
    reference, actual = received([0, 1, 2, 3, 4]), received([2, 1, 0, 4, 3])
    only = r"recv\.x$"
    assert not compare(reference, actual, only=only).ok
    report = compare(reference, actual, only=only, by_source=True)
    assert report.ok
    assert report.results[0].note == "matched by source, 4 of 5 rows stand elsewhere"
    actual["layers.1.recv.x"][4] += 1  # (0, 2, 5), which stands at 3 in the reference
    assert compare(reference, actual, only=only, by_source=True).first.difference.first_violation == (3, 0)


def test_missing_and_repeated_rows_are_named():
    reference, actual = received([0, 1, 2, 3, 4]), received([0, 1, 2, 2])
    report = compare(reference, actual, only=r"recv\.x$", by_source=True)
    assert "2 rows missing, the first is (rank 0, token 2, expert 5)" in report.headline
    assert "1 rows there twice, the first is (rank 1, token 0, expert 4)" in report.headline
    back = compare(actual, reference, only=r"recv\.x$", by_source=True)
    assert "2 rows not expected" in back.headline


def test_slots_by_expert_are_compared_with_rows_one_after_the_other():
    reference = received([0, 1, 2, 3, 4])
    slots = np.full((6, 4, 3), np.nan, np.float32)
    rank, token = np.full((6, 4), -1), np.full((6, 4), -1)
    taken = [0] * 6
    for row in (4, 2, 0, 3, 1):
        e = int(reference["layers.1.recv.expert"][row])
        slots[e, taken[e]] = reference["layers.1.recv.x"][row]
        rank[e, taken[e]] = reference["layers.1.recv.src_rank"][row]
        token[e, taken[e]] = reference["layers.1.recv.src_token"][row]
        taken[e] += 1
    actual = {"layers.1.recv.x": slots, "layers.1.recv.src_rank": rank, "layers.1.recv.src_token": token}
    assert compare(reference, actual, only=r"recv\.x$", by_source=True).ok


def dumper_folder(path, tensors, save, suffix):
    for index, (tags, array) in enumerate(tensors):
        save(
            path / f"{tags[0]}___dump_index={index}___name={tags[1]}{tags[2]}___recompute_status=disabled{suffix}",
            array,
        )


def test_folders_of_the_sglang_dumper(tmp_path):
    t = ours()
    tensors = []
    for rank in range(2):
        q = t["layers.0.attn_proj.q"][:, rank : rank + 1]
        tensors += [
            ((f"step=0___rank={rank}", "embed.hidden", ""), t["embed.hidden"]),
            ((f"step=0___rank={rank}", "attn_proj.q", "___layer_id=0"), q),
            ((f"step=1___rank={rank}", "attn_proj.q", "___layer_id=0"), q * 2),
        ]
    dumper_folder(tmp_path, tensors, np.save, ".npy")
    dump = open_dump(tmp_path)
    assert list(dump)[:2] == ["rank.0.embed.hidden", "rank.0.layers.0.attn_proj.q"]
    reference = {
        "embed.hidden": t["embed.hidden"],
        "layers.0.attn_proj.q": t["layers.0.attn_proj.q"],
        "step.1.layers.0.attn_proj.q": t["layers.0.attn_proj.q"] * 2,
    }
    report = compare(reference, tmp_path, "exact", ranks={r"\.q$": "tp2 : t h[tp] d", "embed": "tp2 : t d"})
    assert report.ok, report.headline
    assert len(report.results) == 3


def test_torch_files_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from refmodel.golden.torch_files import to_numpy, to_torch

    t = ours()
    fp8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    bf16 = np.arange(65536, dtype=np.uint16).view(BF16).reshape(256, 256)
    for array in (fp8, bf16, np.array(1.5, BF16), np.float32([1, 2]), np.int64([[3]])):
        back = to_numpy(to_torch(array))
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    torch.save({"a": {"b": to_torch(bf16)}, "c": [to_torch(fp8)], "n": 3}, tmp_path / "x.pt")
    dump = open_dump(tmp_path / "x.pt")
    assert list(dump) == ["a.b", "c.0"]
    assert dump["a.b"].tobytes() == bf16.tobytes()
    folder = tmp_path / "dumper"
    folder.mkdir()
    values = {"value": to_torch(t["embed.hidden"]), "meta": {"rank": 0}}
    dumper_folder(folder, [(("step=0___rank=0", "embed.hidden", ""), values)], lambda p, v: torch.save(v, p), ".pt")
    assert compare({"embed.hidden": t["embed.hidden"]}, folder, "exact").ok
    torch.save({"f": print}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="weights-only loader refused"):
        open_dump(tmp_path / "code.pt")


def test_torch_files_without_torch_say_what_to_do(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="needs PyTorch, which is not installed"):
        open_dump(tmp_path / "x.pt")

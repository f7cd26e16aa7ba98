"""Every public name that callers rely on: where it comes from, its argument names, what it returns, its errors."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fp8
import parallel
import refmodel
from refmodel import Model, ModelConfig

BF16 = ml_dtypes.bfloat16
ROOT = Path(__file__).resolve().parents[1]

PROMISED = {
    fp8: """E4M3 E5M2 E8M0 RECIPES BlockScaled encode decode quantize gemm mma_step grouped_gemm_contiguous
        grouped_gemm_masked pack_ue8m0 unpack_ue8m0""",
    refmodel: """Model ModelConfig Checkpoint record compare save_tensors load_tensors rms_norm yarn_frequencies
        softmax_scale apply_rope Routing route attend merge_states swiglu moe accept""",
    parallel: """Topology get_dispatch_layout DispatchLayout rebalance_experts count_volumes Volumes Deployment
        get_low_latency_rdma_size_hint elastic_dispatch elastic_reduce normal_dispatch normal_combine normal_reduce
        low_latency_dispatch low_latency_combine low_latency_reduce""",
}


def refuses(words, function, *args, **kwargs):
    with pytest.raises(ValueError, match=words):
        function(*args, **kwargs)


def bits(array, dtype, shape):
    """The array, if it is of that dtype and shape."""
    assert isinstance(array, np.ndarray)
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)
    return array


@pytest.mark.parametrize("package", PROMISED, ids=lambda package: package.__name__)
def test_names_are_where_they_are_promised(package):
    for name in PROMISED[package].split():
        assert name in package.__all__
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package)) | {"compare"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_what_is_imported_first_is_light():
    """A count of volumes loads no model, running a model no comparison and no drawing, a format nothing of the rest."""
    for program, absent in [
        ("import fp8", ("refmodel", "parallel")),
        ("import refmodel", ("parallel", "refmodel.golden", "rich")),
        ("from parallel import Topology, count_volumes, rebalance_experts", ("parallel.deployment", "refmodel.model")),
    ]:
        code = f"{program}; import sys; print([name for name in {absent!r} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stdout + done.stderr


# fp8


def test_encode_and_decode():
    codes = fp8.encode(x=np.array([[1.0, 500.0]]), fmt=fp8.E4M3, overflow="saturate")
    assert bits(codes, ml_dtypes.float8_e4m3fn, (1, 2)).view(np.uint8).tolist() == [[0x38, 0x7E]]
    assert fp8.encode(np.array([500.0]), fmt=fp8.E4M3, overflow="nan").view(np.uint8).tolist() == [0x7F]
    assert bits(fp8.decode(codes=codes, dtype=np.float32), np.float32, (1, 2)).tolist() == [[1.0, 448.0]]
    assert fp8.encode(np.array([2.0]), fmt=fp8.E5M2).view(np.uint8).tolist() == [0x40]
    assert fp8.encode(np.array([2.0**-8]), fmt=fp8.E8M0).view(np.uint8).tolist() == [119]
    refuses("overflow = 'wrap'", fp8.encode, np.ones(1), fmt=fp8.E4M3, overflow="wrap")
    refuses("takes float64, float32 or bfloat16", fp8.encode, np.array([1]), fmt=fp8.E4M3)
    refuses("decode gives", fp8.decode, codes, dtype=np.int32)


def test_quantize_and_dequantize():
    assert {"deepseek_v3", "deepgemm", "sglang", "vllm", "transformer_engine", "torchao"} <= set(fp8.RECIPES)
    x = np.ones((3, 130), np.float32)
    made = fp8.quantize(x=x, block=(1, 128), recipe="deepseek_v3", scale_format="ue8m0")
    assert isinstance(made, fp8.BlockScaled)
    assert made.block == (1, 128)
    assert bits(made.codes, ml_dtypes.float8_e4m3fn, (3, 130)).astype(np.float32)[0, 0] == 256.0
    assert bits(made.scale, np.float32, (3, 2)).tolist() == [[2.0**-8] * 2] * 3
    for dtype in (np.float32, np.float64, BF16):
        assert (bits(made.dequantize(dtype=dtype), dtype, (3, 130)) == 1).all()
    plain = fp8.quantize(x=x, block=(128, 128), recipe="deepgemm", scale_format="float32")
    assert bits(plain.scale, np.float32, (1, 2))[0, 0] == np.float32(1) / np.float32(448)
    rebuilt = fp8.BlockScaled(codes=made.codes, scale=made.scale, block=(1, 128))
    assert rebuilt.dequantize(np.float32).tobytes() == x.tobytes()
    for recipe in fp8.RECIPES:
        fp8.quantize(x, recipe=recipe)
    refuses("recipe", fp8.quantize, x, recipe="mine")
    refuses("two positive sizes", fp8.quantize, x, block=(0, 128))
    refuses("does not fit codes", fp8.BlockScaled, codes=made.codes, scale=made.scale[:, :1], block=(1, 128))


def operand(values, block):
    values = np.array(values, np.float32)
    scale = np.full(tuple(-(-size // side) for size, side in zip(values.shape, block)), 0.5, np.float32)
    return fp8.BlockScaled(codes=fp8.encode(values, fp8.E4M3), scale=scale, block=block)


def test_gemm_and_mma_step():
    a, b = operand([[1, 2, 3], [0, 0, 4]], (1, 128)), operand([[1, 1, 1], [2, 0, 0]], (128, 128))
    out = fp8.gemm(a=a, b=b, accumulator="exact", promotion="mul_add", out_dtype=BF16)
    assert bits(out, BF16, (2, 2)).tolist() == [[1.5, 0.5], [1.0, 0.0]]  # times 1/4, both scales
    for accumulator, promotion in (("hopper", "fma"), ("blackwell", "mul_add")):
        same = fp8.gemm(a=a, b=b, accumulator=accumulator, promotion=promotion, out_dtype=np.float32)
        assert bits(same, np.float32, (2, 2)).tolist() == [[1.5, 0.5], [1.0, 0.0]]
    for unit in ("hopper", "blackwell"):
        step = fp8.mma_step(a=a.codes, b=b.codes, c=np.ones((2, 2), np.float32), unit=unit)
        assert bits(step, np.float32, (2, 2)).tolist() == [[7.0, 3.0], [5.0, 1.0]]
    refuses("same K", fp8.gemm, a=a, b=operand([[1, 1]], (128, 128)))
    refuses("accumulator = 'ampere'", fp8.gemm, a=a, b=b, accumulator="ampere")
    refuses("unit 'ampere'", fp8.mma_step, a=a.codes, b=b.codes, c=None, unit="ampere")


def test_grouped_gemm():
    one, two = operand([[1, 0]], (128, 128)), operand([[0, 1]], (128, 128))
    b = fp8.BlockScaled(np.stack([one.codes, two.codes]), np.stack([one.scale, two.scale]), (128, 128))
    a = operand([[4, 6], [8, 2], [1, 1]], (1, 128))
    made = fp8.grouped_gemm_contiguous(a=a, b=b, grouped_layout=np.array([0, 1, -1]), alignment=1)
    assert bits(made.out, BF16, (3, 1))[:2, 0].tolist() == [1.0, 0.5]
    assert made.defined.tolist() == [True, True, False]
    a = fp8.BlockScaled(np.stack([a.codes, a.codes]), np.stack([a.scale, a.scale]), (1, 128))
    made = fp8.grouped_gemm_masked(a=a, b=b, masked_m=np.array([2, 0]))
    assert bits(made.out, BF16, (2, 3, 1))[0, :2, 0].tolist() == [1.0, 2.0]
    assert made.defined.tolist() == [[True, True, False], [False] * 3]
    refuses("masked_m", fp8.grouped_gemm_masked, a=a, b=b, masked_m=np.array([4, 0]))


def test_packed_scales():
    scale = np.array([[1, 2, 0.5, 4, 8]], np.float32)
    packed = fp8.pack_ue8m0(scale)
    assert bits(packed, np.int32, (1, 2)).view(np.uint8).tolist() == [[127, 128, 126, 129, 130, 0, 0, 0]]
    assert bits(fp8.unpack_ue8m0(packed, 5), np.float32, (1, 5)).tobytes() == scale.tobytes()
    refuses("powers of two", fp8.pack_ue8m0, np.array([[3]], np.float32))


# refmodel: the model


def test_config_and_model(tmp_path):
    config = ModelConfig.preset("tiny")
    assert ModelConfig.preset("v3").n_routed_experts == 256
    assert ModelConfig.preset("example").num_hidden_layers == 3
    assert ModelConfig.from_pretrained(config.to_dict()) == config
    model = Model.random(config=config, seed=0)
    ids = np.array([1, 2, 3])
    cache = model.new_cache()
    logits = bits(model.forward(token_ids=ids, cache=cache, phase="prefill"), np.float32, (3, config.vocab_size))
    assert cache.length == 3
    more = model.forward(token_ids=ids[:1], cache=cache, phase="decode")
    assert bits(more, np.float32, (1, config.vocab_size)).any()
    with refmodel.record() as tensors:
        assert model.forward(ids).tobytes() == logits.tobytes()
    assert bits(tensors["layers.1.attn_core.router.topk_idx"], np.int64, (3, 3)).min() >= 0
    guesses = model.mtp_logits(token_ids=ids[1:], hidden=tensors["final.norm"][:2])
    assert bits(guesses, np.float32, (2, config.vocab_size)).any()
    plain = model.generate(token_ids=ids, max_new_tokens=5, speculative=False)
    assert plain == model.generate(token_ids=ids, max_new_tokens=5, speculative=True)
    assert [type(token) for token in plain] == [int] * 5
    assert plain[0] == logits[-1].argmax()
    refuses("outside the vocabulary of 64", model.forward, token_ids=[64])
    refuses("phase = 'both'", model.forward, token_ids=[1], phase="both")
    refuses("no preset 'v9'", ModelConfig.preset, "v9")
    refuses("hidden_size", ModelConfig.from_pretrained, {**config.to_dict(), "hidden_size": 0})
    with pytest.raises((ValueError, OSError), match="nowhere"):
        Model.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("numerics", [None, "float64", "float32", "bfloat16", "fp8"])
def test_from_pretrained(numerics):
    path = Path(refmodel.__file__).parent / "example"
    assert refmodel.Checkpoint.open(path).config == ModelConfig.preset("example")
    for like in (None, "vllm"):
        model = Model.from_pretrained(path, numerics=numerics, compute="float64", like=like)
        assert model.numerics.name == (numerics or "fp8")
    assert Model.from_pretrained(path, compute="float32").numerics.compute == np.float32
    refuses("numerics", Model.from_pretrained, path, numerics="int4")
    refuses("mine", Model.from_pretrained, path, like="mine")


def test_compare_and_tensor_files(tmp_path):
    tensors = {
        "a": np.arange(3, dtype=np.float32),
        "b": np.array([[1.5]], BF16),
        "c": fp8.encode(np.ones(2), fp8.E4M3),
    }
    refmodel.save_tensors(path=tmp_path / "x.safetensors", tensors=tensors, metadata={"k": "v"})
    loaded = refmodel.load_tensors(path=tmp_path / "x.safetensors")
    for name, array in tensors.items():
        assert bits(loaded[name], array.dtype, array.shape).tobytes() == array.tobytes()
    assert refmodel.compare(reference=tensors, actual=loaded).exit_code == 0
    report = refmodel.compare(reference=tensors, actual={**loaded, "a": loaded["a"] + np.float32(1)})
    assert report.exit_code == 1
    assert "a" in report.headline
    refuses("no tensor name in common", refmodel.compare, reference=tensors, actual={"z": np.ones(1)})
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    refuses("bad.safetensors", refmodel.load_tensors, path=tmp_path / "bad.safetensors")


# refmodel: operators


def test_norm_and_rope():
    made = refmodel.rms_norm(x=np.array([[3.0, 4.0]]), weight=np.array([1.0, 2.0]), eps=0.0)
    np.testing.assert_allclose(made, [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-15)
    refuses("rms_norm", refmodel.rms_norm, x=np.ones((1, 2)), weight=np.ones(3), eps=0.0)
    config = ModelConfig.preset("v3")
    inv_freq, amplitude = refmodel.yarn_frequencies(config)
    assert bits(inv_freq, np.float64, (32,))[0] == amplitude == 1.0
    assert round(refmodel.softmax_scale(config), 10) == 0.1352337789
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    made = refmodel.apply_rope(x=x, positions=np.array([1]), inv_freq=np.array([1.0, 0.01]), interleaved=True)
    np.testing.assert_allclose(made.ravel(), [-1.1426397, 1.9220756, 2.9598507, 4.0297996], atol=5e-8)
    made = refmodel.apply_rope(x=x, positions=np.array([1]), inv_freq=np.array([1.0, 0.01]), interleaved=False)
    np.testing.assert_allclose(made.ravel(), [-1.9841106, 1.9599007, 2.4623779, 4.0197997], atol=5e-8)
    refuses("even width", refmodel.apply_rope, x=x[..., :3], positions=np.array([1]), inv_freq=np.ones(1))


def test_route():
    settings = dict(n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True)
    made = refmodel.route(
        logits=np.array([[2, 1, 0, -1]], np.float32),
        correction_bias=np.array([0, 0, 0, 1.5], np.float32),
        top_k=2,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **settings,
    )
    assert type(made) is refmodel.Routing
    assert made._fields == ("topk_idx", "topk_weights", "margin")
    assert bits(made.topk_idx, np.int64, (1, 2)).tolist() == [[3, 0]]
    np.testing.assert_allclose(bits(made.topk_weights, np.float32, (1, 2)), [[0.58479, 1.91521]], atol=5e-6)
    assert bits(made.margin, np.float64, (1,))[0] == pytest.approx(0.149738, abs=1e-6)  # 0.880797 - 0.731059
    refuses("top_k", refmodel.route, logits=np.ones((1, 4)), correction_bias=None, top_k=5, **settings)


def test_attend_and_merge_states():
    q, k, v = np.zeros((2, 1, 3)), np.ones((2, 1, 3)), np.array([[[1.0]], [[3.0]]])
    out, lse = made = refmodel.attend(q=q, k=k, v=v, scale=1.0, causal_offset=0)
    assert made._fields == ("out", "lse")
    assert bits(out, np.float64, (2, 1, 1)).ravel().tolist() == [1.0, 2.0]
    assert bits(lse, np.float64, (2, 1)).ravel().tolist() == [0.0, np.log(2.0)]
    assert refmodel.attend(q, k, v, 1.0).out.ravel().tolist() == [2.0, 2.0]
    empty = refmodel.attend(q=q, k=k[:0], v=v[:0], scale=1.0)
    assert (empty.out.ravel().tolist(), empty.lse.ravel().tolist()) == ([0.0, 0.0], [-np.inf, -np.inf])
    merged = refmodel.merge_states(out_a=out, lse_a=lse, out_b=empty.out, lse_b=empty.lse)
    assert merged._fields == ("out", "lse")
    assert (merged.out.tobytes(), merged.lse.tobytes()) == (out.tobytes(), lse.tobytes())
    refuses("attend", refmodel.attend, q=q, k=k[..., :2], v=v, scale=1.0)


def test_moe_swiglu_and_accept():
    assert refmodel.swiglu(gate=np.array([0.0, 40.0]), up=np.array([5.0, 2.0])).tolist() == [0.0, 80.0]
    routing = refmodel.Routing(np.array([[1, 0], [-1, 1]]), np.array([[0.25, 0.5], [9.0, 1.0]]), np.zeros(2))
    x = np.array([[1.0, 2.0], [4.0, 8.0]])
    y = refmodel.moe(x=x, routing=routing, experts=[lambda rows: rows, lambda rows: 2 * rows])
    assert bits(y, np.float64, (2, 2)).tolist() == [[1.0, 2.0], [8.0, 16.0]]  # 2/4 + 1/2, and 2 x
    rng = np.random.default_rng(0)
    sure, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    taken = refmodel.accept(draft_tokens=[0], draft_probs=sure[None], target_probs=np.stack([sure, other]), rng=rng)
    assert taken == ([0, 1], 1)
    taken = refmodel.accept(draft_tokens=[0], draft_probs=sure[None], target_probs=np.stack([other, other]), rng=rng)
    assert taken == ([1], 0)
    refuses("accept", refmodel.accept, draft_tokens=[0], draft_probs=sure[None], target_probs=sure[None], rng=rng)


# parallel

TWO = parallel.Topology(num_ranks=2, ranks_per_node=1)
IDS = [np.array([[0, 3], [1, -1]]), np.array([[2, 0]])]  # four experts on two ranks
ROWS = [np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([[5.0, 6.0]], np.float32)]
WEIGHTS = [np.array([[0.5, 0.25], [1.0, 0.0]], np.float32), np.array([[2.0, 1.0]], np.float32)]


def test_dispatch_layout():
    made = parallel.get_dispatch_layout(topk_idx=IDS[0], num_experts=4, topology=TWO)
    assert type(made) is parallel.DispatchLayout
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    assert made._fields == names
    assert bits(made.num_tokens_per_rank, np.int32, (2,)).tolist() == [2, 1]
    assert bits(made.num_tokens_per_rdma_rank, np.int32, (2,)).tolist() == [2, 1]
    assert bits(made.num_tokens_per_expert, np.int32, (4,)).tolist() == [1, 1, 0, 1]
    assert bits(made.is_token_in_rank, bool, (2, 2)).tolist() == [[True, True], [True, False]]
    refuses("do not divide", parallel.get_dispatch_layout, topk_idx=IDS[0], num_experts=5, topology=TWO)
    refuses("holds 3", parallel.get_dispatch_layout, topk_idx=IDS[0], num_experts=2, topology=TWO)


def test_rebalance_experts():
    for policy, counts in (("deepseek", [3, 1, 1, 1]), ("balanced", [2, 2, 1, 1])):  # GPU loads 7 and 5, or 6 and 6
        made = parallel.rebalance_experts(
            weight=np.array([[9, 1, 1, 1]]), num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2, policy=policy
        )
        assert made._fields == ("phy2log", "log2phy", "logcnt")
        assert bits(made.logcnt, np.int64, (1, 4)).tolist() == [counts]
        assert np.bincount(bits(made.phy2log, np.int64, (1, 6))[0]).tolist() == counts
        assert (bits(made.log2phy, np.int64, (1, 4, max(counts))) >= 0).sum(axis=2).tolist() == [counts]
    refuses("num_gpus = 4", parallel.rebalance_experts, np.ones((1, 4)), 6, 1, 1, num_gpus=4)


def test_count_volumes():
    for dispatch in ("normal", "low_latency", "elastic", "allgather", "alltoallv"):
        for payload in ("fp8", "bf16", "fp32", "fp64"):
            made = parallel.count_volumes(
                topk_idx=IDS, num_experts=4, topology=TWO, hidden=256, dispatch=dispatch, payload=payload
            )
            assert isinstance(made, parallel.Volumes)
            assert bits(made.matrix(), np.int64, (2, 2)).min() >= 0
    made = parallel.count_volumes(IDS, 4, TWO, 256, dispatch="low_latency", payload="fp8")
    assert made.matrix(direction="dispatch", link=None, unit="rows", classes=None).tolist() == [[2, 1], [1, 1]]
    data = made.matrix(direction="dispatch", link="rdma", unit="bytes", classes=("payload", "scales", "header"))
    assert data.tolist() == [[0, 256 + 8 + 16], [256 + 8 + 16, 0]]
    assert made.matrix(direction="combine", link="local", unit="bytes", classes="payload").tolist() == [
        [1024, 0],
        [0, 512],
    ]
    refuses("dispatch = 'rdma'", parallel.count_volumes, IDS, 4, TWO, 256, dispatch="rdma")
    refuses("link = 'pcie'", made.matrix, link="pcie")
    refuses("do not divide", parallel.count_volumes, IDS, 5, TWO, 256)


def test_size_hint():
    hint = parallel.get_low_latency_rdma_size_hint
    size = hint(num_max_dispatch_tokens_per_rank=1, hidden=128, num_ranks=1, num_experts=1, version="v1.2.1")
    # two sends and two receives of 16 + 256, two signals of 128, and one alignment more
    assert type(size) is int
    assert size == 2 * (272 + 272 + 128) // 128 * 128 + 128
    refuses("version = 'v9'", hint, 1, 128, 1, 1, version="v9")


def test_elastic_dispatch_and_reduce():
    made = parallel.elastic_dispatch(
        x=ROWS, topk_idx=IDS, topk_weights=WEIGHTS, num_experts=4, topology=TWO, num_max_tokens_per_rank=8
    )
    assert len(made) == 2
    recv_x, recv_topk_idx, recv_topk_weights, recv_src_token_idx, num_recv_tokens_per_rank = made[0]
    assert bits(recv_x, np.float32, (3, 2)).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert recv_topk_idx.tolist() == [[0, -1], [1, -1], [-1, 0]]
    assert bits(recv_topk_weights, np.float32, (3, 2)).tolist() == [[0.5, 0.25], [1, 0], [2, 1]]
    assert bits(recv_src_token_idx, np.int32, (3,)).tolist() == [0, 1, 8]
    assert num_recv_tokens_per_rank.tolist() == [2, 1]
    pairs = [(rows.astype(ml_dtypes.float8_e4m3fn), np.ones((len(rows), 1), np.float32)) for rows in ROWS]
    codes, scales = parallel.elastic_dispatch(pairs, IDS, WEIGHTS, 4, TWO, num_max_tokens_per_rank=8)[1].recv_x
    assert (codes.astype(np.float32).tolist(), scales.shape) == ([[1, 2], [5, 6]], (2, 1))
    refuses("rank 0", parallel.elastic_dispatch, ROWS, IDS, WEIGHTS, 4, TWO, num_max_tokens_per_rank=1)
    y = np.array([[[1.0], [2.0]], [[4.0], [np.nan]]])
    for mode in ("hybrid", "direct", "single"):
        out = parallel.elastic_reduce(
            y=y, topk_idx=IDS[0], num_experts=4, topology=TWO, bias=np.ones((2, 1)), mode=mode
        )
        assert bits(out, np.float64, (2, 1)).tolist() == [[4.0], [5.0]]
    refuses("mode = 'both'", parallel.elastic_reduce, y=y, topk_idx=IDS[0], num_experts=4, topology=TWO, mode="both")


def test_normal_functions():
    made = parallel.normal_dispatch(x=ROWS, topk_idx=IDS, topk_weights=WEIGHTS, num_experts=4, topology=TWO)
    assert made[0]._fields[:3] == ("recv_x", "recv_topk_idx", "recv_topk_weights")
    assert made[0].recv_x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert made[0].num_recv_tokens_per_expert_list == [2, 1]
    back = parallel.normal_combine(x=[one.recv_x for one in made], handles=[one.handle for one in made], topology=TWO)
    assert bits(back[0][0], np.float32, (2, 2)).tolist() == [[2, 4], [3, 4]]  # token 0 was on both ranks
    y = np.array([[[1.0], [2.0]], [[4.0], [np.nan]]], np.float32)
    out = parallel.normal_reduce(y=y, topk_idx=IDS[0], num_experts=4, topology=TWO, bias=np.ones((2, 1), np.float32))
    assert bits(out, np.float32, (2, 1)).tolist() == [[4.0], [5.0]]
    refuses("together", parallel.normal_dispatch, ROWS, IDS, None, num_experts=4, topology=TWO)


def test_low_latency_functions():
    rows = [part.astype(BF16) for part in ROWS]
    made = parallel.low_latency_dispatch(
        x=rows, topk_idx=IDS, num_max_dispatch_tokens_per_rank=2, num_experts=4, topology=TWO, use_fp8=False
    )
    packed = made[0].packed_recv_x
    assert bits(packed, BF16, (2, 4, 2))[0, :2].tolist() == [[1, 2], [5, 6]]
    assert bits(made[0].packed_recv_count, np.int32, (2,)).tolist() == [2, 1]
    back = parallel.low_latency_combine(
        x=[one.packed_recv_x for one in made],
        topk_idx=IDS,
        topk_weights=WEIGHTS,
        handles=[one.handle for one in made],
        topology=TWO,
    )
    assert bits(back[0], BF16, (2, 2)).tolist() == [[0.75, 1.5], [3, 4]]
    y = np.array([[[1.0], [2.0]], [[4.0], [np.nan]]], np.float32)
    out = parallel.low_latency_reduce(y=y, topk_idx=IDS[0], num_experts=4, topology=TWO, topk_weights=WEIGHTS[0])
    assert bits(out, np.float32, (2, 1)).tolist() == [[1.0], [4.0]]
    refuses("rank 0", parallel.low_latency_dispatch, rows, IDS, 1, 4, TWO)


@pytest.mark.parametrize("dispatch", ["normal", "low_latency", "elastic", "allgather", "alltoallv"])
@pytest.mark.parametrize("schedule", ["sequential", "prefill_overlap", "decode_overlap"])
def test_deployment(dispatch, schedule):
    model = Model.random(ModelConfig.preset("tiny"), seed=0, numerics="float64")
    topology = parallel.Topology(num_ranks=2, ranks_per_node=2)
    deployment, other = (
        parallel.Deployment(
            model=model,
            topology=topology,
            redundant_experts=2,
            dispatch=dispatch,
            schedule=schedule,
            transport="memory",
        )
        for _ in range(2)
    )
    ids = np.array([1, 2, 3, 4])
    logits = deployment.run(batch=[[ids], [ids[:2], ids[1:]]])
    assert [[rows.shape for rows in rank] for rank in logits] == [[(4, 64)], [(2, 64), (3, 64)]]
    np.testing.assert_allclose(logits[0][0], model.forward(ids), rtol=1e-10)
    sent = deployment.ledger.matrix(direction="dispatch", link="nvlink", unit="rows", classes="payload")
    assert bits(sent, np.int64, (2, 2))[0, 1] > 0
    assert deployment.hand_over(request=0, other=other).length == 4
    tokens = deployment.generate(batch=[[ids], []], max_new_tokens=3, speculative=True)
    assert tokens == [[model.generate(ids, 3)], []]
    refuses("dispatch = 'x'", parallel.Deployment, model, topology, dispatch="x")
    refuses("schedule = 'x'", parallel.Deployment, model, topology, schedule="x")
    refuses("transport = 'x'", parallel.Deployment, model, topology, transport="x")
    refuses("1 rank lists for 2 ranks", deployment.run, batch=[[ids]])

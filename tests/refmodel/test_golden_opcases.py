"""Cases of operators: made alike everywhere, V3's shapes, and references that other ways of computing agree with."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from parallel import Topology, elastic_reduce, low_latency_reduce, normal_reduce
from refmodel.golden.combine_trees import elastic_direct_combine, low_latency_combine, normal_combine
from refmodel.golden.draws import fractions, normal, permutation
from refmodel.golden.opcases import OPERATORS, case, operator
from refmodel.golden.opcheck import OperatorMismatch, opcheck
from refmodel.rope import softmax_scale, yarn_frequencies

BF16 = ml_dtypes.bfloat16


def test_normal_is_a_sum_of_four_words_rounded_once():
    raw = np.random.PCG64(int.from_bytes(hashlib.sha256(b"key").digest()[:16], "little")).random_raw(6)
    sums = [sum((int(word) >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070 for word in raw]
    found = normal("key", 2, 3, scale=0.5)
    assert found.dtype == BF16
    for got, total in zip(found.reshape(-1).tolist(), sums):
        exact = total * (1.7320508075688772 / 65536 * 0.5)
        neighbours = np.array([np.nextafter(BF16(got), BF16(9)), np.nextafter(BF16(got), BF16(-9))], np.float64)
        assert abs(got - exact) <= np.abs(neighbours - exact).min()


def test_draws_have_their_shape():
    values = normal("many", 600_000).astype(np.float64)  # more than are made at a time
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    np.testing.assert_array_equal(values[:10], normal("many", 10).astype(np.float64))
    assert sorted(permutation("p", 50)) == list(range(50))
    assert not np.array_equal(permutation("p", 50), permutation("q", 50))
    part = fractions("f", 1000)
    assert part.dtype == np.float32
    assert 0 < part.min() < 0.01 < 0.99 < part.max() <= 1
    assert normal("none", 0, 3).shape == (0, 3)


def test_cases_are_made_again_to_the_bit_and_one_at_a_time():
    for name in OPERATORS:
        spec = operator(name)
        first = next(iter(spec.names()))
        one, two = spec.case(first).inputs, spec.case(first).inputs
        assert {n: x.tobytes() for n, x in one.items()} == {n: x.tobytes() for n, x in two.items()}
        assert spec.names("toy") + spec.names("v3") == tuple(sorted(spec.names("all"), key=lambda n: n[:3] == "v3_"))


V3_SHAPES = {
    "rms_norm/v3_rows_64": {"x": (64, 7168)},
    "rope/v3_rows_65": {"x": (65, 128, 64), "inv_freq": (32,)},
    "router/v3_rows_128": {"logits": (128, 256)},
    "swiglu/v3_rows_1": {"gate": (1, 2048)},
    "quantize/v3_rows_128": {"x": (128, 7168)},
    "mla_prefill/v3_rows_65": {"q": (65, 128, 192), "k": (65, 128, 192), "v": (65, 128, 128)},
    "mla_absorbed/v3_keys_64": {"q": (2, 128, 576), "kv": (64, 576)},
    "mla_decode/v3_page_end": {"q": (3, 1, 128, 576), "cache_seqlens": (3,)},
    "sparse_decode/v3_few_keys": {"q": (3, 1, 128, 576), "indices": (3, 1, 2048), "k_cache": (96, 64, 1, 656)},
    "merge_states/v3_rows_9": {"out_a": (9, 128, 512), "lse_b": (9, 128)},
    "normal_combine/v3_rows_1": {"rows": (1, 8, 7168), "topk_idx": (1, 8)},
    "grouped_gemm_masked/v3_down": {"a": (3, 64, 2048), "b": (3, 7168, 2048)},
}


@pytest.mark.parametrize("name", sorted(V3_SHAPES))
def test_v3_cases_have_v3s_shapes(name):
    inputs = case(name)[1].inputs
    assert {key: inputs[key].shape for key in V3_SHAPES[name]} == V3_SHAPES[name]


def test_v3_scalars_are_those_of_the_published_config():
    from refmodel import ModelConfig

    config = ModelConfig.preset("v3")
    spec, given = case("yarn/v3_published")
    found = spec.run(**given.inputs)
    np.testing.assert_array_equal(found["inv_freq"], yarn_frequencies(config)[0].astype(np.float32))
    assert found["softmax_scale"] == np.float32(softmax_scale(config)) == case("mla_decode")[1].inputs["softmax_scale"]
    assert found["amplitude"] == 1


def small(rows, ids, weights=None):
    rows = np.asarray(rows, BF16)[None, :, None]
    return rows, np.int64([ids]), np.ones((1, len(ids)), np.float32) if weights is None else np.float32([weights])


def test_combine_trees_by_hand():
    # 256 + 1 is no bfloat16 (the step there is 2) and rounds to the even 256
    rows, ids, weights = small([256, 1, 1], [0, 1, 2])
    assert low_latency_combine(rows, ids, weights).item() == 258
    # two experts per rank: (256 + 1 -> 256) + 1 -> 256
    assert normal_combine(rows, ids, weights, 2, 1).item() == 256
    # one per rank, two ranks per node: node 0 rounds to 256, the other holds 1
    assert normal_combine(rows, ids, weights, 1, 2).item() == 256
    assert normal_combine(rows, ids, weights, 1, 4).item() == 258
    # float32 drops 2^-25 beside 1 if it comes after it: the order of ranks counts
    tiny = 2.0**-25
    rows, ids, weights = small([1, tiny, -1], [4, 2, 0])
    assert low_latency_combine(rows, ids, weights).item() == 0
    assert normal_combine(rows, ids, weights, 2, 1).item() == 0  # -1 + tiny, then + 1
    rows, ids, weights = small([1, -1, tiny], [4, 0, 2])
    assert elastic_direct_combine(rows, ids, weights, 2).item() == tiny  # in the order of slots
    assert normal_combine(rows, ids, weights, 2, 1).item() == 0  # in the order of ranks
    rows, ids, weights = small([3, np.nan], [0, -1], [0.5, np.nan])
    assert low_latency_combine(rows, ids, weights).item() == 1.5


@pytest.mark.parametrize("name", ["rows_1", "rows_17", "slots_without_expert", "v3_rows_1"])
def test_combine_trees_equal_the_ones_of_the_dialects(name):
    experts, topology = (256, Topology(32, 8)) if name.startswith("v3") else (16, Topology(8, 2))
    others = {
        "low_latency_combine": low_latency_reduce,
        "normal_combine": normal_reduce,
        "elastic_direct_combine": lambda *a, **k: elastic_reduce(*a, mode="direct", **k),
        "elastic_hybrid_combine": lambda *a, **k: elastic_reduce(*a, mode="hybrid", **k),
    }
    for tree, other in others.items():
        spec, given = case(f"{tree}/{name}")
        rows, ids, weights = (given.inputs[n] for n in ("rows", "topk_idx", "topk_weights"))
        expected = other(rows, ids, experts, topology, topk_weights=weights)
        assert spec.run(**given.inputs)["out"].tobytes() == expected.tobytes(), tree


def test_reading_empty_slots_is_seen():
    def reads_all(rows, topk_idx, topk_weights):
        return (rows.astype(np.float32) * topk_weights[..., None]).sum(axis=1).astype(BF16)

    with pytest.raises(OperatorMismatch, match=r"slots_without_expert: .*NaN on one side"):
        opcheck(reads_all, "low_latency_combine")


# torch.topk promises no order among equal scores
def test_another_choice_at_equal_scores_is_no_fault():
    spec = operator("router")

    def highest_index_wins(logits, correction_bias):
        found = spec.run(logits[:, ::-1], correction_bias[::-1])
        return logits.shape[1] - 1 - found["topk_idx"], found["topk_weights"]

    ties = case("router/equal_scores")[1].inputs
    assert not np.array_equal(np.sort(highest_index_wins(**ties)[0]), np.sort(spec.run(**ties)["topk_idx"]))
    assert opcheck(highest_index_wins, "router") == len(spec.names())


# FlashMLA: the causal mask of several new tokens is aligned to the end of the keys
def test_a_causal_mask_from_the_start_is_seen():
    spec = operator("mla_absorbed")

    def from_the_start(q, kv, softmax_scale):
        first = spec.run(q[:1], kv[:1], softmax_scale)
        rest = spec.run(q, kv, softmax_scale)
        return tuple(np.concatenate([first[n], rest[n][1:]]) for n in ("out", "lse"))

    with pytest.raises(OperatorMismatch, match="keys_63: out diverges first"):
        opcheck(from_the_start, "mla_absorbed")


def test_reading_behind_topk_length_is_seen():
    spec = operator("sparse_decode")

    def ignores_the_length(topk_length, **inputs):
        whole = np.full_like(topk_length, inputs["indices"].shape[2])
        return tuple(spec.run(topk_length=whole, **inputs).values())

    with pytest.raises(OperatorMismatch, match="stops_early: out diverges first"):
        opcheck(ignores_the_length, "sparse_decode")


# 0 times whatever an empty side holds is not always 0
def test_a_merge_that_multiplies_an_empty_side_by_zero_is_seen():
    def multiplies(out_a, lse_a, out_b, lse_b):
        top = np.maximum(np.maximum(lse_a, lse_b), np.float32(-1e30))
        a, b = np.exp(lse_a - top), np.exp(lse_b - top)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], np.log(a + b) + top

    with pytest.raises(OperatorMismatch, match="sides_without_keys: out diverges first"):
        opcheck(multiplies, "merge_states")

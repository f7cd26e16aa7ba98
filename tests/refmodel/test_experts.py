"""Routed experts on one rank, and where weights are applied."""

import ml_dtypes
import numpy as np
import pytest
from tiny import TINY, tiny_model

from refmodel import Routing, moe, record, swiglu
from refmodel.numerics import Numerics


def routing(ids, weights):
    ids = np.array(ids)
    return Routing(ids, np.array(weights, np.float32), np.zeros(len(ids)))


def times(factor):
    return lambda rows: rows * factor


def test_swiglu_by_hand():
    np.testing.assert_allclose(
        swiglu(np.array([0.0, 2.0, -100.0]), np.array([5.0, 3.0, 1.0])), [0, 5.28478, 0], atol=1e-5
    )


def test_two_experts_of_one_token():
    # deepseek-ai/DeepEP#112: f = x and 2x with weights .25 and .75
    got = moe(np.array([[4.0, 8.0]]), routing([[0, 1]], [[0.25, 0.75]]), [times(1), times(2)])
    assert got.tolist() == [[7.0, 14.0]]


def test_scaling_factor_is_in_the_weights_and_applied_once():
    # vllm-project/vllm#24119
    x = np.array([[1.0, -3.0]])
    assert moe(x, routing([[1, 0]], [[1.5, 1.0]]), [times(1), times(1)]).tolist() == [[2.5, -7.5]]


def test_minus_one_selects_nothing():
    # vllm-project/vllm#46408: map[-1] is the last expert in NumPy
    called = []

    def last(rows):
        called.append(len(rows))
        return rows * np.nan

    x = np.array([[1.0], [2.0], [3.0]])
    got = moe(x, routing([[0, -1], [-1, -1], [-1, 0]], [[1, 9], [9, 9], [9, 0.5]]), [times(10), last])
    assert got.tolist() == [[10.0], [0.0], [15.0]]
    assert called == []


@pytest.mark.parametrize("poison", [np.nan, 1e30, np.inf])
def test_a_padding_row_reaches_no_real_row(poison):
    # vllm-project/vllm#41249: a batch-wide amax, or a mask of 0 times NaN
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8)).astype(ml_dtypes.bfloat16)
    ids, weights = [[0, 1], [1, 2], [2, 0]], [[0.5, 0.5]] * 3
    experts = [times(1), times(2), times(3)]
    alone = moe(x, routing(ids, weights), experts, Numerics("bfloat16"))
    padded = np.concatenate([x, np.full((1, 8), poison, x.dtype)])
    got = moe(padded, routing([*ids, [-1, -1]], [*weights, [0, 0]]), experts, Numerics("bfloat16"))
    assert got[:3].tobytes() == alone.tobytes()
    assert (got[3] == 0).all()


def test_combine_rounds_product_and_sum_in_top_k_order():
    numerics = Numerics("bfloat16")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 16)).astype(ml_dtypes.bfloat16)
    ids = np.array([rng.permutation(4)[:3] for _ in range(5)])
    weights = rng.random((5, 3)).astype(np.float32)
    rows = {e: (x.astype(np.float64) * (e + 0.3)) for e in range(4)}
    got = moe(x, routing(ids, weights), [lambda r, e=e: r.astype(np.float64) * (e + 0.3) for e in range(4)], numerics)
    for t in range(5):
        total = np.zeros(16, np.float32)
        for k in range(3):
            row = rows[ids[t, k]][t].astype(np.float32).astype(ml_dtypes.bfloat16)  # exact enough: checked below
            assert row.tobytes() == numerics.store(rows[ids[t, k]][t], "expert_row").tobytes()
            total += weights[t, k] * row.astype(np.float32)
        assert got[t].tobytes() == numerics.store(total, "combined_row").tobytes()


def test_shared_expert_is_added_unscaled():
    # sgl-project/sglang#28237: 1 / routed_scaling_factor on a fused shared expert
    model = tiny_model()
    with record() as tensors:
        model.forward(np.arange(10))
    for layer in (1, 2):
        routed = tensors[f"layers.{layer}.combine_recv.routed"]
        shared = tensors[f"layers.{layer}.shared.out"]
        np.testing.assert_array_equal(tensors[f"layers.{layer}.merge.moe"], routed + shared)


def test_recorded_expert_rows_stand_in_token_and_slot_order():
    model = tiny_model()
    with record() as tensors:
        model.forward(np.arange(10))
    K = TINY.num_experts_per_tok
    out = tensors["layers.1.experts.out"].reshape(10, K, -1)
    weights = tensors["layers.1.attn_core.router.topk_weights"]
    combined = sum(weights[:, k, None] * out[:, k] for k in range(K))
    np.testing.assert_array_equal(combined, tensors["layers.1.combine_recv.routed"])

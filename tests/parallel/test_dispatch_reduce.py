"""The buffer-free combines equal their loops, and the dialects."""

import numpy as np
import pytest
from dispatch_oracle import BF16, all_outputs, elastic_tree, plain_sum, random_batch, run_exchange, tree_sum
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.dispatch import elastic_reduce, low_latency_reduce, normal_reduce
from parallel.topology import Topology

TOPOLOGIES = (Topology(1), Topology(4), Topology(4, 2), Topology(8, 4), Topology(4, 1))


@st.composite
def one_rank(draw):
    topology = draw(st.sampled_from(TOPOLOGIES))
    num_experts = topology.num_ranks * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from((BF16, np.float32, np.float64)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top_k = draw(st.integers(1, min(num_experts, 6)))
    x, idx, weights = random_batch(rng, [draw(st.integers(0, 8))], num_experts, top_k, 4, dtype)
    return topology, num_experts, all_outputs(x[0], idx[0]), idx[0], weights[0]


def same_bits(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


@settings(max_examples=100)
@given(one_rank())
def test_reductions_are_their_loops(case):
    topology, num_experts, y, idx, weights = case
    same_bits(low_latency_reduce(y, idx, num_experts, topology, weights), plain_sum(y, idx, weights))
    by_node = topology.num_nodes > 1
    expected = tree_sum(y, idx, weights, num_experts, topology, by_node)
    same_bits(normal_reduce(y, idx, num_experts, topology, topk_weights=weights), expected)
    for mode in ("hybrid", "direct", "single"):
        expected = elastic_tree(y, idx, weights, num_experts, topology, mode)
        same_bits(elastic_reduce(y, idx, num_experts, topology, mode=mode, topk_weights=weights), expected)


@pytest.mark.parametrize("topology", [Topology(8), Topology(8, 2), Topology(8, 4)])
@pytest.mark.parametrize("dtype", [BF16, np.float64])
def test_dialects_are_their_buffer_free_reductions(topology, dtype):
    rng = np.random.default_rng(3)
    x, idx, weights = random_batch(rng, [9, 0, 5, 1, 7, 3, 0, 4], 16, 5, 8, dtype)
    reductions = {
        "normal": normal_reduce,
        "low_latency": low_latency_reduce,
        "elastic": elastic_reduce,
    }
    for dialect, reduction in reductions.items():
        y, _, _ = run_exchange(dialect, topology, 16, x, idx, weights)
        for rank in range(8):
            outputs = all_outputs(x[rank], idx[rank])
            same_bits(y[rank], reduction(outputs, idx[rank], 16, topology, topk_weights=weights[rank]))
            if dtype == np.float64:
                total = (np.nan_to_num(outputs) * np.where(idx[rank] >= 0, weights[rank], 0)[..., None]).sum(axis=1)
                np.testing.assert_allclose(
                    y[rank], total, rtol=1e-12, atol=1e-12 * np.abs(outputs[idx[rank] >= 0]).max(initial=0)
                )


def test_orders_by_hand():
    """bfloat16 has 8 bits: 256 + 1 is lost, 256 + 2 is kept; the order of the sum shows in the result."""
    topology = Topology(2, 1)
    rows = np.array([[[256.0], [1.0], [1.0]]]).astype(BF16)
    # ranks: slots 0 and 1 on rank 0, slot 2 on rank 1
    idx = np.array([[0, 1, 2]])
    assert elastic_reduce(rows, idx, 4, topology, mode="single") == 258  # one float32 sum
    assert elastic_reduce(rows, idx, 4, topology, mode="direct") == 256  # bf16(257) = 256, and 256 + 1 again
    assert normal_reduce(rows, idx, 4, topology) == 256
    assert low_latency_reduce(rows, idx, 4, topology) == 258
    idx = np.array([[0, 2, 3]])  # slots 1 and 2 together on rank 1
    assert elastic_reduce(rows, idx, 4, topology, mode="direct") == 258


def test_bias_comes_first():
    topology = Topology(2)
    rows = np.array([[[1.0], [1.0]]]).astype(BF16)
    idx, bias = np.array([[0, 1]]), np.array([[256.0]]).astype(BF16)
    one = np.array([[1.0]]).astype(BF16)
    assert normal_reduce(rows, idx, 2, topology, bias=bias) == 258
    assert elastic_reduce(rows, idx, 2, topology, bias=bias, mode="direct") == 258
    assert elastic_reduce(rows, idx, 2, topology, bias=(bias, one), mode="single") == 260  # 259 ties to even
    unselected = np.array([[-1, -1]])
    assert normal_reduce(rows, unselected, 2, topology, bias=(bias, bias)) == 512


def test_two_experts_on_one_rank_are_weighted_once():
    """deepseek-ai/DeepEP#112: f = x and 2x, weights .25 and .75 give 1.75 x, not 3 x nor 1.1875 x."""
    topology, x = Topology(1), np.float64(1.0)
    y, idx, weights = np.array([[[x], [2 * x]]]), np.array([[0, 1]]), np.array([[0.25, 0.75]])
    for reduction in (low_latency_reduce, normal_reduce, elastic_reduce):
        assert reduction(y, idx, 2, topology, topk_weights=weights) == 1.75
    assert normal_reduce(y, idx, 2, topology) == 3.0


def test_refuses():
    with pytest.raises(ValueError, match="hybrid"):
        elastic_reduce(np.zeros((1, 1, 1)), np.zeros((1, 1), np.int64), 2, Topology(2), mode="treewise")
    with pytest.raises(ValueError, match="do not fit"):
        normal_reduce(np.zeros((1, 2, 1)), np.zeros((1, 1), np.int64), 2, Topology(2))

"""Every dialect's combine equals its rounding tree, bit for bit."""

import numpy as np
from dispatch_oracle import BF16, all_outputs, elastic_tree, plain_sum, random_batch, run_exchange, tree_sum
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.topology import Topology

DTYPES = (BF16, np.float32, np.float64)
TOPOLOGIES = (
    Topology(1),
    Topology(2),
    Topology(4),
    Topology(8),
    Topology(4, 2),
    Topology(8, 4),
    Topology(8, 2),
    Topology(16, 4),
    Topology(16, 16),
)


@st.composite
def batches(draw):
    topology = draw(st.sampled_from(TOPOLOGIES))
    num_experts = topology.num_ranks * draw(st.integers(1, 3))
    tokens = [draw(st.integers(0, 6)) for _ in range(topology.num_ranks)]
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top_k = draw(st.integers(1, min(num_experts, 6)))
    return topology, num_experts, random_batch(rng, tokens, num_experts, top_k, 5, dtype), rng


def same_bits(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


@settings(max_examples=80)
@given(batches(), st.booleans())
def test_low_latency_is_the_plain_sum_in_top_k_order(batch, shuffled):
    topology, num_experts, (x, idx, weights), rng = batch
    seed = 5 if shuffled else None
    y, _, _ = run_exchange("low_latency", topology, num_experts, x, idx, weights, rng=rng, arrival_seed=seed)
    for rank in range(topology.num_ranks):
        same_bits(y[rank], plain_sum(all_outputs(x[rank], idx[rank]), idx[rank], weights[rank]))


@settings(max_examples=80)
@given(batches())
def test_normal_is_its_rounding_tree(batch):
    topology, num_experts, (x, idx, weights), rng = batch
    y, _, _ = run_exchange("normal", topology, num_experts, x, idx, weights, rng=rng)
    for rank in range(topology.num_ranks):
        outputs = all_outputs(x[rank], idx[rank])
        by_node = topology.num_nodes > 1
        same_bits(y[rank], tree_sum(outputs, idx[rank], weights[rank], num_experts, topology, by_node))


@settings(max_examples=80)
@given(batches(), st.sampled_from(["hybrid", "direct", "single"]), st.sampled_from([None, 3]))
def test_elastic_is_its_rounding_tree(batch, mode, seed):
    topology, num_experts, (x, idx, weights), rng = batch
    y, _, _ = run_exchange("elastic", topology, num_experts, x, idx, weights, rng=rng, mode=mode, arrival_seed=seed)
    for rank in range(topology.num_ranks):
        outputs = all_outputs(x[rank], idx[rank])
        same_bits(y[rank], elastic_tree(outputs, idx[rank], weights[rank], num_experts, topology, mode))


@settings(max_examples=80)
@given(batches(), st.sampled_from(["allgather", "alltoallv"]))
def test_collectives_reduce_as_normal_on_one_node(batch, dialect):
    topology, num_experts, (x, idx, weights), rng = batch
    y, _, _ = run_exchange(dialect, topology, num_experts, x, idx, weights, rng=rng)
    for rank in range(topology.num_ranks):
        outputs = all_outputs(x[rank], idx[rank])
        same_bits(y[rank], tree_sum(outputs, idx[rank], weights[rank], num_experts, topology, False))


def test_the_trees_do_differ_in_bfloat16():
    rng = np.random.default_rng(0)
    topology = Topology(8, 4)
    x, idx, weights = random_batch(rng, [64] * 8, 16, 6, 16, BF16)
    outputs = all_outputs(x[0], idx[0])
    one = plain_sum(outputs, idx[0], weights[0])
    two = tree_sum(outputs, idx[0], weights[0], 16, topology, False)
    three = tree_sum(outputs, idx[0], weights[0], 16, topology, True)
    assert (one != two).any()
    assert (two != three).any()

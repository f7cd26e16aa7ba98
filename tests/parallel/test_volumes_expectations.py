"""Closed forms against exact fractions, published figures and Monte Carlo; the published deployments' exact bytes."""

from fractions import Fraction
from itertools import combinations
from time import process_time

import numpy as np
import pytest

from parallel.dispatch.expectations import expected_reach, hit_probability
from parallel.dispatch.volumes import count_volumes
from parallel.placement import Placement
from parallel.topology import Topology

DATA_CLASSES = ("payload", "scales", "routing", "header", "padding")


def uniform(rng, ranks, tokens, experts, top_k=8):
    """One table per rank: uniform sets of top_k distinct experts, by redrawing rows that repeat one."""
    table = rng.integers(0, experts, (ranks * tokens, top_k))
    while True:
        ordered = np.sort(table, axis=1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not len(again):
            return list(table.reshape(ranks, tokens, top_k))
        table[again] = rng.integers(0, experts, (len(again), top_k))


def test_probabilities_equal_the_enumeration():
    share = np.array([[1, 0.5, 0, 0, 0.25, 0], [0, 0.5, 1, 0, 0.75, 1]])
    for groups, chosen in ((1, 1), (3, 2), (2, 1)):
        size = 6 // groups
        sets = [
            s
            for picked in combinations(range(groups), chosen)
            for s in combinations([g * size + i for g in picked for i in range(size)], 2)
        ]
        for unit in range(2):
            miss = sum((1 - Fraction(share[unit, a])) * (1 - Fraction(share[unit, b])) for a, b in sets) / Fraction(
                len(sets)
            )
            assert hit_probability(share, 2, groups, chosen)[unit] == pytest.approx(float(1 - miss), rel=1e-14)


# deepseek-ai/EPLB#14, vllm-project/vllm#42254
@pytest.mark.parametrize(
    ("experts", "ranks", "expected_ranks", "expected_nodes"),
    [
        (256, 2, 1.993020, 1),
        (256, 4, 3.614214, 1),
        (256, 8, 5.294652, 1),
        (256, 16, 6.523280, 1.993020),
        (256, 32, 7.266800, 3.614214),
        (256, 64, 7.675750, 5.294652),
        (256, 128, 7.890196, 6.523280),
        (256, 256, 8, 7.266800),
        (288, 32, 7.256727, 3.612578),
        (288, 144, 7.902439, 6.671959),
    ],
)
def test_reach_of_uniform_routing(experts, ranks, expected_ranks, expected_nodes):
    reach = expected_reach(Placement.contiguous(experts, ranks), Topology(ranks), 8)
    assert reach == pytest.approx((expected_ranks, expected_nodes), abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "expected_ranks", "expected_nodes"),
    [(2, 1.9258, 1), (4, 2.9282, 1), (8, 3.6290, 1), (16, 5.339357, 1.925842), (32, 6.596513, 2.928210),
     (64, 7.359370, 3.629011)],
)  # fmt: skip
def test_reach_of_group_limited_routing(ranks, expected_ranks, expected_nodes):
    reach = expected_reach(Placement.contiguous(256, ranks), Topology(ranks), 8, 8, 4)
    assert reach == pytest.approx((expected_ranks, expected_nodes), abs=5e-5)


def test_reach_with_redundancy_keeps_to_the_nodes_only_when_groups_do():
    from parallel.eplb import rebalance_experts

    load = np.random.default_rng(0).lognormal(0, 1, (1, 256))
    plan = {n: Placement(rebalance_experts(load, 288, 8, n, 32).phy2log[0], 32) for n in (4, 3)}
    hierarchical, everywhere = (expected_reach(plan[n], Topology(32), 8, 8, 4) for n in (4, 3))
    assert hierarchical.nodes == pytest.approx(2.928210, abs=1e-6)
    assert 6.9 < hierarchical.ranks < 7.05
    assert everywhere.nodes > 3.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 3, 1), "10 experts do not divide into num_groups = 3"),
        ((2, 5, 6), "topk_group = 6"),
        ((5, 5, 2), "top_k = 5: must be 1 to 4"),
        ((0, 1, 1), "top_k = 0"),
    ],
)
def test_impossible_routing_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        hit_probability(np.ones((1, 10)), *arguments)


def test_exact_counts_land_within_sampling_error():
    topology, tokens = Topology(32), 1500
    tables = uniform(np.random.default_rng(7), 32, tokens, 256)
    counts = count_volumes(tables, 256, topology, 8).counts
    reach = expected_reach(Placement.contiguous(256, 32), topology, 8)
    for found, expected, spread in (
        (counts.tokens_to_rank.sum() / tokens / 32, reach.ranks, 0.9),
        (counts.tokens_to_node.sum() / tokens / 32, reach.nodes, 0.7),
    ):
        assert abs(found - expected) < 4 * spread / np.sqrt(32 * tokens)


def test_decode_on_144_ranks_to_the_byte_and_in_time():
    """176 tokens a GPU, 288 physical experts: the bytes of a GPU and layer, and 58 layers counted in half a second."""
    rng, topology = np.random.default_rng(0), Topology(144)
    tables = uniform(rng, 144, 176, 288)
    start = process_time()
    for _ in range(58):
        volumes = count_volumes(tables, 288, topology, 7168, dispatch="low_latency")
        there, back = volumes.matrix("dispatch", classes=DATA_CLASSES), volumes.matrix("combine", classes=DATA_CLASSES)
    assert process_time() - start < 1.0  # 0.14 s on an idle core
    assert set(there.sum(axis=1)) == {10_430_464}
    assert set(back.sum(axis=0)) == {20_185_088}
    rdma = volumes.matrix("dispatch", "rdma", classes=DATA_CLASSES).sum() / 144
    assert rdma == pytest.approx(9_850_994, rel=2e-3)
    assert volumes.matrix("dispatch", "nvlink", classes=DATA_CLASSES).sum() / 144 == pytest.approx(507_036, rel=0.02)
    assert there.mean() == pytest.approx(72_434, abs=1)
    assert volumes.matrix("combine", "rdma", classes=DATA_CLASSES).sum() / 144 == pytest.approx(19_063_694, rel=2e-3)


def group_limited(rng, tokens):
    """[tokens, 8]: 4 of 8 groups of 32, then 8 of those 128, each choice uniform."""
    groups = rng.permuted(np.tile(np.arange(8), (tokens, 1)), axis=1)[:, :4]
    within = rng.permuted(np.tile(np.arange(128), (tokens, 1)), axis=1)[:, :8]
    return np.take_along_axis(groups, within // 32, axis=1) * 32 + within % 32


def test_prefill_on_32_ranks_within_sampling_error():
    rng, topology, tokens = np.random.default_rng(1), Topology(32), 512
    volumes = count_volumes([group_limited(rng, tokens) for _ in range(32)], 256, topology, 7168)
    per_token = {link: volumes.matrix("dispatch", link, "rows").sum() / (32 * tokens) for link in ("rdma", "nvlink")}
    assert per_token["rdma"] == pytest.approx(8995.46 / 4096, rel=0.01)
    assert per_token["nvlink"] == pytest.approx(23641.9 / 4096, rel=0.01)
    row = (
        volumes.matrix("dispatch", "rdma", classes=DATA_CLASSES).sum()
        / volumes.matrix("dispatch", "rdma", "rows").sum()
    )
    assert row == 7472

"""Drawn routing and the published deployments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.dispatch.draw import KINDS, draw_routing
from parallel.dispatch.volumes import count_volumes
from parallel.dispatch.workload import PRESETS, Workload


@given(st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8), st.data())
def test_tokens_get_distinct_experts_within_their_groups(kind, tokens, groups, size, top_k, data):
    chosen = data.draw(st.integers(1, groups))
    experts = groups * size
    top_k = min(top_k, chosen * size)
    ids = draw_routing(kind, np.random.default_rng(tokens), tokens, experts, top_k, groups, chosen)
    assert ids.shape == (tokens, top_k)
    for token in ids.tolist():
        assert len(set(token)) == top_k
        assert all(0 <= expert < experts for expert in token)
        if kind == "group_limited":
            assert len({expert // size for expert in token}) <= chosen


def test_balanced_routing_is_even_and_spread():
    ids = draw_routing("balanced", None, 64, 256, 8)
    assert set(np.bincount(ids.ravel(), minlength=256)) == {2}
    assert ids[1].tolist() == [1, 33, 65, 97, 129, 161, 193, 225]


def test_draws_are_uniform():
    ids = draw_routing("group_limited", np.random.default_rng(0), 40_000, 16, 3, 4, 2)
    counts = np.bincount(ids.ravel(), minlength=16)
    assert abs(counts - 7500).max() < 5 * np.sqrt(7500)
    pairs = np.bincount(np.sort(draw_routing("uniform", np.random.default_rng(1), 30_000, 50, 2), axis=1) @ [50, 1])
    assert abs(pairs[pairs > 0] - 30_000 / 1225).max() < 30
    assert (pairs > 0).sum() == 1225


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("even", None, 1, 4, 1), "routing = 'even'"),
        (("uniform", None, 1, 4, 5), "top-5 of 4 experts"),
        (("uniform", None, -1, 4, 1), "-1 tokens"),
        (("group_limited", None, 1, 8, 2, 3, 1), "num_groups = 3 over 8"),
        (("group_limited", None, 1, 8, 2, 4, 5), "topk_group = 5"),
        (("group_limited", None, 1, 8, 3, 4, 1), "top-3 does not fit into 1 groups of 2"),
    ],
)
def test_impossible_draws_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        draw_routing(*arguments)


def counted(workload, layers=1):
    total = None
    for layer in range(layers):
        arguments = (workload.num_physical, workload.topology, workload.hidden, workload.dispatch, workload.payload)
        volumes = count_volumes(workload.tables(layer), *arguments)
        total = volumes if total is None else total + volumes
    return total


def reach(volumes):
    tokens = volumes.counts.tokens.sum()
    return volumes.counts.tokens_to_rank.sum() / tokens, volumes.counts.tokens_to_node.sum() / tokens


def test_decode_on_144_ranks():
    workload = PRESETS["decode-ep144"]
    volumes = counted(workload)
    assert set(volumes.deepep()["num_dispatch_comm_bytes"]) == {10_430_464}
    assert set(volumes.deepep()["num_combine_comm_bytes"]) == {20_185_088}
    assert workload.expected_reach() == pytest.approx((7.902439, 6.671959), abs=1e-6)
    assert reach(volumes) == pytest.approx(workload.expected_reach(), abs=0.02)
    assert set(count_slots(volumes)) == {1408}


def count_slots(volumes):
    return volumes.counts.slots_to_rank.sum(axis=1)


def test_prefill_on_32_ranks_keeps_to_its_nodes():
    from dataclasses import replace

    workload = replace(PRESETS["prefill-ep32"], tokens=512)
    expected = workload.expected_reach()
    assert expected.nodes == pytest.approx(2.928210, abs=1e-6)
    assert reach(counted(workload)) == pytest.approx(expected, abs=0.03)
    alone = replace(workload, redundant=0)
    assert alone.expected_reach() == pytest.approx((6.596513, 2.928210), abs=1e-6)
    rdma_rows = counted(alone).matrix("dispatch", "rdma", "rows").sum() / (32 * 512)
    assert rdma_rows == pytest.approx(8995.46 / 4096, rel=0.01)


def test_the_paper_s_decode_has_nine_targets():
    workload = PRESETS["paper-ep320"]
    tables = workload.tables(0)
    assert (len(tables), tables[0].shape) == (320, (32, 9))
    assert [int(table[0, 8]) for table in tables[:2]] == [288, 289]  # the shared expert's replicas come last
    assert max(int(table[:, :8].max()) for table in tables) < 288
    assert set(count_slots(counted(workload))) == {288}
    assert workload.expected_reach() is None


def test_the_profile_s_routing_is_forced_balanced():
    volumes = counted(PRESETS["profile-ep128"])
    assert set(volumes.matrix("dispatch", unit="rows").sum(axis=0)) == {1024}
    assert reach(volumes) == (8, 8)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tokens": -1}, "tokens = -1"),
        ({"layers": 0}, "layers = 0"),
        ({"redundant": 8, "shared_replicas": 9}, "shared_replicas = 9"),
        ({"replica_rule": "best"}, "'best' is unknown"),
    ],
)
def test_impossible_workloads_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Workload(**sizes)

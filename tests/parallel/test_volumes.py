"""Counts from the routing table: by hand, against loops, the identities between them, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volumes_oracle import matrix_by_loop, random_tables, rows_by_loop

from parallel.dispatch.row_bytes import CLASSES, DISPATCHES, MODES, combine_row, dispatch_row
from parallel.dispatch.volumes import count_volumes
from parallel.topology import LINKS, Topology

EMPTY = np.zeros((0, 2), int)
TWO_NODES = Topology(4, 2)
FIXTURE = [[[0, 5], [6, 7], [3, -1]], EMPTY, EMPTY, EMPTY]  # tokens A, B, C on rank 0; two experts on each rank


def entries(matrix):
    return {(int(s), int(d)): int(matrix[s, d]) for s, d in np.argwhere(matrix)}


def test_the_hand_fixture_in_normal_dispatch():
    volumes = count_volumes(FIXTURE, 8, TWO_NODES, 128)
    rows = {link: entries(volumes.matrix("dispatch", link, "rows")) for link in LINKS}
    assert rows["rdma"] == {(0, 2): 2}  # A and B
    assert rows["nvlink"] == {(0, 1): 1, (2, 3): 1}  # C, B
    # Rank 0 copies A and C for its own node and hands A to itself; rank 2 keeps A.
    assert rows["local"] == {(0, 0): 3, (2, 2): 1}
    assert volumes.counts.tokens_to_rank.tolist()[0] == [1, 1, 1, 1]
    assert volumes.counts.tokens_to_node.tolist()[0] == [2, 2]
    assert (volumes.matrix("combine", unit="rows") == volumes.matrix("dispatch", unit="rows").T).all()
    # H 128 in fp8: 128 + 4 + 8 + 4 * 2 + 4 * 2 = 156, padded to 160; back 256 + 8, padded to 272
    assert entries(
        volumes.matrix("dispatch", "rdma", classes=("payload", "scales", "header", "routing", "padding"))
    ) == {(0, 2): 320}
    assert volumes.matrix("combine", "rdma").tolist()[2][0] == 2 * 272
    # Control: (8 + 4 + 1) words to the same index of the other node, (2 + 2) words to each rank of the node.
    control = volumes.matrix("dispatch", classes="control")
    assert control[0].tolist() == [16, 16, 52, 0]


def test_the_hand_fixture_in_the_other_dialects():
    message = 128 + 4 + 16
    low_latency = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="low_latency")
    assert low_latency.matrix("dispatch", unit="rows")[0].tolist() == [1, 1, 1, 2]
    assert low_latency.matrix("dispatch", "rdma", classes=CLASSES[:-1]).sum() == 3 * message
    assert low_latency.matrix("combine", "rdma", classes="payload").sum() == 3 * 256
    hybrid = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="elastic")
    assert entries(hybrid.matrix("dispatch", unit="rows")) == {(0, 0): 1, (0, 1): 1, (0, 2): 2, (2, 2): 1, (2, 3): 1}
    direct = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="elastic", mode="direct")
    assert direct.matrix("dispatch", unit="rows")[0].tolist() == [1, 1, 1, 1]
    single = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="elastic", mode="single")
    assert single.matrix("combine", unit="rows")[:, 0].tolist() == [1, 1, 1, 2]
    gather = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="allgather")
    assert gather.matrix("dispatch", unit="rows")[0].tolist() == [3, 3, 3, 3]
    ragged = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="alltoallv")
    assert ragged.matrix("dispatch", unit="rows")[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("dispatch", "several", "payload", "there", "back"),
    [
        ("normal", False, "bf16", 14436, 14340),
        ("normal", False, "fp8", 7492, 14340),
        ("normal", True, "bf16", 14416, 14352),
        ("normal", True, "fp8", 7472, 14352),
        ("low_latency", True, "bf16", 14352, 14336),
        ("low_latency", True, "fp8", 7408, 14336),
        ("elastic", True, "bf16", 14464, 14400),
        ("elastic", True, "fp8", 7520, 14400),
    ],
)
def test_bytes_of_a_row_at_the_published_size(dispatch, several, payload, there, back):
    assert sum(dispatch_row(dispatch, several, 7168, 8, payload).classes.values()) == there
    row = combine_row(dispatch, several, 7168, 8, payload)
    assert sum(row.classes.values()) + sum(row.only_rdma.values()) == back


# deepseek-ai/DeepEP#51, #285, #407: every expert on the own node
def test_own_node_traffic_is_in_the_metric_and_not_on_the_nic():
    tables = [np.tile([0, 2], (5, 1)) for _ in range(2)] + [np.tile([4, 6], (5, 1)) for _ in range(2)]
    volumes = count_volumes(tables, 8, TWO_NODES, 256, payload="bf16")
    assert volumes.deepep()["rdma_send_bytes"].tolist() == [5 * 512] * 4
    assert volumes.matrix("dispatch", "rdma", "rows").sum() == 0
    assert volumes.nic("combine").sum() == 0


# deepseek-ai/DeepEP#51, #130: each token to both nodes: half of what the metric counts crosses
def test_the_metric_is_twice_the_nic_for_two_nodes():
    tables = [np.tile([0, 7], (6, 1))] * 4
    volumes = count_volumes(tables, 8, TWO_NODES, 128)
    rows = volumes.matrix("dispatch", "rdma", "rows")
    assert volumes.deepep()["rdma_send_bytes"].tolist() == [12 * 132] * 4
    assert rows.sum(axis=1).tolist() == [6] * 4
    data = volumes.matrix("dispatch", "rdma", classes=("payload", "scales")).sum(axis=1)
    assert (volumes.deepep()["rdma_send_bytes"] == 2 * data).all()


# deepseek-ai/DeepEP tests/legacy/test_low_latency.py, #141
def test_bytes_behind_published_low_latency_bandwidth():
    rng = np.random.default_rng(3)
    tables = [rng.permuted(np.tile(np.arange(256), (128, 1)), axis=1)[:, :8] for _ in range(16)]
    volumes = count_volumes(tables, 256, Topology(16), 7168, dispatch="low_latency")
    metric = volumes.deepep()
    assert set(metric["num_dispatch_comm_bytes"]) == {7_585_792}
    assert set(metric["num_combine_comm_bytes"]) == {14_680_064}
    for size, time_us, gigabytes in (
        (7_585_792, 77, 98.5), (7_585_792, 194, 39.1), (14_680_064, 114, 128.8), (14_680_064, 360, 40.8),
    ):  # fmt: skip
        assert round(size / time_us / 1e3, 1) == gigabytes
    tables[3][0, :] = -1  # each -1 takes one message away
    less = count_volumes(tables, 256, Topology(16), 7168, dispatch="low_latency").deepep()
    assert less["num_dispatch_comm_bytes"][3] == 7_585_792 - 8 * 7408


def test_metrics_of_the_other_dialects():
    one_node = count_volumes([[[0, 1], [2, 3]], [[0, 1], [0, -1]]], 4, Topology(2), 64)
    assert one_node.deepep() == {
        "nvl_recv_bytes": pytest.approx([3 * 66, 66]),
        "combine_bf16_nvl_send_bytes": pytest.approx([3 * 128, 128]),
    }
    elastic = count_volumes(FIXTURE, 8, TWO_NODES, 128, dispatch="elastic").deepep()
    row = 128 + 4 + 12 * 2
    assert elastic["dispatch_scaleout_bytes"].tolist() == [4 * row, 0, 0, 0]
    assert elastic["dispatch_scaleup_bytes"].tolist() == [row] * 4
    assert elastic["combine_scaleup_bytes"].tolist() == [256 + 8] * 4
    for wrong in ({"dispatch": "allgather"}, {"payload": "fp32"}):
        with pytest.raises(ValueError, match="DeepEP measures"):
            count_volumes(FIXTURE, 8, TWO_NODES, 128, **wrong).deepep()


# deepseek-ai/DeepEP#427
def test_all_tokens_to_one_expert():
    volumes = count_volumes([np.zeros((2304, 1), int)] * 16, 16, Topology(16), 8, dispatch="low_latency")
    received = volumes.matrix("dispatch", unit="rows").sum(axis=0)
    assert received.tolist() == [36864] + [0] * 15


# vllm-project/vllm#42254
def test_all_gather_against_the_all_to_alls_at_four_ranks():
    rng = np.random.default_rng(0)
    tables = [rng.permuted(np.tile(np.arange(256), (2000, 1)), axis=1)[:, :8] for _ in range(4)]
    copies = {}
    for dispatch in ("alltoallv", "allgather", "low_latency"):
        rows = count_volumes(tables, 256, Topology(4), 8, dispatch=dispatch).matrix("dispatch", unit="rows")
        copies[dispatch] = (rows.sum() - np.trace(rows)) / 8000
    assert copies["allgather"] == 3
    assert abs(copies["alltoallv"] - 3.6142 * 3 / 4) < 0.01
    assert abs(copies["low_latency"] - 6) < 0.03


@st.composite
def worlds(draw):
    nodes, width = draw(st.sampled_from([(1, 1), (1, 3), (1, 4), (2, 1), (2, 2), (3, 2), (2, 3)]))
    ranks = nodes * width
    local, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = random_tables(rng, ranks * local, ranks, top_k, 5, distinct=draw(st.booleans()))
    return tables, ranks * local, Topology(ranks, max(width, 1) if nodes > 1 else 4)


@given(worlds(), st.sampled_from(DISPATCHES), st.sampled_from(MODES), st.sampled_from(["fp8", "bf16", "fp32", "fp64"]))
@settings(max_examples=150)
def test_counts_equal_the_loops(world, dispatch, mode, payload):
    tables, experts, topology = world
    hidden = 130
    volumes = count_volumes(tables, experts, topology, hidden, dispatch, payload, mode)
    hops = rows_by_loop(tables, experts, topology, dispatch, mode)
    for direction in ("dispatch", "combine"):
        assert (volumes.matrix(direction, unit="rows") == sum(hops[direction])).all()
        for link in LINKS:
            for cls in CLASSES:
                expected = matrix_by_loop(
                    tables, experts, topology, hidden, dispatch, payload, mode, direction, link, cls
                )
                np.testing.assert_array_equal(volumes.matrix(direction, link, classes=cls), expected, f"{link} {cls}")


@given(worlds())
@settings(max_examples=60)
def test_identities_between_the_dialects(world):
    tables, experts, topology = world
    valid = sum(int((np.asarray(t) >= 0).sum()) for t in tables)
    volumes = {d: count_volumes(tables, experts, topology, 64, d) for d in DISPATCHES}
    slots = volumes["low_latency"].matrix("dispatch", unit="rows")
    assert slots.sum() == valid
    assert volumes["low_latency"].matrix("dispatch", classes=CLASSES[:-1]).sum() == valid * (64 + 4 + 16)
    per_rank = volumes["alltoallv"].matrix("dispatch", unit="rows")
    assert (per_rank <= slots).all()
    normal = volumes["normal"]
    last_hop = normal.hops[1 if topology.num_nodes > 1 else 0].rows
    assert (last_hop.sum(axis=0) == per_rank.sum(axis=0)).all()  # rows received
    for v in volumes.values():
        assert (v.matrix("combine", unit="rows") == v.matrix("dispatch", unit="rows").T).all()
        assert (sum(v.matrix("dispatch", link) for link in LINKS) == v.matrix("dispatch")).all()
        assert (sum(v.matrix("dispatch", classes=c) for c in CLASSES) == v.matrix("dispatch")).all()
        assert (v.matrix() == v.matrix("dispatch") + v.matrix("combine")).all()
        assert (v.wire() == v.matrix().sum(axis=1)).all()
    if topology.num_nodes > 1:
        rdma = normal.matrix("dispatch", "rdma", "rows")
        assert rdma.sum() <= normal.counts.tokens_to_node.sum()
        assert (rdma == volumes["elastic"].matrix("dispatch", "rdma", "rows")).all()
        assert (normal.counts.tokens_to_node.sum(axis=1) == normal.hops[0].rows.sum(axis=1)).all()


def test_layers_add_up():
    one = count_volumes(FIXTURE, 8, TWO_NODES, 128)
    both = one + count_volumes(FIXTURE[::-1], 8, TWO_NODES, 128)
    assert (both.matrix() == one.matrix() + one.matrix()[::-1, ::-1]).all()
    assert both.deepep()["nvl_recv_bytes"].tolist() == [2 * 132] * 4
    with pytest.raises(ValueError, match="cannot be added"):
        one + count_volumes(FIXTURE, 8, TWO_NODES, 256)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[[0, 8]], EMPTY, EMPTY, EMPTY], 8, TWO_NODES, 8), "rank 0, token 0, slot 1: id 8 .* 0 to 7"),
        (([EMPTY, EMPTY, [[1, 2], [0, -2]], EMPTY], 8, TWO_NODES, 8), "rank 2, token 1, slot 1: id -2"),
        (([[[0.0, 1.0]], EMPTY, EMPTY, EMPTY], 8, TWO_NODES, 8), "rank 0 has dtype float64"),
        (([EMPTY, [[0]], EMPTY, EMPTY], 8, TWO_NODES, 8), "rank 1 has shape \\[1, 1\\]"),
        (([EMPTY, [0, 1], EMPTY, EMPTY], 8, TWO_NODES, 8), "rank 1 has shape \\[2\\]"),
        (([EMPTY], 8, TWO_NODES, 8), "1 arrays for 4 ranks"),
        ((FIXTURE, 10, TWO_NODES, 8), "10 physical experts do not divide over 4 ranks: 2 more"),
        ((FIXTURE, 0, TWO_NODES, 8), "0 physical experts"),
        ((FIXTURE, 8, TWO_NODES, 0), "hidden = 0"),
        ((FIXTURE, 8, TWO_NODES, 8, "deepep"), "dispatch = 'deepep'"),
        ((FIXTURE, 8, TWO_NODES, 8, "normal", "int8"), "payload = 'int8'"),
        (
            (FIXTURE, 8, TWO_NODES, 7168, "low_latency", "logfmt10"),
            "LogFMT-10 row .* 9184 to 14560 bytes .* no routing",
        ),
        ((FIXTURE, 8, TWO_NODES, 8, "elastic", "fp8", "fast"), "mode = 'fast'"),
    ],
)
def test_wrong_input_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        count_volumes(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"direction": "there"}, "direction = 'there'"),
        ({"link": "nic"}, "link = 'nic'"),
        ({"unit": "tokens"}, "unit = 'tokens'"),
        ({"classes": "data"}, "class 'data'"),
        ({"unit": "rows", "classes": "payload"}, "leave classes out"),
    ],
)
def test_wrong_names_of_a_matrix(arguments, words):
    with pytest.raises(ValueError, match=words):
        count_volumes(FIXTURE, 8, TWO_NODES, 8).matrix(**arguments)

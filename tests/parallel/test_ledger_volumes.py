"""What a run records equals what the routing table says, by pair, link and class, to the byte."""

import ml_dtypes
import numpy as np
import pytest
from dispatch_oracle import BF16, run_exchange

import fp8
from parallel.dispatch.volumes import count_volumes
from parallel.ledger import CLASSES
from parallel.topology import LINKS, Topology

TOPOLOGIES = (Topology(1), Topology(4), Topology(4, 2), Topology(8, 4), Topology(6, 2), Topology(4, 1), Topology(16, 8))
KINDS = (
    ("normal", {}),
    ("low_latency", {}),
    ("elastic", {"mode": "hybrid"}),
    ("elastic", {"mode": "direct"}),
    ("elastic", {"mode": "single"}),
    ("allgather", {}),
    ("alltoallv", {}),
)
PAYLOADS = {"fp8": BF16, "bf16": BF16, "fp32": np.float32, "fp64": np.float64}


def recorded(dialect, options, topology, num_experts, idx, payload, hidden):
    """Run a batch with this routing; zeros are enough, only sizes count."""
    dtype = PAYLOADS[payload]
    x = [np.zeros((len(ids), hidden), dtype) for ids in idx]
    weights = [np.ones(ids.shape, np.float64 if payload == "fp64" else np.float32) for ids in idx]
    if payload == "fp8":
        x = [fp8.quantize(rows) for rows in x]
    _, _, network = run_exchange(
        dialect,
        topology,
        num_experts,
        x,
        idx,
        weights,
        expert=lambda pairs, first: np.zeros((len(pairs.row), hidden), dtype),
        **options,
    )
    return network.ledger


def assert_same_volumes(ledger, volumes):
    for direction in ("dispatch", "combine"):
        for link in (*LINKS, None):
            rows = ledger.matrix(direction, link, "rows")
            np.testing.assert_array_equal(rows, volumes.matrix(direction, link, "rows"))
            for classes in (*[(name,) for name in CLASSES if name != "cache"], None):
                sent = ledger.matrix(direction, link, classes=classes)
                counted = volumes.matrix(direction, link, classes=classes)
                np.testing.assert_array_equal(sent, counted, err_msg=f"{direction} {link} {classes}")


def random_case(rng):
    topology = TOPOLOGIES[rng.integers(len(TOPOLOGIES))]
    num_experts = topology.num_ranks * int(rng.integers(1, 4))
    top_k = int(rng.integers(1, min(num_experts, 9) + 1))
    tokens = rng.integers(0, 9, topology.num_ranks)
    idx = [np.argsort(rng.random((count, num_experts)), axis=1)[:, :top_k] for count in tokens]
    for ids in idx:
        ids[rng.random(ids.shape) < 0.15] = -1
    return topology, num_experts, idx


def check_random_tables(count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        topology, num_experts, idx = random_case(rng)
        dialect, options = KINDS[number % len(KINDS)]
        payload = list(PAYLOADS)[rng.integers(4)]
        hidden = int(rng.choice([4, 130, 256]))
        ledger = recorded(dialect, options, topology, num_experts, idx, payload, hidden)
        assert_same_volumes(ledger, count_volumes(idx, num_experts, topology, hidden, dialect, payload, **options))


def test_ledger_equals_count():
    check_random_tables(140, seed=0)


@pytest.mark.long
def test_ledger_equals_count_for_many_tables():
    check_random_tables(2000, seed=1)


def hand_routing():
    """All tokens on rank 0 of 2 nodes x 2 ranks, 2 experts a rank: A -> 0, 5; B -> 6, 7; C -> 3."""
    empty = np.zeros((0, 2), np.int64)
    return [np.array([[0, 5], [6, 7], [3, -1]]), empty, empty, empty]


def nonzero(matrix):
    return {(int(src), int(dst)): int(matrix[src, dst]) for src, dst in np.argwhere(matrix)}


def test_hand_counted_rows():
    topology, idx = Topology(4, 2), hand_routing()
    ledger = recorded("normal", {}, topology, 8, idx, "bf16", 8)
    assert nonzero(ledger.matrix("dispatch", "rdma", "rows")) == {(0, 2): 2}
    assert nonzero(ledger.matrix("dispatch", "nvlink", "rows")) == {(0, 1): 1, (2, 3): 1}
    first = ledger.matrix("dispatch", "local", "rows", stage="dispatch_send")
    assert nonzero(first) == {(0, 0): 2}  # A and C for the own node: a copy, and yet an entry
    assert nonzero(ledger.matrix("dispatch", "local", "rows", stage="dispatch_forward")) == {(0, 0): 1, (2, 2): 1}
    assert (ledger.matrix("combine", unit="rows") == ledger.matrix("dispatch", unit="rows").T).all()
    ledger = recorded("low_latency", {}, topology, 8, idx, "bf16", 8)
    assert nonzero(ledger.matrix("dispatch", unit="rows")) == {(0, 0): 1, (0, 1): 1, (0, 2): 1, (0, 3): 2}
    ledger = recorded("elastic", {}, topology, 8, idx, "bf16", 8)
    assert nonzero(ledger.matrix("dispatch", "local", "rows", stage="dispatch_send")) == {(0, 0): 1}
    ledger = recorded("allgather", {}, topology, 8, idx, "bf16", 8)
    assert nonzero(ledger.matrix("dispatch", unit="rows")) == {(0, rank): 3 for rank in range(4)}


@pytest.mark.parametrize(
    ("dialect", "topology", "payload", "there", "back"),
    [
        ("normal", Topology(2), "bf16", 14436, 14340),
        ("normal", Topology(2), "fp8", 7492, 14340),
        ("normal", Topology(2, 1), "bf16", 14416, 14352),
        ("normal", Topology(2, 1), "fp8", 7472, 14352),
        ("low_latency", Topology(2, 1), "fp8", 7408, 14336),
        ("low_latency", Topology(2, 1), "bf16", 14352, 14336),
        ("elastic", Topology(2, 1), "fp8", 7520, 14400),
        ("elastic", Topology(2, 1), "bf16", 14464, 14400),
        ("elastic", Topology(2), "bf16", 14464, 14336),
    ],
)
def test_published_row_sizes(dialect, topology, payload, there, back):
    """One token of hidden 7,168 and top-8, all experts on the other rank."""
    idx = [np.full((1, 8), -1), np.zeros((0, 8), np.int64)]
    idx[0][0, 0] = 1
    ledger = recorded(dialect, {}, topology, 2, idx, payload, 7168)
    sent = ledger.matrix("dispatch", classes=set(CLASSES) - {"control"})
    returned = ledger.matrix("combine", classes=set(CLASSES) - {"control"})
    assert sent[0, 1] == there
    assert returned[1, 0] == back


def test_own_node_traffic_is_not_rdma():
    """deepseek-ai/DeepEP#51: the tests' figure counts rows for the own node, which the NIC never sees."""
    idx = [np.zeros((5, 1), np.int64), *[np.zeros((0, 1), np.int64)] * 3]
    ledger = recorded("normal", {}, Topology(4, 2), 4, idx, "bf16", 8)
    assert ledger.matrix("dispatch", "rdma", classes=("payload",)).sum() == 0
    assert ledger.matrix("dispatch", "local", "rows", stage="dispatch_send").sum() == 5


def test_identities():
    rng = np.random.default_rng(4)
    topology = Topology(8, 4)
    idx = [np.argsort(rng.random((6, 16)), axis=1)[:, :5] for _ in range(8)]
    normal = recorded("normal", {}, topology, 16, idx, "fp8", 128)
    low_latency = recorded("low_latency", {}, topology, 16, idx, "fp8", 128)
    assert low_latency.matrix("dispatch", unit="rows").sum() == 8 * 6 * 5
    message = set(CLASSES) - {"control"}
    assert low_latency.matrix("dispatch", classes=message).sum() == 8 * 6 * 5 * (16 + 128 + 4)
    received = normal.matrix("dispatch", unit="rows", stage="dispatch_forward").sum(axis=0)
    for rank in range(8):
        hits = sum(int((ids // 2 == rank).any(axis=1).sum()) for ids in idx)
        assert received[rank] == hits
    assert (received <= low_latency.matrix("dispatch", unit="rows").sum(axis=0)).all()
    assert (normal.matrix("combine", unit="rows") == normal.matrix("dispatch", unit="rows").T).all()


def test_extreme_imbalance_is_counted_exactly():
    """deepseek-ai/DeepEP#427: 16 ranks of 2,304 tokens, all for expert 0."""
    idx = [np.zeros((2304, 1), np.int64) for _ in range(16)]
    ledger = recorded("low_latency", {}, Topology(16), 16, idx, "bf16", 1)
    assert nonzero(ledger.matrix("dispatch", unit="rows").sum(axis=0)[None, :]) == {(0, 0): 36864}


def test_padded_and_unselected_rows_move_nothing():
    """sgl-project/sglang#28378: rows of -1 add no rows and change no result."""
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    idx, weights = [rng.integers(0, 4, (3, 1)) for _ in range(2)], [np.ones((3, 1), np.float32)] * 2
    plain, _, network = run_exchange("normal", Topology(2), 4, x, idx, weights)
    padded_x = [np.concatenate([rows, np.full((2, 4), np.nan, ml_dtypes.bfloat16)]) for rows in x]
    padded_idx = [np.concatenate([ids, np.full((2, 1), -1)]) for ids in idx]
    padded_weights = [np.concatenate([w, np.full((2, 1), 1e30, np.float32)]) for w in weights]
    padded, _, padded_network = run_exchange("normal", Topology(2), 4, padded_x, padded_idx, padded_weights)
    for left, right in zip(plain, padded):
        assert left.tobytes() == right[:3].tobytes()
        assert (right[3:] == 0).all()
    assert (network.ledger.matrix() == padded_network.ledger.matrix()).all()

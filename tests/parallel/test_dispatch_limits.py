"""DeepEP's limits are reported and never enforced."""

import numpy as np
from dispatch_oracle import BF16, random_batch, run_exchange

from parallel.dispatch import deepep_limits
from parallel.topology import Topology


def test_published_deployments_have_no_limit():
    assert deepep_limits("normal", Topology(32), 7168, 8, 288, payload_bytes=1) == []
    assert deepep_limits("low_latency", Topology(144), 7168, 8, 288, 176) == []
    assert deepep_limits("elastic", Topology(72, 72), 7000, 32, 288) == []
    assert deepep_limits("allgather", Topology(3), 5, 100, 3) == []


def test_each_limit_is_a_sentence():
    assert deepep_limits("low_latency", Topology(7), 256, 12, 7, 512) == [
        "hidden 256: one of 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192",
        "top-k 12: at most 11",
        "512 tokens a rank: NVSHMEM_QP_DEPTH = 1024 allows 511",
    ]
    assert deepep_limits("normal", Topology(10, 2), 7, 33, 10) == [
        "top-k 33: at most 32",
        "rows of 14 B: multiples of 16 B",
        "2 ranks on each node: 8",
        "5 nodes: one of 2, 3, 4, 6, 8, 12, 16, 18, 20",
    ]
    assert deepep_limits("normal", Topology(3), 8, 1, 3075) == [
        "1025 experts on a rank: at most 1024",
        "3 ranks on a node: one of 2, 4, 8",
    ]
    assert deepep_limits("elastic", Topology(2), 8, 33, 2) == ["top-k 33: at most 32"]


def test_refused_shapes_run_here():
    """Hidden 7, 3 ranks, top-12: everything that the kernels refuse."""
    batch = random_batch(np.random.default_rng(0), [2, 3, 1], 15, 12, 7, BF16)
    for dialect in ("normal", "low_latency", "elastic"):
        y, _, _ = run_exchange(dialect, Topology(3), 15, *batch)
        assert [rows.shape for rows in y] == [(2, 7), (3, 7), (1, 7)]

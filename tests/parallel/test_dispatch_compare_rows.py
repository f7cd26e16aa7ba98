"""Rows in another order or layout are equal; a missing, doubled or changed one is named (deepseek-ai/DeepEP#441)."""

import numpy as np
import pytest
from dispatch_oracle import BF16, random_batch

from parallel.dispatch import (
    elastic_dispatch,
    elastic_expand,
    expanded_rows,
    low_latency_dispatch,
    low_latency_rows,
    row_differences,
)
from parallel.topology import Topology

TOPOLOGY = Topology(4, 2)


@pytest.fixture
def batch():
    return random_batch(np.random.default_rng(0), [3, 0, 5, 2], 8, 4, 6, BF16)


def test_orders_and_layouts_are_equal(batch):
    x, idx, weights = batch
    plain = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False, fill=np.nan)
    racy = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False, arrival_seed=1)
    elastic = elastic_dispatch(x, idx, weights, 8, TOPOLOGY, 5)
    other = elastic_dispatch(x, idx, weights, 8, TOPOLOGY, 5, arrival_seed=2)
    assert any(a.recv_x.tobytes() != b.recv_x.tobytes() for a, b in zip(elastic, other))
    assert any(a.packed_recv_x.tobytes() != b.packed_recv_x.tobytes() for a, b in zip(plain, racy))
    for rank in range(4):
        expected = low_latency_rows(plain[rank])
        assert len(expected.key) == sum((ids // 2 == rank).sum() for ids in idx)
        assert row_differences(expected, low_latency_rows(racy[rank])) == []
        expanded = elastic_expand(elastic[rank], 8, TOPOLOGY, 5, expert_alignment=4, fill=np.nan)
        assert row_differences(expected, expanded_rows(expanded, 5)) == []
        expanded = elastic_expand(other[rank], 8, TOPOLOGY, 5, expert_alignment=4, fill=np.nan)
        assert row_differences(expected, expanded_rows(expanded, 5)) == []


def test_cast_rows_are_compared_with_their_scales(batch):
    x, idx, _ = batch
    plain = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY)
    racy = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, arrival_seed=1)
    for left, right in zip(plain, racy):
        assert row_differences(low_latency_rows(left), low_latency_rows(right)) == []
    right.packed_recv_x[1][0, 0, 0] *= 2
    assert len(row_differences(low_latency_rows(left), low_latency_rows(right))) == 1


def test_differences_are_named():
    idx = [np.array([[0], [0]]), np.array([[0], [1]])]
    x = [np.ones((2, 4), BF16)] * 2
    rows = low_latency_rows(low_latency_dispatch(x, idx, 2, 2, Topology(2), use_fp8=False)[0])
    assert rows.key.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    fewer = rows._replace(key=rows.key[1:], rows=(rows.rows[0][1:],))
    assert row_differences(rows, fewer) == ["expert 0, rank 0, token 0: missing in the second"]
    doubled = rows._replace(key=rows.key[[0, 1, 1, 2]], rows=(rows.rows[0][[0, 1, 1, 2]],))
    assert row_differences(rows, doubled) == ["expert 0, rank 0, token 1: 1 times in the first, 2 in the second"]
    changed = rows.rows[0].copy()
    changed[2, 3] = 7
    assert row_differences(rows, rows._replace(rows=(changed,))) == ["expert 0, rank 1, token 0: the rows differ"]

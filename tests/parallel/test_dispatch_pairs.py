"""What experts get: every (token, expert) once, by expert and then in the dialect's receive order, in the form sent."""

from itertools import pairwise

import numpy as np
import pytest
from dispatch_oracle import BF16, random_batch, run_exchange
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8
from parallel.dispatch import DIALECTS
from parallel.topology import Topology

TOPOLOGIES = (Topology(1), Topology(4), Topology(4, 2), Topology(8, 4), Topology(16, 8))


def labelled(idx):
    """Rows that say where they come from: (source rank, token)."""
    return [
        np.stack([np.full(len(ids), rank), np.arange(len(ids))], axis=1).astype(np.float64)
        for rank, ids in enumerate(idx)
    ]


def collect_pairs(dialect, topology, num_experts, idx, **options):
    """{global expert: [(source, token), ...] in the order of the pairs}."""
    found = {}

    def expert(pairs, first):
        assert (np.diff(pairs.expert) >= 0).all()
        for row, local in zip(pairs.row, pairs.expert):
            found.setdefault(first + int(local), []).append(tuple(pairs.x[row].astype(int).tolist()))
        return pairs.x[pairs.row]

    weights = [np.ones(ids.shape) for ids in idx]
    run_exchange(dialect, topology, num_experts, labelled(idx), idx, weights, expert=expert, **options)
    return found


@settings(max_examples=60)
@given(st.sampled_from(DIALECTS), st.sampled_from(TOPOLOGIES), st.integers(0, 2**32))
def test_pairs_stand_by_expert_source_and_token(dialect, topology, seed):
    rng = np.random.default_rng(seed)
    num_experts = 2 * topology.num_ranks
    _, idx, _ = random_batch(rng, rng.integers(0, 6, topology.num_ranks), num_experts, 2, 1, BF16)
    found = collect_pairs(dialect, topology, num_experts, idx)
    for expert in range(num_experts):
        expected = [
            (rank, token) for rank, ids in enumerate(idx) for token in np.flatnonzero((ids == expert).any(axis=1))
        ]
        assert found.get(expert, []) == expected


@pytest.mark.parametrize("dialect", ["low_latency", "elastic"])
def test_seeded_orders_are_other_orders_of_the_same_pairs(dialect):
    rng = np.random.default_rng(0)
    _, idx, _ = random_batch(rng, [6] * 4, 4, 2, 1, BF16)
    plain = collect_pairs(dialect, Topology(4), 4, idx)
    orders = [collect_pairs(dialect, Topology(4), 4, idx, arrival_seed=seed) for seed in (0, 1, 1)]
    assert orders[0] != plain
    assert orders[0] != orders[1]
    assert orders[1] == orders[2]
    for order in orders:
        assert {expert: sorted(pairs) for expert, pairs in order.items()} == plain
        for pairs in order.values():  # a source's rows stay together
            sources = [source for source, _ in pairs]
            assert sum(a != b for a, b in pairwise(sources)) == len(set(sources)) - 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("topology", [Topology(4), Topology(4, 2)])
def test_scaled_rows_arrive_as_they_were_sent(dialect, topology):
    rng = np.random.default_rng(0)
    _, idx, weights = random_batch(rng, [3, 0, 4, 1], 8, 3, 1, BF16)
    wide = [rng.standard_normal((len(ids), 192)).astype(np.float32) for ids in idx]
    scaled = [fp8.quantize(rows) for rows in wide]
    known = {rows.codes[t].tobytes() + rows.scale[t].tobytes() for rows in scaled for t in range(len(rows.codes))}

    def expert(pairs, first):
        assert isinstance(pairs.x, fp8.BlockScaled)
        for row in pairs.row:
            assert pairs.x.codes[row].tobytes() + pairs.x.scale[row].tobytes() in known
        return pairs.x.rows(pairs.row).dequantize(BF16)

    y, _, _ = run_exchange(dialect, topology, 8, scaled, idx, weights, expert=expert)
    for rows, ids, w, result in zip(scaled, idx, weights, y):
        assert result.dtype == BF16
        total = np.where(ids >= 0, w, 0).sum(axis=1, keepdims=True) * rows.dequantize(np.float64)
        np.testing.assert_allclose(result.astype(np.float64), total, rtol=0.03, atol=0.03)

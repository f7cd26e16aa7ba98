"""DeepEP's elastic dispatch: what arrives, in which order, and the expanded layout."""

import numpy as np
import pytest
from dispatch_oracle import BF16, random_batch
from test_dispatch_deepep_normal import Capture

import fp8
from parallel.dispatch import CapacityError, elastic_dispatch, elastic_expand, elastic_reduce
from parallel.network import Network
from parallel.topology import Topology


@pytest.mark.parametrize("topology", [Topology(4), Topology(4, 2), Topology(8, 2), Topology(1)])
@pytest.mark.parametrize("mode", ["hybrid", "direct"])
def test_rows_stand_by_source_and_token(topology, mode):
    ranks = topology.num_ranks
    tokens = [5, 0, 3, 1, 4, 2, 0, 6][:ranks]
    x, idx, weights = random_batch(np.random.default_rng(1), tokens, 2 * ranks, min(4, 2 * ranks), 4, BF16)
    idx = [ids.astype(np.int32) for ids in idx]
    network = Network(topology)
    results = elastic_dispatch(x, idx, weights, 2 * ranks, topology, 6, mode=mode, network=network)
    assert network.pending() == []
    for rank, result in enumerate(results):
        row, per_rank = 0, [0] * ranks
        for source, ids in enumerate(idx):
            for token in range(len(ids)):
                mine = [int(i) - 2 * rank if i >= 0 and i // 2 == rank else -1 for i in ids[token]]
                if max(mine) < 0:
                    continue
                assert result.recv_x[row].tobytes() == x[source][token].tobytes()
                assert result.recv_topk_idx[row].tolist() == mine
                assert result.recv_topk_weights[row].tolist() == weights[source][token].tolist()
                assert result.recv_src_token_idx[row] == source * 6 + token
                per_rank[source] += 1
                row += 1
        assert len(result.recv_x) == row
        assert result.num_recv_tokens_per_rank.tolist() == per_rank
        assert result.recv_topk_idx.dtype == result.recv_src_token_idx.dtype == np.int32


@pytest.mark.parametrize(
    ("topology", "mode"), [(Topology(4, 2), "hybrid"), (Topology(4, 2), "direct"), (Topology(4), "")]
)
def test_counts_that_travel_by_hand(topology, mode):
    """2 experts a rank: A -> 0, 5; B -> 6, 7; C -> 3, all on rank 0: to each rank its rows and its experts' slots."""
    empty = np.zeros((0, 2), np.int64)
    idx = [np.array([[0, 5], [6, 7], [3, -1]]), empty, empty, empty]
    weights, x = [np.ones(ids.shape, np.float32) for ids in idx], [np.zeros((len(ids), 1), BF16) for ids in idx]
    network = Capture(topology)
    elastic_dispatch(x, idx, weights, 8, topology, 3, mode=mode or "hybrid", network=network)
    assert network.sent["dispatch_send", 0, "control"].tolist() == [[1, 1, 0], [1, 0, 1], [1, 0, 1], [1, 1, 1]]
    assert not network.sent["dispatch_send", 1, "control"].any()


def test_pairs_of_codes_and_scales_come_back_as_pairs():
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((3, 256)).astype(np.float32) for _ in range(2)]
    scaled = [fp8.quantize(rows) for rows in wide]
    idx, weights = [np.array([[0, 1], [1, -1], [0, -1]])] * 2, [np.ones((3, 2), np.float32)] * 2
    pairs = [(s.codes, s.scale) for s in scaled]
    result = elastic_dispatch(pairs, idx, weights, 2, Topology(2, 1), 3)[1]
    codes, scale = result.recv_x
    expected = [scaled[source].rows([0, 1]) for source in range(2)]
    assert codes.tobytes() == b"".join(rows.codes.tobytes() for rows in expected)
    assert scale.tobytes() == b"".join(rows.scale.tobytes() for rows in expected)


def test_expanded_rows_by_hand():
    """Rank 0 holds experts 0 and 1; rows [0, 1], [1, -1], [1, 0] expand to 2 and 3 rows in groups of 4."""
    idx = [np.array([[0, 1], [1, -1], [1, 0]])]
    x, weights = [np.array([[1.0], [2.0], [3.0]])], [np.array([[0.1, 0.2], [0.3, 9.0], [0.4, 0.5]])]
    received = elastic_dispatch(x, idx, weights, 2, Topology(1), 3)[0]
    expanded = elastic_expand(received, 2, Topology(1), 3, expert_alignment=4, fill=np.nan)
    expected = [[1.0], [3.0], [np.nan], [np.nan], [1.0], [2.0], [3.0], [np.nan]]
    np.testing.assert_array_equal(expanded.recv_x, expected)
    np.testing.assert_array_equal(expanded.recv_topk_weights, [0.1, 0.5, np.nan, np.nan, 0.2, 0.3, 0.4, np.nan])
    assert expanded.psum_num_recv_tokens_per_expert.tolist() == [2, 7]
    assert expanded.recv_src_metadata.tolist() == [[0, 1, 0, 4], [1, 0, 5, -1], [2, 1, 6, 1]]


@pytest.mark.parametrize("alignment", [1, 128])
def test_alignment_changes_no_row(alignment):
    """InternLM/xtuner#2053: local counts [2, 3, 0, 130] become groups that begin at [0, 128, 256, 256]."""
    slots = np.repeat([0, 1, 3], [2, 3, 130])[:, None]
    x = [np.arange(135.0)[:, None]]
    received = elastic_dispatch(x, [slots], [np.ones((135, 1))], 4, Topology(1), 135)[0]
    expanded = elastic_expand(received, 4, Topology(1), 135, expert_alignment=alignment, fill=np.nan)
    ends = expanded.psum_num_recv_tokens_per_expert
    begins = [0, 128, 256, 256] if alignment == 128 else [0, 2, 5, 5]
    assert ends.tolist() == [b + c for b, c in zip(begins, [2, 3, 0, 130])]
    rows = np.concatenate([expanded.recv_x[b:e] for b, e in zip(begins, ends)])
    np.testing.assert_array_equal(rows, x[0])
    assert len(expanded.recv_x) == (512 if alignment == 128 else 135)


def test_expanded_rows_lead_back_to_the_sum():
    """Through the metadata, one reduction over a token's slots, as a single-reduction combine makes it."""
    topology = Topology(1)
    x, idx, weights = random_batch(np.random.default_rng(2), [6], 5, 3, 4, BF16)
    received = elastic_dispatch(x, idx, weights, 5, topology, 6)[0]
    expanded = elastic_expand(received, 5, topology, 6, expert_alignment=8, fill=np.nan)
    y = np.full((6, 3, 4), np.nan).astype(BF16)
    for row, meta in enumerate(expanded.recv_src_metadata):
        for slot, place in enumerate(meta[2:]):
            if place >= 0:
                y[meta[0], slot] = expanded.recv_x[place]
                assert received.recv_topk_idx[row, slot] >= 0
    expected = elastic_reduce(np.repeat(x[0][:, None], 3, axis=1), idx[0], 5, topology, mode="single")
    assert elastic_reduce(y, idx[0], 5, topology, mode="single").tobytes() == expected.tobytes()


def test_capacity_is_named():
    x, idx = [np.zeros((1, 1)), np.zeros((4, 1))], [np.zeros((1, 1), np.int64), np.zeros((4, 1), np.int64)]
    weights = [np.ones(ids.shape) for ids in idx]
    with pytest.raises(CapacityError, match=r"rank 1, layer 0, .*: needed 4 tokens, have 3"):
        elastic_dispatch(x, idx, weights, 2, Topology(2), 3)
    assert elastic_dispatch(x, idx, weights, 2, Topology(2), 4)[0].recv_src_token_idx.tolist() == [0, 4, 5, 6, 7]

"""DeepEP's normal calls: layouts, receive order, handles, conventions, combine."""

import numpy as np
import pytest
from dispatch_oracle import BF16, add_up, random_batch, run_exchange
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8
from parallel.dispatch import get_dispatch_layout, normal_combine, normal_dispatch
from parallel.network import Network
from parallel.topology import Topology

TOPOLOGIES = (Topology(1), Topology(2), Topology(4), Topology(4, 2), Topology(8, 4), Topology(8, 2), Topology(4, 1))


def routing(rng, topology, num_experts, top_k, tokens):
    x, idx, weights = random_batch(rng, tokens, num_experts, top_k, 4, BF16)
    return x, idx, [w.astype(np.float32) for w in weights]


@st.composite
def batches(draw):
    topology = draw(st.sampled_from(TOPOLOGIES))
    num_experts = topology.num_ranks * draw(st.integers(1, 3))
    tokens = [draw(st.integers(0, 12)) for _ in range(topology.num_ranks)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (
        topology,
        num_experts,
        *routing(rng, topology, num_experts, draw(st.integers(1, min(num_experts, 5))), tokens),
    )


def test_layout_of_the_hand_example():
    """2 nodes x 2 ranks, 2 experts a rank: A -> 0, 5; B -> 6, 7; C -> 3."""
    layout = get_dispatch_layout(np.array([[0, 5], [6, 7], [3, -1]]), 8, Topology(4, 2))
    assert layout.num_tokens_per_rank.tolist() == [1, 1, 1, 1]
    assert layout.num_tokens_per_rdma_rank.tolist() == [2, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 0, 0, 1, 0, 1, 1, 1]
    assert layout.is_token_in_rank.tolist() == [[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert layout.num_tokens_per_rank.dtype == layout.num_tokens_per_expert.dtype == np.int32
    assert get_dispatch_layout(np.array([[0, 5]]), 8, Topology(4)).num_tokens_per_rdma_rank is None


def test_ids_that_do_not_exist_are_errors():
    for wrong in (8, -2):
        with pytest.raises(ValueError, match=str(wrong)):
            get_dispatch_layout(np.array([[0, wrong]]), 8, Topology(4))
    with pytest.raises(ValueError, match="288"):
        get_dispatch_layout(np.array([[0]]), 257, Topology(144))
    with pytest.raises(ValueError, match="integer"):
        get_dispatch_layout(np.array([[0.0]]), 8, Topology(4))


def test_minus_one_does_not_wrap():
    """vllm-project/vllm#46408: local pairs per rank, with and without unselected slots."""
    idx = np.array([[2, 3, 0, 5, 2, 7]]).T
    assert get_dispatch_layout(idx, 8, Topology(4)).num_tokens_per_rank.tolist() == [1, 3, 1, 1]
    with_none = np.concatenate([idx, [[-1]]])
    assert get_dispatch_layout(with_none, 8, Topology(4)).num_tokens_per_rank.tolist() == [1, 3, 1, 1]
    assert get_dispatch_layout(with_none, 8, Topology(4)).is_token_in_rank[-1].tolist() == [False] * 4


@pytest.mark.parametrize("topology", [Topology(4), Topology(4, 2)])
def test_what_the_hand_example_receives(topology):
    idx = [np.array([[0, 5], [6, 7], [3, -1]])] + [np.zeros((0, 2), np.int64)] * 3
    weights = [np.array([[0.5, 0.25], [1, 2], [4, 8]], np.float32)] + [np.zeros((0, 2), np.float32)] * 3
    x = [np.arange(3.0).astype(BF16)[:, None]] + [np.zeros((0, 1), BF16)] * 3
    results = normal_dispatch(x, idx, weights, 8, topology)
    assert [r.recv_x.astype(float).tolist() for r in results] == [[[0.0]], [[2.0]], [[0.0]], [[1.0]]]
    assert [r.recv_topk_idx.tolist() for r in results] == [[[0, -1]], [[1, -1]], [[-1, 1]], [[0, 1]]]
    assert [r.recv_topk_weights.tolist() for r in results] == [[[0.5, 0]], [[4, 0]], [[0, 0.25]], [[1, 2]]]
    assert [r.num_recv_tokens_per_expert_list for r in results] == [[1, 0], [0, 1], [0, 1], [1, 1]]


@settings(max_examples=60)
@given(batches())
def test_rows_stand_by_source_rank_and_token(batch):
    topology, num_experts, x, idx, weights = batch
    local = num_experts // topology.num_ranks
    results = normal_dispatch(x, idx, weights, num_experts, topology)
    for rank, result in enumerate(results):
        row = 0
        counts = [0] * local
        for source, ids in enumerate(idx):
            for token in range(len(ids)):
                mine = [int(i) - rank * local if i >= 0 and i // local == rank else -1 for i in ids[token]]
                if max(mine) < 0:
                    continue
                assert result.recv_x[row].tobytes() == x[source][token].tobytes()
                assert result.recv_topk_idx[row].tolist() == mine
                expected = [w if i >= 0 else 0.0 for i, w in zip(mine, weights[source][token])]
                assert result.recv_topk_weights[row].tolist() == expected
                for i in mine:
                    counts[i] += i >= 0
                row += 1
        assert len(result.recv_x) == row
        assert result.num_recv_tokens_per_expert_list == counts


@settings(max_examples=60)
@given(batches(), st.integers(0, 2))
def test_combine_sums_rows_by_rank_and_node(batch, num_bias):
    topology, num_experts, x, idx, weights = batch
    rng = np.random.default_rng(0)
    results = normal_dispatch(x, idx, weights, num_experts, topology)
    rows = [(rng.standard_normal(r.recv_x.shape) * 8).astype(BF16) for r in results]
    biases = [[rng.standard_normal(b.shape).astype(BF16) for _ in range(num_bias)] for b in x]
    bias = {0: None, 1: [b[0] for b in biases if b], 2: [tuple(b) for b in biases]}[num_bias]
    sent = [r.recv_topk_weights for r in results]
    combined = normal_combine(rows, [r.handle for r in results], topology, sent, bias)
    used = [0] * topology.num_ranks
    for source, ids in enumerate(idx):
        for token in range(len(ids)):
            nodes = {}
            for rank in sorted({int(i) * topology.num_ranks // num_experts for i in ids[token] if i >= 0}):
                nodes.setdefault(topology.node(rank), []).append(rows[rank][used[rank]])
                used[rank] += 1
            several = topology.num_nodes > 1
            parts = [add_up(part, BF16) for part in nodes.values()] if several else nodes.get(0, [])
            start = sum((b[token].astype(np.float32) for b in biases[source]), np.zeros(4, np.float32))
            expected = start.copy()
            for part in parts:
                expected = expected + part.astype(np.float32)
            assert combined[source][0][token].tobytes() == expected.astype(BF16).tobytes()
        np.testing.assert_array_equal(combined[source][1], np.where(ids >= 0, weights[source], 0))


class Capture(Network):
    """Remembers what was sent: (stage, rank, name) -> bytes."""

    def __init__(self, topology):
        super().__init__(topology)
        self.sent = {}

    def _post(self, src, outgoing, tag):
        arrays = {**outgoing.arrays, "control": outgoing.control}
        self.sent |= {(tag.stage, src, name): array for name, array in arrays.items() if array is not None}
        super()._post(src, outgoing, tag)


@settings(max_examples=30)
@given(batches())
def test_calls_and_exchanges_send_the_same(batch):
    topology, num_experts, x, idx, weights = batch
    call, exchange = Capture(topology), Capture(topology)
    results = normal_dispatch(x, idx, weights, num_experts, topology, network=call)
    normal_combine([r.recv_x for r in results], [r.handle for r in results], topology, network=call)
    run_exchange("normal", topology, num_experts, x, idx, weights, network=exchange)
    assert call.sent.keys() == exchange.sent.keys()
    for key, array in call.sent.items():
        if key[0].startswith("dispatch") or key[2] != "x":
            np.testing.assert_array_equal(array, exchange.sent[key], err_msg=str(key))


def test_notifications_by_hand():
    """2 nodes x 2 ranks, 2 experts a rank: A -> 0, 5; B -> 6, 7; C -> 3, all on rank 0."""
    empty = np.zeros((0, 2), np.int64)
    idx = [np.array([[0, 5], [6, 7], [3, -1]]), empty, empty, empty]
    weights, x = [np.ones(ids.shape, np.float32) for ids in idx], [np.zeros((len(ids), 1), BF16) for ids in idx]
    network = Capture(Topology(4, 2))
    normal_dispatch(x, idx, weights, 8, Topology(4, 2), network=network)
    # to node 1: rows for its ranks (8 places), slots for its experts, rows for the node
    assert network.sent["dispatch_send", 0, "control"].tolist() == [[1, 1, *[0] * 6, 0, 1, 1, 1, 2]]
    # to ranks 0 and 1: rows from each node, slots for each of their experts
    assert network.sent["dispatch_forward", 0, "control"].tolist() == [[1, 0, 1, 0], [1, 0, 0, 1]]
    assert network.sent["dispatch_forward", 2, "control"].tolist() == [[1, 0, 0, 1], [1, 0, 1, 1]]
    network = Capture(Topology(4))
    normal_dispatch(x, idx, weights, 8, Topology(4), network=network)
    assert network.sent["dispatch_send", 0, "control"].tolist() == [[1, 1, 0], [1, 0, 1], [1, 0, 1], [1, 1, 1]]


@settings(max_examples=30)
@given(batches())
def test_calls_and_exchanges_move_the_same_bytes(batch):
    topology, num_experts, x, idx, weights = batch
    network = Network(topology)
    results = normal_dispatch(x, idx, weights, num_experts, topology, network=network)
    normal_combine([r.recv_x for r in results], [r.handle for r in results], topology, network=network)
    _, exchanges, other = run_exchange("normal", topology, num_experts, x, idx, weights)
    assert network.pending() == []
    for direction in ("dispatch", "combine"):
        for name in ("payload", "header", "routing", "padding", "control"):
            left = network.ledger.matrix(direction, classes=name)
            np.testing.assert_array_equal(left, other.ledger.matrix(direction, classes=name))
    for result, exchange in zip(results, exchanges):
        if topology.num_nodes == 1:
            np.testing.assert_array_equal(result.handle.recv_src_idx, exchange.recv_src_idx)
        else:
            meta = exchange._recv_meta[exchange.recv_order]
            np.testing.assert_array_equal(result.handle.recv_src_meta, meta)


def test_intranode_handle_by_hand():
    """Two ranks, three tokens on rank 0 and two on rank 1, two channels: tokens 0 and 1, then token 2."""
    idx = [np.array([[0], [1], [0]]), np.array([[1], [0]])]
    x = [np.zeros((3, 1), BF16), np.zeros((2, 1), BF16)]
    weights = [np.ones((3, 1), np.float32), np.ones((2, 1), np.float32)]
    zero, one = (r.handle for r in normal_dispatch(x, idx, weights, 2, Topology(2), num_sms=4))
    assert zero.rank_prefix_matrix.tolist() == one.rank_prefix_matrix.tolist() == [[2, 1], [3, 2]]
    assert zero.channel_prefix_matrix.tolist() == [[1, 2], [1, 1]]
    assert one.channel_prefix_matrix.tolist() == [[0, 1], [1, 1]]
    assert zero.recv_channel_prefix_matrix.tolist() == [[0, 1], [0, 0]]
    assert zero.recv_src_idx.tolist() == [0, 2, 1]
    assert one.recv_src_idx.tolist() == [1, 0]
    assert zero.is_token_in_rank.tolist() == [[True, False], [False, True], [True, False]]
    assert zero.send_head.tolist() == [[0, -1], [-1, 0], [0, -1]]


def test_internode_handle_by_hand():
    """2 nodes x 1 rank: every row crosses once, and one channel holds all tokens."""
    idx = [np.array([[0, 1], [1, -1], [0, -1]]), np.array([[0, 1]])]
    x = [np.zeros((len(ids), 1), BF16) for ids in idx]
    weights = [np.ones(ids.shape, np.float32) for ids in idx]
    zero, one = (r.handle for r in normal_dispatch(x, idx, weights, 2, Topology(2, 1), num_sms=2))
    assert zero.rdma_channel_prefix_matrix.tolist() == zero.gbl_channel_prefix_matrix.tolist() == [[2], [2]]
    assert zero.recv_rdma_channel_prefix_matrix.tolist() == [[2], [1]]
    assert zero.recv_rdma_rank_prefix_sum.tolist() == [2, 3]
    assert zero.recv_gbl_channel_prefix_matrix.tolist() == [[0], [2]]
    assert zero.recv_gbl_rank_prefix_sum.tolist() == [2, 3]
    assert zero.recv_src_meta.tolist() == [[0, 1], [0, 1], [1, 1]]
    assert zero.send_rdma_head.tolist() == [[0, 0], [-1, 1], [1, -1]]
    assert zero.send_nvl_head.tolist() == [[0], [1], [2]]
    assert one.recv_gbl_rank_prefix_sum.tolist() == [2, 3]


@pytest.mark.parametrize("topology", [Topology(4), Topology(4, 2)])
def test_cached_dispatch_sends_other_rows_the_same_way(topology):
    rng = np.random.default_rng(1)
    x, idx, weights = routing(rng, topology, 8, 3, [4, 0, 5, 2])
    first = normal_dispatch(x, idx, weights, 8, topology)
    network = Network(topology)
    again = normal_dispatch(
        [2 * rows for rows in x], None, None, 8, topology, handle=[r.handle for r in first], network=network
    )
    for old, new in zip(first, again):
        assert (new.recv_x == 2 * old.recv_x).all()
        assert new.recv_topk_idx is None
        assert new.recv_topk_weights is None
    assert network.ledger.matrix(classes=("routing", "control")).sum() == 0
    row = {1: 8 + 4, 2: 16}[topology.num_nodes]  # 2 H + 4, or align16(2 H + 8)
    rows = network.ledger.matrix(unit="rows").sum()
    assert network.ledger.matrix().sum() == rows * row


def test_worst_case_rows():
    """num_worst_tokens: as many rows everywhere, no counts, -1 and undefined values in the tail."""
    idx, x = [np.array([[0, 1]]), np.array([[1, 0]])], [np.ones((1, 3), BF16)] * 2
    weights = [np.ones((1, 2), np.float32)] * 2
    for result in normal_dispatch(x, idx, weights, 4, Topology(2), num_worst_tokens=4, fill=np.nan)[:1]:
        assert result.recv_x.shape == (4, 3)
        assert np.isnan(result.recv_x[2:].astype(float)).all()
        assert result.recv_topk_idx.tolist() == [[0, 1], [1, 0], [-1, -1], [-1, -1]]
        assert np.isnan(result.recv_topk_weights[2:]).all()
        assert result.num_recv_tokens_per_expert_list == []
    with pytest.raises(ValueError, match="rank 0 receives 2 tokens, num_worst_tokens is 1: 2 would do"):
        normal_dispatch(x, idx, weights, 4, Topology(2), num_worst_tokens=1)


def test_aligned_counts_are_not_rows():
    """InternLM/xtuner#2053: counts are rounded up (0 stays 0), rows are not padded, one row serves two experts."""
    idx, x = [np.array([[0, 1]])], [np.ones((1, 3), BF16)]
    (result,) = normal_dispatch(x, idx, [np.ones((1, 2), np.float32)], 3, Topology(1), expert_alignment=128)
    assert result.num_recv_tokens_per_expert_list == [128, 128, 0]
    assert len(result.recv_x) == 1
    slots = np.repeat(np.array([0, 1, 3]), [2, 3, 130])[:, None]
    (result,) = normal_dispatch(
        [np.ones((135, 3), BF16)], [slots], [np.ones((135, 1), np.float32)], 4, Topology(1), expert_alignment=128
    )
    assert result.num_recv_tokens_per_expert_list == [128, 128, 0, 256]
    assert len(result.recv_x) == 135


@pytest.mark.parametrize("topology", [Topology(2), Topology(2, 1)])
def test_fp8_rows_keep_their_scales(topology):
    rng = np.random.default_rng(0)
    x, idx, weights = routing(rng, topology, 4, 2, [3, 5])
    wide = [rng.standard_normal((len(rows), 192)).astype(np.float32) for rows in x]  # the last block is partial
    scaled = [fp8.quantize(rows) for rows in wide]
    pairs = [(s.codes, np.asfortranarray(s.scale)) for s in scaled]  # column-major scales, as DeepEP's tests use
    for result, plain in zip(
        normal_dispatch(pairs, idx, weights, 4, topology), normal_dispatch(wide, idx, weights, 4, topology)
    ):
        codes, scale = result.recv_x
        expected = fp8.quantize(plain.recv_x)
        assert codes.tobytes() == expected.codes.tobytes()
        np.testing.assert_array_equal(scale, expected.scale)


def test_ranks_without_tokens_take_part():
    """sgl-project/sglang#25397: 5, 0, 0 and 1 tokens, and none at all."""
    for tokens in ([5, 0, 0, 1], [0, 0, 0, 0]):
        x, idx, weights = routing(np.random.default_rng(0), Topology(4), 8, 2, tokens)
        results = normal_dispatch(x, idx, weights, 8, Topology(4))
        combined = normal_combine([r.recv_x for r in results], [r.handle for r in results], Topology(4))
        assert [len(y) for y, _ in combined] == tokens
        assert all(np.isfinite(y.astype(float)).all() for y, _ in combined)


def test_refuses_half_a_routing():
    x, idx = [np.zeros((1, 1), BF16)], [np.zeros((1, 1), np.int64)]
    with pytest.raises(ValueError, match="together"):
        normal_dispatch(x, idx, None, 1, Topology(1))
    with pytest.raises(ValueError, match="handle"):
        normal_dispatch(x, None, None, 1, Topology(1))

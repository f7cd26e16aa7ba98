"""DeepEP's low-latency calls: buffers, counts, ranges, the cast on the way, combine."""

import numpy as np
import pytest
from dispatch_oracle import BF16, plain_sum, random_batch

import fp8
from parallel.dispatch import (
    CapacityError,
    get_next_low_latency_combine_buffer,
    low_latency_combine,
    low_latency_dispatch,
)
from parallel.network import Network
from parallel.topology import Topology

TOPOLOGY = Topology(4, 2)


@pytest.fixture
def batch():
    x, idx, weights = random_batch(np.random.default_rng(7), [3, 0, 5, 2], 8, 4, 128, BF16)
    return x, idx, weights


def arrived(result, topology):
    """{(expert, source, token): (row, scale or None)} through the handle, and what is left is undefined."""
    found = {}
    src_info, layout_range, *_ = result.handle
    data = result.packed_recv_x if isinstance(result.packed_recv_x, tuple) else (result.packed_recv_x,)
    for expert in range(len(src_info)):
        seen = 0
        for source in range(topology.num_ranks):
            count, begin = int(layout_range[expert, source]) & 0xFFFFFFFF, int(layout_range[expert, source]) >> 32
            for place in range(begin, begin + count):
                key = (expert, source, int(src_info[expert, place]))
                assert key not in found
                found[key] = tuple(part[expert, place] for part in data)
            seen += count
        assert seen == result.packed_recv_count[expert]
    return found


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_slot_is_a_message(batch, seed):
    x, idx, _ = batch
    results = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False, arrival_seed=seed, fill=np.nan)
    for rank, result in enumerate(results):
        assert result.packed_recv_x.shape == (2, 4 * 5, 128)
        assert result.packed_recv_x.dtype == BF16
        expected = {
            (int(i) - 2 * rank, source, token): x[source][token]
            for source, ids in enumerate(idx)
            for token in range(len(ids))
            for i in ids[token]
            if i // 2 == rank
        }
        found = arrived(result, TOPOLOGY)
        assert found.keys() == expected.keys()
        for key, (row,) in found.items():
            assert row.tobytes() == expected[key].tobytes()
        for expert, count in enumerate(result.packed_recv_count):
            assert np.isnan(result.packed_recv_x[expert, count:].astype(float)).all()


def test_seeds_change_the_order_and_nothing_else(batch):
    x, idx, weights = batch
    orders, results = set(), []
    for seed in (None, 1, 2, 3):
        dispatched = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False, arrival_seed=seed, fill=np.nan)
        orders.add(b"".join(r.packed_recv_x.tobytes() for r in dispatched))
        rows = [r.packed_recv_x for r in dispatched]
        combined = low_latency_combine(rows, idx, weights, [r.handle for r in dispatched], TOPOLOGY)
        results.append(b"".join(y.tobytes() for y in combined))
    assert len(orders) > 2
    assert len(set(results)) == 1


def test_layout_range_by_hand():
    """Expert 0 gets two rows of rank 0 and one of rank 1: begin in the high half, count in the low."""
    idx = [np.array([[0], [0]]), np.array([[0], [-1]])]
    x = [np.ones((2, 4), BF16)] * 2
    result = low_latency_dispatch(x, idx, 2, 2, Topology(2), use_fp8=False)[0]
    assert result.handle.layout_range.tolist() == [[0 << 32 | 2, 2 << 32 | 1]]
    assert result.handle.layout_range.dtype == np.int64
    assert result.handle.src_info[0, :3].tolist() == [0, 1, 0]
    assert result.packed_recv_count.tolist() == [3]
    assert result.handle[2:] == (2, 4, 2)


def test_combine_weighs_in_top_k_order(batch):
    x, idx, weights = batch
    dispatched = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False, arrival_seed=3, fill=np.nan)
    rows = [r.packed_recv_x for r in dispatched]
    combined = low_latency_combine(rows, idx, weights, [r.handle for r in dispatched], TOPOLOGY)
    for rank, y in enumerate(combined):
        outputs = np.repeat(x[rank][:, None], 4, axis=1)
        assert y.tobytes() == plain_sum(outputs, idx[rank], weights[rank]).tobytes()


def test_zero_copy_is_the_same(batch):
    x, idx, weights = batch
    dispatched = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False)
    handles = [r.handle for r in dispatched]
    buffers = [get_next_low_latency_combine_buffer(handle, TOPOLOGY) for handle in handles]
    for buffer, result in zip(buffers, dispatched):
        buffer[...] = result.packed_recv_x
    networks = Network(TOPOLOGY), Network(TOPOLOGY)
    plain = low_latency_combine(
        [r.packed_recv_x for r in dispatched], idx, weights, handles, TOPOLOGY, network=networks[0]
    )
    shared = low_latency_combine(buffers, idx, weights, handles, TOPOLOGY, zero_copy=True, network=networks[1])
    for left, right in zip(plain, shared):
        assert left.tobytes() == right.tobytes()
    assert (networks[0].ledger.matrix() == networks[1].ledger.matrix()).all()
    with pytest.raises(ValueError, match="zero_copy"):
        low_latency_combine(buffers, idx, weights, handles, TOPOLOGY, zero_copy=True, use_logfmt=True)


def test_logfmt_is_close(batch):
    x, idx, weights = batch
    x = [(rows.astype(np.float32) * 2.0**-10).astype(BF16) for rows in x]
    dispatched = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_fp8=False)
    rows, handles = [r.packed_recv_x for r in dispatched], [r.handle for r in dispatched]
    plain = low_latency_combine(rows, idx, weights, handles, TOPOLOGY)
    packed = low_latency_combine(rows, idx, weights, handles, TOPOLOGY, use_logfmt=True)
    for left, right in zip(plain, packed):
        assert right.dtype == BF16
        np.testing.assert_allclose(
            left.astype(float), right.astype(float), atol=0.03 * np.abs(left.astype(float)).max(initial=0)
        )


def test_cast_by_hand():
    """amax is at least 1e-4, the scale is amax * float32(1/448), codes are of x * (448 / amax)."""
    x = np.zeros((1, 256), np.float32)
    x[0, :2] = [3.0, -1.5]
    result = low_latency_dispatch([x.astype(BF16)], [np.array([[0]])], 1, 1, Topology(1))[0]
    codes, scale = result.packed_recv_x
    third = np.float32(1 / 448)
    assert scale[0, 0].tolist() == [float(np.float32(3.0) * third), float(np.float32(1e-4) * third)]
    assert codes[0, 0, :3].astype(float).tolist() == [448.0, -224.0, 0.0]
    result = low_latency_dispatch([x.astype(BF16)], [np.array([[0]])], 1, 1, Topology(1), round_scale=True)[0]
    codes, scale = result.packed_recv_x
    assert scale[0, 0].tolist() == [2.0**-7, 2.0**-22]  # 3 / 448 and 1e-4 / 448 rounded up
    assert codes[0, 0, 0].astype(float) == 384.0


def test_ue8m0_scales_are_packed_on_arrival(batch):
    x, idx, _ = batch
    networks = Network(TOPOLOGY), Network(TOPOLOGY)
    plain = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, round_scale=True, network=networks[0])
    packed = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, round_scale=True, use_ue8m0=True, network=networks[1])
    for left, right in zip(plain, packed):
        words = right.packed_recv_x[1]
        assert words.dtype == np.int32
        assert words.shape == (2, 20, 1)
        for expert, count in enumerate(left.packed_recv_count):
            unpacked = fp8.unpack_ue8m0(words[expert, :count], 1)
            np.testing.assert_array_equal(unpacked, left.packed_recv_x[1][expert, :count])
    assert (networks[0].ledger.matrix() == networks[1].ledger.matrix()).all()
    with pytest.raises(ValueError, match="round_scale"):
        low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, use_ue8m0=True)


def test_statistics_add_up(batch):
    x, idx, _ = batch
    stats = [np.zeros(2, np.int32) for _ in range(4)]
    for _ in range(2):
        results = low_latency_dispatch(x, idx, 5, 8, TOPOLOGY, cumulative_local_expert_recv_stats=stats)
    for stat, result in zip(stats, results):
        assert (stat == 2 * result.packed_recv_count).all()


def test_capacity_is_named():
    """ROCm/mori#356: four tokens a rank, all for expert 0, room for three."""
    x, idx = [np.ones((4, 8), BF16)] * 2, [np.zeros((4, 1), np.int64)] * 2
    with pytest.raises(CapacityError, match=r"rank 0: needed 4 tokens, have 3.* at least 4"):
        low_latency_dispatch(x, idx, 3, 2, Topology(2), use_fp8=False)
    result = low_latency_dispatch(x, idx, 4, 2, Topology(2), use_fp8=False)[0]
    assert result.packed_recv_count.tolist() == [8]


def test_one_stride_for_uneven_ranks():
    """sgl-project/sglang#27945: 1 and 7 tokens share buffers of 7 rows for each source."""
    x, idx = [np.ones((1, 8), BF16), np.ones((7, 8), BF16)], [np.zeros((1, 1), np.int64), np.zeros((7, 1), np.int64)]
    results = low_latency_dispatch(x, idx, 7, 2, Topology(2), use_fp8=False)
    assert [r.packed_recv_x.shape for r in results] == [(1, 14, 8)] * 2
    assert results[0].packed_recv_count.tolist() == [8]


def test_message_bytes_at_published_size():
    """128 tokens, top-8, hidden 7,168: 7,585,792 B there and 14,680,064 B back; one slot less is one message less."""
    idx = [np.tile(np.arange(8), (128, 1))]
    x = [np.zeros((128, 7168), BF16)]
    for masked, messages in ((0, 1024), (10, 1014)):
        idx[0].reshape(-1)[:masked] = -1
        network = Network(Topology(1))
        result = low_latency_dispatch(x, idx, 128, 8, Topology(1), network=network)[0]
        wire = network.ledger.matrix("dispatch").sum() - network.ledger.matrix("dispatch", classes="control").sum()
        assert wire == messages * 7408
        rows = np.zeros((8, 128, 7168), BF16)
        low_latency_combine([rows], idx, [np.ones((128, 8), np.float32)], [result.handle], Topology(1), network=network)
        assert network.ledger.matrix("combine", classes="payload").sum() == messages * 14336
    assert 1024 * 7408 == 7_585_792
    assert 1024 * 14336 == 14_680_064

"""The network's mailboxes, copies and errors, and the options of exchanges."""

import numpy as np
import pytest
from dispatch_oracle import BF16

from parallel.dispatch import make_exchange
from parallel.network import Network, NotDelivered, Tag
from parallel.topology import Topology

TAG = Tag("dispatch_send")


def test_rows_arrive_in_the_order_of_sources():
    network = Network(Topology(3))
    for src in (2, 0, 1):
        rows = np.full((3, 2), 10 * src, np.int64) + np.arange(3)[:, None]
        network.send_rows(src, {"x": (rows, "payload")}, np.array([1, 0, 2]), TAG, control=np.full((3, 1), src))
    received = network.receive(2, TAG)
    assert received.counts.tolist() == [2, 2, 2]
    assert received.arrays["x"][:, 0].tolist() == [1, 2, 11, 12, 21, 22]
    assert received.control.tolist() == [[0], [1], [2]]
    assert network.receive(1, TAG).arrays["x"].shape == (0, 2)
    assert network.pending() == [(TAG, 3)]
    assert network.receive(0, TAG, (1, 2)).arrays["x"][:, 0].tolist() == [10, 20]
    network.receive(0, TAG, (0,))
    assert network.pending() == []


def test_many_ranks_take_the_same_rows():
    """From 16 ranks on, an exchange is put together as a whole."""
    rng = np.random.default_rng(0)
    splits = rng.integers(0, 3, (16, 16))
    network, slices = Network(Topology(16)), {}
    for src in range(16):
        rows = rng.standard_normal((splits[src].sum(), 2)).astype(BF16)
        for dst in range(16):
            start = splits[src, :dst].sum()
            slices[src, dst] = rows[start : start + splits[src, dst]].tobytes()
        network.send_rows(src, {"x": (rows, "payload")}, splits[src], TAG)
    for dst in range(16):
        received = network.receive(dst, TAG)
        assert received.arrays["x"].tobytes() == b"".join(slices[src, dst] for src in range(16))
        assert received.control is None


def test_nothing_is_shared():
    network, own = Network(Topology(2)), np.arange(4.0).reshape(2, 2)
    network.send_rows(0, {"x": (own[:], "payload")}, np.array([1, 1]), TAG)  # a view is copied
    own[...] = -1
    network.send_rows(1, {"x": (np.zeros((0, 2)), "payload")}, np.array([0, 0]), TAG)
    assert network.receive(0, TAG).arrays["x"].tolist() == [[0.0, 1.0]]
    fresh = np.arange(2.0).reshape(1, 2)
    fresh = fresh.copy()
    network.send_rows(0, {"x": (fresh, "payload")}, np.array([0, 1]), TAG._replace(layer=1))
    with pytest.raises(ValueError, match="read-only"):
        fresh[0, 0] = 1


def test_one_row_can_go_to_many():
    network = Network(Topology(2))
    for src in range(2):
        rows = np.array([[src]])
        network.send_rows(src, {"x": (rows, "payload")}, np.array([1, 1]), TAG, starts=np.array([0, 0]))
    assert [network.receive(dst, TAG).arrays["x"].tolist() for dst in range(2)] == [[[0], [1]]] * 2
    assert network.ledger.matrix(unit="rows").tolist() == [[1, 1], [1, 1]]


def test_ragged_rows():
    network, tag = Network(Topology(2)), TAG
    data = np.arange(6, dtype=np.uint8)
    network.send_rows(0, {"x": (data, "payload")}, np.array([2, 1]), tag, lengths={"x": np.array([1, 2, 3])})
    received = network.receive(0, tag, (0,))
    assert received.arrays["x"].tolist() == [0, 1, 2]
    assert received.lengths["x"].tolist() == [1, 2]
    assert network.receive(1, tag, (0,)).arrays["x"].tolist() == [3, 4, 5]
    assert network.ledger.matrix()[0].tolist() == [3, 3]
    assert network.ledger.matrix(unit="rows")[0].tolist() == [2, 1]


def test_readiness_counts_empty_packets():
    network = Network(Topology(2))
    exchanges = [make_exchange("low_latency", network, rank, 2) for rank in range(2)]
    assert exchanges[0].ready("dispatch_send")
    assert not exchanges[0].ready("dispatch_recv")
    assert exchanges[0].waits_for("dispatch_recv") == [0, 1]
    none = np.zeros((0, 3), np.float32), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    exchanges[1].dispatch_send(*none)
    assert exchanges[0].waits_for("dispatch_recv") == [0]
    exchanges[0].dispatch_send(*none)
    assert exchanges[0].ready("dispatch_recv")
    assert len(exchanges[0].dispatch_recv().row) == 0
    with pytest.raises(ValueError, match="combine_fly"):
        exchanges[0].ready("combine_fly")


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(4)])
@pytest.mark.parametrize("dialect", ["normal", "elastic"])
def test_the_middle_hop_waits_for_its_sources_only(dialect, topology):
    network = Network(topology)
    exchanges = [make_exchange(dialect, network, rank, 4) for rank in range(4)]
    none = np.zeros((0, 3), np.float32), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    for rank in (0, 2):
        exchanges[rank].dispatch_send(*none)
    assert exchanges[0].ready("dispatch_forward")
    assert not exchanges[0].ready("dispatch_recv")
    assert exchanges[1].ready("dispatch_forward") == (topology.num_nodes == 1)


def test_errors_say_what_would_do():
    network = Network(Topology(2))
    with pytest.raises(ValueError, match="add up to 1, not to 2 rows"):
        network.send_rows(0, {"x": (np.zeros((2, 1)), "payload")}, np.array([1, 0]), TAG)
    arrays = {"x": (np.zeros((2, 1)), "payload"), "y": (np.zeros((1, 1)), "payload")}
    with pytest.raises(ValueError, match="equally long"):
        network.send_rows(0, arrays, np.array([1, 1]), TAG)
    with pytest.raises(NotDelivered, match=r"rank 1 has not received layer 0, message dispatch_send.*0, 1"):
        network.receive(1, TAG)
    with pytest.raises(ValueError, match="normal, low_latency"):
        make_exchange("ring", network, 0, 2)
    with pytest.raises(ValueError, match="colour"):
        make_exchange("normal", network, 0, 2, colour="red")
    with pytest.raises(ValueError, match="hybrid, direct, single"):
        make_exchange("elastic", network, 0, 2, mode="spiral")
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        make_exchange("normal", network, 2, 2)
    with pytest.raises(ValueError, match="4 would do"):
        make_exchange("normal", network, 0, 3)


def test_an_exchange_checks_its_arrays():
    network = Network(Topology(1))
    exchange = make_exchange("normal", network, 0, 2, layer=4)
    x, idx, weights = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match=r"rank 0, layer 4: 1 rows"):
        exchange.dispatch_send(x[:1], idx, weights)
    with pytest.raises(ValueError, match="ids are physical, 0 to 1"):
        exchange.dispatch_send(x, idx + 2, weights)
    exchange.dispatch_send(x, idx, weights)
    exchange.dispatch_recv()
    with pytest.raises(ValueError, match="one row for each of the 2 pairs"):
        exchange.combine_send(x[:1])

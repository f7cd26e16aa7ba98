"""Faults between ranks: the same result or a clear error, and the page that says so."""

from pathlib import Path

import numpy as np
import pytest
from dispatch_oracle import BF16, random_batch, run_exchange
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.dispatch import DIALECTS, CapacityError, make_exchange
from parallel.dispatch.fault_matrix import COLUMNS, document, outcomes
from parallel.network import Disagreement, Network, NotDelivered, Tag
from parallel.packets import FAULTS, DamagedMessage, Fault, FaultyNetwork, PacketNetwork
from parallel.topology import Topology

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
ERRORS = {"NotDelivered", "DamagedMessage", "CapacityError", "Disagreement"}


def test_the_page_says_what_happens():
    assert PAGE.read_text() == document(), "python -m parallel.dispatch.fault_matrix > docs/faults.md"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_gives_wrong_numbers(column, fault):
    found = outcomes(fault, column)
    assert len(found) == (4 if column in ("normal", "elastic hybrid") else 2)
    for outcome in found:
        if fault in ("duplicate", "reorder"):
            assert outcome.result == "same result"
        else:
            assert outcome.result in ERRORS
            for part in ("rank", "layer 0", outcome.stage, "step 1"):
                assert part in outcome.message


@settings(max_examples=60)
@given(st.sampled_from(DIALECTS), st.integers(0, 2**32), st.booleans())
def test_packets_change_nothing(dialect, seed, two_nodes):
    rng = np.random.default_rng(seed)
    topology = Topology(4, 2) if two_nodes else Topology(4)
    batch = random_batch(rng, rng.integers(0, 5, 4), 8, 3, 6, BF16)
    expected, _, network = run_exchange(dialect, topology, 8, *batch)
    packets = PacketNetwork(topology)
    y, _, _ = run_exchange(dialect, topology, 8, *batch, network=packets, rng=rng)
    for left, right in zip(expected, y):
        assert left.tobytes() == right.tobytes()
    assert (network.ledger.matrix() == packets.ledger.matrix()).all()


@settings(max_examples=40)
@given(st.sampled_from(DIALECTS), st.integers(0, 2**32), st.sampled_from(["duplicate", "reorder"]))
def test_any_order_and_any_repetition(dialect, seed, kind):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rng.integers(0, 5, 4), 8, 3, 6, BF16)
    expected, _, _ = run_exchange(dialect, Topology(4, 2), 8, *batch)
    stages = ("dispatch_send", "dispatch_forward", "combine_send", "combine_forward")
    faulty = FaultyNetwork(Topology(4, 2), [Fault(kind, stage, step=0, every=True) for stage in stages])
    y, _, _ = run_exchange(dialect, Topology(4, 2), 8, *batch, network=faulty, rng=rng)
    assert faulty.ignored == (faulty.happened if kind == "duplicate" else 0)
    for left, right in zip(expected, y):
        assert left.tobytes() == right.tobytes()


def test_logfmt_rows_are_verified_too():
    batch = random_batch(np.random.default_rng(0), [3, 3], 4, 2, 128, BF16)
    network = FaultyNetwork(Topology(2), [Fault("corrupt", "combine_send", step=0)])
    with pytest.raises(DamagedMessage, match="checksum"):
        run_exchange("low_latency", Topology(2), 4, *batch, network=network, logfmt=True)
    y, _, _ = run_exchange("low_latency", Topology(2), 4, *batch, network=PacketNetwork(Topology(2)), logfmt=True)
    expected, _, _ = run_exchange("low_latency", Topology(2), 4, *batch, logfmt=True)
    assert [a.tobytes() for a in y] == [a.tobytes() for a in expected]


def test_a_lost_packet_is_waited_for_by_name():
    batch = random_batch(np.random.default_rng(0), [3, 3], 4, 2, 8, BF16)
    batch[1][0][0] = [2, 3]  # rank 0 has a row for rank 1
    network = FaultyNetwork(Topology(2), [Fault("drop", "dispatch_send", step=0)])
    exchanges = [make_exchange("normal", network, rank, 4, layer=5) for rank in range(2)]
    for rank, exchange in enumerate(exchanges):
        exchange.dispatch_send(*(part[rank] for part in batch))
    assert exchanges[0].ready("dispatch_recv")
    assert not exchanges[1].ready("dispatch_recv")
    assert exchanges[1].waits_for("dispatch_recv") == [0]
    with pytest.raises(NotDelivered, match=r"rank 1 has not received layer 5, message dispatch_send .* rank\(s\) 0"):
        exchanges[1].dispatch_recv()


@pytest.mark.parametrize("dialect", ["low_latency", "elastic"])
def test_capacity_and_agreement_name_the_place(dialect):
    """deepseek-ai/DeepEP#165: too many tokens, or different maxima, hang there; 3 and 5 tokens under 5 work."""
    batch = random_batch(np.random.default_rng(0), [3, 5], 4, 2, 8, BF16)
    y, _, _ = run_exchange(dialect, Topology(2), 4, *batch, num_max_tokens_per_rank=5)
    assert [len(rows) for rows in y] == [3, 5]
    with pytest.raises(
        CapacityError, match=r"rank 1, layer 0, message dispatch_send .*needed 5 tokens, have 4.*at least 5"
    ):
        run_exchange(dialect, Topology(2), 4, *batch, num_max_tokens_per_rank=4)
    network = Network(Topology(2))
    for rank, maximum in enumerate((5, 6)):
        exchange = make_exchange(dialect, network, rank, 4, layer=2, num_max_tokens_per_rank=maximum)
        exchange.dispatch_send(*(part[rank] for part in batch))
    with pytest.raises(Disagreement, match=r"layer 2, message dispatch_send.*rank 0 sent it with .*5.*rank 1 has .*6"):
        exchange.dispatch_recv()


def test_sends_and_receipts_happen_once():
    network, tag = Network(Topology(2)), Tag("dispatch_send", layer=3)
    rows = {"x": (np.zeros((2, 1)), "payload")}
    network.send_rows(0, rows, np.array([1, 1]), tag)
    with pytest.raises(ValueError, match=r"rank 0 sent layer 3, message dispatch_send .* twice"):
        network.send_rows(0, {"x": (np.zeros((2, 1)), "payload")}, np.array([1, 1]), tag)
    assert len(network.receive(0, tag, (0,)).arrays["x"]) == 1
    with pytest.raises(ValueError, match=r"rank 0 received layer 3.* twice"):
        network.receive(0, tag, (0,))


def test_unknown_fault():
    with pytest.raises(ValueError, match="drop, duplicate"):
        Fault("explode", "dispatch_send")

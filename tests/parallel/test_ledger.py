"""The ledger's sums, filters and errors."""

import numpy as np
import pytest

from parallel.ledger import Ledger, Tag
from parallel.topology import Topology


@pytest.fixture
def ledger():
    book = Ledger(Topology(4, 2))
    book.append(0, np.array([1, 2, 0, 3]), {"payload": 10, "scales": 4}, Tag("dispatch_send", layer=0))
    book.append(1, np.array([0, 1, 0, 1]), {"payload": 10}, Tag("combine_send", layer=1, micro_batch=1, step=2))
    book.append(1, np.array([1, 1, 1, 1]), {"control": 8}, Tag("dispatch_send", layer=1))
    book.append(2, np.array([0, 0, 0, 1]), {"cache": 100}, Tag("hand_over", request=7))
    return book


def test_sums(ledger):
    expected = np.array([[14, 28, 0, 42], [8, 18, 8, 18], [0, 0, 0, 100], [0, 0, 0, 0]])
    assert (ledger.matrix() == expected).all()
    assert ledger.matrix().dtype == np.int64
    assert ledger.matrix(classes="scales")[0].tolist() == [4, 8, 0, 12]
    assert ledger.matrix("dispatch")[1].tolist() == [8, 8, 8, 8]
    assert ledger.matrix("combine")[1].tolist() == [0, 10, 0, 10]
    assert ledger.matrix(link="local").trace() == ledger.matrix(link="local").sum() == 32
    assert ledger.matrix(link="nvlink").tolist() == [[0, 28, 0, 0], [8, 0, 0, 0], [0, 0, 0, 100], [0, 0, 0, 0]]
    assert ledger.matrix(link="rdma").sum() == 42 + 8 + 18
    assert ledger.matrix(layer=1).sum() == 52
    assert ledger.matrix(micro_batch=1, step=2).sum() == 20
    assert ledger.matrix(request=7).sum() == 100
    assert ledger.matrix(stage="combine_send", layer=None).sum() == 20


def test_rows_are_counted_once(ledger):
    assert ledger.matrix(unit="rows")[0].tolist() == [1, 2, 0, 3]
    assert ledger.matrix(unit="rows")[1].tolist() == [0, 1, 0, 1]  # control words are no rows
    assert ledger.matrix(unit="rows", classes=("payload", "scales"))[0].tolist() == [1, 2, 0, 3]
    assert ledger.matrix(unit="rows", classes="control")[1].tolist() == [1, 1, 1, 1]


def test_uneven_rows():
    book = Ledger(Topology(2))
    book.append(0, np.array([2, 1]), {}, Tag("combine_send"), {"payload": np.array([30, 7])})
    assert book.matrix()[0].tolist() == [30, 7]
    assert book.matrix(unit="rows")[0].tolist() == [2, 1]
    assert book.matrix(classes="scales").sum() == 0
    assert [(entry.dst, entry.rows, entry.bytes) for entry in book.entries()] == [(0, 2, 30), (1, 1, 7)]


def test_entries_add_up(ledger):
    total = np.zeros((4, 4), np.int64)
    for entry in ledger.entries():
        assert entry.link == ledger.topology.link(entry.src, entry.dst)
        total[entry.src, entry.dst] += entry.bytes
    assert (total == ledger.matrix()).all()


def test_merge(ledger):
    other = Ledger(Topology(4, 2))
    other.append(3, np.array([1, 0, 0, 0]), {"payload": 1}, Tag("dispatch_send"), {"scales": np.array([5, 0, 0, 0])})
    before = ledger.matrix()
    ledger.merge(other)
    assert (ledger.matrix() == before + other.matrix()).all()
    with pytest.raises(ValueError, match="cannot be merged"):
        ledger.merge(Ledger(Topology(4)))


def test_an_empty_ledger_is_zero():
    assert Ledger(Topology(3)).matrix("dispatch", "rdma").tolist() == [[0] * 3] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direction": "back"}, "dispatch, combine"),
        ({"link": "pcie"}, "nvlink"),
        ({"unit": "GB"}, "bytes"),
        ({"classes": "weights"}, "payload"),
        ({"level": 3}, "layer"),
    ],
)
def test_unknown_names_are_errors(ledger, arguments, message):
    with pytest.raises(ValueError, match=message):
        ledger.matrix(**arguments)


def test_unknown_classes_are_not_recorded(ledger):
    with pytest.raises(ValueError, match="weights"):
        ledger.append(0, np.zeros(4, int), {"weights": 1}, Tag("dispatch_send"))

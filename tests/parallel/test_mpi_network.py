"""The MPI network, over a communicator of threads, and over MPI where it is installed."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from dispatch_oracle import BF16, expert_output, random_batch, run_exchange

from parallel.dispatch import make_exchange
from parallel.mpi import MpiNetwork, ProgramsDiffer, world
from parallel.network import NotDelivered, Tag
from parallel.topology import Topology

KINDS = (
    ("normal", {}),
    ("low_latency", {"arrival_seed": 4}),
    ("low_latency", {"logfmt": True}),
    ("elastic", {"mode": "hybrid"}),
    ("elastic", {"mode": "single"}),
    ("allgather", {}),
    ("alltoallv", {}),
)


class ThreadComm:
    """The few collective calls that the network makes, between threads of one process."""

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size, timeout=20)
        self.board, self.ranks = [None] * size, threading.local()

    def Get_size(self):
        return self.size

    def Get_rank(self):
        return self.ranks.value

    def allgather(self, value):
        self.barrier.wait()
        self.board[self.ranks.value] = value
        self.barrier.wait()
        everything = list(self.board)
        self.barrier.wait()
        return everything

    def alltoall(self, values):
        return [row[self.ranks.value] for row in self.allgather(values)]

    def Alltoallv(self, send, receive):
        data, sizes = send
        stops = np.cumsum(sizes)
        parts = [data[stop - size : stop] for stop, size in zip(stops, sizes)]
        arrived = self.alltoall(parts)
        assert [len(part) for part in arrived] == list(receive[1])
        receive[0][...] = np.concatenate(arrived)


def on_processes(size, program):
    """Run `program(comm)` in `size` threads; results by process, or the first error."""
    comm, results, errors = ThreadComm(size), [None] * size, []

    def body(process):
        comm.ranks.value = process
        try:
            results[process] = program(comm)
        except Exception as error:
            errors.append(error)
            comm.barrier.abort()

    threads = [threading.Thread(target=body, args=(process,)) for process in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def run_local(comm, topology, num_experts, batch, dialect, options):
    """Every stage for this process's ranks, in rank order; (y by rank, merged ledger matrix, handed over)."""
    network = MpiNetwork(topology, comm)
    x, idx, weights = batch
    local = num_experts // topology.num_ranks
    exchanges = {rank: make_exchange(dialect, network, rank, num_experts, **options) for rank in network.local_ranks}
    for rank, exchange in exchanges.items():
        exchange.dispatch_send(x[rank], idx[rank], weights[rank])
    for exchange in exchanges.values():
        exchange.dispatch_forward()
    for rank, exchange in exchanges.items():
        pairs = exchange.dispatch_recv()
        rows = expert_output(pairs.x[pairs.row], pairs.expert + rank * local)
        exchange.combine_send(rows)
    for exchange in exchanges.values():
        exchange.combine_forward()
    y = {rank: exchange.combine_recv() for rank, exchange in exchanges.items()}
    assert network.pending() == []
    return y, network.gathered_ledger(), sum(comm.allgather(network.handed_over))


@pytest.mark.parametrize(("dialect", "options"), KINDS)
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_change_nothing(dialect, options, processes):
    topology = Topology(8, 4)
    batch = random_batch(np.random.default_rng(5), [4, 0, 3, 7, 1, 0, 2, 5], 16, 4, 256, BF16)
    expected, _, network = run_exchange(dialect, topology, 16, *batch, **options)
    results = on_processes(processes, lambda comm: run_local(comm, topology, 16, batch, dialect, options))
    y = {rank: rows for result in results for rank, rows in result[0].items()}
    assert sorted(y) == list(range(8))
    for rank in range(8):
        assert y[rank].tobytes() == expected[rank].tobytes()
    for _, ledger, handed in results:
        np.testing.assert_array_equal(ledger.matrix(), network.ledger.matrix())
        np.testing.assert_array_equal(ledger.matrix(), handed)
        for direction in ("dispatch", "combine"):
            for name in ("payload", "control", "routing", "padding"):
                np.testing.assert_array_equal(
                    ledger.matrix(direction, classes=name), network.ledger.matrix(direction, classes=name)
                )


def test_ranks_lie_contiguously():
    results = on_processes(3, lambda comm: MpiNetwork(Topology(8), comm).local_ranks)
    assert results == [(0, 1), (2, 3, 4), (5, 6, 7)]


def test_different_programs_are_noticed():
    def program(comm):
        network = MpiNetwork(Topology(2), comm)
        layer = comm.Get_rank()
        rank = network.local_ranks[0]
        network.send_rows(rank, {"x": (np.zeros((0, 2)), "payload")}, np.zeros(2, int), Tag("dispatch_send", layer))

    with pytest.raises(ProgramsDiffer, match=r"layer 0.*layer 1|layer 1.*layer 0"):
        on_processes(2, program)


def test_only_own_ranks():
    def program(comm):
        network = MpiNetwork(Topology(2), comm)
        with pytest.raises(ValueError, match="cannot send for rank"):
            network.send_rows(1 - network.local_ranks[0], {}, np.zeros(2, int), Tag("dispatch_send"))
        with pytest.raises(ValueError, match="cannot receive for rank"):
            network.receive(1 - network.local_ranks[0], Tag("dispatch_send"))
        with pytest.raises(NotDelivered, match="layer 7"):
            network.receive(network.local_ranks[0], Tag("dispatch_send", layer=7))

    on_processes(2, program)


def test_one_sender_needs_a_flush():
    """A hand-over: one rank sends to one other, the rest take part in the call only."""
    tag = Tag("hand_over", request=3)

    def program(comm):
        network = MpiNetwork(Topology(4), comm)
        if 0 in network.local_ranks:
            rows = np.arange(6, dtype=np.int16).reshape(3, 2)
            network.send_rows(0, {"kv": (rows, "cache")}, np.array([0, 0, 0, 3]), tag, destinations=(3,))
        network.flush(tag)
        if 3 in network.local_ranks:
            return network.receive(3, tag, (0,)).arrays["kv"].tolist()

    assert on_processes(2, program) == [None, [[0, 1], [2, 3], [4, 5]]]


def test_more_processes_than_ranks():
    with pytest.raises(ValueError, match="3 processes for 2 ranks"):
        on_processes(3, lambda comm: MpiNetwork(Topology(2), comm))


def test_missing_mpi_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match="mpi4py"):
        world()


def mpiexec():
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@pytest.mark.parametrize("processes", [2, 4])
def test_real_processes(processes):
    pytest.importorskip("mpi4py")
    if mpiexec() is None:
        pytest.skip("no mpiexec beside Python or on the path")
    here = Path(__file__).parent
    command = [mpiexec(), "-n", str(processes), sys.executable, "-m", "mpi4py", str(here / "mpi_program.py")]
    path = os.pathsep.join((str(here), str(here.parent.parent)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"]

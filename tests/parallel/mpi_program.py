"""Run under mpiexec: every dialect over MPI against the same batch in one process; its first process prints "same"."""

import numpy as np
from dispatch_oracle import BF16, random_batch, run_exchange
from test_mpi_network import KINDS, run_local

from parallel.mpi import world
from parallel.topology import Topology


def main():
    topology = Topology(8, 4)
    batch = random_batch(np.random.default_rng(5), [4, 0, 3, 7, 1, 0, 2, 5], 16, 4, 256, BF16)
    for dialect, options in KINDS:
        expected, _, network = run_exchange(dialect, topology, 16, *batch, **options)
        y, ledger, handed = run_local(world(), topology, 16, batch, dialect, options)
        for rank, rows in y.items():
            assert rows.tobytes() == expected[rank].tobytes(), (dialect, rank)
        assert (ledger.matrix() == network.ledger.matrix()).all(), dialect
        assert (ledger.matrix() == handed).all(), dialect
    if sum(world().allgather(1)) == world().Get_size() and world().Get_rank() == 0:
        print("same")


main()

"""The network over MPI: emulated ranks placed on real processes, and every exchange one Alltoallv of bytes."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.messages import Outgoing, describe, some_ranks
from parallel.network import Network
from parallel.topology import Topology


class ProgramsDiffer(ValueError):
    """Two processes came to different exchanges: they do not run the same program in the same order."""


class _Schema(NamedTuple):
    """What one source's bytes mean to one process; travels beside them."""

    arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]  # name -> dtype, shape of a row
    classes: dict[str, str]
    splits: np.ndarray  # int64 [ranks of the process]
    lengths: dict[str, np.ndarray]  # ragged array -> bytes of each row
    destinations: tuple[int, ...]  # of this process
    control: tuple[np.dtype, int] | None  # dtype, words
    control_to: tuple[int, ...]
    terms: dict[str, object]


class MpiNetwork(Network):
    """The interface of `Network` for the ranks of this process; `comm` is an mpi4py communicator.

    Ranks lie contiguously on the processes, as evenly as they can, or as `ranks_of_processes` says (ascending ranks of
    each process). A process sends and receives for its own, `local_ranks`, only. The exchange of a tag takes place when
    the last local rank has sent its part, so that every process has to run the same program order; if they differ,
    ProgramsDiffer names both. An exchange in which not all ranks send is started by `flush(tag)` on every process.
    The ledger of a process holds what its ranks sent; `gathered_ledger` merges all.
    `handed_over` int64 [R, R] is what was really given to MPI, byte by byte (the parts for own ranks included); counts
    and layouts travel beside it as envelopes, as MPI's own headers do.
    Raises ValueError for more processes than ranks.
    """

    def __init__(self, topology: Topology, comm=None, ledger: Ledger | None = None, ranks_of_processes=None):
        super().__init__(topology, ledger)
        self.comm = world() if comm is None else comm
        processes = self.comm.Get_size()
        if processes > topology.num_ranks:
            raise ValueError(
                f"{processes} processes for {topology.num_ranks} ranks: start at most {topology.num_ranks}"
            )
        bounds = [topology.num_ranks * process // processes for process in range(processes + 1)]
        evenly = [tuple(range(first, stop)) for first, stop in pairwise(bounds)]
        self.ranks_of_processes = evenly if ranks_of_processes is None else list(ranks_of_processes)
        self.local_ranks = self.ranks_of_processes[self.comm.Get_rank()]
        self.handed_over = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
        self._outbox: dict[Tag, dict[int, Outgoing]] = {}

    def send_rows(self, src, arrays, splits, tag, *args, **kwargs):
        self._must_be_local(src, "send")
        if src in self._outbox.get(tag, ()):
            raise ValueError(f"rank {src} sent {describe(tag)} twice: one send for each rank and tag")
        super().send_rows(src, arrays, splits, tag, *args, **kwargs)

    def receive(self, dst, tag, sources=None, *, gathered=True):
        self._must_be_local(dst, "receive")
        return super().receive(dst, tag, sources, gathered=gathered)

    def flush(self, tag: Tag) -> None:
        """Exchange what this process's ranks have sent under the tag so far; every process must call it."""
        sends = self._outbox.pop(tag, {})
        outgoing = [[self._schema(part, ranks) for part in sends.values()] for ranks in self.ranks_of_processes]
        envelopes = self.comm.alltoall([(tag, tuple(sends), schemas) for schemas in outgoing])
        for process, (other, _, _) in enumerate(envelopes):
            if other != tag:
                raise ProgramsDiffer(
                    f"process {self.comm.Get_rank()} came to {describe(tag)}, process {process} to {describe(other)}: "
                    "all processes must run the same program order"
                )
        data = [self._bytes_for(sends, ranks) for ranks in self.ranks_of_processes]
        counts = [sum(_size(schema) for schema in schemas) for _, _, schemas in envelopes]
        received = np.empty(sum(counts), np.uint8)
        sizes = [len(part) for part in data]
        self.comm.Alltoallv([np.concatenate(data), sizes], [received, counts])
        position = 0
        for _, sources, schemas in envelopes:
            for source, schema in zip(sources, schemas):
                position = self._deliver(source, schema, received, position, tag)

    def gathered_ledger(self) -> Ledger:
        """One ledger of all processes' sends, on every process; a collective call."""
        total = Ledger(self.topology)
        for ledger in self.comm.allgather(self.ledger):
            total.merge(ledger)
        return total

    def _post(self, src: int, outgoing: Outgoing, tag: Tag) -> None:
        sends = self._outbox.setdefault(tag, {})
        sends[src] = outgoing
        if len(sends) == len(self.local_ranks):
            self.flush(tag)

    def _must_be_local(self, rank: int, verb: str) -> None:
        if rank not in self.local_ranks:
            raise ValueError(
                f"process {self.comm.Get_rank()} cannot {verb} for rank {rank}: it has ranks "
                f"{some_ranks(list(self.local_ranks))}"
            )

    def _schema(self, part: Outgoing, ranks: tuple[int, ...]) -> _Schema:
        rows = {name: (array.dtype, array.shape[1:]) for name, array in part.arrays.items()}
        lengths = {name: np.concatenate([part.row_lengths(name, rank) for rank in ranks]) for name in part.offsets}
        control = None if part.control is None else (part.control.dtype, part.control.shape[1])
        return _Schema(
            rows,
            part.classes,
            part.splits[list(ranks)],
            lengths,
            tuple(rank for rank in part.destinations if rank in ranks),
            control,
            tuple(rank for rank in part.control_to if rank in ranks),
            part.terms,
        )

    def _bytes_for(self, sends: dict[int, Outgoing], ranks: tuple[int, ...]) -> np.ndarray:
        """What goes to one process: by source, array, destination; control words after the arrays."""
        pieces = []
        for src, part in sends.items():
            for name in part.arrays:
                for rank in ranks:
                    pieces.append(_as_bytes(part.part(name, rank)))
                    self.handed_over[src, rank] += len(pieces[-1])
            for rank in ranks:
                words = part.control_for(rank)
                if words is not None:
                    pieces.append(_as_bytes(words))
                    self.handed_over[src, rank] += len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def _deliver(self, source: int, schema: _Schema, data: np.ndarray, position: int, tag: Tag) -> int:
        """Put one source's bytes into the mailbox; returns where the next source's begin."""
        arrays = {}
        for name, (dtype, shape) in schema.arrays.items():
            rows = int(schema.lengths[name].sum() if name in schema.lengths else schema.splits.sum())
            size = rows * dtype.itemsize * int(np.prod(shape))
            arrays[name] = data[position : position + size].copy().view(dtype).reshape(rows, *shape)
            arrays[name].setflags(write=False)
            position += size
        control = None
        if schema.control is not None and schema.control_to:
            dtype, words = schema.control
            size = len(schema.control_to) * words * dtype.itemsize
            control = data[position : position + size].copy().view(dtype).reshape(-1, words)
            position += size
        splits = np.zeros(self.topology.num_ranks, np.int64)
        splits[list(self.local_ranks)] = schema.splits
        starts = np.cumsum(splits) - splits
        offsets = {name: np.concatenate([[0], np.cumsum(length)]) for name, length in schema.lengths.items()}
        outgoing = Outgoing(
            arrays,
            schema.classes,
            starts,
            splits,
            schema.destinations,
            control,
            schema.control_to if control is not None else (),
            offsets,
            schema.terms,
        )
        super()._post(source, outgoing, tag)
        return position


def world():
    """MPI's communicator of all processes; raises ValueError where mpi4py is missing."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError("transport 'mpi' needs mpi4py and an MPI: pip install 'refmodel[mpi]'") from None
    return MPI.COMM_WORLD


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 [bytes]; narrow dtypes have no MPI type of their own."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _size(schema: _Schema) -> int:
    """Bytes that one source sends to a process."""
    total = 0
    for name, (dtype, shape) in schema.arrays.items():
        rows = int(schema.lengths[name].sum() if name in schema.lengths else schema.splits.sum())
        total += rows * dtype.itemsize * int(np.prod(shape))
    if schema.control is not None:
        total += len(schema.control_to) * schema.control[1] * schema.control[0].itemsize
    return total

"""A request leaves one deployment for another: its cache rows cross, and the other goes on with the same bits.

Only the rows cross here, those of the MTP layer included. `parallel.serving.handoff` has the protocol around them:
reserved pages, rows sent while a prompt is still being computed, and what decoding needs besides the cache.
"""

from math import gcd

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.network import Network
from parallel.topology import Topology
from refmodel.cache import LatentCache


def joint_topology(source: Topology, other: Topology) -> Topology:
    """The ranks of both: the source's first, then the other's, on nodes of their own."""
    ranks = source.num_ranks, other.num_ranks
    return Topology(sum(ranks), gcd(*ranks))


def hand_over(source, request: int, other, rank: int | None, ledger: Ledger) -> LatentCache:
    """Move a request from deployment `source` to `rank` of `other` (default: where `other` would place it).

    Every layer's rows take one exchange, tagged `hand_over` with the request, in class `cache` of `ledger`, whose
    topology is `joint_topology`. The source gives its pages back and knows the request no longer. Over MPI every
    process calls it. Returns the cache on the other side.
    Raises ValueError, with nothing moved, for an unknown request, for one that the other side already holds, and for
    deployments whose models, numerics, pages or transports differ.
    """
    cache = source.residents.cache_of(request)
    _check_sides(source, other, cache)
    if other.residents.holds(request):
        raise ValueError(f"request {request} already has a cache where it is to be handed over: forget that one first")
    src = source.rank_of(request)
    other.place(request, other.rank_of(request) if rank is None else rank)
    arrived = other.new_cache(request)
    dst = source.topology.num_ranks + other.rank_of(request)
    network = _network_between(source, other, ledger)
    for layer in range(cache.pool.num_layers):
        rows = _move_rows(network, cache, layer, src, dst, request)
        if rows is not None:
            arrived.write(layer, 0, rows)
    arrived.length = cache.length
    other.residents.keep(request, arrived)
    source.residents.forget(request)
    cache.release()
    return arrived


def _check_sides(source, other, cache: LatentCache) -> None:
    if other is source:
        raise ValueError("hand_over: the other deployment is this one; a request moves between two")
    if source.transport != other.transport:
        raise ValueError(f"hand_over from transport {source.transport!r} to {other.transport!r}: both must be the same")
    here, there = ((pool.num_layers, pool.width, pool.dtype.name) for pool in (cache.pool, other.new_cache(0).pool))
    if here != there:
        raise ValueError(f"hand_over between pages of (layers, width, dtype) {here} and {there}: they must be the same")
    mine, theirs = source.model, other.model
    if mine.numerics != theirs.numerics:
        raise ValueError(f"hand_over between numerics {mine.numerics} and {theirs.numerics}: they must be the same")
    if mine.config != theirs.config or not _same_weights(mine.weights, theirs.weights):
        raise ValueError("hand_over between deployments of two models: both must have the same config and weights")


def _same_weights(mine, theirs) -> bool:
    """Whether two sets of weights are of one model: the same object, or the same final norm and embedding samples."""
    if mine is theirs:
        return True
    every = max(1, mine.config.vocab_size // 64)
    samples = [(weights.norm.tobytes(), weights.embedding[::every].tobytes()) for weights in (mine, theirs)]
    return samples[0] == samples[1]


def _network_between(source, other, ledger: Ledger) -> Network:
    if source.transport == "memory":
        return Network(ledger.topology, ledger)
    from parallel.mpi import MpiNetwork

    behind = source.topology.num_ranks
    ranks = [
        (*here, *(behind + rank for rank in there))
        for here, there in zip(source.network.ranks_of_processes, other.network.ranks_of_processes)
    ]
    return MpiNetwork(ledger.topology, source.network.comm, ledger, ranks)


def _move_rows(network: Network, cache: LatentCache, layer: int, src: int, dst: int, request) -> np.ndarray | None:
    """Rows [written, C + P] of one layer, as `dst` gets them; None on a process that `dst` is not on."""
    tag, local = Tag("hand_over", layer, request=request), getattr(network, "local_ranks", (src, dst))
    if src in local:
        rows = cache.rows(layer, cache.written[layer])
        splits = np.zeros(network.topology.num_ranks, np.int64)
        splits[dst] = len(rows)
        network.send_rows(src, {"rows": (rows, "cache")}, splits, tag, destinations=(dst,))
    if hasattr(network, "flush"):  # over MPI an exchange in which not all ranks send waits for its start
        network.flush(tag)
    return network.receive(dst, tag, [src]).arrays["rows"] if dst in local else None

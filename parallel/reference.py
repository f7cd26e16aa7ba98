"""The one-rank run that a deployment must equal bit for bit.

Dialects with a single reduction equal the plain `Model`. The others round partial sums on the way; their reference is
one rank that applies the same rounding tree straight from the routing table, without buffers or messages.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from parallel.dispatch.reduce import elastic_reduce, normal_reduce
from parallel.replicas import choose_replicas
from parallel.topology import Topology
from refmodel.experts import LocalExchange
from refmodel.model import Model

#: rules whose answer depends on which tokens are asked about together: those are asked one token at a time
_BY_TOKEN = ("random", "round_robin")


def choose_by_row(topk_idx, rows, placement, rule, rank, topology, all_to_all):
    """Physical ids [T, K] of the tokens at global rows [T] on one rank: the same however a batch is cut."""
    topk_idx = np.asarray(topk_idx)
    physical = np.empty(topk_idx.shape, np.int64)
    cut = np.arange(1, len(rows)) if rule in _BY_TOKEN else np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *cut.tolist(), len(rows)]
    for start, stop in pairwise(edges):
        if stop > start:
            part = slice(start, stop)
            physical[part] = choose_replicas(
                topk_idx[part],
                placement,
                rule,
                rank=rank,
                token_offset=int(rows[start]),
                topology=topology,
                all_to_all=all_to_all,
            )
    return physical


def rounding_tree(dispatch: str, topology: Topology, mode: str = "hybrid"):
    """A dialect's reduction as a function of (y, topk_idx, num_experts, topk_weights=...); None for a single sum."""
    if dispatch == "low_latency" or (dispatch == "elastic" and mode == "single"):
        return None
    if dispatch == "normal":
        return partial(normal_reduce, topology=topology)
    if dispatch == "elastic":
        mode = mode if topology.num_nodes > 1 else "direct"
        return partial(elastic_reduce, topology=topology, mode=mode)
    # the plain collectives know no nodes: each rank its own rows, then ranks ascending
    return partial(normal_reduce, topology=Topology(topology.num_ranks, topology.num_ranks))


class _TreeExchange(LocalExchange):
    """The one-rank exchange with another reduction at its end."""

    def __init__(self, numerics, reduce, choose, num_physical):
        super().__init__(numerics)
        self._reduce, self._choose, self._num_physical = reduce, choose, num_physical

    def combine_recv(self):
        physical = self._choose(self._topk_idx)
        rows = self._rows[np.maximum(self._index, 0)]  # [T, K, D]; what stands at a slot of -1 is not read
        return self._reduce(rows, physical, num_experts=self._num_physical, topk_weights=self._topk_weights)


class ReferenceModel(Model):
    """`deployment`'s model on one rank, with its rounding tree."""

    def __init__(self, deployment, reduce):
        model = deployment.model
        self.config, self.numerics, self.notices = model.config, model.numerics, model.notices
        self.weights, self._deployment, self._reduce = model.weights, deployment, reduce

    def _exchange(self, items, layer):
        placement = self._deployment.placement(layer)
        choose = partial(self._physical, items, placement)
        return _TreeExchange(self.numerics, self._reduce, choose, placement.num_physical)

    def _physical(self, items, placement, topk_idx):
        ranks = np.concatenate([np.full(len(i.token_ids), self._deployment.rank_of(i.request)) for i in items])
        physical = np.empty(topk_idx.shape, np.int64)
        for rank in np.unique(ranks):
            rows = np.flatnonzero(ranks == rank)
            physical[rows] = self._deployment.choose(topk_idx[rows], rows, placement, int(rank))
        return physical

"""The two plain collectives that engines also use for experts: all-gather with reduce-scatter, and a ragged all-to-all.

Both reduce as normal dispatch on one node does: each rank its own experts' rows, then ranks ascending.
"""

import numpy as np

from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import localize
from parallel.dispatch.local_pairs import LocalPairs
from parallel.dispatch.payload import join_payload, payload_arrays
from parallel.dispatch.rank_rows import RankRowsExchange, sum_by_token


def global_routing(topk_idx: np.ndarray, topk_weights: np.ndarray) -> dict:
    """Global ids as int32 and weights, as they travel beside a row."""
    return {"topk_idx": (topk_idx.astype(np.int32), "routing"), "topk_weights": (topk_weights, "routing")}


class AllToAllVExchange(RankRowsExchange):
    """One row for each (token, rank) by a ragged all-to-all. Receive order: source rank, then token."""

    def _beside_row(self, payload, topk_idx, topk_weights):
        return global_routing(topk_idx, topk_weights)

    def _control(self, splits):
        return splits[:, None].astype(np.int64)

    def _local_ids(self, arrays):
        local = self.num_local_experts
        return localize(arrays["topk_idx"], self.rank * local, local), arrays["topk_weights"]


class AllGatherExchange(Exchange):
    """Every token row to every rank, and one partial row for every token back (vLLM's default for expert parallelism).

    Receive order: source rank, then token. A rank without an expert of the token sends a row of zeros.
    """

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, topk_weights = self._checked(x, topk_idx, topk_weights)
        ranks, self._tokens = self.topology.num_ranks, len(topk_idx)
        arrays = {name: (array.copy(), cls) for name, (array, cls) in payload_arrays(x).items()}
        arrays |= global_routing(topk_idx, topk_weights.copy())
        self.network.send_rows(
            self.rank,
            arrays,
            np.full(ranks, self._tokens),
            self._tag("dispatch_send"),
            starts=np.zeros(ranks, np.int64),
            control=np.full((ranks, 1), self._tokens, np.int64),
            terms=self._terms(x, topk_idx),
        )

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        self._from, local = received.counts, self.num_local_experts
        ids = localize(received.arrays["topk_idx"], self.rank * local, local)
        self._pairs = LocalPairs(ids, received.arrays["topk_weights"], local)
        return Pairs(join_payload(received.arrays), self._pairs.row, self._pairs.expert)

    def combine_send(self, rows):
        partial = self._pairs.reduce(self._check_pairs(rows, len(self._pairs)))
        self.network.send_rows(self.rank, {"x": (partial, "payload")}, self._from, self._tag("combine_send"))

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [R * T, D] by (rank, token)
        token = np.tile(np.arange(self._tokens), self.topology.num_ranks)
        return sum_by_token(rows, token, self._tokens)

    def _awaits(self, stage):
        super()._awaits(stage)
        sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
        return ((self._tag(sends[stage]), None),) if stage in sends else ()

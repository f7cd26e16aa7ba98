"""An exchange with a placement in front of it: logical experts become physical slots before anything is sent."""

import numpy as np


class PlacedExchange:
    """One rank's exchange of one layer, under the protocol of `parallel.dispatch.exchange`.

    `choose(topk_idx) -> physical ids` picks a replica per (token, slot); `placement` names each slot's expert.
    `routed` collects what every rank sent, so that a recording can say which token and slot a pair came from.
    """

    def __init__(self, exchange, placement, choose, rows, routed: dict):
        self.exchange, self._placement, self._choose = exchange, placement, choose
        self._rows, self._routed = rows, routed

    def dispatch_send(self, x, topk_idx, topk_weights):
        """Choose replicas, then send."""
        physical = self._choose(topk_idx)
        self._routed[self.exchange.rank] = (self._rows, physical)
        self.exchange.dispatch_send(x, physical, topk_weights)

    def dispatch_recv(self):
        """What arrived for this rank's slots."""
        self._pairs = self.exchange.dispatch_recv()
        return self._pairs

    def logical_expert(self, e: int) -> int:
        """The expert whose weights slot `e` of this rank holds."""
        return int(self._placement.experts_on(self.exchange.rank)[e])

    def pair_slots(self) -> np.ndarray:
        """Global token row * K + slot of each pair."""
        src_rank, src_token = self.exchange.origins()
        src_rank, src_token = src_rank[self._pairs.row], src_token[self._pairs.row]
        physical = self._pairs.expert + self.exchange.rank * self.exchange.num_local_experts
        slots = np.empty(len(physical), np.int64)
        for rank in np.unique(src_rank):
            mine = src_rank == rank
            rows, sent = self._routed[int(rank)]
            slot = (sent[src_token[mine]] == physical[mine, None]).argmax(axis=1)
            slots[mine] = rows[src_token[mine]] * sent.shape[1] + slot
        return slots

    def __getattr__(self, name):
        # the other stages, `ready` and `waits_for` are the dialect's own
        return getattr(self.exchange, name)

"""An exchange with a placement in front of it: logical experts become physical slots before anything is sent."""

import numpy as np

from parallel.dispatch.collectives import AllGatherExchange
from parallel.dispatch.low_latency import LowLatencyExchange


class PlacedExchange:
    """One rank's exchange of one layer, under the protocol of `parallel.dispatch.exchange`.

    `choose(topk_idx) -> physical ids` picks a replica per (token, slot); `placement` names each slot's expert.
    `routed` collects what every rank sent, so that a recording can say which token and slot a pair came from; None
    where ranks are in several processes.
    """

    def __init__(self, exchange, placement, choose, rows, routed: dict | None):
        self.exchange, self._placement, self._choose = exchange, placement, choose
        self._rows, self._routed = rows, routed

    def dispatch_send(self, x, topk_idx, topk_weights):
        """Choose replicas, then send."""
        physical = self._choose(topk_idx)
        if self._routed is not None:
            self._routed[self.exchange.rank] = (self._rows, physical)
        self.exchange.dispatch_send(x, physical, topk_weights)

    def dispatch_recv(self):
        """What arrived for this rank's slots."""
        pairs = self.exchange.dispatch_recv()
        self._row, self._expert = pairs.row, pairs.expert  # not the rows themselves: they may go once they are used
        return pairs

    def logical_expert(self, e: int) -> int:
        """The expert whose weights slot `e` of this rank holds."""
        return int(self._placement.experts_on(self.exchange.rank)[e])

    def pair_slots(self) -> np.ndarray | None:
        """Global token row * K + slot of each pair, for a recording: found from what every rank sent."""
        if self._routed is None:
            return None
        rank, token = (origin[self._row] for origin in self._origins())  # [P] each
        physical = self._expert + self.exchange.rank * self.exchange.num_local_experts
        slots = np.empty(len(physical), np.int64)
        for source in np.unique(rank):
            mine = rank == source
            rows, sent = self._routed[int(source)]
            slot = (sent[token[mine]] == physical[mine, None]).argmax(axis=1)
            slots[mine] = rows[token[mine]] * sent.shape[1] + slot
        return slots

    def _origins(self):
        """(source rank, source token) of every received row [M]."""
        ranks, tokens = [], []
        for source in sorted(self._routed):
            token = self._received_tokens(self._routed[source][1])
            ranks.append(np.full(len(token), source))
            tokens.append(token)
        origins = np.concatenate(ranks), np.concatenate(tokens)  # in receive order
        order = getattr(self.exchange, "recv_order", None)  # where rows lie otherwise: after a middle hop
        if order is None:
            return origins
        place = np.argsort(order, kind="stable")
        return origins[0][place], origins[1][place]

    def _received_tokens(self, sent):
        """Tokens of one source whose rows come here, in receive order; `sent` int [T, K] physical ids."""
        here = (sent >= 0) & (sent // self.exchange.num_local_experts == self.exchange.rank)
        if isinstance(self.exchange, LowLatencyExchange):  # one row per expert, by (expert, token)
            token, slot = np.nonzero(here)
            return token[np.lexsort((token, sent[token, slot]))]
        if isinstance(self.exchange, AllGatherExchange):
            return np.arange(len(sent))
        return np.flatnonzero(here.any(axis=1))

    def __getattr__(self, name):
        # the other stages, `ready` and `waits_for` are the dialect's own
        return getattr(self.exchange, name)

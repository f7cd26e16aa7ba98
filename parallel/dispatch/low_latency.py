"""DeepEP's low-latency dispatch and combine: one message for each token and expert, straight to the expert's rank.

Rows are never merged; weights are applied at the token's own rank, in top-k order, so that there is one reduction.
Source: DeepEP csrc/kernels/legacy/internode_ll.cu.
"""

import numpy as np

from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import order_by
from parallel.dispatch.payload import join_payload, payload_arrays, take_rows
from parallel.dispatch.rounding_tree import ordered_sum

HEADER_WORDS = 4  # int32: the token's index on its rank, then three reserved words


class LowLatencyExchange(Exchange):
    """One rank's low-latency exchange.

    `arrival_seed` permutes, within each expert, the order of the source ranks' blocks and the rows within a block: the
    real kernels take slots by atomic counters, so any such order is a legal one. None keeps (source, token).
    """

    def __init__(self, *args, arrival_seed: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.arrival_seed = arrival_seed

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, self._weights = self._checked(x, topk_idx, topk_weights)
        self._shape = topk_idx.shape
        ids = topk_idx.reshape(-1)
        by_expert = order_by(ids + 1, self.num_experts + 1)
        self._slot = by_expert[np.count_nonzero(ids < 0) :]  # [n] flat (token, slot), by (expert, token)
        token = self._slot // max(1, topk_idx.shape[1])
        ranks = self.topology.num_ranks
        counts = np.bincount(ids[self._slot], minlength=self.num_experts).reshape(ranks, self.num_local_experts)
        header = np.zeros((len(token), HEADER_WORDS), np.int32)
        header[:, 0] = token
        arrays = {"header": (header, "header"), **take_rows(payload_arrays(x), token)}
        control = counts.astype(np.int32)
        self.network.send_rows(self.rank, arrays, counts.sum(axis=1), self._tag("dispatch_send"), control=control)

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        self._from = received.counts
        local = np.arange(self.num_local_experts)
        expert = np.repeat(
            np.tile(local, len(received.counts)), received.control.reshape(-1)
        )  # [M] by (source, expert)
        self._row = self._arrival_order(expert, received.counts)
        self.recv_src_idx = received.arrays["header"][:, 0]
        return Pairs(join_payload(received.arrays), self._row, expert[self._row])

    def combine_send(self, rows):
        rows = self._check_pairs(rows, len(self._row))
        back = np.empty_like(rows)
        back[self._row] = rows
        flags = np.ones((self.topology.num_ranks, self.num_local_experts), np.int32)
        self.network.send_rows(
            self.rank, {"x": (back, "payload")}, self._from, self._tag("combine_send"), control=flags
        )

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [n, D] in the order of self._slot
        in_token_order = order_by(self._slot, self._weights.size)
        slots = self._slot[in_token_order]
        counts = np.bincount(slots // max(1, self._shape[1]), minlength=self._shape[0])
        return ordered_sum(rows, in_token_order, counts, weights=self._weights.reshape(-1)[slots])

    def _awaits(self, stage):
        super()._awaits(stage)
        sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
        return ((self._tag(sends[stage]), None),) if stage in sends else ()

    def _arrival_order(self, expert: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Rows [M] sorted by expert; source ranks' blocks stay whole."""
        if self.arrival_seed is None:
            return order_by(expert, self.num_local_experts)
        seed = (self.arrival_seed, self.rank, self.layer, self.micro_batch, self.step)
        rng = np.random.default_rng(np.abs(seed))
        source = np.repeat(np.arange(len(counts)), counts)
        block = rng.random((self.num_local_experts, len(counts)))[expert, source]
        return np.lexsort((rng.random(len(expert)), block, expert))

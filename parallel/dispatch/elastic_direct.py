"""DeepEP V2's elastic dispatch without a middle hop: one row for each token and rank, straight there and back.

`direct` sends back one row for each (token, rank), `single` one for each (token, slot), so that there is one reduction.
"""

import numpy as np

from parallel.dispatch.elastic_rows import check_capacity, last_slot, metadata_arrays, return_padding
from parallel.dispatch.layout import localize, order_by, shuffled_blocks
from parallel.dispatch.rank_rows import RankRowsExchange
from parallel.dispatch.rounding_tree import ordered_sum


class ElasticDirectExchange(RankRowsExchange):
    """One rank's elastic exchange, `mode` "direct" or "single".

    Receive order: source rank, then token, as DeepEP has it with `deterministic=True`; without, rows of a source arrive
    in any order, of which `arrival_seed` picks one.
    `num_max_tokens_per_rank` is the stride of `src_token_global_idx` and the capacity; None takes the largest stride.
    Ranks' partial sums are added in the order of the last slot that each of them serves.
    """

    def __init__(self, *args, mode="direct", num_max_tokens_per_rank: int | None = None, arrival_seed=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.arrival_seed = arrival_seed
        self.single = mode == "single"
        self.stride = num_max_tokens_per_rank or (2**31 - 1) // self.topology.num_ranks

    def dispatch_send(self, x, topk_idx, topk_weights):
        check_capacity(self._where("dispatch_send"), len(topk_idx), self.stride)
        super().dispatch_send(x, topk_idx, topk_weights)

    def dispatch_recv(self):
        pairs = super().dispatch_recv()
        self.recv_arrays = self._received
        self.recv_src_token_idx = self._received["src_token_global_idx"]
        return pairs

    def combine_send(self, rows):
        rows = self._check_pairs(rows, len(self._pairs))
        source = np.repeat(np.arange(len(self._from)), self._from)  # [M]
        splits = self._from
        if self.single:
            back = self._pairs.by_row(rows)
            source = np.repeat(source, self._pairs.per_row)
            splits = np.bincount(source, minlength=len(self._from))
        else:
            back = self._pairs.reduce(rows)
        is_rdma = self.topology.node(source) != self.topology.node(self.rank)
        padding, lengths = return_padding(is_rdma, self.recv_topk_idx.shape[1])
        arrays = {"x": (back, "payload"), **padding}
        self.network.send_rows(self.rank, arrays, splits, self._tag("combine_send"), lengths=lengths)

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]
        tokens, top_k = self._topk_idx.shape
        if not self.single:
            slot = last_slot(self._topk_idx[self._token], self._dst, self.num_local_experts)
            order = order_by(self._token * top_k + slot, tokens * top_k)
            return ordered_sum(rows, order, np.bincount(self._token, minlength=tokens))
        mine = self._topk_idx[self._token] // self.num_local_experts == self._dst[:, None]
        row, slot = np.nonzero(mine)  # [n] as the rows come back: by (rank, token, slot); -1 // e is no rank
        token = self._token[row]
        order = order_by(token * top_k + slot, tokens * top_k)
        counts = np.bincount(token, minlength=tokens)
        return ordered_sum(rows, order, counts, self._weights[token[order], slot[order]])

    def _receive_order(self, counts):
        if self.arrival_seed is None:
            return None
        return shuffled_blocks(np.repeat(np.arange(len(counts)), counts), self._seed(self.arrival_seed))

    def _beside_row(self, payload, topk_idx, topk_weights):
        return metadata_arrays(payload, topk_idx, topk_weights, self.rank * self.stride + self._token)

    def _terms(self, x, topk_idx):
        return {**super()._terms(x, topk_idx), "num_max_tokens_per_rank": self.stride}

    def _control(self, splits):
        return np.concatenate([splits[:, None].astype(np.int32), self._slots_by_rank()], axis=1)

    def _local_ids(self, arrays):
        local = self.num_local_experts
        return localize(arrays["topk_idx"], self.rank * local, local), arrays["topk_weights"]

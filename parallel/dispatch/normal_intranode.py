"""DeepEP's normal dispatch and combine within one node: one row for each token and rank that needs it.

The expert's rank weighs and adds up its own experts' rows and sends one row back; the token's rank adds those.
Source: DeepEP csrc/kernels/legacy/intranode.cu.
"""

import numpy as np

from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import inverse, localize, order_by, selected_units, send_order
from parallel.dispatch.payload import join_payload, payload_arrays, take_rows
from parallel.dispatch.rounding_tree import ordered_sum


class LocalPairs:
    """The pairs of received rows [M] that carry K local expert ids each, and the reduction of their outputs per row."""

    def __init__(self, topk_idx: np.ndarray, topk_weights: np.ndarray, num_local_experts: int, order=None):
        """`topk_idx` [M, K] local ids or -1; `order` [M]: the rows in receive order, where they stand otherwise."""
        if order is None:
            row, slot = np.nonzero(topk_idx >= 0)
            in_row_order = None
        else:
            place, slot = np.nonzero(topk_idx[order] >= 0)
            row = order[place]
            in_row_order = order_by(row, len(order))
        by_expert = order_by(topk_idx[row, slot], num_local_experts)
        self.row, self.slot = row[by_expert], slot[by_expert]
        self.expert = topk_idx[self.row, self.slot].astype(np.int64)
        self._index = inverse(by_expert)  # pair of each (row, slot), by row and then slot
        if in_row_order is not None:
            self._index, row, slot = self._index[in_row_order], row[in_row_order], slot[in_row_order]
        self._weights = topk_weights[row, slot]
        self._counts = np.bincount(row, minlength=len(topk_idx))

    def reduce(self, rows: np.ndarray) -> np.ndarray:
        """[M, D]: each received row's weighted sum of expert outputs, slots ascending, rounded to the storage dtype."""
        return ordered_sum(rows, self._index, self._counts, self._weights)


class NormalIntranodeExchange(Exchange):
    """One rank's normal exchange on one node. Receive order: source rank, then token."""

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, topk_weights = self._checked(x, topk_idx, topk_weights)
        ranks, local = self.topology.num_ranks, self.num_local_experts
        self._tokens = len(topk_idx)
        dst, self._token, splits = send_order(selected_units(topk_idx, local, ranks))
        ids = localize(topk_idx[self._token], dst[:, None] * local, local)
        arrays = {
            **take_rows(payload_arrays(x), self._token),
            "header": (self._token.astype(np.int32), "header"),
            "topk_idx": (ids.astype(np.int64, copy=False), "routing"),
            "topk_weights": (np.where(ids >= 0, topk_weights[self._token], topk_weights.dtype.type(0)), "routing"),
        }
        control = np.empty((ranks, 1 + local), np.int32)
        control[:, 0] = splits
        control[:, 1:] = np.bincount(topk_idx[topk_idx >= 0], minlength=self.num_experts).reshape(ranks, local)
        self.network.send_rows(self.rank, arrays, splits, self._tag("dispatch_send"), control=control)

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        arrays = received.arrays
        self._from, self.recv_src_idx = received.counts, arrays["header"]
        self.recv_topk_idx, self.recv_topk_weights = arrays["topk_idx"], arrays["topk_weights"]
        self._pairs = LocalPairs(self.recv_topk_idx, self.recv_topk_weights, self.num_local_experts)
        return Pairs(join_payload(arrays), self._pairs.row, self._pairs.expert)

    def combine_send(self, rows):
        partial = self._pairs.reduce(self._check_pairs(rows, len(self._pairs.row)))
        arrays = {"x": (partial, "payload"), "header": (self.recv_src_idx, "header")}
        self.network.send_rows(self.rank, arrays, self._from, self._tag("combine_send"))

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [n, D] by (rank, token), as sent
        return sum_by_token(rows, self._token, self._tokens)

    def _awaits(self, stage):
        super()._awaits(stage)
        sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
        return (self._tag(sends[stage]), None) if stage in sends else None


def sum_by_token(rows: np.ndarray, token: np.ndarray, num_tokens: int) -> np.ndarray:
    """[T, D]: rows [n, D] added by their token in the order in which they stand, rounded once."""
    return ordered_sum(rows, order_by(token, num_tokens), np.bincount(token, minlength=num_tokens))

"""What the dialects that send one row for each token and rank have in common: straight there, and one row back."""

import numpy as np

from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import order_by, selected_units, send_order
from parallel.dispatch.local_pairs import LocalPairs
from parallel.dispatch.payload import join_payload, payload_arrays, take_rows
from parallel.dispatch.rounding_tree import ordered_sum


class RankRowsExchange(Exchange):
    """Rows to each rank that a token needs, its own included; receive order is (source rank, token).

    A dialect says what travels beside the payload (`_beside_row`), which control words (`_control`), which ids a
    received row selects here (`_local_ids`), and what goes back beside the reduced row (`_beside_return`).
    """

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, topk_weights = self._checked(x, topk_idx, topk_weights)
        self._topk_idx, self._weights = topk_idx, topk_weights
        in_rank = selected_units(topk_idx, self.num_local_experts, self.topology.num_ranks)
        self._dst, self._token, splits = send_order(in_rank)
        arrays = take_rows(payload_arrays(x), self._token)
        arrays |= self._beside_row(arrays, topk_idx[self._token], topk_weights[self._token])
        control, terms = self._control(splits), self._terms(x, topk_idx)
        self.network.send_rows(self.rank, arrays, splits, self._tag("dispatch_send"), control=control, terms=terms)

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        self._from, self._received = received.counts, received.arrays
        self.recv_topk_idx, self.recv_topk_weights = self._local_ids(received.arrays)
        self.recv_order = self._receive_order(received.counts)
        self._pairs = LocalPairs(self.recv_topk_idx, self.recv_topk_weights, self.num_local_experts, self.recv_order)
        return Pairs(join_payload(received.arrays), self._pairs.row, self._pairs.expert)

    def combine_send(self, rows):
        partial = self._pairs.reduce(self._check_pairs(rows, len(self._pairs)))
        arrays = {"x": (partial, "payload"), **self._beside_return()}
        self.network.send_rows(self.rank, arrays, self._from, self._tag("combine_send"))

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [n, D] by (rank, token), as sent
        return sum_by_token(rows, self._token, len(self._topk_idx))

    def _awaits(self, stage):
        super()._awaits(stage)
        sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
        return ((self._tag(sends[stage]), None),) if stage in sends else ()

    def _slots_by_rank(self) -> np.ndarray:
        """int32 [R, e]: how many of this rank's slots select each expert."""
        ids = self._topk_idx[self._topk_idx >= 0]
        return np.bincount(ids, minlength=self.num_experts).reshape(-1, self.num_local_experts).astype(np.int32)

    def _beside_row(self, payload: dict, topk_idx: np.ndarray, topk_weights: np.ndarray) -> dict:
        """Arrays that travel with the rows [n]: ids and weights [n, K] of their tokens, and the dialect's own."""
        raise NotImplementedError

    def _control(self, splits: np.ndarray) -> np.ndarray:
        """Control words [R, words]."""
        raise NotImplementedError

    def _local_ids(self, arrays: dict) -> tuple[np.ndarray, np.ndarray]:
        """(local expert ids or -1, weights) [M, K] of the received rows."""
        raise NotImplementedError

    def _receive_order(self, counts: np.ndarray) -> np.ndarray | None:
        """Rows [M] in receive order, given the rows of each source [R]; None if they stand in it."""
        return None

    def _beside_return(self) -> dict:
        """Arrays that travel back beside the reduced rows."""
        return {}


def sum_by_token(rows: np.ndarray, token: np.ndarray, num_tokens: int, initial=None) -> np.ndarray:
    """[T, D]: rows [n, D] added by their token in the order in which they stand (to `initial`), rounded once."""
    counts = np.bincount(token, minlength=num_tokens)
    return ordered_sum(rows, order_by(token, num_tokens), counts, initial=initial)

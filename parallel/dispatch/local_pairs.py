"""The (row, expert) pairs of the rows that a rank received, and their reduction to one row each."""

import numpy as np

from parallel.dispatch.layout import inverse, order_by
from parallel.dispatch.rounding_tree import ordered_sum


class LocalPairs:
    """Pairs of received rows [M] that carry K local expert ids each; pair p is row `row[p]` for expert `expert[p]`.

    Sorted by expert, then by receive order, then by slot.
    """

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
        self.per_row = np.bincount(row, minlength=len(topk_idx))  # [M] pairs of each row

    def __len__(self) -> int:
        return len(self.row)

    def reduce(self, rows: np.ndarray) -> np.ndarray:
        """[M, D]: each received row's weighted sum of expert outputs, slots ascending, rounded to the storage dtype."""
        return ordered_sum(rows, self._index, self.per_row, self._weights)

    def by_row(self, rows: np.ndarray) -> np.ndarray:
        """[P, D]: expert outputs in the order of the received rows, slots ascending; nothing is added up."""
        return rows[self._index]

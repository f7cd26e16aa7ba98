"""DeepEP's normal dispatch and combine within one node: one row for each token and rank that needs it.

The expert's rank weighs and adds up its own experts' rows and sends one row back; the token's rank adds those.
Source: DeepEP csrc/kernels/legacy/intranode.cu.
"""

import numpy as np

from parallel.dispatch.layout import localize
from parallel.dispatch.rank_rows import RankRowsExchange


class NormalIntranodeExchange(RankRowsExchange):
    """One rank's normal exchange on one node. Receive order: source rank, then token."""

    def dispatch_recv(self):
        pairs = super().dispatch_recv()
        self.recv_src_idx = self._received["header"]
        return pairs

    def _beside_row(self, payload, topk_idx, topk_weights):
        local = self.num_local_experts
        ids = localize(topk_idx, self._dst[:, None] * local, local)  # the sender localises
        return {
            "header": (self._token.astype(np.int32), "header"),
            "topk_idx": (ids.astype(np.int64, copy=False), "routing"),
            "topk_weights": (np.where(ids >= 0, topk_weights, topk_weights.dtype.type(0)), "routing"),
        }

    def _control(self, splits):
        return np.concatenate([splits[:, None].astype(np.int32), self._slots_by_rank()], axis=1)

    def _local_ids(self, arrays):
        return arrays["topk_idx"], arrays["topk_weights"]

    def _beside_return(self):
        return {"header": (self.recv_src_idx, "header")}

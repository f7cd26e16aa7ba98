"""DeepEP's normal dispatch and combine over several nodes: one copy for each token and node, then for each rank.

A row crosses to the same GPU index of another node by RDMA, is passed on there by NVLink, and comes back the same way;
the forwarding rank adds up its node's rows and rounds the partial sum. The own node takes the same two hops, the first
of which is a copy in place.
Source: DeepEP csrc/kernels/legacy/internode.cu.
"""

import numpy as np

from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import (
    localize,
    node_mask,
    node_peers,
    order_by,
    rail,
    selected_units,
    send_order,
    spread,
)
from parallel.dispatch.local_pairs import LocalPairs
from parallel.dispatch.payload import array_row_bytes, join_payload, padding_array, payload_arrays, take_rows
from parallel.dispatch.rank_rows import sum_by_token

ALIGNMENT = 16  # bytes of a row in the forwarding buffers
RANK_WORDS = 8  # words that DeepEP's notification reserves for the ranks of a node


class NormalInternodeExchange(Exchange):
    """One rank's normal exchange over several nodes. Receive order: source rank, then token."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        topology = self.topology
        self.node, self.index = topology.node(self.rank), topology.local_index(self.rank)
        self._nodes, self._width = topology.num_nodes, topology.ranks_per_node
        self._rails = rail(topology, self.rank)
        self._peers = node_peers(topology, self.rank)

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, topk_weights = self._checked(x, topk_idx, topk_weights)
        self._tokens = len(topk_idx)
        in_rank = selected_units(topk_idx, self.num_local_experts, self.topology.num_ranks)
        node, self._token, per_node = send_order(node_mask(in_rank, self.topology))
        arrays = {
            **take_rows(payload_arrays(x), self._token),
            "header": (self._source_meta(in_rank[self._token], node), "header"),
            "topk_idx": (topk_idx[self._token].astype(np.int32), "routing"),
            "topk_weights": (topk_weights[self._token], "routing"),
        }
        arrays |= padding_array(len(node), array_row_bytes(arrays), ALIGNMENT)
        others = tuple(rank for rank in self._rails if rank != self.rank)
        self.network.send_rows(
            self.rank,
            arrays,
            spread(self._rails, per_node, self.topology.num_ranks),
            self._tag("dispatch_send"),
            destinations=self._rails,
            control=self._node_notification(topk_idx, in_rank, per_node),
            control_to=others,
            terms=self._terms(x, topk_idx),
        )

    def dispatch_forward(self):
        received = self._receive("dispatch_forward")
        arrays = received.arrays  # rows by (source node, token)
        self._from_nodes, self._source = received.counts, arrays["header"]
        first = self.node * self._width * self.num_local_experts
        ids = localize(arrays["topk_idx"], first, self._width * self.num_local_experts)
        peer, self._forwarded, per_peer = send_order(selected_units(ids, self.num_local_experts, self._width))
        source_node = np.repeat(np.arange(self._nodes), received.counts)
        control = np.zeros((self._width, self._nodes + self.num_local_experts), np.int32)
        np.add.at(control, (peer, source_node[self._forwarded]), 1)
        per_expert = np.bincount(ids[ids >= 0], minlength=self._width * self.num_local_experts)
        control[:, self._nodes :] = per_expert.reshape(self._width, -1)
        classes = {"header": "header", "topk_idx": "routing", "topk_weights": "routing", "scale": "scales"}
        classes["padding"] = "padding"
        taken = {name: (array[self._forwarded], classes.get(name, "payload")) for name, array in arrays.items()}
        self.network.send_rows(
            self.rank,
            taken,
            spread(self._peers, per_peer, self.topology.num_ranks),
            self._tag("dispatch_forward"),
            destinations=self._peers,
            control=control,
        )

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        arrays = received.arrays  # rows by (forwarding rank, source node, token)
        self._from_peers, self._recv_meta = received.counts, arrays["header"]
        per_source = received.control[:, : self._nodes]  # [forwarding rank = GPU index of the source, source node]
        source = np.arange(self._nodes)[None, :] * self._width + np.arange(self._width)[:, None]
        source = np.repeat(source.reshape(-1), per_source.reshape(-1))
        order = order_by(source, self.topology.num_ranks)
        local = self.num_local_experts
        ids = localize(arrays["topk_idx"], self.rank * local, local)
        self._pairs = LocalPairs(ids, arrays["topk_weights"], local, order)
        self.recv_order, self.recv_source_rank = order, source
        self.recv_topk_idx, self.recv_topk_weights = ids, arrays["topk_weights"]
        return Pairs(join_payload(arrays), self._pairs.row, self._pairs.expert)

    def combine_send(self, rows):
        partial = self._pairs.reduce(self._check_pairs(rows, len(self._pairs)))
        self._send_back("combine_send", partial, self._recv_meta, self._peers, self._from_peers)

    def combine_forward(self):
        rows = self._receive("combine_forward").arrays["x"]  # [n, D] by (rank of the node, row), as forwarded
        partial = sum_by_token(rows, self._forwarded, len(self._source))
        self._send_back("combine_forward", partial, self._source, self._rails, self._from_nodes)

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [n, D] by (node, token), as sent
        return sum_by_token(rows, self._token, self._tokens)

    def _awaits(self, stage):
        super()._awaits(stage)
        return {
            "dispatch_forward": ((self._tag("dispatch_send"), self._rails),),
            "dispatch_recv": ((self._tag("dispatch_forward"), self._peers),),
            "combine_forward": ((self._tag("combine_send"), self._peers),),
            "combine_recv": ((self._tag("combine_forward"), self._rails),),
        }.get(stage, ())

    def _source_meta(self, in_rank: np.ndarray, node: np.ndarray) -> np.ndarray:
        """int32 [n, 2]: the source's node and the ranks of the target node that need the row, as bits."""
        by_node = in_rank.reshape(len(node), self._nodes, self._width)[np.arange(len(node)), node]
        bits = np.zeros(len(node), np.uint32)
        for index in range(min(self._width, 32)):
            bits |= by_node[:, index].astype(np.uint32) << np.uint32(index)
        return np.stack([np.full(len(node), self.node, np.int32), bits.view(np.int32)], axis=1)

    def _node_notification(self, topk_idx, in_rank, per_node) -> np.ndarray:
        """int32 [nodes - 1, words]: rows for each rank of a node, slots for each of its experts, rows for the node."""
        rank_words = max(RANK_WORDS, self._width)
        words = np.zeros((self._nodes, rank_words + self.num_experts // self._nodes + 1), np.int32)
        words[:, : self._width] = in_rank.sum(axis=0).reshape(self._nodes, self._width)
        per_expert = np.bincount(topk_idx[topk_idx >= 0], minlength=self.num_experts)
        words[:, rank_words:-1] = per_expert.reshape(self._nodes, -1)
        words[:, -1] = per_node
        return np.delete(words, self.node, axis=0)

    def _send_back(self, stage, rows, meta, ranks, counts) -> None:
        arrays = {"x": (rows, "payload"), "header": (meta, "header")}
        arrays |= padding_array(len(rows), array_row_bytes(arrays), ALIGNMENT)
        splits = spread(ranks, counts, self.topology.num_ranks)
        self.network.send_rows(self.rank, arrays, splits, self._tag(stage), destinations=ranks)

"""DeepEP V2's elastic dispatch over several nodes: once to each other node by RDMA, then to its ranks by NVLink.

Rows for the own node skip the first hop. Partial sums are rounded on the expert's rank, then for each node on the rank
that the rows came in by, and each stands at the last slot it serves when the next sum adds in slot order.
"""

import numpy as np

from parallel.dispatch.elastic_rows import check_capacity, last_slot, metadata_arrays, return_padding
from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import (
    localize,
    node_mask,
    node_peers,
    order_by,
    rail,
    selected_units,
    send_order,
    shuffled_blocks,
    spread,
)
from parallel.dispatch.local_pairs import LocalPairs
from parallel.dispatch.payload import join_payload, payload_arrays, take_rows
from parallel.dispatch.rounding_tree import ordered_sum


class ElasticHybridExchange(Exchange):
    """One rank's elastic exchange in hybrid mode; arguments as for ElasticDirectExchange.

    Receive order: source rank, then token, as DeepEP has it with `deterministic=True`; without, rows that come in by
    one rank of the node arrive in any order, of which `arrival_seed` picks one.
    """

    def __init__(self, *args, mode="hybrid", num_max_tokens_per_rank: int | None = None, arrival_seed=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.arrival_seed = arrival_seed
        topology = self.topology
        self.stride = num_max_tokens_per_rank or (2**31 - 1) // topology.num_ranks
        self.node, self._width = topology.node(self.rank), topology.ranks_per_node
        self._others = tuple(rank for rank in rail(topology, self.rank) if rank != self.rank)
        self._peers = node_peers(topology, self.rank)
        self._not_rails = tuple(rank for rank in range(topology.num_ranks) if rank not in self._others)

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, topk_weights = self._checked(x, topk_idx, topk_weights)
        check_capacity(self._where("dispatch_send"), len(topk_idx), self.stride)
        self._topk_idx = topk_idx
        in_rank = selected_units(topk_idx, self.num_local_experts, self.topology.num_ranks)
        mask = np.zeros_like(in_rank)  # [T, R]: the first hop
        others, peers = list(self._others), list(self._peers)
        mask[:, others] = np.delete(node_mask(in_rank, self.topology), self.node, axis=1)
        mask[:, peers] = in_rank[:, peers]
        dst, token, splits = send_order(mask)
        to_peer = self.topology.node(dst) == self.node
        self._to_peer = dst[to_peer], token[to_peer]
        self._to_node = self.topology.node(dst[~to_peer]), token[~to_peer]
        arrays = take_rows(payload_arrays(x), token)
        src_token = self.rank * self.stride + token
        arrays |= metadata_arrays(arrays, topk_idx[token], topk_weights[token], src_token)
        slots = np.bincount(topk_idx[topk_idx >= 0], minlength=self.num_experts).reshape(len(splits), -1)
        control = np.concatenate([in_rank.sum(axis=0)[:, None], slots], axis=1).astype(np.int32)
        terms = {**self._terms(x, topk_idx), "num_max_tokens_per_rank": self.stride}
        self.network.send_rows(self.rank, arrays, splits, self._tag("dispatch_send"), control=control, terms=terms)

    def dispatch_forward(self):
        received = self._receive("dispatch_forward")
        arrays = received.arrays  # rows by (other node, token)
        self._from_nodes, ids = received.counts, arrays["topk_idx"]
        here = self._width * self.num_local_experts
        local = localize(ids, self.node * here, here)
        peer, self._forwarded, per_peer = send_order(selected_units(local, self.num_local_experts, self._width))
        self._forwarded_slot = last_slot(local[self._forwarded], peer, self.num_local_experts)
        self._per_peer = per_peer
        classes = {"topk_idx": "routing", "topk_weights": "routing", "linked_list": "routing", "scale": "scales"}
        classes |= {"src_token_global_idx": "header", "padding": "padding"}
        taken = {name: (array[self._forwarded], classes.get(name, "payload")) for name, array in arrays.items()}
        splits = spread(self._peers, per_peer, self.topology.num_ranks)
        self.network.send_rows(self.rank, taken, splits, self._tag("dispatch_forward"), destinations=self._peers)

    def dispatch_recv(self):
        (direct_tag, direct_from), (forward_tag, forward_from) = self._awaits("dispatch_recv")
        direct = self.network.receive(self.rank, direct_tag, direct_from)
        forwarded = self.network.receive(self.rank, forward_tag, forward_from)
        self._direct = direct.counts[[self._not_rails.index(rank) for rank in self._peers]]
        self._through = forwarded.counts
        arrays = {name: np.concatenate([direct.arrays[name], forwarded.arrays[name]]) for name in direct.arrays}
        self.recv_arrays, self.recv_src_token_idx = arrays, arrays["src_token_global_idx"]
        local = self.num_local_experts
        ids = localize(arrays["topk_idx"], self.rank * local, local)
        order = np.argsort(self.recv_src_token_idx, kind="stable")
        if self.arrival_seed is not None:
            came_in_by = self.topology.local_index(self.recv_src_token_idx // self.stride)
            order = shuffled_blocks(came_in_by, self._seed(self.arrival_seed))
        self.recv_order, self.recv_topk_idx, self.recv_topk_weights = order, ids, arrays["topk_weights"]
        self._pairs = LocalPairs(ids, arrays["topk_weights"], local, order)
        return Pairs(join_payload(arrays), self._pairs.row, self._pairs.expert)

    def combine_send(self, rows):
        partial = self._pairs.reduce(self._check_pairs(rows, len(self._pairs)))  # direct rows first, then forwarded
        width = np.arange(self._width)
        owner = np.concatenate([np.repeat(width, self._direct), np.repeat(width, self._through)])
        arrays = {"x": (partial[order_by(owner, self._width)], "payload")}  # to each peer: its own tokens' rows first
        splits = spread(self._peers, self._direct + self._through, self.topology.num_ranks)
        self.network.send_rows(self.rank, arrays, splits, self._tag("combine_send"), destinations=self._peers)

    def combine_forward(self):
        rows = self._receive("combine_forward").arrays["x"]  # by peer: rows of this rank's tokens, then forwarded ones
        peer, self._own_token = self._to_peer
        mine = np.bincount(peer - self._peers[0], minlength=self._width)
        is_own = np.repeat(np.tile([True, False], self._width), np.stack([mine, self._per_peer], axis=1).reshape(-1))
        own_slot = last_slot(self._topk_idx[self._own_token], peer, self.num_local_experts)
        self._own = self._sum(rows[is_own], self._own_token, own_slot, len(self._topk_idx))
        partial = self._sum(rows[~is_own], self._forwarded, self._forwarded_slot, int(self._from_nodes.sum()))
        padding, lengths = return_padding(np.ones(len(partial), bool), self._topk_idx.shape[1])
        splits = spread(self._others, self._from_nodes, self.topology.num_ranks)
        tag = self._tag("combine_forward")
        arrays = {"x": (partial, "payload"), **padding}
        self.network.send_rows(self.rank, arrays, splits, tag, destinations=self._others, lengths=lengths)

    def combine_recv(self):
        rows = self._receive("combine_recv").arrays["x"]  # [n, D] by (other node, token), as sent
        own_token = np.unique(self._own_token)
        node, token = self._to_node
        node = np.concatenate([np.full(len(own_token), self.node), node])
        token = np.concatenate([own_token, token])
        slot = last_slot(self._topk_idx[token], node, self._width * self.num_local_experts)
        return self._sum(np.concatenate([self._own[own_token], rows]), token, slot, len(self._topk_idx))

    def _awaits(self, stage):
        super()._awaits(stage)
        return {
            "dispatch_forward": ((self._tag("dispatch_send"), self._others),),
            "dispatch_recv": (
                (self._tag("dispatch_send"), self._not_rails),
                (self._tag("dispatch_forward"), self._peers),
            ),
            "combine_forward": ((self._tag("combine_send"), self._peers),),
            "combine_recv": ((self._tag("combine_forward"), self._others),),
        }.get(stage, ())

    def _sum(self, rows, token, slot, num_tokens) -> np.ndarray:
        """[num_tokens, D]: rows added by token in slot order, rounded once."""
        top_k = self._topk_idx.shape[1]
        order = order_by(token * top_k + slot, num_tokens * top_k)
        return ordered_sum(rows, order, np.bincount(token, minlength=num_tokens))

"""DeepEP V2's elastic combine in its own shape, for a whole cluster at once: lists with one entry per rank.

It is written apart from the exchanges, from the routing tables and from what dispatch gave, so that each is held
against the other. Source: DeepEP deep_ep/buffers/elastic.py (combine) and deep_ep/utils/refs.py (order of the sums).
"""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.deepep_elastic import ElasticDispatch, ElasticExpanded
from parallel.dispatch.elastic_rows import last_slot, return_padding
from parallel.dispatch.layout import (
    check_topk_idx,
    experts_per_rank,
    localize,
    node_mask,
    node_peers,
    order_by,
    rail,
    selected_units,
    send_order,
    spread,
)
from parallel.dispatch.reduce import LEVELS, bias_sum
from parallel.dispatch.rounding_tree import ordered_sum
from parallel.network import Network, Tag
from parallel.topology import Topology

_FIRST, _SECOND = (Tag(stage, hop="elastic_combine") for stage in ("combine_send", "combine_forward"))


class Back(NamedTuple):
    """Rows on their way back: `rows` [n, H], their weights [n, K] (0.0 at other ranks' slots) or None."""

    rows: np.ndarray
    weights: np.ndarray | None

    def take(self, index) -> "Back":
        """The rows that `index` names, with their weights."""
        return Back(self.rows[index], None if self.weights is None else self.weights[index])


def elastic_combine(
    x: list,
    received: list[ElasticDispatch],
    topk_idx: list,
    num_experts: int,
    topology: Topology,
    num_max_tokens_per_rank: int,
    topk_weights: list | None = None,
    bias: list | None = None,
    mode: str = "hybrid",
    expanded: list[ElasticExpanded] | None = None,
    network: Network | None = None,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Send the experts' rows back and add them up: (combined_x [T, H], combined_topk_weights [T, K] or None) per rank.

    `received` and `topk_idx` are what dispatch gave and was given. Without `expanded`, `x` holds one row for each
    received token, a rank's own experts already added up. With it (`elastic_expand`), one row for each (token, expert),
    whose padding is never read: they are added up here, rank by rank, or with `mode` "single"
    (`allow_multiple_reduction=False`) sent one by one and added once. "hybrid" adds up within each node before a row
    leaves it, "direct" does not. The sums are not weighted: multiply before.
    `topk_weights`: [M, K] for each received token, or [rows] where expanded; they come back beside the rows.
    `bias` per rank, [T, H] or a pair of them, comes first.
    Raises ValueError for another mode, for "single" without `expanded`, and for another number of rows.
    """
    if mode not in LEVELS:
        raise ValueError(f"mode = {mode!r} is none of {', '.join(LEVELS)}")
    if mode == "single" and expanded is None:
        raise ValueError('mode "single" adds one row for each (token, expert): it needs the expanded rows of dispatch')
    network, local = network or Network(topology), experts_per_rank(num_experts, topology)
    ids = [check_topk_idx(table, num_experts, topology) for table in topk_idx]
    sources = []
    for rank, arrived in enumerate(received):
        sent = None if topk_weights is None else np.asarray(topk_weights[rank])
        places = None if expanded is None else expanded[rank].recv_src_metadata[:, 2:]
        needed = len(arrived.recv_topk_idx) if expanded is None else len(expanded[rank].recv_topk_weights)
        if len(x[rank]) != needed:
            kind = "received tokens" if expanded is None else "expanded rows"
            raise ValueError(f"rank {rank} has {len(x[rank])} rows to send back for {needed} {kind}: one for each")
        back, row = _rows_back(np.asarray(x[rank]), sent, arrived, places, mode == "single")
        by_token = np.argsort(arrived.recv_src_token_idx[row], kind="stable")  # then by slot: rows are in that order
        sources.append((back.take(by_token), arrived.recv_src_token_idx[row][by_token] // num_max_tokens_per_rank))
    if mode == "hybrid" and topology.num_nodes > 1:
        return _hybrid(network, sources, ids, local, bias)
    return _direct(network, sources, ids, local, bias, mode == "single")


def _rows_back(x, weights, arrived: ElasticDispatch, places, single: bool) -> tuple[Back, np.ndarray]:
    """What a rank sends back, and the received row [n] of each; `places` [M, K]: expanded rows, or -1."""
    if places is None:
        here = None if weights is None else np.where(arrived.recv_topk_idx >= 0, weights, weights.dtype.type(0))
        return Back(x, here), np.arange(len(x))
    row, slot = np.nonzero(places >= 0)
    at = places[row, slot]
    by_slot = None
    if weights is not None:
        by_slot = np.zeros((len(at), places.shape[1]), weights.dtype)
        by_slot[np.arange(len(at)), slot] = weights[at]
    if single:
        return Back(x[at], by_slot), row
    counts = np.bincount(row, minlength=len(places))
    by_row = None if by_slot is None else ordered_sum(by_slot, np.arange(len(at)), counts)
    return Back(ordered_sum(x, at, counts), by_row), np.arange(len(places))


def _direct(network: Network, sources, ids, local: int, bias, single: bool) -> list:
    """One hop: every row straight to the rank of its token."""
    topology = network.topology
    for rank, (back, source) in enumerate(sources):
        is_rdma = topology.node(source) != topology.node(rank)
        _send(network, _FIRST, rank, back, np.bincount(source, minlength=topology.num_ranks), is_rdma, ids[rank])
    results = []
    for rank, table in enumerate(ids):
        back = _received(network, _FIRST, rank, None)
        dst, token, _ = send_order(selected_units(table, local, topology.num_ranks))
        slot = last_slot(table[token], dst, local)
        if single:
            row, slot = np.nonzero(table[token] // local == dst[:, None])  # -1 // e is no rank
            token = token[row]
        results.append(_summed(back, token, slot, table, _bias(bias, rank)))
    return results


def _hybrid(network: Network, sources, ids, local: int, bias) -> list:
    """Two hops: to the rank of the node with the token's GPU index, which adds up, and by RDMA to the token's rank."""
    topology = network.topology
    width = topology.ranks_per_node
    for rank, (back, source) in enumerate(sources):
        index, peers = topology.local_index(source), node_peers(topology, rank)
        splits = spread(peers, np.bincount(index, minlength=width), topology.num_ranks)
        no_rdma = np.zeros(len(source), bool)
        _send(network, _FIRST, rank, back.take(order_by(index, width)), splits, no_rdma, ids[rank], peers)
    own = [_by_node(network, rank, ids, local) for rank in range(topology.num_ranks)]
    results = []
    for rank, table in enumerate(ids):
        arrived = _received(network, _SECOND, rank, _other_nodes(topology, rank))
        hit = node_mask(selected_units(table, local, topology.num_ranks), topology)
        mine = np.flatnonzero(hit[:, topology.node(rank)])
        hit[:, topology.node(rank)] = False
        node, token, _ = send_order(hit)
        node = np.concatenate([np.full(len(mine), topology.node(rank)), node])
        token = np.concatenate([mine, token])
        back = _joined(own[rank], arrived)
        slot = last_slot(table[token], node, local * width)
        results.append(_summed(back, token, slot, table, _bias(bias, rank)))
    return results


def _by_node(network: Network, rank: int, ids, local: int) -> Back:
    """Add up what came in for each source on this rank's rail, send it on, and keep the own tokens' part."""
    topology = network.topology
    node, width = int(topology.node(rank)), topology.ranks_per_node
    sources = rail(topology, rank)
    received = _received(network, _FIRST, rank, node_peers(topology, rank))
    here = np.concatenate([localize(ids[source], node * width * local, width * local) for source in sources])
    source_node = np.repeat(np.arange(topology.num_nodes), [len(ids[source]) for source in sources])
    peer, token, _ = send_order(selected_units(here, local, width))
    rows, weights = _summed(received, token, last_slot(here[token], peer, local), here, None)
    summed = Back(rows, weights)
    selected = (here >= 0).any(axis=1)
    leaving = selected & (source_node != node)
    splits = spread(sources, np.bincount(source_node[leaving], minlength=topology.num_nodes), topology.num_ranks)
    by_rdma = np.ones(int(leaving.sum()), bool)
    _send(network, _SECOND, rank, summed.take(leaving), splits, by_rdma, ids[rank], _other_nodes(topology, rank))
    return summed.take(selected & (source_node == node))


def _send(network: Network, tag: Tag, rank: int, back: Back, splits, is_rdma, table, destinations=None) -> None:
    """Rows, with their weights where they travel, and the room for weights that a row has by RDMA."""
    arrays, (padding, lengths) = {"x": (back.rows, "payload")}, return_padding(is_rdma, table.shape[1])
    if back.weights is not None:
        arrays["topk_weights"] = (back.weights, "routing")
        lengths["padding"] = np.maximum(lengths["padding"] - back.weights.itemsize * table.shape[1], 0)
        padding = {"padding": (padding["padding"][0][: int(lengths["padding"].sum())], "padding")}
    network.send_rows(rank, arrays | padding, splits, tag, destinations=destinations, lengths=lengths)


def _received(network: Network, tag: Tag, rank: int, sources) -> Back:
    arrays = network.receive(rank, tag, sources).arrays
    return Back(arrays["x"], arrays.get("topk_weights"))


def _summed(back: Back, token, slot, table, initial) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows and weights added up by token in slot order; tokens that select nothing get `initial` or 0."""
    tokens, top_k = table.shape
    order, counts = order_by(token * top_k + slot, tokens * top_k), np.bincount(token, minlength=tokens)
    initial = bias_sum(initial, back.rows.dtype)
    weights = None if back.weights is None else ordered_sum(back.weights, order, counts)
    return ordered_sum(back.rows, order, counts, initial=initial), weights


def _joined(first: Back, second: Back) -> Back:
    weights = None if first.weights is None else np.concatenate([first.weights, second.weights])
    return Back(np.concatenate([first.rows, second.rows]), weights)


def _bias(bias, rank: int):
    return None if bias is None else bias[rank]


def _other_nodes(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks of the same GPU index on the other nodes."""
    return tuple(other for other in rail(topology, rank) if other != rank)

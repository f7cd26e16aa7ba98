"""The hops of DeepEP's normal dispatch and combine for a whole cluster, from masks and handles alone.

Every function takes lists with one entry per rank; what a rank receives stands by (source rank, token).
"""

import numpy as np

from parallel.dispatch.layout import localize, node_mask, node_peers, order_by, rail, send_order, spread
from parallel.dispatch.payload import array_row_bytes, padding_array, payload_arrays, take_rows
from parallel.dispatch.rank_rows import sum_by_token
from parallel.dispatch.reduce import bias_sum
from parallel.network import Network, Tag

ROW_ALIGNMENT = 16
RANK_WORDS = 8


def dispatch_intranode(network: Network, x, in_rank, topk_idx, topk_weights, num_experts: int) -> list[dict]:
    """Received arrays per rank; routing, where it travels, is localised by the sender."""
    ranks = network.topology.num_ranks
    local, tag = num_experts // ranks, Tag("dispatch_send", hop="normal_dispatch")
    for rank, mask in enumerate(in_rank):
        dst, token, splits = send_order(mask)
        arrays = take_rows(payload_arrays(x[rank]), token) | {"header": (token.astype(np.int32), "header")}
        control = None
        if topk_idx is not None:
            ids = localize(topk_idx[rank][token], dst[:, None] * local, local)
            weights = np.asarray(topk_weights[rank])[token]
            arrays["topk_idx"] = (ids.astype(np.int64), "routing")
            arrays["topk_weights"] = (np.where(ids >= 0, weights, weights.dtype.type(0)), "routing")
            slots = _slots(topk_idx[rank], num_experts).reshape(ranks, local)
            control = np.concatenate([splits[:, None], slots], axis=1).astype(np.int32)
        network.send_rows(rank, arrays, splits, tag, control=control)
    return [network.receive(rank, tag).arrays for rank in range(ranks)]


def dispatch_internode(network: Network, x, in_rank, topk_idx, topk_weights, num_experts: int) -> list[dict]:
    """Received arrays per rank; routing, where it travels, keeps global ids."""
    first, second = Tag("dispatch_send", hop="normal_dispatch"), Tag("dispatch_forward", hop="normal_dispatch")
    ranks = range(network.topology.num_ranks)
    for rank in ranks:
        routing = None if topk_idx is None else (topk_idx[rank], np.asarray(topk_weights[rank]))
        _send_to_nodes(network, first, rank, x[rank], in_rank[rank], routing, num_experts)
    for rank in ranks:
        _pass_on(network, first, second, rank, in_rank, topk_idx is not None, num_experts)
    return [_by_source(network, second, rank, in_rank) for rank in ranks]


def _send_to_nodes(network: Network, tag: Tag, rank: int, x, mask, routing, num_experts: int) -> None:
    """One row to each node that a token needs, by the rank of the same GPU index."""
    topology = network.topology
    arrays, per_node = _first_hop(topology, rank, x, mask)
    control = None
    if routing is not None:
        token = send_order(node_mask(mask, topology))[1]
        arrays["topk_idx"] = (routing[0][token].astype(np.int32), "routing")
        arrays["topk_weights"] = (routing[1][token], "routing")
        control = _node_words(topology, rank, routing[0], mask, num_experts)
    arrays |= padding_array(int(per_node.sum()), array_row_bytes(arrays), ROW_ALIGNMENT)
    rails = rail(topology, rank)
    others = tuple(other for other in rails if other != rank)
    splits = spread(rails, per_node, topology.num_ranks)
    network.send_rows(rank, arrays, splits, tag, destinations=rails, control=control, control_to=others)


def _pass_on(network: Network, first: Tag, second: Tag, rank: int, in_rank, with_routing: bool, num_experts) -> None:
    """Forward what came in for the node, one row for each rank of it that needs the token."""
    topology = network.topology
    received = network.receive(rank, first, rail(topology, rank)).arrays
    node, width = int(topology.node(rank)), topology.ranks_per_node
    masks = []
    for source in rail(topology, rank):
        mine = in_rank[source][:, node * width : (node + 1) * width]
        masks.append(mine[mine.any(axis=1)])
    _, row, per_peer = send_order(np.concatenate(masks))
    arrays = {name: (array[row], _CLASSES.get(name, "payload")) for name, array in received.items()}
    control = _peer_words(topology, node, masks, received["topk_idx"], num_experts) if with_routing else None
    peers = node_peers(topology, rank)
    splits = spread(peers, per_peer, topology.num_ranks)
    network.send_rows(rank, arrays, splits, second, destinations=peers, control=control)


def _by_source(network: Network, tag: Tag, rank: int, in_rank) -> dict:
    """What a rank received, put in the order of (source rank, token)."""
    topology = network.topology
    nodes, width = topology.num_nodes, topology.ranks_per_node
    received = network.receive(rank, tag, node_peers(topology, rank)).arrays  # by (GPU index, node, token)
    counts = np.array([[in_rank[n * width + i][:, rank].sum() for n in range(nodes)] for i in range(width)])
    source = np.arange(nodes)[None, :] * width + np.arange(width)[:, None]
    order = order_by(np.repeat(source.reshape(-1), counts.reshape(-1)), topology.num_ranks)
    return {name: array[order] for name, array in received.items()}


def combine_intranode(network: Network, x, handles, topk_weights, bias) -> list[tuple]:
    """(combined rows, combined weights) per rank."""
    tag = Tag("combine_send", hop="normal_combine")
    for rank, handle in enumerate(handles):
        splits = np.diff(handle.rank_prefix_matrix[:, rank], prepend=0)
        count = int(splits.sum())
        arrays = _back(x[rank], None if topk_weights is None else topk_weights[rank], count)
        arrays["header"] = (handle.recv_src_idx.copy(), "header")
        network.send_rows(rank, arrays, splits, tag)
    results = []
    for rank, handle in enumerate(handles):
        arrays = network.receive(rank, tag).arrays
        token = send_order(handle.is_token_in_rank)[1]
        results.append(_summed(arrays, token, len(handle.is_token_in_rank), None if bias is None else bias[rank]))
    return results


def combine_internode(network: Network, x, handles, topk_weights, bias) -> list[tuple]:
    """(combined rows, combined weights) per rank: summed by node on the rank that forwarded, then at the source."""
    topology = network.topology
    nodes, width = topology.num_nodes, topology.ranks_per_node
    first, second = Tag("combine_send", hop="normal_combine"), Tag("combine_forward", hop="normal_combine")
    for rank, handle in enumerate(handles):
        per_source = np.diff(handle.recv_gbl_rank_prefix_sum, prepend=0)
        order = order_by(np.repeat(np.arange(topology.num_ranks) % width, per_source), width)
        arrays = _back(x[rank], None if topk_weights is None else topk_weights[rank], len(order), order)
        arrays["header"] = (handle.recv_src_meta[order], "header")
        arrays |= padding_array(len(order), array_row_bytes(arrays), ROW_ALIGNMENT)
        splits = spread(node_peers(topology, rank), per_source.reshape(nodes, width).sum(axis=0), topology.num_ranks)
        network.send_rows(rank, arrays, splits, first, destinations=node_peers(topology, rank))
    for rank, handle in enumerate(handles):
        received = network.receive(rank, first, node_peers(topology, rank)).arrays
        _, row, _ = send_order(handle.send_nvl_head >= 0)
        rows, weights = _summed(received, row, len(handle.send_nvl_head), None)
        arrays = {"x": (rows, "payload")}
        if weights is not None:
            arrays["topk_weights"] = (weights, "routing")
        meta = np.zeros((len(rows), 2), np.int32)
        meta[row] = received["header"]
        arrays["header"] = (meta, "header")
        arrays |= padding_array(len(rows), array_row_bytes(arrays), ROW_ALIGNMENT)
        rails = rail(topology, rank)
        splits = spread(rails, np.diff(handle.recv_rdma_rank_prefix_sum, prepend=0), topology.num_ranks)
        network.send_rows(rank, arrays, splits, second, destinations=rails)
    results = []
    for rank, handle in enumerate(handles):
        arrays = network.receive(rank, second, rail(topology, rank)).arrays
        token = send_order(handle.send_rdma_head >= 0)[1]
        results.append(_summed(arrays, token, len(handle.send_rdma_head), None if bias is None else bias[rank]))
    return results


_CLASSES = {
    "scale": "scales",
    "header": "header",
    "topk_idx": "routing",
    "topk_weights": "routing",
    "padding": "padding",
}


def _first_hop(topology, rank, x, mask) -> tuple[dict, np.ndarray]:
    """Rows for each node with their meta, and rows per node."""
    width = topology.ranks_per_node
    node, token, per_node = send_order(node_mask(mask, topology))
    wanted = mask[token].reshape(len(token), topology.num_nodes, width)[np.arange(len(token)), node]
    bits = (wanted * (1 << np.arange(width))).sum(axis=1, dtype=np.int64) & 0xFFFFFFFF
    meta = np.stack([np.full(len(token), topology.node(rank)), bits], axis=1).astype(np.uint32).view(np.int32)
    return take_rows(payload_arrays(x), token) | {"header": (meta, "header")}, per_node


def _back(x, weights, count, order=None) -> dict:
    """The rows (and weights) that go back, in the given order."""
    order = np.arange(count) if order is None else order
    arrays = {"x": (np.asarray(x)[order], "payload")}
    if weights is not None:
        arrays["topk_weights"] = (np.asarray(weights)[order], "routing")
    return arrays


def _summed(arrays, token, num_tokens, bias) -> tuple[np.ndarray, np.ndarray | None]:
    rows = sum_by_token(arrays["x"], token, num_tokens, bias_sum(bias, arrays["x"].dtype))
    weights = sum_by_token(arrays["topk_weights"], token, num_tokens) if "topk_weights" in arrays else None
    return rows, weights


def _slots(topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
    return np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)


def _node_words(topology, rank, topk_idx, mask, num_experts) -> np.ndarray:
    """int32 [nodes - 1, words]: rows for each rank of a node, slots for each of its experts, rows for the node."""
    nodes, width = topology.num_nodes, topology.ranks_per_node
    by_rank = np.zeros((nodes, max(RANK_WORDS, width)), np.int64)
    by_rank[:, :width] = mask.sum(axis=0).reshape(nodes, width)
    per_node = node_mask(mask, topology).sum(axis=0)[:, None]
    words = np.concatenate([by_rank, _slots(topk_idx, num_experts).reshape(nodes, -1), per_node], axis=1)
    return np.delete(words, topology.node(rank), axis=0).astype(np.int32)


def _peer_words(topology, node, masks, topk_idx, num_experts) -> np.ndarray:
    """int32 [ranks per node, nodes + e]: rows from each source node, slots of each local expert."""
    width = topology.ranks_per_node
    here = num_experts // topology.num_nodes
    rows = np.stack([mask.sum(axis=0) for mask in masks], axis=1)  # [rank of the node, source node]
    slots = _slots(localize(topk_idx, node * here, here), here).reshape(width, -1)
    return np.concatenate([rows, slots], axis=1).astype(np.int32)

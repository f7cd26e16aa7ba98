"""The handles of DeepEP's normal dispatch: where every token went, by rank and by channel.

Channels are contiguous ranges of ceil(T / channels) tokens.
Source: DeepEP csrc/kernels/legacy/intranode.cu and internode.cu.
"""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.layout import node_mask
from parallel.topology import Topology


class IntranodeHandle(NamedTuple):
    """One rank's handle on one node; DeepEP's fields in their order, for C channels."""

    rank_prefix_matrix: np.ndarray  # int32 [R, R] tokens from ranks 0..i to rank j, inclusive
    channel_prefix_matrix: np.ndarray  # int32 [R, C] sent to the rank in channels 0..c, inclusive
    recv_channel_prefix_matrix: np.ndarray  # int32 [R, C] where channel c of the source begins in its block
    recv_src_idx: np.ndarray  # int32 [num_recv] token index on its rank
    is_token_in_rank: np.ndarray  # bool [T, R]
    send_head: np.ndarray  # int32 [T, R] position in the channel's queue to the rank, -1 where not sent


class InternodeHandle(NamedTuple):
    """One rank's handle over several nodes; DeepEP's fields in their order."""

    is_token_in_rank: np.ndarray  # bool [T, R]
    rdma_channel_prefix_matrix: np.ndarray  # int32 [N, C] sent to the node in channels 0..c, inclusive
    gbl_channel_prefix_matrix: np.ndarray  # int32 [R, C] sent to the rank in channels 0..c, inclusive
    recv_rdma_channel_prefix_matrix: np.ndarray  # int32 [N, C] arrived from the node in channels 0..c, inclusive
    recv_rdma_rank_prefix_sum: np.ndarray  # int32 [N] arrived from nodes 0..n, to be forwarded, inclusive
    recv_gbl_channel_prefix_matrix: np.ndarray  # int32 [R, C] where channel c of the source begins in recv_x
    recv_gbl_rank_prefix_sum: np.ndarray  # int32 [R] received from ranks 0..i, inclusive
    recv_src_meta: np.ndarray  # int32 [num_recv, 2] source node, ranks of this node that got the row, as bits
    send_rdma_head: np.ndarray  # int32 [T, N] position in the channel's queue to the node, -1 where not sent
    send_nvl_head: np.ndarray  # int32 [forwarded, ranks per node] position in the queue to the rank, -1 where not sent


def intranode_handles(topology: Topology, in_rank: list[np.ndarray], num_channels: int) -> list[IntranodeHandle]:
    """Handles of all ranks from bool [T, R] masks."""
    counts = np.stack([mask.sum(axis=0) for mask in in_rank])  # [source, destination]
    rank_prefix = np.cumsum(counts, axis=0).astype(np.int32)
    prefix = [channel_prefix(mask, num_channels) for mask in in_rank]
    return [
        IntranodeHandle(
            rank_prefix,
            prefix[rank],
            np.stack([exclusive(one[rank]) for one in prefix]),
            np.concatenate([np.flatnonzero(mask[:, rank]) for mask in in_rank]).astype(np.int32),
            mask,
            queue_positions(mask, num_channels),
        )
        for rank, mask in enumerate(in_rank)
    ]


def internode_handles(topology: Topology, in_rank: list[np.ndarray], num_channels: int) -> list[InternodeHandle]:
    """Handles of all ranks from bool [T, R] masks."""
    per_rank = [channel_prefix(mask, num_channels) for mask in in_rank]
    to_node = [node_mask(mask, topology) for mask in in_rank]
    per_node = [channel_prefix(mask, num_channels) for mask in to_node]
    counts = np.stack([mask.sum(axis=0) for mask in in_rank])  # [source, destination]
    handles = []
    for rank, mask in enumerate(in_rank):
        node, width = int(topology.node(rank)), topology.ranks_per_node
        rails = range(topology.local_index(rank), topology.num_ranks, width)
        arrived = np.array([to_node[source][:, node].sum() for source in rails])
        begin = np.cumsum(counts[:, rank]) - counts[:, rank]
        handles.append(
            InternodeHandle(
                mask,
                per_node[rank],
                per_rank[rank],
                np.stack([per_node[source][node] for source in rails]),
                np.cumsum(arrived).astype(np.int32),
                np.stack([begin[source] + exclusive(one[rank]) for source, one in enumerate(per_rank)]).astype(
                    np.int32
                ),
                np.cumsum(counts[:, rank]).astype(np.int32),
                _source_meta(topology, in_rank, rank),
                queue_positions(to_node[rank], num_channels),
                _forward_heads(topology, in_rank, to_node, rank, num_channels),
            )
        )
    return handles


def channels(num_tokens: int, num_channels: int) -> np.ndarray:
    """int64 [T]: the channel of each token."""
    return np.arange(num_tokens) // max(1, -(-num_tokens // num_channels))


def channel_prefix(mask: np.ndarray, num_channels: int) -> np.ndarray:
    """int32 [U, C]: tokens sent to each unit in channels 0..c."""
    counts = np.zeros((num_channels, mask.shape[1]), np.int32)
    np.add.at(counts, channels(len(mask), num_channels), mask)
    return np.cumsum(counts, axis=0, dtype=np.int32).T


def exclusive(prefix: np.ndarray) -> np.ndarray:
    """Where each channel begins, from the inclusive sums [C]."""
    return np.concatenate([[0], prefix[:-1]]).astype(np.int32)


def queue_positions(mask: np.ndarray, num_channels: int) -> np.ndarray:
    """int32 [T, U]: how many tokens of the same channel went to the unit before, -1 where the token does not go."""
    before = np.cumsum(mask, axis=0, dtype=np.int32) - mask
    channel = channels(len(mask), num_channels)
    first = np.searchsorted(channel, channel)
    return np.where(mask, before - before[first], np.int32(-1)) if len(mask) else before


def _source_meta(topology, in_rank, rank) -> np.ndarray:
    """int32 [num_recv, 2] in receive order."""
    width = topology.ranks_per_node
    peers = slice(topology.node(rank) * width, (topology.node(rank) + 1) * width)
    metas = []
    for source, mask in enumerate(in_rank):
        bits = (mask[mask[:, rank], peers] * (1 << np.arange(width))).sum(axis=1, dtype=np.int64)
        metas.append(np.stack([np.full(len(bits), topology.node(source)), bits & 0xFFFFFFFF], axis=1))
    return np.concatenate(metas).astype(np.uint32).view(np.int32)


def _forward_heads(topology, in_rank, to_node, rank, num_channels) -> np.ndarray:
    """int32 [forwarded, ranks per node], rows by (source node, token).

    The kernels interleave the source nodes as their rows arrive; here each channel takes them in ascending order.
    """
    width, node = topology.ranks_per_node, int(topology.node(rank))
    sources = range(topology.local_index(rank), topology.num_ranks, width)
    masks, channel = [], []
    for source in sources:
        picked = to_node[source][:, node]
        masks.append(in_rank[source][picked][:, node * width : (node + 1) * width])
        channel.append(channels(len(picked), num_channels)[picked])
    mask, channel = np.concatenate(masks), np.concatenate(channel)
    heads = np.full(mask.shape, -1, np.int32)
    for peer in range(width):
        rows = np.flatnonzero(mask[:, peer])
        order = rows[np.argsort(channel[rows], kind="stable")]
        first = np.searchsorted(channel[order], channel[order])
        heads[order, peer] = np.arange(len(order)) - first
    return heads

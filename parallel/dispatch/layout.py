"""Who gets what: the routing table turned into counts, masks and send orders."""

from typing import NamedTuple

import numpy as np

from parallel.topology import Topology


class DispatchLayout(NamedTuple):
    """What one rank is going to send; field names are DeepEP's."""

    num_tokens_per_rank: np.ndarray  # int32 [R], each token once per rank
    num_tokens_per_rdma_rank: np.ndarray | None  # int32 [nodes], each token once per node, the own one included
    num_tokens_per_expert: np.ndarray  # int32 [E], every selected slot
    is_token_in_rank: np.ndarray  # bool [T, R]


def get_dispatch_layout(topk_idx: np.ndarray, num_experts: int, topology: Topology) -> DispatchLayout:
    """Count one rank's tokens by destination.

    `topk_idx` [T, K] holds physical expert ids, -1 for no selection; `num_experts` physical experts lie contiguously on
    the ranks. Counts by rank and by node count a token once, counts by expert count every slot;
    `num_tokens_per_rdma_rank` is None on a single node.
    Raises ValueError for an id of `num_experts` or more or below -1 (DeepEP ignores those silently), and where ranks do
    not divide `num_experts`.
    Source: DeepEP csrc/kernels/legacy/layout.cu.
    """
    topk_idx = check_topk_idx(topk_idx, num_experts, topology)
    per_expert = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    in_rank = selected_units(topk_idx, num_experts // topology.num_ranks, topology.num_ranks)
    per_node = None
    if topology.num_nodes > 1:
        per_node = node_mask(in_rank, topology).sum(axis=0, dtype=np.int32)
    return DispatchLayout(in_rank.sum(axis=0, dtype=np.int32), per_node, per_expert.astype(np.int32), in_rank)


def experts_per_rank(num_experts: int, topology: Topology) -> int:
    """Physical experts on each rank; raises ValueError where they do not divide."""
    if num_experts < 1 or num_experts % topology.num_ranks:
        nearest = -(-max(num_experts, 1) // topology.num_ranks) * topology.num_ranks
        raise ValueError(
            f"{num_experts} physical experts do not divide over {topology.num_ranks} ranks: "
            f"every rank holds the same number; {nearest} would do"
        )
    return num_experts // topology.num_ranks


def check_topk_idx(topk_idx, num_experts: int, topology: Topology) -> np.ndarray:
    """The routing table as an integer array [T, K]; raises ValueError where it is none or names a wrong expert."""
    experts_per_rank(num_experts, topology)
    topk_idx = np.asarray(topk_idx)
    if topk_idx.ndim != 2 or topk_idx.dtype.kind not in "iu":
        raise ValueError(f"topk_idx is {topk_idx.dtype} of shape {topk_idx.shape}: an integer [T, K] is needed")
    if topk_idx.size and (topk_idx.max() >= num_experts or topk_idx.min() < -1):
        wrong = topk_idx[(topk_idx >= num_experts) | (topk_idx < -1)][0]
        raise ValueError(f"topk_idx holds {wrong}: ids are physical, 0 to {num_experts - 1}, or -1 for no selection")
    return topk_idx


def selected_units(topk_idx: np.ndarray, experts_per_unit: int, num_units: int) -> np.ndarray:
    """bool [T, U]: does any slot of the token select an expert of the unit (rank or node)?"""
    hit = np.zeros((len(topk_idx), num_units + 1), bool)
    unit = np.where(topk_idx >= 0, topk_idx // experts_per_unit, num_units)
    hit[np.arange(len(topk_idx))[:, None], unit] = True
    return hit[:, :num_units]


def node_mask(in_rank: np.ndarray, topology: Topology) -> np.ndarray:
    """bool [T, nodes] from bool [T, R]."""
    if topology.num_nodes == 1:
        return in_rank.any(axis=1, keepdims=True)
    return in_rank.reshape(len(in_rank), topology.num_nodes, topology.ranks_per_node).any(axis=2)


def send_order(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(unit [n], token [n], rows per unit [U]) of bool [T, U]: by unit, then by token."""
    unit, token = np.nonzero(np.ascontiguousarray(mask.T))
    return unit, token, np.bincount(unit, minlength=mask.shape[1])


def node_peers(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's node, itself included."""
    first = int(topology.node(rank)) * topology.ranks_per_node
    return tuple(range(first, first + topology.ranks_per_node))


def rail(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks of the same GPU index, one on each node, itself included."""
    return tuple(range(int(topology.local_index(rank)), topology.num_ranks, topology.ranks_per_node))


def spread(ranks: tuple[int, ...], counts: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64 [R]: the counts at their ranks, 0 elsewhere."""
    splits = np.zeros(num_ranks, np.int64)
    splits[list(ranks)] = counts
    return splits


def localize(topk_idx: np.ndarray, first_expert, num_local: int) -> np.ndarray:
    """Ids [n, K] relative to `first_expert` (a number or [n, 1]); -1 where the expert is not among the `num_local`."""
    local = topk_idx - first_expert
    return np.where((local >= 0) & (local < num_local), local, -1)


def shuffled_blocks(block: np.ndarray, seed) -> np.ndarray:
    """Rows [M] by block, in an order within each block that the seed (integers) picks."""
    return np.lexsort((np.random.default_rng(seed).random(len(block)), block))


def order_by(keys: np.ndarray, limit: int) -> np.ndarray:
    """Stable argsort of keys from 0 to `limit` - 1; narrow keys are sorted by radix, an order of magnitude faster."""
    if limit <= 1 << 8:
        keys = keys.astype(np.uint8)
    elif limit <= 1 << 16:
        keys = keys.astype(np.uint16)
    return np.argsort(keys, kind="stable")


def inverse(order: np.ndarray) -> np.ndarray:
    """The permutation that undoes `order`."""
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return back

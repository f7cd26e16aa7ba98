"""DeepEP's normal calls in their own shapes, for a whole cluster at once: lists with one entry per rank.

They are written apart from the exchanges, so that each is held against the other.
Source: DeepEP deep_ep/buffers/legacy.py (dispatch, combine) and csrc/kernels/legacy/{intranode,internode}.cu.
"""

from typing import Any, NamedTuple

import numpy as np

from parallel.dispatch.deepep_handles import InternodeHandle, IntranodeHandle, internode_handles, intranode_handles
from parallel.dispatch.layout import check_topk_idx, experts_per_rank, get_dispatch_layout, localize
from parallel.dispatch.normal_hops import combine_internode, combine_intranode, dispatch_internode, dispatch_intranode
from parallel.dispatch.payload import join_like, num_rows
from parallel.network import Network
from parallel.topology import Topology


class NormalDispatch(NamedTuple):
    """What one rank received: one row for each token that selects an expert here, by (source rank, token)."""

    recv_x: Any  # [num_recv, H], or (codes, scales) as it was sent
    recv_topk_idx: np.ndarray | None  # [num_recv, K] local ids, -1 elsewhere
    recv_topk_weights: np.ndarray | None  # float32 [num_recv, K], 0.0 elsewhere
    num_recv_tokens_per_expert_list: list[int]  # slots of each local expert, rounded up to expert_alignment
    handle: IntranodeHandle | InternodeHandle


def normal_dispatch(
    x: list,
    topk_idx: list | None,
    topk_weights: list | None,
    num_experts: int,
    topology: Topology,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
    handle: list | None = None,
    num_sms: int = 20,
    fill: float | None = None,
    network: Network | None = None,
) -> list[NormalDispatch]:
    """Send every token once to each rank that holds one of its experts (its own rank included).

    `x` per rank: rows [T, H], or a pair (codes, scales) of any strides. `topk_idx` [T, K] and `topk_weights` [T, K] per
    rank. `handle` (a list of earlier handles) repeats that dispatch for other rows: no routing travels, and the result
    has none. `num_worst_tokens` gives every output that many rows, an empty list of counts, and ids of -1 in the tail,
    whose rows and weights are undefined (`fill` is put there; NaN shows who reads them).
    The counts are counts: `recv_x` holds no padding rows, and one row for a token however many experts it selects here.
    `num_sms` sets the number of channels (half of it), which shows in the handle only.
    Raises ValueError for topk_idx without topk_weights, for both or neither of topk_idx and handle, and where
    `num_worst_tokens` is less than a rank receives.
    Source: DeepEP deep_ep/buffers/legacy.py (dispatch).
    """
    if (topk_idx is None) != (topk_weights is None) or (topk_idx is None) == (handle is None):
        raise ValueError("give topk_idx and topk_weights together, or a handle of an earlier dispatch, and not both")
    local = experts_per_rank(num_experts, topology)
    if handle is None:
        topk_idx = [check_topk_idx(ids, num_experts, topology) for ids in topk_idx]
        in_rank = [get_dispatch_layout(ids, num_experts, topology).is_token_in_rank for ids in topk_idx]
    else:
        in_rank = [one.is_token_in_rank for one in handle]
    network = network or Network(topology)
    several = topology.num_nodes > 1
    hops = dispatch_internode if several else dispatch_intranode
    received = hops(network, x, in_rank, topk_idx, topk_weights, num_experts)
    handles = handle or (internode_handles if several else intranode_handles)(topology, in_rank, num_sms // 2)
    results = []
    for rank, arrays in enumerate(received):
        ids = weights = None
        counts = np.zeros(local, np.int64)
        if topk_idx is not None:
            ids, weights, counts = _local_routing(arrays, rank * local if several else 0, local, topk_idx[rank].dtype)
        rows = join_like(x[rank], arrays)
        if num_worst_tokens:
            rows, ids, weights = _worst_case(rank, rows, ids, weights, num_worst_tokens, fill)
        aligned = [] if num_worst_tokens else (-(-counts // expert_alignment) * expert_alignment).tolist()
        results.append(NormalDispatch(rows, ids, weights, aligned, handles[rank]))
    return results


def normal_combine(
    x: list,
    handles: list,
    topology: Topology,
    topk_weights: list | None = None,
    bias: list | None = None,
    network: Network | None = None,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Send one row for each received token back and add them up: (combined_x [T, H], combined_topk_weights) per rank.

    The sum is not weighted: multiply and add up a rank's own experts before. Ranks are added in ascending order in
    float32 (float64 for float64 rows), over several nodes first within each node, which rounds the partial sum.
    `bias` per rank, [T, H] or a pair of them, comes first; a token without experts gives the bias or 0.
    `topk_weights` [num_recv, K] float32 are added up beside the rows. Rows beyond those received are never read.
    Source: DeepEP deep_ep/buffers/legacy.py (combine).
    """
    network = network or Network(topology)
    combine = combine_internode if topology.num_nodes > 1 else combine_intranode
    return combine(network, x, handles, topk_weights, bias)


def _local_routing(arrays, first_expert, local, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(local ids or -1, weights or 0.0, slots of each local expert) of received rows."""
    ids = localize(arrays["topk_idx"], first_expert, local).astype(dtype)
    weights = np.where(ids >= 0, arrays["topk_weights"], arrays["topk_weights"].dtype.type(0))
    return ids, weights, np.bincount(ids[ids >= 0], minlength=local)


def _worst_case(rank, rows, ids, weights, size, fill):
    count = num_rows(rows)
    if count > size:
        raise ValueError(f"rank {rank} receives {count} tokens, num_worst_tokens is {size}: {count} would do")

    def grown(array, tail):
        out = np.zeros((size, *array.shape[1:]), array.dtype)
        out[:count] = array
        if tail is not None:
            out[count:] = tail
        return out

    rows = tuple(grown(part, fill) for part in rows) if isinstance(rows, tuple) else grown(rows, fill)
    if ids is not None:
        ids, weights = grown(ids, -1), grown(weights, fill)
    return rows, ids, weights

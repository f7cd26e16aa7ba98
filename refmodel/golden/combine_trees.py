"""Combine as each dialect adds it up, by plain loops over tokens: what a combine kernel is held to.

`rows` [T, K, D] are the experts' outputs at the token's slots; nothing is read at a slot of -1. Product and running sum
are each rounded to float32, and each finished sum to bfloat16. The trees differ in which sums are finished on the way.
Sources: DeepEP csrc/kernels/legacy (internode_ll.cu, intranode.cu, internode.cu) and deep_ep/utils/refs.py.
"""

import numpy as np

from fp8.rounding import to_bfloat16


def low_latency_combine(rows, topk_idx, topk_weights) -> np.ndarray:
    """One sum over the slots in top-k order: bfloat16 [T, D]."""
    return _combine(rows, topk_idx, topk_weights, (), False)


def normal_combine(rows, topk_idx, topk_weights, experts_per_rank: int, ranks_per_node: int) -> np.ndarray:
    """Slots within each rank, ranks ascending within each node, nodes ascending: bfloat16 [T, D]."""
    groups = (experts_per_rank, experts_per_rank * ranks_per_node)
    return _combine(rows, topk_idx, topk_weights, groups, False)


def elastic_direct_combine(rows, topk_idx, topk_weights, experts_per_rank: int) -> np.ndarray:
    """Slots within each rank, then ranks in the order of their last slots: bfloat16 [T, D]."""
    return _combine(rows, topk_idx, topk_weights, (experts_per_rank,), True)


def elastic_hybrid_combine(rows, topk_idx, topk_weights, experts_per_rank: int, ranks_per_node: int) -> np.ndarray:
    """Slots within each rank, ranks within each node, nodes, each in the order of last slots: bfloat16 [T, D]."""
    groups = (experts_per_rank, experts_per_rank * ranks_per_node)
    return _combine(rows, topk_idx, topk_weights, groups, True)


def _combine(rows, topk_idx, topk_weights, group_sizes, by_last_slot: bool) -> np.ndarray:
    out = [_token(*token, group_sizes, by_last_slot) for token in zip(rows, topk_idx, topk_weights)]
    return to_bfloat16(np.array(out, np.float32).reshape(len(rows), rows.shape[2]))


def _token(rows, ids, weights, group_sizes, by_last_slot: bool) -> np.ndarray:
    """The unrounded last sum of one token, float32 [D]. A term is (when it is added, an expert of its group, row)."""
    terms = []
    for slot, expert in enumerate(ids):
        if expert >= 0:
            terms.append((slot, int(expert), np.float32(weights[slot]) * rows[slot].astype(np.float32)))
    for size in group_sizes:
        finished = []
        for group in sorted({expert // size for _, expert, _ in terms}):
            mine = [term for term in terms if term[1] // size == group]
            row = to_bfloat16(_sum(mine, rows.shape[1])).astype(np.float32)
            when = max(term[0] for term in mine) if by_last_slot else group
            finished.append((when, group * size, row))
        terms = finished
    return _sum(terms, rows.shape[1])


def _sum(terms, width: int) -> np.ndarray:
    total = np.zeros(width, np.float32)
    for _, _, row in sorted(terms, key=lambda term: term[0]):
        total = total + row
    return total

"""The combined rows straight from the routing table, without buffers: the same rounding trees as the dialects.

Each takes one rank's expert outputs `y` [T, K, D], one row for each slot, and returns [T, D] in the dtype of `y`.
Rows at slots of -1 are never read. Without `topk_weights` the rows are added as they are; with them [T, K] each row is
multiplied first, product and sum each rounded to float32 (float64 for float64 rows).
"""

from typing import NamedTuple

import numpy as np

from parallel.dispatch.layout import check_topk_idx, experts_per_rank
from parallel.dispatch.rounding_tree import accumulator_dtype, ordered_sum
from parallel.topology import Topology

LEVELS = {"single": (), "direct": ("rank",), "hybrid": ("rank", "node")}


class Terms(NamedTuple):
    """Rows [n, D] still to be added up: whose they are, which expert or group they come from, when they are added."""

    rows: np.ndarray
    token: np.ndarray  # int64 [n]
    source: np.ndarray  # int64 [n] an expert of the group
    order: np.ndarray  # int64 [n] sort key within the token


def low_latency_reduce(y, topk_idx, num_experts: int, topology: Topology, topk_weights=None) -> np.ndarray:
    """One sum over the slots in top-k order. Source: DeepEP csrc/kernels/legacy/internode_ll.cu (combine)."""
    terms, weights = _slots(y, topk_idx, topk_weights, num_experts, topology)
    return _total(terms, len(y), None, weights)


def normal_reduce(y, topk_idx, num_experts: int, topology: Topology, bias=None, topk_weights=None) -> np.ndarray:
    """Slots within each rank, ranks ascending within each node, nodes ascending; each partial sum is rounded.

    On one node there is no sum by node. `bias` ([T, D], or two of them, which are added first) starts the last sum.
    Source: DeepEP csrc/kernels/legacy/intranode.cu and internode.cu (combine).
    """
    per_rank = experts_per_rank(num_experts, topology)
    terms, weights = _slots(y, topk_idx, topk_weights, num_experts, topology)
    terms = _level(terms, per_rank, "ascending", weights)
    if topology.num_nodes > 1:
        terms = _level(terms, per_rank * topology.ranks_per_node, "ascending")
    return _total(terms, len(y), bias)


def elastic_reduce(
    y, topk_idx, num_experts: int, topology: Topology, bias=None, mode: str = "hybrid", topk_weights=None
) -> np.ndarray:
    """Slots within each rank ("direct"), then also within each node ("hybrid"), or one sum over all ("single").

    Every sum runs in top-k order; a partial sum is rounded and stands at the last slot of its group. `bias` as in
    `normal_reduce`. Raises ValueError for another mode.
    Source: DeepEP deep_ep/utils/refs.py (combine).
    """
    if mode not in LEVELS:
        raise ValueError(f"mode = {mode!r} is none of {', '.join(LEVELS)}")
    per_rank = experts_per_rank(num_experts, topology)
    size = {"rank": per_rank, "node": per_rank * topology.ranks_per_node}
    terms, weights = _slots(y, topk_idx, topk_weights, num_experts, topology)
    for level in LEVELS[mode]:
        terms, weights = _level(terms, size[level], "last slot", weights), None
    return _total(terms, len(y), bias, weights)


def bias_sum(bias, dtype: np.dtype) -> np.ndarray | None:
    """[T, D] in the accumulator's dtype: the bias, or the sum of two."""
    if bias is None:
        return None
    wide = accumulator_dtype(dtype)
    if isinstance(bias, tuple):
        return np.asarray(bias[0]).astype(wide) + np.asarray(bias[1]).astype(wide)
    return np.asarray(bias).astype(wide)


def _slots(y, topk_idx, topk_weights, num_experts, topology) -> tuple[Terms, np.ndarray | None]:
    """Every valid slot as a term, and its weight."""
    y, topk_idx = np.asarray(y), check_topk_idx(topk_idx, num_experts, topology)
    if y.ndim != 3 or y.shape[:2] != topk_idx.shape:
        raise ValueError(f"y {y.shape} and topk_idx {topk_idx.shape} do not fit: [T, K, D] and [T, K] are needed")
    token, slot = np.nonzero(topk_idx >= 0)
    weights = None if topk_weights is None else np.asarray(topk_weights)[token, slot]
    return Terms(y[token, slot], token, topk_idx[token, slot].astype(np.int64), slot), weights


def _level(terms: Terms, group_size: int, order: str, weights=None) -> Terms:
    """Add up, within each token, the terms whose sources lie in one group of experts."""
    group = terms.source // group_size
    by_group = np.lexsort((terms.order, group, terms.token))
    token, group = terms.token[by_group], group[by_group]
    starts = np.flatnonzero(np.diff(token, prepend=-1) | np.diff(group, prepend=-1))
    counts = np.diff(starts, append=len(token))
    rows = ordered_sum(terms.rows, by_group, counts, None if weights is None else weights[by_group])
    last = terms.order[by_group][starts + counts - 1]
    first_expert = group[starts] * group_size
    return Terms(rows, token[starts], first_expert, first_expert if order == "ascending" else last)


def _total(terms: Terms, num_tokens: int, bias, weights=None) -> np.ndarray:
    """The last sum of each token."""
    by_token = np.lexsort((terms.order, terms.token))
    counts = np.bincount(terms.token, minlength=num_tokens)
    weights = None if weights is None else weights[by_token]
    return ordered_sum(terms.rows, by_token, counts, weights, bias_sum(bias, terms.rows.dtype))

"""Closed forms: how many ranks and nodes a token reaches on average, for random routing.

`uniform`: every set of K distinct logical experts is equally likely. Group-limited: `topk_group` of `num_groups`
groups of consecutive experts, all choices equally likely, then every set of K experts within them. Real gates pick
groups by score, which correlates with the experts picked, so they reach somewhat more; exact counts come from the
routing table.
"""

from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np

from parallel.placement import Placement
from parallel.topology import Topology


class Reach(NamedTuple):
    """Expected number of distinct ranks and nodes that a token's experts stand on."""

    ranks: float
    nodes: float


def hit_probability(share, top_k: int, num_groups: int = 1, topk_group: int = 1) -> np.ndarray:
    """Probability that a token reaches each unit: float64 [U].

    share [U, E]: the part of a logical expert's tokens that a unit (rank or node) serves, 0 to 1; with one replica
    each, 1 where the expert stands. Raises ValueError where the groups cannot give `top_k` experts."""
    share = np.asarray(share, dtype=np.float64)
    units, experts = share.shape
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"{experts} experts do not divide into num_groups = {num_groups}")
    if not 1 <= topk_group <= num_groups:
        raise ValueError(f"topk_group = {topk_group}: must be 1 to num_groups = {num_groups}")
    reachable = topk_group * (experts // num_groups)
    if not 1 <= top_k <= reachable:
        raise ValueError(
            f"top_k = {top_k}: must be 1 to {reachable}, the experts of {topk_group} of {num_groups} groups"
        )
    by_group = (1 - share).reshape(units, num_groups, -1)  # the chance to miss, if the expert is selected
    missed = np.zeros((num_groups, units, top_k + 1))  # of each group: symmetric polynomials of the chances to miss
    missed[:, :, 0] = 1
    for expert in by_group.transpose(2, 1, 0):  # [G, U]
        missed[:, :, 1:] += missed[:, :, :-1] * expert[:, :, None]
    chosen = list(combinations(range(num_groups), topk_group))
    total = sum(_product([missed[group] for group in groups])[:, top_k] for groups in chosen)
    return 1 - total / (len(chosen) * comb(reachable, top_k))


def _product(polynomials: list[np.ndarray]) -> np.ndarray:
    """Product of polynomials [U, K + 1], cut off after K."""
    result = polynomials[0]
    for other in polynomials[1:]:
        degree = result.shape[1]
        result = np.stack([(result[:, : d + 1] * other[:, d::-1]).sum(axis=1) for d in range(degree)], axis=1)
    return result


def expected_reach(
    placement: Placement, topology: Topology, top_k: int, num_groups: int = 1, topk_group: int = 1
) -> Reach:
    """Mean ranks and nodes per token when each replica of an expert serves an equal part of its tokens at random."""
    share = np.zeros((placement.num_ranks, placement.num_experts))
    slot = np.arange(placement.num_physical)
    np.add.at(share, (placement.rank(slot), placement.phy2log), 1 / placement.logcnt[placement.phy2log])
    nodes = np.zeros((topology.num_nodes, placement.num_experts))
    np.add.at(nodes, topology.node(np.arange(placement.num_ranks)), share)
    arguments = (top_k, num_groups, topk_group)
    return Reach(*(float(hit_probability(np.minimum(s, 1), *arguments).sum()) for s in (share, nodes)))

"""The balancer of experts: replicas of hot experts and their places, judged like the other balancers.

Placement is `parallel.eplb`; here stand the plain placement beside it and the bound that none can beat.
"""

from typing import NamedTuple

import numpy as np

from parallel.eplb import gpu_loads, rebalance_experts

POLICIES = ("contiguous", "deepseek", "balanced")


class BalancedExperts(NamedTuple):
    """phy2log int64 [L, P]; load float64 [L, gpus]; max_over_mean [L]; over_bound [L], 1 is optimal."""

    phy2log: np.ndarray
    load: np.ndarray
    max_over_mean: np.ndarray
    over_bound: np.ndarray


def balance_experts(
    load, num_physical: int, num_groups: int, num_nodes: int, num_gpus: int, policy: str = "balanced"
) -> BalancedExperts:
    """Place the experts whose recorded `load` is [L, E] in `num_physical` slots, equally many on each GPU.

    Policies: contiguous (expert i in slot i, spare slots repeat the first experts), deepseek (EPLB), balanced (EPLB
    improved; in each layer never a larger maximum than the other two). Raises ValueError as `rebalance_experts` does.
    """
    load = np.asarray(load, np.float64)
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {list(POLICIES)}")
    names = POLICIES if policy == "balanced" else (policy,)
    plans = [_place(load, num_physical, num_groups, num_nodes, num_gpus, name) for name in names]
    loads = [gpu_loads(load, plan, num_gpus) for plan in plans]
    best = np.argmin([each.max(axis=1) for each in reversed(loads)], axis=0)  # of equals, the later policy
    layers = np.arange(len(load))
    phy2log, gpu = np.stack(plans[::-1])[best, layers], np.stack(loads[::-1])[best, layers]
    top, mean = gpu.max(axis=1), gpu.mean(axis=1)
    bound = np.maximum(mean, [least_replica_load(row, num_physical) for row in load])
    return BalancedExperts(phy2log, gpu, _ratio(top, mean), _ratio(top, bound))


def least_replica_load(load: np.ndarray, num_physical: int) -> float:
    """The least that the heaviest replica can carry: min over replica counts of max load / count, counts summing to P.

    Some GPU holds that replica whole, so no placement has a smaller maximum. `load` float [E].
    """
    count = np.ones(len(load))
    for _ in range(num_physical - len(load)):
        count[np.argmax(load / count)] += 1  # the heaviest replica can shrink only by another of its kind
    return float((load / count).max())


def _place(load, num_physical, num_groups, num_nodes, num_gpus, policy) -> np.ndarray:
    if policy == "contiguous":
        return np.tile(np.arange(num_physical) % load.shape[1], (len(load), 1))
    return rebalance_experts(load, num_physical, num_groups, num_nodes, num_gpus, policy=policy).phy2log


def _ratio(top: np.ndarray, base: np.ndarray) -> np.ndarray:
    return np.where(base > 0, top / np.where(base > 0, base, 1.0), 1.0)

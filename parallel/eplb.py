"""Redundant experts and where they stand: the load balancer of deepseek-ai/EPLB, with ties that always break the
same way.

`rebalance_experts(policy="deepseek")` follows deepseek-ai/EPLB eplb.py step by step in float32 (groups to nodes,
replicas within a node, replicas to GPUs) but sorts stably: of equal loads the lower index comes first.
`policy="balanced"` keeps the groups on their nodes and packs the replicas better (see `parallel/eplb_balanced.py`).
"""

from typing import NamedTuple

import numpy as np

from parallel.eplb_balanced import repack
from parallel.placement import nearest_redundant

POLICIES = ("deepseek", "balanced")


class Plan(NamedTuple):
    """phy2log int64 [L, R]: logical expert of each physical one. log2phy int64 [L, E, max count]: physical ids in
    order of creation (not ascending), -1 after the last. logcnt int64 [L, E]: replicas of each logical expert."""

    phy2log: np.ndarray
    log2phy: np.ndarray
    logcnt: np.ndarray


class Replicas(NamedTuple):
    """Replicas before packing: phy2log, rank (how many copies the expert had before) [X, R]; logcnt [X, E]."""

    phy2log: np.ndarray
    rank: np.ndarray
    logcnt: np.ndarray


def chosen_policy(num_groups: int, num_nodes: int) -> str:
    """`hierarchical` (a group stays on one node) when the nodes divide the groups, else `global` (nodes are ignored).

    The rule of deepseek-ai/EPLB eplb.py, which applies it without a word: V3 prefill on 4 nodes is hierarchical
    (8 % 4 is 0), decode on 18 nodes is global."""
    if num_groups < 1 or num_nodes < 1:
        raise ValueError(f"num_groups = {num_groups}, num_nodes = {num_nodes}: both must be at least 1")
    return "hierarchical" if num_groups % num_nodes == 0 else "global"


def balanced_packing(weight: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs n items into m packs of n/m: heaviest first, each into the lightest pack that has room (lowest index wins).

    weight float32 [X, n] -> (pack [X, n], rank in pack [X, n]), int64. One item per pack keeps the order and
    ignores the load, as the original does."""
    rows, items = weight.shape
    size = items // num_packs
    if size == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), dtype=np.int64)
    order = np.argsort(-weight, axis=-1, kind="stable")
    pack = np.empty((rows, items), dtype=np.int64)
    rank = np.empty((rows, items), dtype=np.int64)
    load = np.zeros((rows, num_packs), dtype=np.float32)
    filled = np.zeros((rows, num_packs), dtype=np.int64)
    row = np.arange(rows)
    for item in order.T:  # [X]: the next heaviest item of every row
        lightest = np.where(filled < size, load, np.float32(np.inf)).argmin(axis=-1)
        pack[row, item] = lightest
        rank[row, item] = filled[row, lightest]
        load[row, lightest] += weight[row, item]
        filled[row, lightest] += 1
    return pack, rank


def replicate_experts(weight: np.ndarray, num_physical: int) -> Replicas:
    """One replica of each expert, then one more of whichever carries most per replica (lowest index wins).

    weight float32 [X, E] -> Replicas over `num_physical` columns."""
    rows, experts = weight.shape
    phy2log = np.tile(np.arange(num_physical), (rows, 1))
    rank = np.zeros((rows, num_physical), dtype=np.int64)
    logcnt = np.ones((rows, experts), dtype=np.int64)
    row = np.arange(rows)
    for physical in range(experts, num_physical):
        heaviest = (weight / logcnt.astype(np.float32)).argmax(axis=-1)
        phy2log[:, physical] = heaviest
        rank[:, physical] = logcnt[row, heaviest]
        logcnt[row, heaviest] += 1
    return Replicas(phy2log, rank, logcnt)


def rebalance_experts(
    weight, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, policy: str = "deepseek"
) -> Plan:
    """Replicates the hot experts and places all replicas over GPUs so that the GPU loads are even.

    weight [L, E] (any real dtype, computed in float32 as the original does): load of each logical expert per layer.
    num_replicas R: physical experts in all; every GPU holds R / num_gpus of them.
    policy `deepseek`: deepseek-ai/EPLB eplb.py with stable ties. `balanced`: no GPU holds an expert twice where that is
    possible, never a higher maximum load (`gpu_loads`) and never more duplicates than `deepseek` in any layer.
    Whether groups stay within nodes is decided by `chosen_policy(num_groups, num_nodes)`.
    Raises ValueError for shapes, counts and weights that no plan can serve, naming the numbers."""
    exact, weight = np.asarray(weight), _checked_weight(weight)
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r}: must be one of {', '.join(POLICIES)}")
    if chosen_policy(num_groups, num_nodes) == "global":
        num_groups, num_nodes = 1, 1
    _check_counts(weight.shape[1], num_replicas, num_groups, num_nodes, num_gpus)

    groups = weight.reshape(len(weight), num_groups, -1).sum(axis=-1, dtype=np.float32)  # [L, G]
    mlog2log = _experts_by_node(groups, num_nodes, weight.shape[1] // num_groups)  # [L, E]
    by_node = np.take_along_axis(weight, mlog2log, axis=1).reshape(len(weight) * num_nodes, -1)  # [L*N, E/N]
    replicas = replicate_experts(by_node, num_replicas // num_nodes)
    load = np.take_along_axis(by_node / replicas.logcnt.astype(np.float32), replicas.phy2log, axis=1)  # [L*N, R/N]
    pack, rank = balanced_packing(load, num_gpus // num_nodes)
    slot = pack * (num_replicas // num_gpus) + rank
    if policy == "balanced":
        exact = np.take_along_axis(exact.astype(np.float64), mlog2log, axis=1).reshape(by_node.shape)
        *replicas, slot = repack(exact, replicas.phy2log, pack, num_gpus // num_nodes, num_nodes)
        replicas = Replicas(*replicas)
    return _assemble(mlog2log, replicas, slot, num_nodes)


def _checked_weight(weight) -> np.ndarray:
    array = np.asarray(weight)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"weight has shape {list(array.shape)}: must be [layers, experts] with at least one of each")
    if array.dtype.kind not in "iufb":
        raise ValueError(f"weight has dtype {array.dtype}: must be real numbers, the load of each expert")
    array = array.astype(np.float32)
    bad = np.argwhere(~np.isfinite(array) | (array < 0))
    if len(bad):
        layer, expert = bad[0]
        raise ValueError(
            f"weight[{layer}, {expert}] = {array[layer, expert]}: a load must be finite and not negative in float32"
        )
    if array.sum(axis=1, dtype=np.float64).max() > np.finfo(np.float32).max:
        raise ValueError("the loads of a layer add up to more than float32 holds: scale them down")
    return array


def _check_counts(experts: int, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    if min(replicas, gpus) < 1:
        raise ValueError(f"num_replicas = {replicas}, num_gpus = {gpus}: both must be at least 1")
    if experts % groups:
        raise ValueError(f"{experts} experts do not divide into num_groups = {groups}")
    if gpus % nodes:
        raise ValueError(f"num_gpus = {gpus} is not a multiple of num_nodes = {nodes}")
    if replicas < experts:
        raise ValueError(
            f"num_replicas = {replicas} is less than the {experts} experts: each needs at least one replica"
        )
    if replicas % gpus:
        redundant = replicas - experts + nearest_redundant(replicas, gpus)
        raise ValueError(
            f"num_replicas = {replicas} does not divide over num_gpus = {gpus}: "
            f"with {experts} experts the nearest redundant count that does is {redundant}"
        )


def _experts_by_node(groups: np.ndarray, num_nodes: int, group_size: int) -> np.ndarray:
    """Logical experts in the order in which the nodes hold them, int64 [L, E], from the group loads [L, G]."""
    pack, rank = balanced_packing(groups, num_nodes)
    position = pack * (groups.shape[1] // num_nodes) + rank  # [L, G]: where each group stands
    order = np.argsort(position, axis=1)  # [L, G]: the group at each place
    return (order[:, :, None] * group_size + np.arange(group_size)).reshape(len(groups), -1)


def _assemble(mlog2log: np.ndarray, replicas: Replicas, slot: np.ndarray, num_nodes: int) -> Plan:
    """Plan from replicas by node [L*N, ...] and the slot of each replica within its node [L*N, R/N]."""
    layers, experts = mlog2log.shape
    order = np.argsort(slot, axis=1)  # [L*N, R/N]: the replica in each slot
    first = np.arange(num_nodes)[None, :, None] * (experts // num_nodes)
    mlog = np.take_along_axis(replicas.phy2log, order, axis=1).reshape(layers, num_nodes, -1) + first
    phy2log = np.take_along_axis(mlog2log, mlog.reshape(layers, -1), axis=1)  # [L, R]
    rank = np.take_along_axis(replicas.rank, order, axis=1).reshape(layers, -1)  # [L, R]
    logcnt = np.empty((layers, experts), dtype=np.int64)
    np.put_along_axis(logcnt, mlog2log, replicas.logcnt.reshape(layers, -1), axis=1)
    log2phy = np.full((layers, experts, logcnt.max()), -1, dtype=np.int64)
    log2phy[np.arange(layers)[:, None], phy2log, rank] = np.arange(phy2log.shape[1])
    return Plan(phy2log, log2phy, logcnt)


def gpu_loads(weight, phy2log: np.ndarray, num_gpus: int) -> np.ndarray:
    """Load of each GPU, float64 [L, P]: a replica carries its expert's load divided by the number of replicas.

    weight [L, E], phy2log [L, R]. Loads are added in ascending order, so equal sets of replicas give equal sums."""
    weight = np.asarray(weight, dtype=np.float64)
    layers, experts = weight.shape
    logcnt = np.stack([np.bincount(row, minlength=experts) for row in phy2log])
    load = np.take_along_axis(weight / np.maximum(logcnt, 1), phy2log, axis=1)  # [L, R]
    return np.sort(load.reshape(layers, num_gpus, -1), axis=-1).sum(axis=-1)


def count_duplicates(phy2log: np.ndarray, num_gpus: int) -> np.ndarray:
    """Wasted slots, int64 [L]: replicas whose GPU already holds another replica of the same expert."""
    by_gpu = np.sort(phy2log.reshape(len(phy2log), num_gpus, -1), axis=-1)
    return (by_gpu[:, :, 1:] == by_gpu[:, :, :-1]).sum(axis=(1, 2))


def balancedness(loads: np.ndarray) -> np.ndarray:
    """Mean over maximum of the loads [..., P]; 1.0 (perfect) where there is no load at all."""
    top = loads.max(axis=-1)
    return np.where(top > 0, loads.mean(axis=-1) / np.where(top > 0, top, 1), 1.0)

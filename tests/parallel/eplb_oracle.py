"""Slow, obvious versions of the expert load balancer, in Python loops, and of what a valid plan is."""

import numpy as np


def pack(weights, packs):
    """Heaviest first into the lightest pack with room: list of (pack, rank in pack), float32 sums, lowest index
    wins."""
    size = len(weights) // packs
    if size == 1:
        return [(i, 0) for i in range(len(weights))]
    load, filled, result = [np.float32(0)] * packs, [0] * packs, [None] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        target = min((p for p in range(packs) if filled[p] < size), key=lambda p: (load[p], p))
        result[item] = (target, filled[target])
        load[target] = np.float32(load[target] + weights[item])
        filled[target] += 1
    return result


def replicate(weights, physical):
    """(expert, copies before it) of each physical expert."""
    copies = [1] * len(weights)
    result = [(e, 0) for e in range(len(weights))]
    for _ in range(len(weights), physical):
        shares = [np.float32(w / np.float32(c)) for w, c in zip(weights, copies)]
        hot = shares.index(max(shares))
        result.append((hot, copies[hot]))
        copies[hot] += 1
    return result


def plan_layer(weights, physical, groups, nodes, gpus):
    """phy2log of one layer, hierarchical with the given groups and nodes (1, 1 for the global policy)."""
    weights = [np.float32(w) for w in weights]
    size = len(weights) // groups
    group_load = [np.sum(np.array(weights[g * size : (g + 1) * size]), dtype=np.float32) for g in range(groups)]
    place = {}
    for group, (node, rank) in enumerate(pack(group_load, nodes)):
        place[node, rank] = group
    phy2log = [None] * physical
    slots, per_gpu = physical // nodes, physical // gpus
    for node in range(nodes):
        members = [place[node, r] * size + i for r in range(groups // nodes) for i in range(size)]
        replicas = replicate([weights[e] for e in members], slots)
        counts = [sum(1 for e, _ in replicas if e == i) for i in range(len(members))]
        load = [np.float32(weights[members[e]] / np.float32(counts[e])) for e, _ in replicas]
        for (local, _), (gpu, rank) in zip(replicas, pack(load, gpus // nodes)):
            phy2log[node * slots + gpu * per_gpu + rank] = members[local]
    return phy2log


def check_plan(plan, layers, experts, physical):
    """Every expert has a replica, counts add up, and log2phy is the inverse of phy2log."""
    assert plan.phy2log.shape == (layers, physical)
    assert plan.logcnt.shape == (layers, experts)
    for layer in range(layers):
        counts = [list(plan.phy2log[layer]).count(e) for e in range(experts)]
        assert counts == list(plan.logcnt[layer])
        assert min(counts) >= 1
        for e in range(experts):
            slots = [int(p) for p in plan.log2phy[layer, e] if p >= 0]
            assert sorted(slots) == [p for p in range(physical) if plan.phy2log[layer, p] == e]
            assert (plan.log2phy[layer, e, len(slots) :] == -1).all()
    assert plan.log2phy.shape[2] == plan.logcnt.max()

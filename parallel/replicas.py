"""Which replica of a logical expert serves a token: the choice rules of the engines, as pure functions.

A rule that depends on the rank (or on a generator of the rank's own) is right only behind an all-to-all, where one rank
routes each token. Where every rank sees every token and the outputs are summed, two ranks that choose differently add a
replicated expert twice or not at all (sgl-project/sglang#32962); there only rank-invariant rules will do.
"""

import numpy as np

from parallel.placement import Placement
from parallel.topology import Topology

RANK_INVARIANT = {
    "static": False,  # replica (rank mod count): every rank always uses the same one
    "nearest": False,  # own rank's replica, else its node's (shared by GPU index), else as static
    "first_on_node": False,  # own node's first replica, else as static: overloads it (sgl-project/sglang#13423)
    "random": False,  # a generator of the rank's own, seeded by (seed, rank, token offset)
    "round_robin": True,  # the n-th pair of an expert goes to replica (token offset + n) mod count
    "position": True,  # (token * K + slot) mod count: biased where K and count share a factor (vllm-project/vllm#40810)
    "hashed": True,  # a hash of (seed, token, slot, expert) mod count
}
RULES = tuple(RANK_INVARIANT)


def is_rank_invariant(rule: str) -> bool:
    """Does the rule choose the same replica on every rank that sees the same tokens?"""
    if rule not in RANK_INVARIANT:
        raise ValueError(f"replica rule {rule!r} is unknown: must be one of {', '.join(RULES)}")
    return RANK_INVARIANT[rule]


def choose_replicas(
    topk_idx,
    placement: Placement,
    rule: str,
    *,
    rank: int = 0,
    token_offset: int = 0,
    seed: int = 0,
    topology: Topology | None = None,
    all_to_all: bool = True,
) -> np.ndarray:
    """Physical expert of every selected logical expert: int64 [T, K]; -1 stays -1.

    topk_idx int [T, K]: logical ids, -1 for none. rank: the rank that routes these tokens. token_offset: position
    of the first token in the whole batch, so that rules without a rank give the same answer however the batch is cut
    (`round_robin` counts the pairs of this call only). topology: needed by `nearest` and `first_on_node`.
    all_to_all=False: every rank sees every token; rules that are not rank-invariant are refused.
    Raises ValueError for unknown rules, ids outside the placement, and rules refused."""
    if not is_rank_invariant(rule) and not all_to_all:
        invariant = [name for name in RULES if RANK_INVARIANT[name]]
        raise ValueError(
            f"replica rule {rule!r} depends on the rank: without an all-to-all every rank sees every token, and a "
            f"replicated expert would be added twice or not at all; use one of {', '.join(invariant)}"
        )
    ids = _checked_ids(topk_idx, placement)
    expert = np.maximum(ids, 0)  # what is computed for -1 is thrown away below
    if rule in ("nearest", "first_on_node"):
        physical = _local_table(placement, rule, rank, topology)[expert]
    else:
        count = placement.logcnt[expert]
        physical = placement.log2phy[expert, _draw(rule, ids, expert, count, rank, token_offset, seed)]
    return np.where(ids < 0, -1, physical)


def _checked_ids(topk_idx, placement: Placement) -> np.ndarray:
    ids = np.asarray(topk_idx)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"topk_idx has shape {list(ids.shape)} and dtype {ids.dtype}: must be integers [tokens, top-k]"
        )
    ids = ids.astype(np.int64)
    bad = np.argwhere((ids < -1) | (ids >= placement.num_experts))
    if len(bad):
        token, slot = bad[0]
        raise ValueError(
            f"topk_idx[{token}, {slot}] = {ids[token, slot]} is no logical expert: "
            f"must be 0 to {placement.num_experts - 1}, or -1 for none"
        )
    return ids


def _draw(rule: str, ids, expert, count, rank: int, token_offset: int, seed: int) -> np.ndarray:
    """Index of the replica, int64 [T, K], for the rules that do not look at where replicas stand."""
    if rule == "static":
        return rank % count
    if rule == "random":
        return np.random.default_rng((seed, rank, token_offset)).integers(0, count)
    if rule == "round_robin":
        return (token_offset + _occurrence(ids)) % count
    position = (token_offset + np.arange(len(ids)))[:, None] * ids.shape[1] + np.arange(ids.shape[1])  # [T, K]
    if rule == "position":
        return position % count
    return (_mix(position, expert, seed) % count.astype(np.uint64)).astype(np.int64)


def _occurrence(ids: np.ndarray) -> np.ndarray:
    """How many earlier pairs (by token, then slot) hold the same id: int64 [T, K]."""
    flat = ids.ravel()
    order = np.argsort(flat.astype(np.int16) if flat.max(initial=0) < 32768 else flat, kind="stable")
    ordered = flat[order]
    place = np.arange(len(flat))
    starts = np.r_[True, ordered[1:] != ordered[:-1]][: len(flat)]
    seen = np.empty(len(flat), dtype=np.int64)
    seen[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return seen.reshape(ids.shape)


def _mix(position, expert, seed: int) -> np.ndarray:
    """64 well-mixed bits of each (seed, position, expert): two rounds of the splitmix64 finaliser (Steele et al.
    2014)."""
    with np.errstate(over="ignore"):
        bits = np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64)
        for salt in (expert.astype(np.uint64), np.uint64(0x9E3779B97F4A7C15)):
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = (bits ^ (bits >> np.uint64(31))) + salt
    return bits ^ (bits >> np.uint64(33))


def _local_table(placement: Placement, rule: str, rank: int, topology: Topology | None) -> np.ndarray:
    """The physical slot that `rank` uses for each logical expert: int64 [E]."""
    if topology is None or topology.num_ranks != placement.num_ranks:
        raise ValueError(f"replica rule {rule!r} needs the topology of the placement's {placement.num_ranks} ranks")
    if not 0 <= rank < placement.num_ranks:
        raise ValueError(f"rank = {rank}: must be 0 to {placement.num_ranks - 1}")
    table = np.empty(placement.num_experts, dtype=np.int64)
    for expert in range(placement.num_experts):
        slots = placement.log2phy[expert, : placement.logcnt[expert]]
        own = slots[placement.rank(slots) == rank]
        node = slots[topology.node(placement.rank(slots)) == topology.node(rank)]
        if len(own) and rule == "nearest":
            table[expert] = own[0]
        elif len(node):
            table[expert] = node[topology.local_index(rank) % len(node) if rule == "nearest" else 0]
        else:
            table[expert] = slots[rank % len(slots)]
    return table


def replica_loads(physical_ids, num_physical: int) -> np.ndarray:
    """(token, slot) pairs that each physical expert serves, int64 [S]; ids of -1 (padding, none) are not counted."""
    ids = np.asarray(physical_ids).ravel()
    return np.bincount(ids[ids >= 0], minlength=num_physical)


def expert_loads(topk_idx, num_experts: int, valid=None) -> np.ndarray:
    """(token, slot) pairs of each logical expert, int64 [E]; ids of -1 and tokens that are not `valid` [T] do not
    count.

    Padding rows must be marked by -1 or by `valid`, or the balancer chases them (vllm-project/vllm-ascend#9244)."""
    ids = np.asarray(topk_idx)
    return replica_loads(ids if valid is None else ids[np.asarray(valid, dtype=bool)], num_experts)

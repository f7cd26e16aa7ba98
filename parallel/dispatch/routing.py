"""A layer's routing table, checked and counted: how many rows each rank has for each rank and node."""

from functools import cached_property

import numpy as np

from parallel.placement import nearest_redundant
from parallel.topology import Topology


class Routing:
    """Counts of one layer (or of several added up), each computed when it is first asked for.

    tokens int64 [R]; slots_to_rank int64 [R, R] slots of a source's tokens that select an expert of the rank;
    tokens_to_rank int64 [R, R] tokens with at least one such slot; tokens_to_node int64 [R, N]."""

    def __init__(self, ids: np.ndarray, tokens: np.ndarray, num_experts: int, topology: Topology):
        self._ids, self.tokens, self.top_k = ids, tokens, ids.shape[1]
        self.num_experts, self.topology, self.layers = num_experts, topology, 1

    @cached_property
    def _source(self) -> np.ndarray:
        """Rank of each token, int32 [T]."""
        return np.repeat(np.arange(len(self.tokens), dtype=np.int32), self.tokens)

    @cached_property
    def _rank(self) -> np.ndarray:
        """Rank of each selected expert, int16 [T, K]; -1 for none (-1 // e is -1)."""
        return self._ids // np.int16(self.num_experts // self.topology.num_ranks)

    @cached_property
    def slots_to_rank(self) -> np.ndarray:
        return self._pairs(self._rank, len(self.tokens), self._rank >= 0)

    @cached_property
    def tokens_to_rank(self) -> np.ndarray:
        return self._pairs(*_distinct(self._rank, len(self.tokens)))

    @cached_property
    def tokens_to_node(self) -> np.ndarray:
        nodes = self.topology.num_nodes
        node = self._rank // np.int16(self.topology.ranks_per_node) if nodes > 1 else np.minimum(self._rank, 0)
        return self._pairs(*_distinct(node, nodes))

    def _pairs(self, unit: np.ndarray, num_units: int, chosen: np.ndarray) -> np.ndarray:
        """Chosen entries of unit [T, K] by source rank: int64 [R, units]."""
        key = (self._source * np.int32(num_units))[:, None] + unit
        return np.bincount(key[chosen], minlength=len(self.tokens) * num_units).reshape(-1, num_units)

    def plus(self, other: "Routing") -> "Routing":
        """Counts of both, which must be of the same ranks, experts and top-k."""
        mine, theirs = ((r.topology, r.num_experts, r.top_k) for r in (self, other))
        if mine != theirs:
            raise ValueError(f"counts of {mine} and {theirs} (topology, experts, top-k) cannot be added up")
        none = np.empty((0, self.top_k), np.int16)
        total = Routing(none, self.tokens + other.tokens, self.num_experts, self.topology)
        total.layers = self.layers + other.layers
        for name in ("slots_to_rank", "tokens_to_rank", "tokens_to_node"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total


def _distinct(unit: np.ndarray, num_units: int) -> tuple[np.ndarray, int, np.ndarray]:
    """(units sorted within each row, num_units, which of them differ from the one before and are not -1)."""
    unit = np.sort(unit, axis=1)
    chosen = unit >= 0
    chosen[:, 1:] &= unit[:, 1:] != unit[:, :-1]
    return unit, num_units, chosen


def check_routing(topk_idx, num_experts: int, topology: Topology) -> Routing:
    """Counts of a list with one int array [T_r, K] for each rank (physical ids, -1 for none).

    Raises ValueError for a wrong number of ranks, shapes or dtypes, ranks that do not divide the experts, and ids
    outside
    -1 ... num_experts - 1, naming rank, token, slot and id."""
    ranks = topology.num_ranks
    if num_experts < 1 or num_experts % ranks:
        raise ValueError(
            f"{num_experts} physical experts do not divide over {ranks} ranks: "
            f"{nearest_redundant(num_experts, ranks) if num_experts > 0 else ranks} more redundant experts would do"
        )
    if num_experts > np.iinfo(np.int16).max:
        raise ValueError(f"num_experts = {num_experts}: at most {np.iinfo(np.int16).max} are counted")
    tables = [np.asarray(table) for table in topk_idx]
    if len(tables) != ranks:
        raise ValueError(f"topk_idx holds {len(tables)} arrays for {ranks} ranks: one [tokens, top-k] each is needed")
    for rank, table in enumerate(tables):
        if table.ndim != 2 or table.shape[1] != tables[0].shape[-1] or not table.shape[1]:
            raise ValueError(
                f"topk_idx of rank {rank} has shape {list(table.shape)}: "
                "must be [tokens, top-k] with the same top-k of at least 1 on all ranks"
            )
        if table.dtype.kind not in "iu":
            raise ValueError(
                f"topk_idx of rank {rank} has dtype {table.dtype}: must be integers, the physical expert ids"
            )
    tokens = np.array([len(table) for table in tables], np.int64)
    ids = np.concatenate(tables)
    if ids.size and not (ids.min() >= -1 and ids.max() < num_experts):
        _refuse_ids(tables, num_experts)
    return Routing(ids.astype(np.int16), tokens, num_experts, topology)


def _refuse_ids(tables, num_experts: int) -> None:
    for rank, table in enumerate(tables):
        bad = np.argwhere((table < -1) | (table >= num_experts)) if table.size else ()
        if len(bad):
            token, slot = bad[0]
            raise ValueError(
                f"rank {rank}, token {token}, slot {slot}: id {table[token, slot]} is no physical expert; "
                f"must be 0 to {num_experts - 1}, or -1 for none"
            )

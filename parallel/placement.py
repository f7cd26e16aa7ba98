"""Which logical expert stands in which physical slot, and which rank holds the slot."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Duplicate(NamedTuple):
    """A rank that holds `count` > 1 replicas of one logical expert: count - 1 slots are wasted."""

    rank: int
    expert: int
    count: int


def nearest_redundant(num_experts: int, num_ranks: int) -> int:
    """The fewest redundant experts that make `num_experts` divisible over `num_ranks` (0 when they already are)."""
    return -num_experts % num_ranks


@dataclass(frozen=True, eq=False)
class Placement:
    """One layer's physical experts: `phy2log` [S], the logical expert in each physical slot, over `num_ranks` ranks.

    Rank r holds the slots r * S/R ... (r + 1) * S/R - 1. Every logical expert 0 ... E-1 has at least one slot.
    Raises ValueError when the slots do not divide over the ranks or an expert has none."""

    phy2log: np.ndarray
    num_ranks: int

    def __post_init__(self):
        slots = np.array(self.phy2log)
        if slots.ndim != 1 or slots.dtype.kind not in "iu" or not len(slots):
            raise ValueError(
                f"phy2log has shape {list(slots.shape)} and dtype {slots.dtype}: must be integers [physical experts]"
            )
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks = {self.num_ranks}: there must be at least one rank")
        slots = slots.astype(np.int64)
        if slots.min() < 0:
            raise ValueError(f"phy2log[{slots.argmin()}] = {slots.min()}: logical experts count from 0")
        missing = np.flatnonzero(np.bincount(slots) == 0)
        if len(missing):
            raise ValueError(
                f"logical expert {missing[0]} of {slots.max() + 1} has no physical slot: each needs at least one"
            )
        if len(slots) % self.num_ranks:
            redundant = len(slots) - slots.max() - 1 + nearest_redundant(len(slots), self.num_ranks)
            raise ValueError(
                f"{len(slots)} physical experts do not divide over {self.num_ranks} ranks: "
                f"with {slots.max() + 1} logical experts the nearest redundant count that does is {redundant}"
            )
        slots.flags.writeable = False
        object.__setattr__(self, "phy2log", slots)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int, redundant_experts: int = 0) -> "Placement":
        """Physical expert i is logical expert i mod E: the plan before any load is known (SGLang's trivial one)."""
        if num_experts < 1 or redundant_experts < 0:
            raise ValueError(
                f"num_experts = {num_experts}, redundant_experts = {redundant_experts}: "
                "there must be at least one expert and no negative count"
            )
        return cls(np.arange(num_experts + redundant_experts) % num_experts, num_ranks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(logical experts, physical experts, ranks)."""
        return self.num_experts, self.num_physical, self.num_ranks

    @property
    def num_physical(self) -> int:
        return len(self.phy2log)

    @cached_property
    def num_experts(self) -> int:
        """Logical experts."""
        return int(self.phy2log.max()) + 1

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @cached_property
    def logcnt(self) -> np.ndarray:
        """Replicas of each logical expert: int64 [E]."""
        return np.bincount(self.phy2log)

    @cached_property
    def log2phy(self) -> np.ndarray:
        """Physical slots of each logical expert, ascending, -1 after the last: int64 [E, max count]."""
        table = np.full((self.num_experts, self.logcnt.max()), -1, dtype=np.int64)
        order = np.argsort(self.phy2log, kind="stable")
        expert = self.phy2log[order]
        first = np.cumsum(self.logcnt) - self.logcnt
        table[expert, np.arange(len(order)) - first[expert]] = order
        return table

    def rank(self, physical):
        """Rank that holds a physical slot (or an array of slots)."""
        return physical // self.slots_per_rank

    def experts_on(self, rank: int) -> np.ndarray:
        """Logical experts of a rank in slot order: int64 [S/R]."""
        return self.phy2log[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def duplicates(self) -> list[Duplicate]:
        """Every rank that holds an expert more than once, in order of rank and expert."""
        found = []
        for rank in range(self.num_ranks):
            expert, count = np.unique(self.experts_on(rank), return_counts=True)
            found += [Duplicate(rank, int(e), int(c)) for e, c in zip(expert, count) if c > 1]
        return found


def compare_placements(left: Placement, right: Placement, load) -> str:
    """One line on how two placements of the same experts differ under `load` [E]: by the loads of their ranks and by
    duplicates, not by ids, because plans that differ only in how ties break serve equally well.

    Raises ValueError when the placements are not of the same shape."""
    if left.shape != right.shape:
        raise ValueError("placements of different shapes (experts, physical experts, ranks) cannot be compared")
    if np.array_equal(left.phy2log, right.phy2log):
        return "same placement"
    loads = [np.sort(rank_loads(p, load)) for p in (left, right)]
    equal = "equal loads" if np.allclose(*loads, rtol=1e-12, atol=0) else "different loads"
    wasted = [
        f"{side} holds expert {d.expert} {d.count} times on rank {d.rank}"
        for side, placement in (("left", left), ("right", right))
        for d in placement.duplicates()
    ]
    return "; ".join([equal, *wasted])


def rank_loads(placement: Placement, load) -> np.ndarray:
    """Load of each rank, float64 [R], when every expert's load [E] is shared evenly by its replicas."""
    load = np.asarray(load, dtype=np.float64)
    if load.shape != (placement.num_experts,):
        raise ValueError(
            f"load has shape {list(load.shape)}: must be one number for each of {placement.num_experts} experts"
        )
    return (load / placement.logcnt)[placement.phy2log].reshape(placement.num_ranks, -1).sum(axis=1)

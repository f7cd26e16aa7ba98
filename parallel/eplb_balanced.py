"""A packer that puts the replicas of one expert on different GPUs and evens the loads by swapping.

Longest-processing-time packing (deepseek-ai/EPLB eplb.py) does not look at what a GPU already holds, so two replicas of
one expert can share a GPU and waste a slot (deepseek-ai/EPLB#22), and it stops at the first packing it finds.
Here replicas are packed apart first, then swaps bring every GPU under the maximum of the original plan, then swaps
lower the heaviest GPU. Where the original replica counts leave a duplicate, its slot goes to another expert if the
maximum allows. A row keeps the original packing unless the new one is no heavier and has no more duplicates.
"""

from typing import NamedTuple

import numpy as np

from parallel.eplb_search import Packing, lower, reassign, search

DUPLICATE_COST = (0.05, 0.5, 2.0)  # in units of the maximum load: from even loads first to no duplicates first
REASSIGNMENTS = 12  # slots of a row that may go to another expert


class Packed(NamedTuple):
    """phy2log [X, n] expert of each replica, rank [X, n] copies that the expert has before it, logcnt [X, E],
    slot [X, n] place of each replica: pack * (n / packs) + rank in pack."""

    phy2log: np.ndarray
    rank: np.ndarray
    logcnt: np.ndarray
    slot: np.ndarray


def repack(weight, phy2log, pack, num_packs: int, rows_per_layer: int) -> Packed:
    """Better packs for given replicas.

    weight float64 [X, E]; phy2log [X, n] expert of each replica; pack [X, n] the packing to improve on. Consecutive
    `rows_per_layer` rows are the nodes of one layer: none of them may exceed the heaviest pack of the layer."""
    load = np.take_along_axis(weight / _counts(phy2log, weight.shape[1]), phy2log, axis=1)  # [X, n]
    heaviest = np.array([_heaviest(load[row], pack[row], num_packs) for row in range(len(load))])
    limit = np.repeat(heaviest.reshape(-1, rows_per_layer).max(axis=1), rows_per_layer)
    apart = _pack_apart(load, phy2log, num_packs, weight.shape[1])
    expert, best = phy2log.copy(), pack.copy()
    for row in range(len(load)):
        original = Packing(weight[row], phy2log[row], pack[row], num_packs)
        candidates = _candidates(original, apart[row], limit[row])
        allowed = [c for c in candidates if _score(c)[0] <= original.duplicates() and _score(c)[1] <= limit[row]]
        chosen = min(allowed, key=_score, default=original)
        expert[row], best[row] = chosen.expert, chosen.pack
    logcnt = _counts(expert, weight.shape[1])
    rank_in_pack = _rank_in_pack(best, np.take_along_axis(weight / logcnt, expert, axis=1))
    return Packed(expert, _occurrence(expert), logcnt, best * (expert.shape[1] // num_packs) + rank_in_pack)


def _candidates(original: Packing, apart: np.ndarray, limit: float) -> list[Packing]:
    """Packings found from replicas packed apart and from the original packing, with and without changed counts.

    The last and dearest search runs only where the first two left a duplicate."""
    found = []
    for start, cost in zip((apart, original.pack, apart), DUPLICATE_COST):
        if cost == DUPLICATE_COST[-1] and min(map(_score, found)) <= (0, limit):
            break
        packing = search(original.with_pack(start), limit, cost)
        found.append(lower(packing.with_pack(packing.pack)))
        packing = _part_most(packing, limit)
        for _ in range(REASSIGNMENTS):
            if _score(packing) <= (0, limit):
                break
            changed = reassign(packing, limit)
            if changed is None:
                break
            packing = search(changed, limit, cost)
        found.append(lower(packing))
    return found


def _part_most(packing: Packing, limit: float) -> Packing:
    """Gives slots of duplicates to other experts, without a search between, until few enough are left for one each."""
    while packing.duplicates() > REASSIGNMENTS:
        changed = reassign(packing, limit)
        if changed is None:
            break
        packing = changed
    return packing


def _score(packing: Packing) -> tuple[int, float]:
    return packing.duplicates(), _heaviest(packing.load, packing.pack, len(packing.total))


def _pack_apart(load, phy2log, num_packs: int, experts: int) -> np.ndarray:
    """Heaviest first into the lightest pack with room that lacks the expert (with room, where every such pack has
    it)."""
    rows, items = load.shape
    pack = np.empty((rows, items), dtype=np.int64)
    total = np.zeros((rows, num_packs))
    filled = np.zeros((rows, num_packs), dtype=np.int64)
    holds = np.zeros((rows, experts, num_packs), dtype=bool)
    row = np.arange(rows)
    for item in np.argsort(-load, axis=-1, kind="stable").T:
        expert = phy2log[row, item]
        has_room = filled < items // num_packs
        apart = has_room & ~holds[row, expert]
        allowed = np.where(apart.any(axis=1, keepdims=True), apart, has_room)
        lightest = np.where(allowed, total, np.inf).argmin(axis=-1)
        pack[row, item] = lightest
        total[row, lightest] += load[row, item]
        filled[row, lightest] += 1
        holds[row, expert, lightest] = True
    return pack


def _heaviest(load, pack, num_packs: int) -> float:
    """Largest total of a pack, each added in ascending order so that equal packs give equal sums."""
    order = np.lexsort((load, pack))
    return load[order].reshape(num_packs, -1).sum(axis=1).max()


def _counts(phy2log: np.ndarray, experts: int) -> np.ndarray:
    return np.stack([np.bincount(row, minlength=experts) for row in phy2log])


def _occurrence(phy2log: np.ndarray) -> np.ndarray:
    """How often the expert of each column stands in earlier columns: int64 [X, n]."""
    order = np.argsort(phy2log, axis=1, kind="stable")
    ordered = np.take_along_axis(phy2log, order, axis=1)
    column = np.arange(phy2log.shape[1])
    first = np.maximum.accumulate(np.where(np.diff(ordered, axis=1, prepend=-1) != 0, column, 0), axis=1)
    rank = np.empty_like(phy2log)
    np.put_along_axis(rank, order, column - first, axis=1)
    return rank


def _rank_in_pack(pack: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Place of each replica in its pack, heaviest first (lower index first among equals)."""
    rank = np.empty_like(pack)
    for row in range(len(pack)):
        order = np.lexsort((-load[row], pack[row]))
        size = len(order) // (pack[row].max() + 1)
        rank[row, order] = np.arange(len(order)) % size
    return rank

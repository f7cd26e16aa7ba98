"""Local search over packings of expert replicas: swaps of two replicas, and giving a wasted slot to another expert."""

import numpy as np

SEARCH_SWAPS = 100  # per row, to reach a packing without duplicates under the limit
LOWER_SWAPS = 400  # per row; plans of 288 replicas on 144 GPUs need fewer than 60
PATIENCE = 25  # swaps without a better packing, after which the search ends
TABU = 6  # swaps for which a replica that moved stays where it is, so that the search leaves local minima
ROUNDING = 1e-12  # relative: sums of the same loads in another order


class Packing:
    """One row of replicas over packs: expert [n] and pack [n] of each replica, load [n], total [P] of each pack, and
    holds [P, E], how often a pack holds an expert. A replica's load is the expert's weight over its replica count."""

    def __init__(self, weight, expert, pack, num_packs: int):
        self.weight, self.expert, self.pack = weight, expert.copy(), pack.copy()
        self.count = np.bincount(expert, minlength=len(weight))
        self.holds = np.zeros((num_packs, len(weight)), dtype=np.int64)
        np.add.at(self.holds, (pack, expert), 1)
        self.load = (weight / np.maximum(self.count, 1))[expert]
        self.total = np.bincount(pack, weights=self.load, minlength=num_packs)

    def with_pack(self, pack) -> "Packing":
        """The same replicas, packed otherwise."""
        return Packing(self.weight, self.expert, pack, len(self.total))

    def duplicates(self) -> int:
        return int(np.maximum(self.holds - 1, 0).sum())

    def swap(self, a: int, b: int) -> None:
        """Replicas a and b change places."""
        for item, other in ((a, self.pack[b]), (b, self.pack[a])):
            self.holds[self.pack[item], self.expert[item]] -= 1
            self.holds[other, self.expert[item]] += 1
        self.pack[a], self.pack[b] = self.pack[b], self.pack[a]
        for p in (self.pack[a], self.pack[b]):
            self.total[p] = self.load[self.pack == p].sum()

    def duplicates_after(self, a: np.ndarray) -> np.ndarray:
        """Change of the number of duplicates when replicas a [A] and each of the n change places: int64 [A, n]."""
        copy = (self.holds[self.pack, self.expert] > 1).astype(np.int64)  # [n]: leaving removes a duplicate
        arrives = self.holds[self.pack[None, :], self.expert[a, None]] > 0  # [A, n]: a becomes one at the other's place
        returns = self.holds[self.pack[a, None], self.expert[None, :]] > 0  # [A, n]: the other becomes one at a's place
        change = arrives.astype(np.int64) + returns - copy[a, None] - copy[None, :]
        same = (self.expert[a, None] == self.expert) | (self.pack[a, None] == self.pack)
        return np.where(same, 0, change)

    def totals_after(self, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Totals of the two packs when replicas a [A] and each of the n change places: two float64 [A, n]."""
        change = self.load - self.load[a, None]
        return self.total[self.pack[a], None] + change, self.total[self.pack] - change


def search(packing: Packing, limit: float, duplicate_cost: float) -> Packing:
    """Best swap after best swap (tabu search) until there is no duplicate and no pack above `limit`; the best one seen.

    `duplicate_cost` is what a duplicate weighs against load above the limit, in units of the limit; from 1 on a packing
    without duplicates counts as better than one under the limit."""
    everyone = np.arange(len(packing.pack))
    free_from = np.zeros(len(everyone), dtype=np.int64)  # the step from which a replica may move again
    scale = limit if limit > 0 else 1.0
    best_score, best_pack, best_step = (np.inf, np.inf), packing.pack, 0
    for step in range(SEARCH_SWAPS):
        excess = np.maximum(packing.total - limit, 0) / scale
        over = excess.sum() if excess.sum() > ROUNDING else 0.0
        score = (over, packing.duplicates()) if duplicate_cost < 1 else (packing.duplicates(), over)
        if score < best_score:
            best_score, best_pack, best_step = score, packing.pack.copy(), step
        if not any(score) or step - best_step > PATIENCE:
            break
        cost = duplicate_cost * packing.duplicates_after(everyone)
        for after in packing.totals_after(everyone):
            cost += np.maximum(after - limit, 0) / scale
        cost -= excess[packing.pack[:, None]] + excess[packing.pack]
        held = free_from > step
        cost[held[:, None] | held | (packing.pack[:, None] == packing.pack)] = np.inf
        a, b = np.unravel_index(cost.argmin(), cost.shape)
        if cost[a, b] == np.inf:
            break
        packing.swap(a, b)
        free_from[[a, b]] = step + TABU
    return packing.with_pack(best_pack)


def lower(packing: Packing) -> Packing:
    """Swaps between the heaviest pack and another, without a new duplicate, while they lower the larger of the two."""
    for _ in range(LOWER_SWAPS):
        heaviest = packing.total.argmax()
        members = np.flatnonzero(packing.pack == heaviest)
        after = np.maximum(*packing.totals_after(members))
        after[(packing.duplicates_after(members) > 0) | (packing.pack == heaviest)[None, :]] = np.inf
        a, b = np.unravel_index(after.argmin(), after.shape)
        if not after[a, b] < packing.total[heaviest] * (1 - ROUNDING):
            break
        packing.swap(members[a], b)
    return packing


def reassign(packing: Packing, limit: float) -> Packing | None:
    """Gives the slot of one duplicate (of any expert with several replicas, where there is no duplicate) to the expert
    that then leaves the least load above `limit`; None if none fits.

    The expert that loses the replica carries its load on the others; the one that gains it must not stand there yet."""
    best = (np.inf, np.inf, -1, -1)
    weight, count = packing.weight, packing.count
    spare = packing.holds[packing.pack, packing.expert] > 1
    spare = np.flatnonzero(spare if spare.any() else count[packing.expert] > 1)
    _, first = np.unique(packing.pack[spare] * len(weight) + packing.expert[spare], return_index=True)
    for replica in spare[first]:  # one of each pack and expert
        pack, loser = packing.pack[replica], packing.expert[replica]
        total = packing.total + packing.holds[:, loser] * weight[loser] * (1 / (count[loser] - 1) - 1 / count[loser])
        total[pack] -= weight[loser] / (count[loser] - 1)
        after = total[:, None] + packing.holds * (weight / (count + 1) - weight / count)  # [P, E]
        after[pack] += weight / (count + 1)
        over = np.maximum(after - limit, 0).sum(axis=0)
        over[(packing.holds[pack] > 0) | (count >= len(packing.total))] = np.inf
        winner = np.lexsort((after.max(axis=0), over))[0]
        best = min(best, (over[winner], after[:, winner].max(), replica, winner))
    if best[0] == np.inf:
        return None
    expert = packing.expert.copy()
    expert[best[2]] = best[3]
    return Packing(weight, expert, packing.pack, len(packing.total))

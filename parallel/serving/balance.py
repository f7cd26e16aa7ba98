"""Three balancers behind one interface: items with costs in several dimensions, bins, a policy that places them.

The published system balances prefill (attention work and tokens), decode (cache use and requests) and experts (load
received): DeepSeek open-infra-index, 202502OpenSourceWeek/day_6. Prefill and decode differ only in their costs and are
served here; experts can be replicated and have a file of their own (balance_experts.py). The objective is the largest
load over the mean load, in the worst dimension: the slowest rank sets the pace of all.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

UNPLACED = -1


class Balanced(NamedTuple):
    """bins int64 [n], -1 where nothing had room; load float64 [B, d]; max_over_mean [d]; over_bound [d].

    over_bound is the largest load over a bound that no placement of the same items can beat: 1 is optimal.
    """

    bins: np.ndarray
    load: np.ndarray
    max_over_mean: np.ndarray
    over_bound: np.ndarray

    @property
    def objective(self) -> float:
        """Largest load over mean load in the worst dimension."""
        return float(self.max_over_mean.max())


def prefill_cost(new_tokens, cached_tokens=0) -> np.ndarray:
    """Costs [n, 2] of prefilling: pairs of query and visible key, c * n + n (n + 1) / 2, and tokens to dispatch, n."""
    new = np.atleast_1d(np.asarray(new_tokens, np.float64))
    cached = np.broadcast_to(np.asarray(cached_tokens, np.float64), new.shape)
    if (new < 0).any() or (cached < 0).any():
        raise ValueError("token counts cannot be negative")
    return np.stack([cached * new + new * (new + 1) / 2, new], axis=1)


def decode_cost(cache_tokens) -> np.ndarray:
    """Costs [n, 2] of decoding: tokens in the cache, and one request."""
    tokens = np.atleast_1d(np.asarray(cache_tokens, np.float64))
    if (tokens < 0).any():
        raise ValueError("token counts cannot be negative")
    return np.stack([tokens, np.ones(len(tokens))], axis=1)


def balance(cost, num_bins: int, policy: str = "balanced", start=None, capacity=None) -> Balanced:
    """Place items of `cost` [n, d] (in order of arrival) into bins that already carry `start` [B, d].

    `capacity` [d] or [B, d] bounds a bin's load; an item that fits nowhere stays out (-1). Policies: round_robin,
    least_0 .. least_{d-1} (each item into the bin with the least load in that dimension), balanced. `balanced` places
    as many items as any of the others and its objective is never larger. Raises ValueError for unknown policies,
    negative costs, or shapes that do not fit.
    """
    cost = np.asarray(cost, np.float64)
    if cost.ndim != 2 or num_bins < 1 or (cost < 0).any():
        raise ValueError(
            f"cost {cost.shape} must be [n, d] without negative entries, and num_bins = {num_bins} at least 1"
        )
    start = np.zeros((num_bins, cost.shape[1])) if start is None else np.asarray(start, np.float64)
    if start.shape != (num_bins, cost.shape[1]):
        raise ValueError(f"start {start.shape} must be [{num_bins}, {cost.shape[1]}]: a load per bin and dimension")
    room = np.broadcast_to(np.inf if capacity is None else np.asarray(capacity, np.float64), start.shape)
    plain = plain_policies(cost.shape[1])
    if policy == "balanced":
        return _best(cost, start, room, plain)
    if policy not in plain:
        raise ValueError(f"policy {policy!r} is not one of {[*plain, 'balanced']}")
    return assess(cost, plain[policy](cost, start, room), start)


def compare(cost, num_bins: int, start=None, capacity=None) -> dict[str, Balanced]:
    """What every policy makes of the same items, `balanced` last."""
    names = [*plain_policies(np.asarray(cost).shape[1]), "balanced"]
    return {name: balance(cost, num_bins, name, start, capacity) for name in names}


def plain_policies(dimensions: int) -> dict[str, Callable]:
    """Name -> function (cost, start, room) -> bins, of the policies that look at one item at a time, in order."""
    least = {
        f"least_{d}": (lambda c, s, r, d=d: _in_order(c, s, r, lambda i, load: load[:, d])) for d in range(dimensions)
    }
    return {"round_robin": _round_robin, **least}


def assess(cost, bins, start) -> Balanced:
    """Loads of a placement and how far they are from the mean and from the bound."""
    cost, bins, start = np.asarray(cost, np.float64), np.asarray(bins, np.int64), np.asarray(start, np.float64)
    placed = bins != UNPLACED
    load = start.copy()
    np.add.at(load, bins[placed], cost[placed])
    top, mean, bound = load.max(axis=0), load.mean(axis=0), lower_bound(cost[placed], start)
    return Balanced(bins, load, _ratio(top, mean), _ratio(top, bound))


def lower_bound(cost: np.ndarray, start: np.ndarray) -> np.ndarray:
    """For each dimension, a load that the fullest bin reaches in every placement of all items.

    The mean; the fullest bin at the start; the largest item on the emptiest bin; and, with more items than bins, the
    two least of the B + 1 largest, which must meet somewhere.
    """
    bins = len(start)
    bound = np.maximum(start.max(axis=0), (start.sum(axis=0) + cost.sum(axis=0)) / bins)
    if len(cost):
        bound = np.maximum(bound, cost.max(axis=0) + start.min(axis=0))
    if len(cost) > bins:
        descending = -np.sort(-cost, axis=0)
        bound = np.maximum(bound, descending[bins - 1] + descending[bins])
    return bound


def _ratio(top: np.ndarray, base: np.ndarray) -> np.ndarray:
    return np.where(base > 0, top / np.where(base > 0, base, 1.0), 1.0)


def _round_robin(cost, start, room) -> np.ndarray:
    """Item i to bin i, or the next one after it that has room."""
    bins = len(start)
    return _in_order(cost, start, room, lambda i, load: (np.arange(bins) - i) % bins)


def _in_order(cost, start, room, rank, order=None) -> np.ndarray:
    """Place items one by one into the bin of least `rank(i, load)` that has room; ties go to the lowest bin."""
    load, chosen = start.copy(), np.full(len(cost), UNPLACED, np.int64)
    for i in range(len(cost)) if order is None else order:
        fits = (load + cost[i] <= room).all(axis=1)
        if fits.any():
            chosen[i] = np.where(fits, rank(i, load), np.inf).argmin()
            load[chosen[i]] += cost[i]
    return chosen


def _best(cost, start, room, plain) -> Balanced:
    """The best of: every plain placement, and largest-first by the worst dimension, each then improved by exchanges."""
    mean = (start.sum(axis=0) + cost.sum(axis=0)) / len(start)
    scale = np.where(mean > 0, mean, 1.0)
    share = cost / scale
    largest_first = np.argsort(-share.max(axis=1, initial=0), kind="stable")

    def worst(i, load):
        return ((load + cost[i]) / scale).max(axis=1)

    placements = [place(cost, start, room) for place in plain.values()]
    placements.append(_in_order(cost, start, room, worst, largest_first))
    most = max(np.count_nonzero(bins != UNPLACED) for bins in placements)
    full = [bins for bins in placements if np.count_nonzero(bins != UNPLACED) == most]
    candidates = full + [_improve(cost, bins, start, room, scale) for bins in full]
    results = (assess(cost, bins, start) for bins in candidates)
    return min(results, key=lambda result: (result.objective, result.over_bound.max()))


def _improve(cost, bins, start, room, scale) -> np.ndarray:
    """Lower the worst load over its mean; then, without raising that, the worst load over its bound.

    One item that dwarfs the rest fixes the first figure: the second still evens out the other dimension.
    """
    bins = _exchange(cost, bins, start, room, scale)
    reached = assess(cost, bins, start)
    bound = lower_bound(cost[bins != UNPLACED], start)
    limit = np.minimum(room, (reached.load / scale).max() * scale)
    return _exchange(cost, bins, start, limit, np.where(bound > 0, bound, 1.0))


def _exchange(cost, bins, start, room, scale, rounds: int = 500) -> np.ndarray:
    """Move an item out of the fullest bin, or exchange it for another's, as long as the fuller of both gets lower."""
    bins = bins.copy()
    load = assess(cost, bins, start).load
    for _ in range(rounds):
        full = int((load / scale).max(axis=1).argmax())
        here, there = np.flatnonzero(bins == full), np.flatnonzero((bins != full) & (bins != UNPLACED))
        if not len(here):
            break
        # A move is an exchange for nothing: one virtual item of no cost in every other bin.
        others = np.delete(np.arange(len(start)), full)
        partner_bin = np.concatenate([bins[there], others])  # [p]
        partner_cost = np.concatenate([cost[there], np.zeros((len(others), cost.shape[1]))])
        delta = partner_cost[None] - cost[here][:, None]  # [h, p, d] what the full bin gains
        new_full, new_other = load[full] + delta, load[partner_bin] - delta
        value = np.maximum((new_full / scale).max(axis=2), (new_other / scale).max(axis=2))  # [h, p]
        value[(new_full > room[full]).any(axis=2) | (new_other > room[partner_bin]).any(axis=2)] = np.inf
        h, p = np.unravel_index(value.argmin(), value.shape) if value.size else (0, 0)
        if not value.size or value[h, p] >= (load[full] / scale).max() * (1 - 1e-12):
            break
        bins[here[h]] = partner_bin[p]
        if p < len(there):
            bins[there[p]] = full
        load[full], load[partner_bin[p]] = new_full[h, p].copy(), new_other[h, p].copy()
    return bins

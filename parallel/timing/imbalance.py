"""How unevenly experts load ranks: from a routing table, from a load vector, or drawn."""

from typing import NamedTuple

import numpy as np


class Loads(NamedTuple):
    """Rows that arrive at each rank and experts with rows there: float64 [R] each, from one layer of one step."""

    rows: np.ndarray
    experts: np.ndarray

    @property
    def imbalance(self) -> float:
        """Largest load over mean load."""
        return float(self.rows.max() / self.rows.mean()) if self.rows.sum() else 1.0


def loads_of_routing(topk_idx: np.ndarray, phy2log: np.ndarray, num_ranks: int) -> Loads:
    """Loads of a routing table: topk_idx int [T, K], logical experts, -1 for none; phy2log [P] places physical experts.

    An expert's rows are shared evenly by its replicas. Raises ValueError for ids outside the placement.
    """
    logical = int(np.max(phy2log)) + 1
    chosen = np.asarray(topk_idx).ravel()
    chosen = chosen[chosen != -1]
    if chosen.size and (chosen.min() < 0 or chosen.max() >= logical):
        raise ValueError(f"topk_idx has ids from {chosen.min()} to {chosen.max()}, but experts are 0 to {logical - 1}")
    return loads_of_vector(np.bincount(chosen, minlength=logical).astype(np.float64), phy2log, num_ranks)


def loads_of_vector(per_expert: np.ndarray, phy2log: np.ndarray, num_ranks: int) -> Loads:
    """Loads of a vector of rows per logical expert [E]. Raises ValueError where ranks do not divide the placement."""
    phy2log = np.asarray(phy2log)
    if len(phy2log) % num_ranks:
        raise ValueError(f"{len(phy2log)} physical experts do not divide over {num_ranks} ranks")
    if np.max(phy2log) >= len(per_expert):
        raise ValueError(f"the placement names expert {np.max(phy2log)}, but loads are given for {len(per_expert)}")
    replicas = np.bincount(phy2log, minlength=len(per_expert))
    per_physical = (np.asarray(per_expert, dtype=np.float64) / np.maximum(replicas, 1))[phy2log]  # [P]
    per_rank = per_physical.reshape(num_ranks, -1)  # [R, P/R]
    return Loads(per_rank.sum(axis=1), (per_rank > 0).sum(axis=1).astype(np.float64))


def even_placement(num_experts: int, num_physical: int) -> np.ndarray:
    """phy2log [P] without a balancer: experts in order, then the first ones once more.

    Raises ValueError for fewer physical experts than experts.
    """
    if num_physical < num_experts:
        raise ValueError(f"{num_physical} physical experts cannot hold {num_experts} experts")
    return np.arange(num_physical) % num_experts


def drawn_popularity(num_experts: int, spread: float, seed: int = 0) -> np.ndarray:
    """Share of rows per expert [E], log-normal with standard deviation `spread` of the logarithm; sums to 1.

    A model for want of data: published expert loads are close to log-normal (deepseek-ai/DeepEP#393).
    """
    if spread < 0:
        raise ValueError(f"spread = {spread}: a standard deviation cannot be negative")
    weight = np.exp(spread * np.random.default_rng(seed).standard_normal(num_experts))
    return weight / weight.sum()


def read_loads(path, num_experts: int) -> np.ndarray:
    """Rows per logical expert and layer, float64 [L, E], from a file.

    Text with one number per line or comma, or a `.npy` vector of floats, is one layer's loads; every other file is
    read as recorded routing (see `parallel.dispatch.routing_file`), and its ids are counted layer by layer.
    Raises ValueError for another shape, a negative load, or experts that the model does not have.
    """
    name = str(path)
    if name.endswith((".csv", ".txt")):
        with open(path, encoding="utf-8") as file:
            words = file.read().replace(",", " ").split()
        try:
            loads = np.array([[float(word) for word in words]])
        except ValueError:
            raise ValueError(f"{path}: expected numbers separated by commas or spaces") from None
    elif name.endswith(".npy") and np.load(path, mmap_mode="r", allow_pickle=False).ndim == 1:
        loads = np.load(path, allow_pickle=False)[None].astype(np.float64)
    else:
        loads = _counted(path, num_experts)
    if loads.shape[1] != num_experts or not np.all(loads >= 0) or not np.all(loads.sum(axis=1) > 0):
        raise ValueError(
            f"{path} holds loads of {loads.shape[1]} experts: expected {num_experts} numbers from 0 up, not all 0"
        )
    return loads


def _counted(path, num_experts):
    from parallel.dispatch.routing_file import load_routing  # only where routing was recorded

    ids = load_routing([path], num_experts).ids  # [L, T, K]
    return np.stack([np.bincount(layer[layer >= 0], minlength=num_experts) for layer in ids]).astype(np.float64)

"""Top-k routing is a set: compare ids without their order, and forgive a flip only at a tie.

The order of the selected experts means nothing, and where the k-th and the next candidate are closer than the
noise of the scores, either choice is right. A margin tensor (the smaller of the group and the expert margin)
says how close they were.
"""

import re
from typing import NamedTuple

import numpy as np

_IDS = re.compile(r"(^|\.)(topk_idx|topk_ids|topk_indices)$")
_WEIGHTS = ("topk_weights", "weights", "topk_weight")


class Routes(NamedTuple):
    """Top-k ids of two sides, compared by row: `flipped` rows chose other experts, `ties` of those at a margin
    not above the limit, `order` puts the actual slots into the order of the reference's (valid where not flipped)."""

    flipped: np.ndarray
    ties: np.ndarray
    order: np.ndarray


def is_topk_idx(name: str) -> bool:
    """Whether a tensor of this name holds the ids of selected experts."""
    return bool(_IDS.search(name))


def sibling(name: str, names, *candidates: str) -> str | None:
    """The first of `candidates` that stands beside `name` (same prefix) among `names`."""
    prefix = name[: name.rfind(".") + 1]
    return next((prefix + c for c in candidates if prefix + c in names), None)


def ids_of(name: str, names) -> str | None:
    """The tensor of ids that belongs to the weights `name`, or None if `name` holds no routing weights."""
    if name.rsplit(".", 1)[-1] not in _WEIGHTS:
        return None
    return sibling(name, names, "topk_idx", "topk_ids", "topk_indices")


def compare_routes(reference: np.ndarray, actual: np.ndarray, margin: np.ndarray | None, tie: float) -> Routes:
    """Compare ids [..., K] as sets; `margin` [...] is the reference's. -1 (no expert) counts like any id."""
    by_r, by_a = np.argsort(reference, axis=-1, kind="stable"), np.argsort(actual, axis=-1, kind="stable")
    sorted_r, sorted_a = np.take_along_axis(reference, by_r, -1), np.take_along_axis(actual, by_a, -1)
    flipped = (sorted_r != sorted_a).any(axis=-1)
    ties = np.zeros_like(flipped)
    if margin is not None and margin.shape == flipped.shape:
        ties = flipped & (np.asarray(margin, np.float64) <= tie)
    rank_in_r = np.argsort(by_r, axis=-1, kind="stable")  # slot of the reference -> place in sorted order
    return Routes(flipped, ties, np.take_along_axis(by_a, rank_in_r, -1))

"""Join what the worker processes of an engine hold into whole tensors."""

from collections.abc import Mapping, Sequence

import numpy as np


def join_ranks(
    ranks: Sequence[Mapping[str, np.ndarray]], joins: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """(name -> whole tensor, notes) from each rank's parts.

    `joins[name]` is `same` (the default: every rank holds the whole), `sum` (partial sums, added in rank order in
    float64 and rounded to the parts' dtype) or `concat:AXIS`. A note tells where ranks that should hold the same do
    not. Raises ValueError for a rank that lacks a tensor, shapes that do not fit, or an unknown rule.
    """
    whole, notes = {}, []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        lacking = [rank for rank, tensors in enumerate(ranks) if name not in tensors]
        if lacking:
            raise ValueError(f"{name}: rank {lacking[0]} of {len(ranks)} did not capture it")
        parts = [tensors[name] for tensors in ranks]
        rule = joins.get(name, "same")
        whole[name] = join_parts(name, parts, rule)
        if rule == "same":
            notes += _unequal(name, parts)
    return whole, notes


def join_parts(name: str, parts: Sequence[np.ndarray], rule: str) -> np.ndarray:
    """One tensor from its parts by rank; see `join_ranks`."""
    kind, _, axis = rule.partition(":")
    if kind == "concat" and axis.isdecimal():
        return np.concatenate(parts, axis=int(axis))
    if kind not in ("same", "sum"):
        raise ValueError(f"{name}: join rule {rule!r} must be 'same', 'sum' or 'concat:AXIS'")
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"{name}: ranks hold shapes {sorted(shapes)}, one shape is required to join by {kind!r}")
    if kind == "same" or len(parts) == 1:
        return parts[0]
    return sum(part.astype(np.float64) for part in parts).astype(parts[0].dtype)


def rank_of(index: int, parts: Sequence[np.ndarray], axis: int) -> int:
    """Which rank's part of a concatenated tensor holds position `index` of `axis`."""
    ends = np.cumsum([part.shape[axis] for part in parts])
    return int(np.searchsorted(ends, index, side="right"))


def _unequal(name: str, parts: Sequence[np.ndarray]) -> list[str]:
    """A note for each rank whose copy differs from rank 0's."""
    notes = []
    for rank, part in enumerate(parts[1:], 1):
        if part.tobytes() != parts[0].tobytes():
            worst = np.abs(part.astype(np.float64) - parts[0].astype(np.float64)).max() if part.size else 0.0
            notes.append(f"{name}: rank {rank} differs from rank 0 by up to {worst:.3g}; both should hold the same")
    return notes

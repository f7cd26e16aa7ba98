"""Match dispatched rows by where they came from: (source rank, source token, expert).

The order of rows that a dispatch delivers is the implementation's business (deepseek-ai/DeepEP#48), and so is the
layout: one row after the other, or a slot per (local expert, place) of which some are empty. A row with a source token
below 0 is empty.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from refmodel.golden.dump import Dump

RANK, TOKEN, EXPERT = "src_rank", "src_token", "expert"
COMBINED = "recv_src_token_idx"  # source rank * most tokens per rank + token, as DeepEP's elastic dispatch gives it


class Keys(NamedTuple):
    """Where each row came from, int64 [N, 3] (rank, token, expert), and which row it is of the first `axes` axes
    taken together, [N]. An unknown part of a key is 0 everywhere."""

    keys: np.ndarray
    rows: np.ndarray
    axes: int


class Match(NamedTuple):
    """order [N]: the row of the actual side for each reference row, -1 where there is none; and the keys that are
    missing, unexpected, or there more than once."""

    order: np.ndarray
    missing: list[tuple[int, ...]]
    extra: list[tuple[int, ...]]
    repeated: list[tuple[int, ...]]


def source_keys(name: str, dump: Dump) -> Keys | None:
    """The keys of the rows of tensor `name`, from the tensors beside it: `src_rank`, `src_token` and `expert`, or
    `recv_src_token_idx`; any subset that holds a token. Each is [rows], or [groups, places] where the group counts
    as the expert. None if there is no such tensor or `name` is one of them."""
    prefix, _, last = name.rpartition(".")
    prefix = f"{prefix}." if prefix else ""
    if last in (RANK, TOKEN, EXPERT, COMBINED):
        return None
    token = next((dump[prefix + n] for n in (TOKEN, COMBINED) if prefix + n in dump), None)
    if token is None or dump[name].shape[: token.ndim] != token.shape:
        return None
    parts = [dump[prefix + RANK] if prefix + RANK in dump else np.zeros_like(token), token]
    if prefix + EXPERT in dump:
        parts.append(dump[prefix + EXPERT])
    elif token.ndim == 2:
        parts.append(np.broadcast_to(np.arange(len(token))[:, None], token.shape))
    else:
        parts.append(np.zeros_like(token))
    keys = np.stack([np.asarray(p, np.int64).reshape(-1) for p in parts], axis=1)
    rows = np.flatnonzero(keys[:, 1] >= 0)
    return Keys(keys[rows], rows, token.ndim)


def match_rows(reference: np.ndarray, actual: np.ndarray) -> Match:
    """Find each key of `reference` [N, 3] among `actual` [M, 3]."""
    places: dict[tuple, list[int]] = {}
    for row, key in enumerate(map(tuple, actual.tolist())):
        places.setdefault(key, []).append(row)
    wanted = list(map(tuple, reference.tolist()))
    expected = set(wanted)
    order = np.array([places[key][0] if key in places else -1 for key in wanted], np.int64)
    repeated = [key for key, rows in places.items() if len(rows) > 1]
    if len(expected) < len(wanted):
        repeated += [key for key, count in Counter(wanted).items() if count > 1]
    return Match(order, [k for k in wanted if k not in places], [k for k in places if k not in expected], repeated)


def describe(match: Match) -> str | None:
    """One phrase about rows that are missing, unexpected or repeated; None where every row has its partner."""
    phrases = []
    for keys, word in ((match.missing, "missing"), (match.extra, "not expected"), (match.repeated, "there twice")):
        if keys:
            rank, token, expert = keys[0]
            phrases.append(f"{len(keys)} rows {word}, the first is (rank {rank}, token {token}, expert {expert})")
    return "; ".join(phrases) or None


def gather(array: np.ndarray, keys: Keys) -> np.ndarray:
    """The rows of `array` that hold something, one after the other: [N, ...]."""
    return array.reshape(-1, *array.shape[keys.axes :])[keys.rows]

"""Which experts a token goes to, and with which weights: V3's group-limited sigmoid gate and its relatives."""

from typing import NamedTuple

import numpy as np

from refmodel.threads import NUMBER, each, row_pieces

SCORING = ("sigmoid", "softmax")
METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
# rows that are routed at a time
_PIECE = 512
# up to here one sort of every row takes less than picking the best, the second best, ...
_FEW_ROWS = 16


class Routing(NamedTuple):
    topk_idx: np.ndarray  # int64 [T, K], best first; -1 in a row that holds NaN
    topk_weights: np.ndarray  # float32 [T, K] (float64 for float64 logits)
    margin: np.ndarray | None  # float64 [T]: how far the selection is from another one; None where not wanted


def route(
    logits,
    correction_bias,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    norm_topk_prob: bool = True,
    scoring_func: str = "sigmoid",
    topk_method: str = "noaux_tc",
    norm_eps: float = 1e-20,
    with_margin: bool = True,
) -> Routing:
    """Select `top_k` of E experts per row.

    logits [T, E] any float dtype; correction_bias [E] or None, float32, used for the selection only.
    scores = scoring(logits), rounded to float32 (kept in float64 for float64 logits); choice = scores + bias, exact.
    Groups are E / n_group contiguous experts. `noaux_tc` ranks them by the sum of their two best choices,
    `group_limited_greedy` (V2) by the best one, `greedy` has no groups; experts outside the best `topk_group` groups
    cannot be selected, whatever their score. Weights are the scores without bias, divided by (sum + norm_eps) where
    norm_topk_prob, times routed_scaling_factor, rounded once.
    Ties: the lowest index wins, in groups and in experts. `margin` is the smaller of the distance between the last
    selected and the first rejected group, and the same for experts; inf where nothing is rejected; None unless
    `with_margin`.
    A row with NaN selects nothing: -1 and weight 0. Raises ValueError for shapes or settings that do not fit.
    Source: DeepSeek-V3 report 2.1.2; transformers models/deepseek_v3 (the epsilon, the -inf mask).
    """
    logits = np.asarray(logits)
    _check(logits, correction_bias, top_k, n_group, topk_group, scoring_func, topk_method)
    wide = np.float64 if logits.dtype == np.float64 else np.float32
    bias = None if correction_bias is None else np.asarray(correction_bias, np.float64)
    T, E = logits.shape
    if topk_method == "greedy":
        n_group = topk_group = 1
    best = 2 if topk_method == "noaux_tc" else 1  # choices that count for a group

    def route_rows(rows):
        # exponentials may overflow to the right limit; 0 / 0 without an epsilon is the NaN that such an engine makes
        with np.errstate(over="ignore", invalid="ignore"):
            scores = _score(logits[rows].astype(np.float64), scoring_func).astype(wide).astype(np.float64)  # [t, E]
            choice = scores if bias is None else scores + bias
            poisoned = np.isnan(np.maximum.reduce(choice, axis=None, initial=-np.inf))
            if poisoned:
                invalid = np.isnan(choice).any(axis=1)  # [t]
                choice = np.where(invalid[:, None], 0.0, choice)
            topk_idx, margin = _select(choice, top_k, n_group, topk_group, best, with_margin)
            weights = scores[np.arange(len(scores))[:, None], topk_idx]  # [t, K]
            if norm_topk_prob:
                weights /= np.add.reduce(weights, axis=1, keepdims=True) + norm_eps
        if poisoned:
            topk_idx[invalid], weights[invalid] = -1, 0
            if with_margin:
                margin[invalid] = np.nan
        return Routing(topk_idx, (weights * routed_scaling_factor).astype(wide), margin)

    if T <= _PIECE:
        return route_rows(slice(None))
    margin = np.empty(T) if with_margin else None
    routing = Routing(np.empty((T, top_k), np.int64), np.empty((T, top_k), wide), margin)

    def place(rows):
        for whole, part in zip(routing, route_rows(rows)):
            if part is not None:
                whole[rows] = part

    each(place, row_pieces(T, _PIECE), 10 * T * E * NUMBER)
    return routing


def _select(choice, top_k, n_group, topk_group, best, with_margin):
    """(expert ids [T, K] best first, margin [T] or None) of the largest choices [T, E] in the best groups."""
    T, size = len(choice), choice.shape[1] // n_group
    rows, margins = np.arange(T)[:, None], []
    if n_group > 1:
        grouped = choice.reshape(T, n_group, size)
        score = _group_scores(grouped, best)  # [T, G]
        groups = np.sort((-score).argsort(axis=1, kind="stable")[:, :topk_group], axis=1)  # ids ascend
        choice = grouped[rows, groups].reshape(T, topk_group * size)
        if with_margin:
            margins.append(_gap(np.sort(score, axis=1)[:, ::-1], topk_group))
    order = _best(choice, min(top_k + 1, choice.shape[1]))  # [T, K + 1]
    if with_margin:
        margins.append(_gap(choice[rows, order], top_k))
    topk_idx = order[:, :top_k]
    if n_group > 1:
        group, place = np.divmod(topk_idx, size)
        topk_idx = groups[rows, group] * size + place
    return topk_idx, np.minimum.reduce(margins) if with_margin else None


def _score(logits, scoring_func):
    if scoring_func == "sigmoid":
        out = np.negative(logits)
        np.exp(out, out=out)
        out += 1.0
        return np.divide(1.0, out, out=out)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def _group_scores(grouped, best):
    """The score of each group of grouped [T, G, E / G]: the sum of its `best` (1 or 2) largest choices."""
    ascending = grouped.copy()
    ascending.sort(axis=2)  # as fast as finding the best and the second one
    if best == 1 or grouped.shape[2] == 1:
        return ascending[..., -1]
    return ascending[..., -1] + ascending[..., -2]


def _best(choice, count):
    """Positions of the `count` largest numbers of each row, descending, of equal ones the lowest first: [T, count]."""
    # after -inf, what has been taken could not be told from what must not be taken again
    if len(choice) < _FEW_ROWS or np.isneginf(choice).any():
        return (-choice).argsort(axis=1, kind="stable")[:, :count]
    left, rows = choice.copy(), np.arange(len(choice))
    order = np.empty((len(choice), count), np.int64)
    for k in range(count):
        order[:, k] = left.argmax(axis=1)  # the first of several maxima
        left[rows, order[:, k]] = -np.inf
    return order


def _gap(descending, count):
    """Distance between entry count - 1 and entry count of rows sorted descending; inf where there is no such entry."""
    if descending.shape[1] <= count:
        return np.full(len(descending), np.inf)
    last, rejected = descending[:, count - 1], descending[:, count]
    return np.subtract(last, rejected, out=np.zeros(len(last)), where=last != rejected)  # 0 for two infinities, too


def _check(logits, bias, top_k, n_group, topk_group, scoring_func, topk_method):
    if logits.ndim != 2:
        raise ValueError(f"route: logits {logits.shape} must be [tokens, experts]")
    E = logits.shape[1]
    if bias is not None and np.shape(bias) != (E,):
        raise ValueError(f"route: correction_bias {np.shape(bias)} must be [{E}], one per expert")
    if scoring_func not in SCORING:
        raise ValueError(f"route: scoring_func = {scoring_func!r}: must be one of {', '.join(SCORING)}")
    if topk_method not in METHODS:
        raise ValueError(f"route: topk_method = {topk_method!r}: must be one of {', '.join(METHODS)}")
    if n_group < 1 or E % n_group:
        raise ValueError(f"route: {E} experts do not divide into n_group = {n_group} groups")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"route: topk_group = {topk_group} must be between 1 and n_group = {n_group}")
    reachable = E if topk_method == "greedy" else E // n_group * topk_group
    if not 1 <= top_k <= reachable:
        raise ValueError(f"route: top_k = {top_k} must be between 1 and the {reachable} experts of the chosen groups")

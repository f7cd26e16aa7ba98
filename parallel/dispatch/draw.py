"""Routing tables drawn at random, where no recorded ones are at hand."""

import numpy as np

KINDS = ("uniform", "group_limited", "balanced")


def draw_routing(
    kind: str,
    rng: np.random.Generator,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_groups: int = 1,
    topk_group: int = 1,
) -> np.ndarray:
    """Logical expert ids int16 [num_tokens, top_k], distinct within a token.

    `uniform`: every set of experts equally likely. `group_limited`: `topk_group` of `num_groups` groups of consecutive
    experts, then experts within them, both uniform. `balanced`: every expert gets the same number of tokens (where
    tokens are a multiple of experts / top_k), a token's experts spread evenly over the ids; nothing is random.
    Raises ValueError for kinds and counts that cannot be drawn."""
    if kind not in KINDS:
        raise ValueError(f"routing = {kind!r}: must be one of {', '.join(KINDS)}")
    if num_tokens < 0 or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"{num_tokens} tokens, top-{top_k} of {num_experts} experts: tokens must be at least 0 and top-k 1 to "
            f"{num_experts}"
        )
    if kind == "uniform":
        return _distinct(rng, num_tokens, num_experts, top_k)
    if kind == "balanced":
        token, slot = np.arange(num_tokens)[:, None], np.arange(top_k)
        return ((token + slot * (num_experts // top_k)) % num_experts).astype(np.int16)
    if num_groups < 1 or num_experts % num_groups or not 1 <= topk_group <= num_groups:
        raise ValueError(
            f"topk_group = {topk_group} of num_groups = {num_groups} over {num_experts} experts: "
            "groups must divide the experts, and at least one and at most all of them are chosen"
        )
    size = num_experts // num_groups
    if top_k > topk_group * size:
        raise ValueError(f"top-{top_k} does not fit into {topk_group} groups of {size} experts")
    groups = _distinct(rng, num_tokens, num_groups, topk_group)
    within = _distinct(rng, num_tokens, topk_group * size, top_k)
    chosen = np.take_along_axis(groups, (within // np.int16(size)).astype(np.intp), axis=1)
    return chosen * np.int16(size) + within % np.int16(size)


def _distinct(rng: np.random.Generator, rows: int, pool: int, count: int) -> np.ndarray:
    """Uniform ordered sets without repetition, int16 [rows, count]; rows that repeat a member are drawn again."""
    if 2 * count * count > pool:  # repeats would be the rule
        return np.argsort(rng.random((rows, pool), dtype=np.float32), axis=1)[:, :count].astype(np.int16)
    drawn = rng.integers(0, pool, (rows, count), dtype=np.int16)
    again = np.arange(rows)
    while len(again):
        ordered = np.sort(drawn[again], axis=1)
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        drawn[again] = rng.integers(0, pool, (len(again), count), dtype=np.int16)
    return drawn

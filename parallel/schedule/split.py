"""How a batch becomes two micro-batches."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """New tokens `start` to `stop` (exclusive) of a request."""

    request: int
    start: int
    stop: int


def attention_pairs(cached: int, start: int, stop: int) -> int:
    """(query, key) pairs of core attention when new tokens start..stop follow `cached` keys and each other."""
    return (stop - start) * cached + (stop * (stop + 1) - start * (start + 1)) // 2


def split_prefill(new_tokens: Sequence[int], cached: Sequence[int] | None = None) -> tuple[list[Part], list[Part]]:
    """Cut a rank's batch where attention work is halved; one prompt may lie in both halves, its beginning in the first.

    new_tokens: tokens to compute per request; cached: keys that exist already (0 each by default).
    The cut is the token boundary with the smallest difference of attention pairs (the earlier one of a tie).
    Source of the rule: deepseek-ai/profile-data README (attention load of the two micro-batches is balanced, so a
    prompt may be split between them). Raises ValueError for a negative count or lists of different length.
    """
    cached = [0] * len(new_tokens) if cached is None else list(cached)
    if len(cached) != len(new_tokens):
        raise ValueError(f"{len(new_tokens)} requests but {len(cached)} cached lengths: give one for each request")
    if any(count < 0 for count in [*new_tokens, *cached]):
        raise ValueError(f"new_tokens = {list(new_tokens)}, cached = {cached}: token counts cannot be negative")
    total = sum(attention_pairs(before, 0, count) for count, before in zip(new_tokens, cached))
    first, second, done = [], [], 0
    for request, (count, before) in enumerate(zip(new_tokens, cached)):
        cut = _cut(count, before, total - 2 * done)
        done += attention_pairs(before, 0, cut)
        if cut:
            first.append(Part(request, 0, cut))
        if cut < count:
            second.append(Part(request, cut, count))
            first_open = request + 1
            second += [Part(r, 0, new_tokens[r]) for r in range(first_open, len(new_tokens)) if new_tokens[r]]
            break
    return first, second


def _cut(count: int, cached: int, wanted: int) -> int:
    """Tokens of a request that go to the first half, when twice their pairs should come to `wanted`."""
    low, high = 0, count
    while low < high:  # the first cut whose doubled pairs reach what is wanted
        middle = (low + high) // 2
        if 2 * attention_pairs(cached, 0, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    over = abs(2 * attention_pairs(cached, 0, low) - wanted)
    under = abs(wanted - 2 * attention_pairs(cached, 0, low - 1))
    return low - 1 if under <= over else low


def split_decode(num_requests: int) -> tuple[list[int], list[int]]:
    """Request indices of the two halves; with an odd number the first half has one more. Either may be empty.

    Raises ValueError for a negative number.
    """
    if num_requests < 0:
        raise ValueError(f"num_requests = {num_requests}: a rank cannot have a negative number of requests")
    middle = -(-num_requests // 2)
    return list(range(middle)), list(range(middle, num_requests))

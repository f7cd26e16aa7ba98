"""Cutting a batch into two micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.split import Part, attention_pairs, split_decode, split_prefill


def pairs_slow(cached, start, stop):
    return sum(1 for query in range(start, stop) for key in range(cached + query + 1) if key >= 0)


def best_slow(new_tokens, cached):
    """Every token boundary tried; the earliest of the best."""
    tokens = [(request, position) for request, count in enumerate(new_tokens) for position in range(count)]
    work = [cached[request] + position + 1 for request, position in tokens]
    return min(range(len(tokens) + 1), key=lambda cut: (abs(sum(work[:cut]) - sum(work[cut:])), cut))


def test_one_prompt_is_cut_inside():
    # 4 tokens: 1 + 2 + 3 + 4 = 10 pairs; after 3 tokens 6 against 4
    assert split_prefill([4]) == ([Part(0, 0, 3)], [Part(0, 3, 4)])


def test_a_tie_takes_the_earlier_boundary():
    # 1 + 2 = 3 pairs: after 0 tokens 0 against 3, after 1 token 1 against 2, after 2 tokens 3 against 0
    assert split_prefill([2]) == ([Part(0, 0, 1)], [Part(0, 1, 2)])
    assert split_prefill([1]) == ([], [Part(0, 0, 1)])


def test_two_equal_prompts_go_whole():
    assert split_prefill([5, 5]) == ([Part(0, 0, 5)], [Part(1, 0, 5)])


def test_cached_keys_weigh():
    # request 0: 2 tokens behind 10 keys: 11 + 12; request 1: 4 tokens: 1 + 2 + 3 + 4; cut after 2 tokens: 23 | 10
    assert split_prefill([2, 4], cached=[10, 0]) == ([Part(0, 0, 1)], [Part(0, 1, 2), Part(1, 0, 4)])


def test_an_empty_batch_has_two_empty_halves():
    assert split_prefill([]) == split_prefill([0, 0]) == ([], [])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=6))
def test_the_cut_is_the_best_boundary(requests):
    new_tokens, cached = [count for count, _ in requests], [before for _, before in requests]
    first, second = split_prefill(new_tokens, cached)
    assert sum(part.stop - part.start for part in first) == best_slow(new_tokens, cached)
    covered = [(part.request, position) for part in first + second for position in range(part.start, part.stop)]
    assert covered == [(request, position) for request, count in enumerate(new_tokens) for position in range(count)]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_attention_pairs_count_every_query_and_key(cached, start, more):
    assert attention_pairs(cached, start, start + more) == pairs_slow(cached, start, start + more)


@pytest.mark.parametrize(("count", "halves"), [(0, ([], [])), (1, ([0], [])), (5, ([0, 1, 2], [3, 4]))])
def test_decode_requests_are_halved(count, halves):
    assert split_decode(count) == halves


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="negative"):
        split_prefill([3, -1])
    with pytest.raises(ValueError, match="2 requests but 1"):
        split_prefill([3, 1], [2])
    with pytest.raises(ValueError, match="negative"):
        split_decode(-1)

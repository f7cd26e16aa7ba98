"""Acceptance in numbers, with counts reported by users (vllm-project/vllm#48892, exo-explore/exo#1192)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.serving.spec_stats import SpecStats, expected_length


def test_one_draft_token_as_reported():
    stats = SpecStats(1, drafts=26407, draft_tokens=26407, accepted_tokens=22021, accepted_at=[22021])
    assert round(stats.acceptance_rate, 4) == 0.8339
    assert round(stats.acceptance_length, 3) == 1.834
    assert stats.rate_at == [stats.acceptance_rate]


def test_eight_draft_tokens_as_reported():
    stats = SpecStats(8, drafts=11043, draft_tokens=88344, accepted_tokens=38611)
    assert round(stats.accepted_tokens / stats.drafts, 4) == 3.4964
    assert round(stats.acceptance_length, 2) == 4.50
    assert round(stats.acceptance_rate, 4) == 0.4371


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
def test_counts_against_a_plain_sum(accepted, cut):
    one, other = SpecStats(3), SpecStats(3)
    for i, count in enumerate(accepted):
        (one if i < cut else other).add(count)
    total = one.merge([other])
    assert total.drafts == len(accepted)
    assert total.accepted_tokens == sum(accepted) == sum(total.accepted_at)
    assert total.accepted_at == [sum(count > i for count in accepted) for i in range(3)]
    assert total.acceptance_length == 1 + (sum(accepted) / len(accepted) if accepted else 0)
    assert total.rate_at == sorted(total.rate_at, reverse=True)


def test_a_shorter_last_draft_counts_what_it_proposed():
    stats = SpecStats(3)
    stats.add(1, proposed=2)
    assert (stats.draft_tokens, stats.acceptance_rate, stats.acceptance_length) == (2, 0.5, 2.0)


def test_expected_length():
    assert expected_length(0.8, 1) == 1.8
    assert expected_length(0.5, 3) == 1.875
    assert (expected_length(0.0, 4), expected_length(1.0, 4)) == (1.0, 5.0)


def test_bad_input():
    with pytest.raises(ValueError, match="2 accepted of 1"):
        SpecStats(3).add(2, proposed=1)
    with pytest.raises(ValueError, match="do not add up"):
        SpecStats(3).merge([SpecStats(2)])
    with pytest.raises(ValueError, match=r"acceptance 1\.5"):
        expected_length(1.5, 1)
    with pytest.raises(ValueError, match="num_draft_tokens = 0"):
        SpecStats(0)

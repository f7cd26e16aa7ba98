"""Placement: what stands where, what is wasted, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.placement import Placement, compare_placements, nearest_redundant, rank_loads


def test_a_placement_by_hand():
    placement = Placement([2, 0, 1, 1, 1, 3], 2)
    assert placement.logcnt.tolist() == [1, 3, 1, 1]
    assert placement.log2phy.tolist() == [[1, -1, -1], [2, 3, 4], [0, -1, -1], [5, -1, -1]]
    assert (placement.slots_per_rank, placement.num_experts, placement.num_physical) == (3, 4, 6)
    assert placement.experts_on(1).tolist() == [1, 1, 3]
    assert placement.rank(np.array([0, 2, 3, 5])).tolist() == [0, 0, 1, 1]
    assert placement.duplicates() == [(1, 1, 2)]
    assert rank_loads(placement, [6, 9, 1, 2]).tolist() == [10, 8]


# vllm-project/vllm-ascend#5311, #1116, #4232
def test_every_logical_expert_is_reachable_with_redundancy():
    placement = Placement.contiguous(8, 4, redundant_experts=4)
    assert placement.slots_per_rank == 3
    assert placement.logcnt.sum() == 12
    assert placement.log2phy.shape == (8, 2)
    assert (placement.log2phy[4:, 1] == -1).all()
    for physical, logical in enumerate(placement.phy2log):
        assert physical in placement.log2phy[logical]
    local = [physical % placement.slots_per_rank for physical in placement.log2phy.ravel() if physical >= 0]
    assert set(local) == {0, 1, 2}


# vllm-project/vllm#18343
@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"), [(256, 32, 0), (256, 144, 32), (256, 5, 4), (384, 5, 1), (256, 320, 64)]
)
def test_the_nearest_redundant_count(experts, ranks, redundant):
    assert nearest_redundant(experts, ranks) == redundant
    assert Placement.contiguous(experts, ranks, redundant).slots_per_rank == (experts + redundant) // ranks


@pytest.mark.parametrize(
    ("phy2log", "ranks", "words"),
    [
        (np.arange(384), 5, "384 physical experts do not divide over 5 ranks.* nearest redundant count .* is 1"),
        (np.arange(257) % 256, 8, "257 .* 8 ranks: with 256 logical .* is 8"),
        ([0, 2], 1, "logical expert 1 of 3 has no physical slot"),
        ([0, -1], 1, "phy2log\\[1\\] = -1"),
        ([0.5, 1.0], 1, "dtype float64"),
        ([[0, 1]], 1, "shape \\[1, 2\\]"),
        ([], 1, "shape \\[0\\]"),
        ([0, 1], 0, "num_ranks = 0"),
    ],
)
def test_refusals_name_the_numbers(phy2log, ranks, words):
    with pytest.raises(ValueError, match=words):
        Placement(phy2log, ranks)


def test_a_placement_cannot_change():
    slots = np.array([0, 1, 1, 0])
    placement = Placement(slots, 2)
    slots[0] = 1
    assert placement.phy2log.tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        placement.phy2log[0] = 1


# deepseek-ai/EPLB#8: an unstable sort swaps a replica of expert 8 for expert 9, both of load 86
def test_equal_loads_are_called_equal_and_the_duplicate_is_named():
    load = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]
    stable = Placement([7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1], 8)
    other = Placement([7, 10, 6, 9, 6, 11, 8, 8, 2, 4, 5, 1, 5, 0, 3, 1], 8)
    assert compare_placements(stable, other, load) == "equal loads; right holds expert 8 2 times on rank 3"
    assert compare_placements(stable, stable, load) == "same placement"
    assert compare_placements(stable, other, [*load[:8], 172, 90, 16, 27]).startswith("different loads")
    with pytest.raises(ValueError, match="different shapes"):
        compare_placements(stable, Placement([0, 1], 2), load)


def test_load_must_name_every_expert():
    with pytest.raises(ValueError, match="shape \\[3\\]"):
        rank_loads(Placement([0, 1], 2), [1, 2, 3])


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_tables_are_inverse_of_each_other(experts, ranks, extra, random):
    redundant = nearest_redundant(experts, ranks) + extra * ranks
    slots = list(range(experts)) + [random.randrange(experts) for _ in range(redundant)]
    random.shuffle(slots)
    placement = Placement(slots, ranks)
    for logical in range(experts):
        expected = [p for p, e in enumerate(slots) if e == logical]
        assert placement.log2phy[logical, : len(expected)].tolist() == expected
        assert (placement.log2phy[logical, len(expected) :] == -1).all()
        assert placement.logcnt[logical] == len(expected)
    wasted = sum(d.count - 1 for d in placement.duplicates())
    assert wasted == len(slots) - sum(len(set(placement.experts_on(r))) for r in range(ranks))

"""Which replica serves a token: fairness, rank invariance, and rows that must not count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.placement import Placement
from parallel.replicas import RANK_INVARIANT, RULES, choose_replicas, expert_loads, is_rank_invariant, replica_loads
from parallel.topology import Topology


# sgl-project/sglang#13423: expert 0 has replicas on ranks 0, 1 (node 0) and 8 (node 1); each rank sends one token
@pytest.mark.parametrize(
    ("rule", "loads"), [("first_on_node", [8, 0, 8]), ("nearest", [4, 4, 8]), ("static", [6, 5, 5])]
)
def test_loads_of_replicas_under_equal_traffic(rule, loads):
    slots = np.arange(1, 17)
    slots[[0, 1, 8]] = 0
    placement = Placement(np.unique(slots, return_inverse=True)[1], 16)
    topology = Topology(16, 8)
    chosen = [choose_replicas([[0]], placement, rule, rank=r, topology=topology)[0, 0] for r in range(16)]
    if rule == "nearest":  # the ranks that hold a replica use their own
        assert (chosen[0], chosen[1], chosen[8]) == (0, 1, 8)
    assert replica_loads(chosen, 16)[[0, 1, 8]].tolist() == loads


def test_nearest_falls_back_to_the_static_replica():
    placement = Placement([0, 1, 0, 2], 4)
    topology = Topology(4, 2)
    chosen = [
        choose_replicas([[0, 1, 2]], placement, "nearest", rank=r, topology=topology)[0].tolist() for r in range(4)
    ]
    assert chosen == [[0, 1, 3], [0, 1, 3], [2, 1, 3], [2, 1, 3]]
    with pytest.raises(ValueError, match="needs the topology"):
        choose_replicas([[0]], placement, "nearest")
    with pytest.raises(ValueError, match="rank = 4"):
        choose_replicas([[0]], placement, "nearest", rank=4, topology=topology)


def test_round_robin_and_position_by_hand():
    placement = Placement([0, 1, 0, 0], 1)  # replicas of 0 in slots 0, 2, 3
    ids = [[0, 1], [0, -1], [1, 0], [0, 0]]
    assert choose_replicas(ids, placement, "round_robin").tolist() == [[0, 1], [2, -1], [1, 3], [0, 2]]
    assert choose_replicas(ids, placement, "round_robin", token_offset=1).tolist() == [[2, 1], [3, -1], [1, 0], [2, 3]]
    # flat positions 0, 2, 5, 6, 7 mod 3
    assert choose_replicas(ids, placement, "position").tolist() == [[0, 1], [3, -1], [1, 3], [0, 2]]


# vllm-project/vllm#40810: the hot expert always stands in slot 0 of 8
@pytest.mark.parametrize("count", [2, 4, 8])
def test_position_is_biased_and_the_other_rules_are_not(count):
    placement = Placement([0] * count + [1] * count, 1)
    ids = np.full((1000, 8), 1)
    ids[:, 0] = 0
    loads = {rule: replica_loads(choose_replicas(ids, placement, rule)[:, 0], 2 * count)[:count] for rule in RULES[3:]}
    assert loads["position"].tolist() == [1000] + [0] * (count - 1)
    for rule in ("round_robin", "hashed", "random"):
        assert abs(loads[rule] - 1000 / count).max() < 4 * np.sqrt(1000 / count), rule


def test_which_rules_are_the_same_on_every_rank():
    placement, topology = Placement([0, 1, 2, 0, 1, 0, 3, 3], 4), Topology(4, 2)
    ids = np.random.default_rng(0).integers(-1, 4, (64, 3))
    for rule in RULES:
        per_rank = [choose_replicas(ids, placement, rule, rank=r, topology=topology) for r in range(4)]
        assert all((per_rank[0] == chosen).all() for chosen in per_rank) == is_rank_invariant(rule), rule


# sgl-project/sglang#32962: every rank sees every token and outputs are summed
def test_rank_dependent_rules_are_refused_without_an_all_to_all():
    placement, topology = Placement([0, 1, 0, 2], 2), Topology(2, 2)
    for rule, invariant in RANK_INVARIANT.items():
        if invariant:
            choose_replicas([[0, 2]], placement, rule, all_to_all=False)
        else:
            with pytest.raises(ValueError, match=r"depends on the rank.*round_robin, position, hashed"):
                choose_replicas([[0, 2]], placement, rule, topology=topology, all_to_all=False)
    # What the refusal prevents: each rank prefers its own replica, both add expert 0.
    added = sum(
        placement.rank(choose_replicas([[0]], placement, "nearest", rank=r, topology=topology)[0, 0]) == r
        for r in (0, 1)
    )
    assert added == 2


def test_hashed_does_not_depend_on_how_the_batch_is_cut():
    placement = Placement([0, 1, 2, 0, 1, 2], 2)
    ids = np.random.default_rng(1).integers(0, 3, (40, 4))
    whole = choose_replicas(ids, placement, "hashed", seed=9)
    cut = [choose_replicas(ids[a : a + 8], placement, "hashed", seed=9, token_offset=a) for a in range(0, 40, 8)]
    np.testing.assert_array_equal(whole, np.concatenate(cut))
    assert (whole != choose_replicas(ids, placement, "hashed", seed=10)).any()


def mixed(seed, position, expert):
    """The hash of the rule on Python integers: two rounds of the splitmix64 finaliser."""
    bits = (seed * 0x9E3779B97F4A7C15 + position) % 2**64
    for salt in (expert, 0x9E3779B97F4A7C15):
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        bits = ((bits ^ bits >> 31) + salt) % 2**64
    return bits ^ bits >> 33


def test_hashed_is_the_same_on_every_machine():
    """Other engines that want the same choice can compute it: literal values, and the hash by plain integers."""
    placement = Placement([0, 0, 0, 0, 0, 0, 0, 1, 1, 1], 1)
    ids = np.array([[0, 1]] * 12)
    chosen = choose_replicas(ids, placement, "hashed", seed=9)
    assert chosen[:, 0].tolist() == [3, 0, 1, 0, 2, 1, 3, 2, 6, 1, 1, 4]
    for flat, (expert, slot) in enumerate(zip(ids.ravel(), chosen.ravel())):
        assert slot == [0, 7][expert] + mixed(9, flat, int(expert)) % [7, 3][expert]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[0, 4]], "topk_idx\\[0, 1\\] = 4 .* 0 to 3"),
        ([[0, -2]], "= -2"),
        ([0, 1], "\\[2\\]"),
        ([[0.0]], "float64"),
    ],
)
def test_ids_outside_the_placement_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        choose_replicas(ids, Placement([0, 1, 2, 3], 2), "static")


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="'fair' is unknown"):
        choose_replicas([[0]], Placement([0], 1), "fair")


# vllm-project/vllm-ascend#9244, #8710; sgl-project/sglang#28378: padding is no load, and -1 is not the last expert
def test_padding_is_not_counted():
    ids = np.array([[0, 1], [2, 1], [3, 0], [3, 3], [3, 3], [3, 3], [3, 3], [3, 3]])
    valid = np.arange(8) < 3
    assert expert_loads(ids, 4, valid).tolist() == [2, 2, 1, 1]
    assert expert_loads(np.where(valid[:, None], ids, -1), 4).sum() == 6
    physical = choose_replicas(np.where(valid[:, None], ids, -1), Placement([3, 0, 1, 2, 3, 3], 2), "round_robin")
    assert (physical[3:] == -1).all()
    assert replica_loads(physical, 6).sum() == 6


# vllm-project/vllm#23745: a strided placement; weights must be loaded by the same map as tokens are sent
def test_weights_loaded_by_another_map_than_the_placement_s():
    placement = Placement([0, 2, 1, 3], 2)  # rank 0 holds experts 0 and 2
    ids, weights = np.array([[0, 1], [2, 3], [1, 3]]), np.array([[0.5, 0.5], [0.25, 0.75], [1.0, 2.0]])
    factor = np.arange(4) + 1.0  # f_e(x) = (e + 1) x
    physical = choose_replicas(ids, placement, "static")
    one_rank = (factor[ids] * weights).sum(axis=1)
    assert one_rank.tolist() == [1.5, 3.75, 10.0]
    assert (factor[placement.phy2log][physical] * weights).sum(axis=1).tolist() == one_rank.tolist()
    contiguous = factor[physical]  # slot i holds expert i: experts 1 and 2 are swapped
    assert (contiguous * weights).sum(axis=1).tolist() == [2.0, 3.5, 11.0]


# sgl-project/sglang#25285: the mapping must be applied once
def test_mapping_twice_shows():
    placement = Placement(np.arange(8)[::-1], 4)
    once = choose_replicas([[0, 3]], placement, "static")
    assert once.tolist() == [[7, 4]]
    assert choose_replicas(once, placement, "static").tolist() == [[0, 3]]


@given(
    st.integers(1, 5), st.integers(0, 6), st.sampled_from(RULES), st.integers(0, 3), st.randoms(use_true_random=False)
)
def test_every_choice_is_a_replica_of_the_expert(experts, redundant, rule, rank, random):
    slots = list(range(experts)) + [random.randrange(experts) for _ in range(redundant)]
    slots += [0] * (-len(slots) % 4)
    random.shuffle(slots)
    placement = Placement(slots, 4)
    ids = np.array([[random.randrange(-1, experts) for _ in range(3)] for _ in range(5)])
    chosen = choose_replicas(ids, placement, rule, rank=rank, seed=3, topology=Topology(4, 2))
    for logical, physical in zip(ids.ravel(), chosen.ravel()):
        assert physical == -1 if logical < 0 else slots[physical] == logical
    assert choose_replicas(np.zeros((0, 3), int), placement, rule, topology=Topology(4, 2)).shape == (0, 3)

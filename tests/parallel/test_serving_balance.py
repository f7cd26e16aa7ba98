"""Balancers: by hand, against every placement there is, and against the plain policies on log-normal loads."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.serving.balance import (
    UNPLACED,
    assess,
    balance,
    compare,
    decode_cost,
    lower_bound,
    plain_policies,
    prefill_cost,
)
from parallel.serving.balance_experts import balance_experts, least_replica_load


def test_costs_by_hand():
    # 3 new tokens after 10 cached ones see 11, 12 and 13 keys
    assert prefill_cost([3, 4], [10, 0]).tolist() == [[36.0, 3.0], [10.0, 4.0]]
    assert decode_cost([7, 0]).tolist() == [[7.0, 1.0], [0.0, 1.0]]


def test_one_long_request_among_short_ones():  # vllm-project/vllm#48808: 27, 5, 0 and 0 requests on four ranks
    cost = decode_cost([8000] + [100] * 12)
    by_requests, by_cache, better = (balance(cost, 4, policy) for policy in ("least_1", "least_0", "balanced"))
    assert by_requests.load[:, 1].tolist() == [4, 3, 3, 3]
    assert by_cache.load[:, 1].tolist() == [1, 4, 4, 4]
    assert better.load[:, 0].max() == 8000
    assert better.objective <= min(by_requests.objective, by_cache.objective)
    assert better.over_bound[0] == 1.0


def test_round_robin_and_least_by_hand():
    cost = np.array([[5.0], [1.0], [1.0], [1.0]])
    assert balance(cost, 2, "round_robin").bins.tolist() == [0, 1, 0, 1]
    assert balance(cost, 2, "least_0").bins.tolist() == [0, 1, 1, 1]
    best = balance(cost, 2)
    assert best.load.ravel().tolist() == [5.0, 3.0]
    assert best.max_over_mean.tolist() == [1.25]
    assert best.over_bound.tolist() == [1.0]


def test_running_requests_and_full_ranks_count():
    start = np.array([[90.0, 1.0], [10.0, 1.0]])
    placed = balance(decode_cost([50, 30, 5]), 2, "balanced", start=start, capacity=[100, 3])
    assert (placed.load <= [100, 3]).all()
    assert placed.bins.tolist() == [1, 1, 0]
    full = balance(decode_cost([50, 60, 60]), 2, "least_0", start=start, capacity=[100, 9])
    assert full.bins.tolist() == [1, UNPLACED, UNPLACED]
    better = balance(decode_cost([60, 30, 60]), 2, start=start, capacity=[100, 9])
    assert np.count_nonzero(better.bins != UNPLACED) == 2


costs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(costs, st.integers(1, 3), st.lists(st.integers(0, 15), min_size=6, max_size=6))
def test_bound_and_best_against_every_placement(items, num_bins, begin):
    cost, start = np.array(items, float), np.array(begin, float).reshape(3, 2)[:num_bins]
    every = [assess(cost, bins, start) for bins in itertools.product(range(num_bins), repeat=len(items))]
    bound = lower_bound(cost, start)
    assert (np.array([result.load.max(axis=0) for result in every]) >= bound - 1e-9).all()
    best = balance(cost, num_bins, start=start)
    assert best.objective >= min(result.objective for result in every) - 1e-12
    for policy in plain_policies(2):
        assert best.objective <= balance(cost, num_bins, policy, start=start).objective


@settings(max_examples=40)
@given(costs, st.integers(1, 3), st.integers(1, 25), st.integers(1, 9))
def test_nothing_exceeds_its_room_and_nothing_that_fits_is_left_out(items, num_bins, most, count):
    cost = np.array(items, float)
    best = balance(cost, num_bins, capacity=[most, count])
    assert (best.load <= [most, count]).all()
    for policy in plain_policies(2):
        plain = balance(cost, num_bins, policy, capacity=[most, count])
        assert (plain.load <= [most, count]).all()
        assert np.count_nonzero(best.bins >= 0) >= np.count_nonzero(plain.bins >= 0)
        for i in np.flatnonzero(plain.bins == UNPLACED):
            assert not (plain.load + cost[i] <= [most, count]).all(axis=1).any()


def prompts(rng, n):
    """Log-normal prompts, half of them behind a cached prefix."""
    return prefill_cost(np.ceil(rng.lognormal(7, 1, n)), np.floor(rng.lognormal(7, 1, n)) * (rng.random(n) < 0.5))


def contexts(rng, n):
    """Log-normal contexts of decoding requests."""
    return decode_cost(np.ceil(rng.lognormal(8, 0.8, n)))


def mean_results(make, items: int, bins: int, seeds) -> dict[str, tuple[float, float]]:
    """policy -> (max over mean in the worst dimension, max over bound in the worst dimension), means over seeds."""
    runs = [compare(make(np.random.default_rng(seed), items), bins) for seed in seeds]
    for run in runs:
        assert run["balanced"].objective <= min(result.objective for result in run.values())
    return {
        name: tuple(np.mean([(run[name].objective, run[name].over_bound.max()) for run in runs], axis=0))
        for name in runs[0]
    }


CASES = {"prompts": (prompts, 96, 8), "contexts": (contexts, 256, 16)}


@pytest.mark.parametrize("name", CASES)
def test_lognormal_loads_as_the_page_on_serving_states_them(name):
    make, items, bins = CASES[name]
    results = mean_results(make, items, bins, range(8))
    assert results["balanced"][1] < 1.05
    assert results["balanced"][0] < min(value[0] for policy, value in results.items() if policy != "balanced") - 0.02
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    for policy, (over_mean, over_bound) in results.items():
        assert f"| {name} | {policy} | {over_mean:.3f} | {over_bound:.3f} |" in page


@pytest.mark.long
@pytest.mark.parametrize(("make", "items", "bins"), [(prompts, 128, 32), (contexts, 512, 32)])
def test_many_lognormal_loads(make, items, bins):
    results = mean_results(make, items, bins, range(100, 130))
    assert results["balanced"][0] < min(value[0] for policy, value in results.items() if policy != "balanced")


def test_heaviest_replica_by_hand():
    assert least_replica_load(np.array([6.0, 1.0, 1.0]), 3) == 6.0
    assert least_replica_load(np.array([6.0, 1.0, 1.0]), 5) == 2.0
    assert least_replica_load(np.array([4.0, 4.0]), 3) == 4.0


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 3))
def test_heaviest_replica_against_every_count(load, spare):
    counts = itertools.product(range(1, spare + 2), repeat=len(load))
    every = [max(n / c for n, c in zip(load, count)) for count in counts if sum(count) == len(load) + spare]
    assert least_replica_load(np.array(load, float), len(load) + spare) == min(every)


@pytest.mark.parametrize("name", ["readme", "v3_prefill", "v3_decode144", "skew_zipf", "one_hot", "groups_eq_nodes"])
def test_experts_on_recorded_loads_never_worse(name):
    cases = np.load(Path(__file__).parent / "data/eplb_cases.npz")
    weight, (physical, *geometry) = cases[f"{name}/weight"], (int(v) for v in cases[f"{name}/params"])
    plans = {
        policy: balance_experts(weight, physical, *geometry, policy)
        for policy in ("contiguous", "deepseek", "balanced")
    }
    for policy in ("contiguous", "deepseek"):
        assert (plans["balanced"].max_over_mean <= plans[policy].max_over_mean * (1 + 1e-12)).all()
    for plan in plans.values():
        assert (plan.over_bound >= 1 - 1e-12).all()
        assert all(set(row) == set(range(weight.shape[1])) for row in plan.phy2log)
        np.testing.assert_allclose(plan.load.sum(axis=1), weight.sum(axis=1), rtol=1e-6)


def test_experts_on_lognormal_loads_as_the_page_states_them():
    load = np.random.default_rng(0).lognormal(0, 1, (8, 256))
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    for gpus, nodes in ((32, 4), (144, 18)):
        for policy in ("contiguous", "deepseek", "balanced"):
            plan = balance_experts(load, 288, 8, nodes, gpus, policy)
            over_mean, over_bound = plan.max_over_mean.mean(), plan.over_bound.mean()
            assert f"| experts, {gpus} GPUs | {policy} | {over_mean:.3f} | {over_bound:.3f} |" in page


def test_bad_input():
    with pytest.raises(ValueError, match="policy 'best'"):
        balance(decode_cost([1]), 2, "best")
    with pytest.raises(ValueError, match="negative"):
        balance([[-1.0]], 2)
    with pytest.raises(ValueError, match=r"start \(1, 2\)"):
        balance(decode_cost([1]), 2, start=np.zeros((1, 2)))
    with pytest.raises(ValueError, match="negative"):
        prefill_cost([-1])
    with pytest.raises(ValueError, match="negative"):
        decode_cost([-1])
    with pytest.raises(ValueError, match="policy 'best'"):
        balance_experts(np.ones((1, 4)), 4, 1, 1, 2, "best")

"""Where the factor between bound and published step can go."""

import math
from itertools import permutations

import pytest

from parallel.timing.estimate import evaluate
from parallel.timing.gap import (
    FACTORS,
    GapInputs,
    balanced_and_not,
    decompose,
    drawn_imbalance,
    gap_range,
    step_seconds,
)
from parallel.timing.inputs import defaults
from parallel.timing.quantities import QUANTITIES


@pytest.fixture(scope="module")
def gap():
    return decompose(GapInputs(imbalance=1.15))


def test_the_bound_and_one_factor_at_a_time(gap):
    assert math.isclose(gap.bound, 37.9764053e-3, rel_tol=1e-8)
    # link 39 of 50 GB/s on a step that the network bounds
    assert math.isclose(gap.steps[frozenset(["link"])], 37.9764053e-3 * 50 / 39, rel_tol=1e-8)
    assert math.isclose(gap.steps[frozenset(["imbalance"])], 37.9764053e-3 * 1.15, rel_tol=1e-8)
    # two exchanges per layer take 10 us more, and two micro-batches have four
    assert math.isclose(gap.steps[frozenset(["sync"])], 37.9764053e-3 + 62 * 2 * 10e-6, rel_tol=1e-8)
    both = gap.steps[frozenset(["schedule", "sync"])] - gap.steps[frozenset(["schedule"])]
    assert math.isclose(both, 62 * 4 * 10e-6, rel_tol=1e-8)
    # attention stays hidden behind the network
    assert gap.shares["attention"].alone == 0


@pytest.mark.parametrize("change", [{}, {"nic": 100e9}, {"context": 20000}, {"requests": 20}, {"hbm": 1e12}])
def test_the_bound_is_the_notebooks_whatever_the_inputs(change):
    values = evaluate(
        QUANTITIES,
        {**defaults(), **{k: v for k, v in change.items() if k != "requests"}},
        {"requests": change.get("requests", 1850 / 21)},
    )
    assert math.isclose(step_seconds(GapInputs(**change), frozenset()), values["step_bound"], rel_tol=1e-12)


def test_the_five_stage_schedule_by_hand(gap):
    # per layer: both exchanges, and both micro-batches' experts, under which nothing is in flight
    experts = (1850 / 21) * 8 * 88e6 / 1979e12
    first = (187e6 + 1850 / 42 * 4989 * 1152) / 3.35e12  # attention of the first micro-batch before anything overlaps
    step = 37.9764053e-3 + 62 * 2 * experts + first
    assert math.isclose(gap.steps[frozenset(["schedule"])], step, rel_tol=1e-8)
    assert math.isclose(step, 41.9e-3, rel_tol=3e-3)


def test_shares_add_up_to_the_difference(gap):
    assert math.isclose(sum(share.mean for share in gap.shares.values()), gap.modelled - gap.bound, rel_tol=1e-12)
    assert set(gap.shares) == set(FACTORS)
    assert len(gap.steps) == 2 ** len(FACTORS)


def test_the_mean_share_is_the_mean_over_every_order(gap):
    for name in ("link", "schedule"):
        added = []
        for order in permutations(FACTORS):
            before = frozenset(order[: order.index(name)])
            added.append(gap.steps[before | {name}] - gap.steps[before])
        assert math.isclose(gap.shares[name].mean, sum(added) / len(added), rel_tol=1e-12)


def test_the_result_is_a_range_with_a_residual():
    published = (1.8 / 22, 1.8 / 20)
    found = gap_range(GapInputs(), (1.1, 2.5), published)
    assert found.balanced.modelled < published[0] < published[1] < found.unbalanced.modelled
    assert found.residual[0] < found.residual[1]
    assert found.residual[0] == published[0] / found.balanced.modelled
    assert 1.5 < found.balanced.modelled / found.balanced.bound < 2.5


def test_the_balancer_gains_about_what_sglang_published():
    # lmsys.org 2025-05-05: expert balancing gives 2.54 times in decode and 1.49 times in prefill
    balanced, plain = drawn_imbalance(0.5, 144, 144 * 176 * 8)
    assert 1.0 < balanced < 1.2
    assert 2.0 < plain / balanced < 3.0
    balanced, plain = drawn_imbalance(0.5, 32, 32 * 16384 * 8)
    assert 1.3 < plain / balanced < 1.7


def test_even_loads_need_no_balancer():
    assert balanced_and_not([1.0] * 4, [5.0] * 4, 2, 4) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"link": 1.2}, "link"),
        ({"imbalance": 0.5}, "below the mean"),
        ({"sync": -1}, "sync"),
        ({"attention": 0}, "peak"),
    ],
)
def test_impossible_losses_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        GapInputs(**change)


def test_all_factors_off_is_never_slower_than_any_on(gap):
    assert min(gap.steps.values()) == gap.bound
    assert max(gap.steps.values()) == gap.modelled == step_seconds(GapInputs(imbalance=1.15), frozenset(FACTORS))

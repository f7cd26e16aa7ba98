"""The load balancer against deepseek-ai/EPLB's own outputs, against loops, and on inputs from public reports."""

from pathlib import Path

import numpy as np
import pytest
from eplb_oracle import check_plan, plan_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.eplb import balancedness, chosen_policy, count_duplicates, gpu_loads, rebalance_experts

DATA = np.load(Path(__file__).parent / "data" / "eplb_cases.npz")
CASES = sorted({name.split("/")[0] for name in DATA.files if "/" in name})
README = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def case(name):
    return DATA[f"{name}/weight"], [int(value) for value in DATA[f"{name}/params"]]


def row_length(weight, replicas, groups, nodes):
    """Longest row that the original sorts: its sort is stable up to 16 elements."""
    if groups % nodes:
        groups, nodes = 1, 1
    return max(replicas // nodes, groups)


def test_there_are_25_cases():
    assert len(CASES) == 25


@pytest.mark.parametrize("name", CASES)
def test_plan_equals_the_original_s(name):
    weight, params = case(name)
    plan = rebalance_experts(weight, *params)
    check_plan(plan, *weight.shape, params[0])
    np.testing.assert_array_equal(plan.logcnt, DATA[f"{name}/logcnt"])
    top = gpu_loads(weight, plan.phy2log, params[3]).max(axis=1)
    np.testing.assert_allclose(top, gpu_loads(weight, DATA[f"{name}/phy2log"], params[3]).max(axis=1), rtol=1e-6)
    # The same algorithm with a stable sort, written independently.
    np.testing.assert_array_equal(plan.phy2log, DATA[f"{name}/phy2log_stable"])
    np.testing.assert_array_equal(plan.log2phy, DATA[f"{name}/log2phy_stable"])
    if row_length(weight, *params[:3]) <= 16:
        np.testing.assert_array_equal(plan.phy2log, DATA[f"{name}/phy2log"])
        np.testing.assert_array_equal(plan.log2phy, DATA[f"{name}/log2phy"])


# deepseek-ai/EPLB#8, #12, #19
def test_the_documented_example():
    plan = rebalance_experts(README, 16, 4, 2, 8)
    assert plan.phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    loads = gpu_loads(README, plan.phy2log, 8)
    assert loads[0].tolist() == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert loads[1].tolist() == [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5]
    np.testing.assert_allclose(balancedness(loads), [0.82772, 0.80501], atol=5e-6)


# deepseek-ai/EPLB#22: both replicas of expert 2 on one GPU
def test_two_replicas_of_an_expert_can_share_a_gpu():
    plan = rebalance_experts([[5, 9, 4, 6]], 6, 1, 1, 2)
    assert plan.phy2log.tolist() == [[0, 2, 3, 1, 1, 3]]
    assert count_duplicates(plan.phy2log, 2).tolist() == [1]


# deepseek-ai/EPLB#22, vllm-project/vllm#18343
def test_a_forced_duplicate_and_no_load_at_all():
    plan = rebalance_experts([[100, 1, 1, 1]], 6, 1, 1, 2)
    assert plan.logcnt.tolist() == [[3, 1, 1, 1]]
    np.testing.assert_allclose(np.sort(gpu_loads([[100, 1, 1, 1]], plan.phy2log, 2)[0]), [106 / 3, 203 / 3])
    assert count_duplicates(plan.phy2log, 2).tolist() == [1]
    empty = rebalance_experts(np.zeros((1, 8)), 12, 4, 2, 4)
    assert empty.logcnt.tolist() == [[3, 1, 1, 1, 3, 1, 1, 1]]
    assert balancedness(gpu_loads(np.zeros((1, 8)), empty.phy2log, 4)).tolist() == [1.0]


# deepseek-ai/EPLB#14: 5 groups over 3 nodes
def test_the_policy_that_ran_is_named_and_the_global_one_packs_onto_gpus():
    assert chosen_policy(5, 3) == "global"
    assert [chosen_policy(8, nodes) for nodes in (1, 4, 18, 40)] == ["hierarchical", "hierarchical", "global", "global"]
    weight = [[5, 4, 3, 2, 1, 1, 1, 1, 1]]
    plan = rebalance_experts(weight, 12, 5, 3, 4)
    assert gpu_loads(weight, plan.phy2log, 4).tolist() == [[5, 4.5, 5, 4.5]]
    with pytest.raises(ValueError, match="9 experts do not divide into num_groups = 5"):
        rebalance_experts(weight, 12, 5, 1, 4)
    # deepseek-ai/EPLB pull 16: 9 + 1 and 8 + 1, not 9 + 8
    assert gpu_loads([[9, 8, 1, 1]], rebalance_experts([[9, 8, 1, 1]], 4, 1, 3, 2).phy2log, 2).tolist() == [[10, 9]]


def test_loads_above_2_to_the_24_collapse_in_float32_as_in_the_original():
    assert rebalance_experts([[16777216, 16777217]], 3, 1, 1, 1).logcnt.tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], 2, 1, 1, 1), "shape \\[2\\]"),
        ((np.zeros((0, 4)), 4, 1, 1, 1), "shape \\[0, 4\\]"),
        (([[1, 2, 3, 4]], 3, 1, 1, 1), "num_replicas = 3 is less than the 4 experts"),
        # sgl-project/sglang#8253, vllm-project/vllm#52435
        ((np.ones((1, 256)), 257, 8, 2, 8), "num_replicas = 257 .* num_gpus = 8.* nearest redundant count .* 8"),
        ((np.ones((1, 384)), 384, 1, 1, 5), "384 .* 5.* nearest redundant count that does is 1"),
        (([[1, 2, 3, 4]], 6, 2, 2, 3), "num_gpus = 3 is not a multiple of num_nodes = 2"),
        (([[1, np.nan, 3, 4]], 4, 1, 1, 1), "weight\\[0, 1\\] = nan"),
        (([[1, 2, -3, 4]], 4, 1, 1, 1), "weight\\[0, 2\\] = -3"),
        (([[3e38, 3e38]], 2, 1, 1, 1), "more than float32 holds"),
        (([["a", "b"]], 2, 1, 1, 1), "dtype <U1"),
        (([[1, 2]], 2, 0, 1, 1), "num_groups = 0"),
        (([[1, 2]], 2, 1, 1, 0), "num_gpus = 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_numbers(arguments, words):
    with pytest.raises(ValueError, match=words):
        rebalance_experts(*arguments)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy = 'best'"):
        rebalance_experts([[1, 2]], 2, 1, 1, 1, policy="best")


@st.composite
def problems(draw):
    nodes, gpus_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = draw(st.sampled_from([nodes, 2 * nodes, 2 * nodes + 1]))
    experts = groups * draw(st.integers(1, 4))
    gpus = nodes * gpus_per_node
    replicas = (-(-experts // gpus) + draw(st.integers(0, 2))) * gpus
    layers = draw(st.integers(1, 2))
    top = draw(st.sampled_from([0, 2, 9, 1000]))
    weight = draw(
        st.lists(st.lists(st.integers(0, top), min_size=experts, max_size=experts), min_size=layers, max_size=layers)
    )
    return weight, replicas, groups, nodes, gpus


@given(problems())
@settings(max_examples=120)
def test_plans_equal_the_loops(problem):
    weight, replicas, groups, nodes, gpus = problem
    plan = rebalance_experts(weight, replicas, groups, nodes, gpus)
    scope = (groups, nodes) if groups % nodes == 0 else (1, 1)
    assert plan.phy2log.tolist() == [plan_layer(row, replicas, *scope, gpus) for row in weight]
    check_plan(plan, len(weight), len(weight[0]), replicas)


@given(problems())
@settings(max_examples=80)
def test_a_balanced_plan_is_valid_and_no_worse(problem):
    weight, replicas, groups, nodes, gpus = problem
    plain, balanced = (rebalance_experts(*problem, policy=policy) for policy in ("deepseek", "balanced"))
    check_plan(balanced, len(weight), len(weight[0]), replicas)
    assert (gpu_loads(weight, balanced.phy2log, gpus).max(1) <= gpu_loads(weight, plain.phy2log, gpus).max(1)).all()
    assert (count_duplicates(balanced.phy2log, gpus) <= count_duplicates(plain.phy2log, gpus)).all()
    if groups % nodes == 0:  # a group stays within its node
        group_size, slots = len(weight[0]) // groups, replicas // nodes
        for plan in (plain, balanced):
            for row in plan.phy2log:
                nodes_of = [{p // slots for p in range(replicas) if row[p] // group_size == g} for g in range(groups)]
                assert all(len(on) == 1 for on in nodes_of)

"""Every number of the case-study notebook, exactly: its own arithmetic beside the formulas, then literal values."""

import math
from fractions import Fraction

import pytest

from parallel.timing.estimate import Quantity, evaluate, solve
from parallel.timing.inputs import INPUTS, defaults
from parallel.timing.quantities import QUANTITIES, SECTIONS


@pytest.fixture(scope="module")
def values():
    return evaluate(QUANTITIES, defaults())


def notebook():
    """The published day, worked out with fractions."""
    f = Fraction
    seqs = f(14800) / 8 / 21
    tokens = seqs * 2
    kv = seqs * 4989 * 576 * 2 * 61
    weights = 61 * f(187 * 10**6) + 58 * 3 * 44 * 10**6 + 2 * 129280 * 7168
    hbm, bf16, fp8 = f(335, 100) * 10**12, 989 * 10**12, 1979 * 10**12
    attn = max((187 * 10**6 + seqs * 4989 * 1152) / hbm, tokens * 4989 * 278528 / bf16)
    moe = max(3 * 44 * 10**6 / hbm, tokens * 9 * 88 * 10**6 / fp8)
    comm = tokens * 8 * ((7168 + 224) + 7168 * 2) / (50 * 10**9)
    bound, real = 62 * max(attn + moe, comm), f(18, 10) / 21
    computed = 73700 * (1 - f(342, 608)) / 8
    flop = 2 * 37 * 10**9 + 61 * (f(4989) / 2) * 81920
    cost = f(22675, 100) * 8 * 24 * 2
    revenue = f(342 * 14 + (608 - 342) * 55 + 168 * 219) * 10**9 / 100 / 10**6
    return {
        "decode_gpu": f(1850),
        "requests": seqs,
        "kv": kv,
        "weights": weights,
        "used": kv + weights,
        "tokens": tokens,
        "attn": attn,
        "moe": moe,
        "comm": comm,
        "step_bound": bound,
        "step_serial": 62 * (attn + moe + comm),
        "step_published": real,
        "gap": real / bound,
        "hit_rate": f(342, 608),
        "computed": computed,
        "prefill_token_flop": flop,
        "prefill_flops": computed * flop,
        "prefill_of_fp8": computed * flop / fp8,
        "prefill_of_bf16": computed * flop / bf16,
        "cost": cost,
        "revenue": revenue,
        "margin": revenue / cost - 1,
        "cost_per_million": cost / 168000,
    }


def test_every_number_of_the_notebook_follows_exactly(values):
    for name, exact in notebook().items():
        assert math.isclose(values[name], float(exact), rel_tol=1e-14), name


def test_numbers_that_are_whole_are_exact(values):
    assert values["hit_rate"] == 0.5625
    assert values["cost"] == 87072.0
    assert values["revenue"] == 562100.0
    assert values["decode_gpu"] == 1850.0
    assert values["computed"] == 4030.46875
    assert values["kv_token"] == 70272
    assert values["weights"] == 20916358080.0


@pytest.mark.parametrize(
    ("name", "value", "digits"),
    [
        ("requests", 88.0952381, 9),
        ("kv", 30.8850459e9, 9),
        ("used", 51.8014040e9, 9),
        ("attn", 247.553176e-6, 9),
        ("attn_memory", 206.958874e-6, 9),
        ("moe", 70.5118025e-6, 9),
        ("moe_memory", 39.4029851e-6, 9),
        ("dispatch", 208.384e-6, 12),
        ("combine", 404.138667e-6, 9),
        ("comm", 612.522667e-6, 9),
        ("step_bound", 37.9764053e-3, 9),
        ("step_serial", 57.696434e-3, 8),
        ("step_published", 85.7142857e-3, 9),
        ("gap", 2.25704052, 9),
        ("prefill_token_flop", 86.4653158e9, 9),
        ("prefill_flops", 348.495753e12, 9),
        ("prefill_prefix_flops", 376.756e12, 6),
        ("prefill_of_fp8", 0.176096894, 9),
        ("prefill_of_bf16", 0.352371844, 9),
        ("margin", 5.45557699, 9),
        ("margin_published", 5.45473861, 9),
        ("cost_per_million", 0.518285714, 9),
        ("prefill_nodes", 95.482185, 8),
        ("decode_nodes", 131.381381, 9),
        ("rows_per_expert", 704.761905, 9),
        ("ridge_rows", 295.373134, 9),
        ("ridge_tokens", 98.4577114, 9),
        ("attn_ridge_requests", 51.0039415, 9),
        ("gqa_token", 192512, 12),
        ("gqa_ratio", 2.73952641, 9),
        ("gqa_kv", 84.70528e9, 12),
        ("gqa_tp_kv", 21.17632e9, 12),
        ("gqa_tp_same_kv", 84.70528e9, 12),
        ("gqa_fp8_kv", 42.35264e9, 12),
        ("faster_comm", 306.261333e-6, 9),
        ("compute", 318.064978e-6, 9),
        ("faster_step", 19.7200287e-3, 9),
        ("fp8_step", 18.9882027e-3, 9),
        ("sparse_step", 18.9882027e-3, 9),
        ("isca_exchange", 120.96e-6, 12),
        ("isca_layer", 241.92e-6, 12),
        ("isca_step", 14.75712e-3, 12),
        ("isca_tps", 67.7638997, 9),
        ("isca_nvl_exchange", 6.72e-6, 12),
        ("isca_nvl_step", 0.81984e-3, 12),
    ],
)
def test_published_and_derived_values(values, name, value, digits):
    assert math.isclose(values[name], value, rel_tol=0.51 * 10.0 ** (1 - digits)), values[name]


def test_equal_sides_at_the_ridge(values):
    at = evaluate(QUANTITIES, defaults(), {"requests": values["ridge_requests"]})
    assert math.isclose(at["moe_memory"], at["moe_compute"], rel_tol=1e-12)
    at = evaluate(QUANTITIES, defaults(), {"requests": values["attn_ridge_requests"]})
    assert math.isclose(at["attn_memory"], at["attn_compute"], rel_tol=1e-12)


def test_rounded_totals_explain_both_published_revenues(values):
    assert values["revenue_low"] == pytest.approx(560_525)
    assert values["revenue_high"] == pytest.approx(563_675)
    corners = [
        ((hit * 14 + (total - hit) * 55 + out * 219) / 100) * 1000
        for hit in (341.5, 342.5)
        for total in (607.5, 608.5)
        for out in (167.5, 168.5)
    ]
    assert min(corners) == pytest.approx(values["revenue_low"])
    assert max(corners) == pytest.approx(values["revenue_high"])
    assert values["revenue_low"] < 562_027 < values["revenue_high"]


def test_what_the_memory_estimate_leaves_out(values):
    assert values["left_dense"] == 3 * 3 * 7168 * 18432
    assert values["left_mtp"] == 187e6 + 3 * 44e6 + 2 * 7168**2
    assert values["used_with_left"] == pytest.approx(57.9188793e9, rel=1e-8)
    assert values["spare"] == 80e9 - values["used_with_left"] > 0


def test_every_input_changes_something_and_has_a_source(values):
    for name, entry in INPUTS.items():
        assert entry.unit
        assert entry.source
        if name == "memory":
            changed = evaluate(QUANTITIES, {**defaults(), name: 2 * entry.value})
            assert changed["spare"] > values["spare"]
            continue
        changed = evaluate(QUANTITIES, {**defaults(), name: entry.value * 1.37})
        assert changed != values, name


def test_a_faster_network_moves_the_bottleneck():
    changed = evaluate(QUANTITIES, {**defaults(), "nic": 100e9})
    assert changed["comm"] < changed["attn"] + changed["moe"]
    assert math.isclose(changed["step_bound"], 62 * (247.553176e-6 + 70.5118025e-6), rel_tol=1e-8)


def test_the_batch_for_a_target_speed():
    requests = solve(QUANTITIES, defaults(), "requests", "step_bound", 1.8 / 20, 1e6)
    assert math.isclose(requests, 208.776248, rel_tol=1e-8)  # 0.09 / 62 * 50e9 / (16 * 21728)
    assert math.isclose(requests, 0.09 / 62 * 50e9 / (16 * 21728), rel_tol=1e-13)
    assert evaluate(QUANTITIES, defaults(), {"requests": requests})["step_bound"] <= 0.09
    assert solve(QUANTITIES, defaults(), "requests", "step_bound", 1.8 / 20, 100) == 100
    with pytest.raises(ValueError, match="however small"):
        solve(QUANTITIES, defaults(), "requests", "step_bound", 1e-3, 1e6)


def test_formulas_name_what_they_use_and_refuse_what_they_cannot():
    double = Quantity("b", "s", "1", "2 * a + max(a, 1)", "")
    assert double.uses == ("a",)
    assert evaluate([double], {"a": 3}) == {"b": 9.0}
    with pytest.raises(ValueError, match="uses a, which has no value"):
        evaluate([double], {})
    with pytest.raises(ValueError, match="divides by zero"):
        evaluate([Quantity("b", "s", "1", "1 / a", "")], {"a": 0})


def test_the_table_of_formulas_is_whole():
    assert {quantity.section for quantity in QUANTITIES} == set(SECTIONS)
    names = [quantity.name for quantity in QUANTITIES]
    assert len(names) == len(set(names))
    assert not set(names) & set(INPUTS)

"""Cost and income of a day: the published figures, and prices by hand."""

from fractions import Fraction

import numpy as np
import pytest

from parallel.serving import published
from parallel.serving.economics import (
    DISCOUNT,
    R1,
    V3,
    Market,
    Prices,
    Traffic,
    cost,
    discounted_share,
    income,
    margin,
    revenue,
    revenue_range,
)

DAY = Traffic(np.array([342e9]), np.array([266e9]), np.array([168e9]))


def test_published_income_cost_and_margin():
    by_hand = Fraction(342_000 * 14 + 266_000 * 55 + 168_000 * 219, 100)
    assert by_hand == 562_100
    assert income(DAY).sum() == pytest.approx(562_100, abs=1e-6)
    assert cost(226.75 * 24) == 87_072.0
    assert margin(562_100, 87_072) == pytest.approx(5.455577, abs=1e-6)
    assert margin(562_027, 87_072) == pytest.approx(5.454739, abs=1e-6)


def test_the_rounding_of_the_token_totals_explains_the_difference():
    low, high = revenue_range(DAY)
    corners = [
        revenue(Traffic(342e9 + h, 608e9 + i - 342e9 - h, 168e9 + o), R1)
        for h in (-0.5e9, 0.5e9)
        for i in (-0.5e9, 0.5e9)
        for o in (-0.5e9, 0.5e9)
    ]
    assert (low, high) == pytest.approx((min(corners), max(corners)), abs=1e-3)
    assert low < 562_027 < 562_100 < high


def test_the_hit_rate_is_a_tie():
    assert DAY.hit_rate == 0.5625
    assert Fraction(342, 608) == Fraction(9, 16)
    assert Traffic(np.zeros(2), np.zeros(2), np.ones(2)).hit_rate == 0.0


def test_what_remains_by_hand():
    million = Traffic(np.array([1e6, 1e6]), np.array([2e6, 2e6]), np.array([1e6, 1e6]))
    r1, v3, night = 0.14 + 2 * 0.55 + 2.19, 0.07 + 2 * 0.27 + 1.10, 0.035 + 2 * 0.135 + 0.55
    np.testing.assert_allclose(income(million, Market(paid_share=0.25)), [r1 / 4] * 2)
    np.testing.assert_allclose(income(million, Market(v3_share=0.4)), [0.6 * r1 + 0.4 * v3] * 2)
    np.testing.assert_allclose(income(million, Market(off_peak=True), [1.0, 0.5]), [night, (night + r1) / 2])
    np.testing.assert_allclose(income(million, Market(off_peak=False), [1.0, 0.5]), [r1] * 2)
    np.testing.assert_allclose(income(million, Market(0.5, 1.0, True), [0.0, 1.0]), [v3 / 2, night / 2])


def test_night_discounts_meet_in_one_list():
    for name in ("hit", "miss", "output"):
        assert getattr(DISCOUNT, name) == pytest.approx(getattr(V3, name) / 2, rel=1e-12)
        assert getattr(DISCOUNT, name) == pytest.approx(getattr(R1, name) / 4, rel=0.02)


def test_hours_of_the_discount():
    start, hours = np.array([0.0, 8.0, 12.0, 23.75, 24.25, 32.0, 24.0, 0.0]), np.array([1, 1, 1, 1, 0.5, 1, 24, 48])
    expected = [0.5, 0.5, 0.0, 0.25, 0.5, 0.5, 8 / 24, 16 / 48]
    np.testing.assert_allclose(discounted_share(start, hours), expected)


def test_hourly_cost_is_16_dollars_a_node():
    day = published.published_day()
    hourly = (day.nodes * day.hours).reshape(24, 4).sum(axis=1)
    expected = [278] * 12 + [218, 195.5, 150.5, 83, 68, 68, 83, 158, 248, 278, 278, 278]
    assert hourly.tolist() == expected
    assert cost(hourly).sum() == 87_072.0
    assert cost(hourly)[[0, 16]].tolist() == [4448.0, 1088.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Market(paid_share=1.2), "paid_share = 1.2"),
        (lambda: Market(v3_share=-0.1), "v3_share = -0.1"),
        (lambda: Prices(1, -1, 1), "price miss = -1"),
        (lambda: margin(1.0, 0.0), "positive cost"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()

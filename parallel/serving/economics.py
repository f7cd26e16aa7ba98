"""What serving costs, what its tokens would bring at list prices, and what remains of that.

Prices and rules: DeepSeek open-infra-index, 202502OpenSourceWeek/day_6 (R1's prices, $2 per GPU hour), and the price
list at api-docs.deepseek.com/quick_start/pricing as it stood from February to September 2025 (V3, discount at night).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GPUS_PER_NODE = 8
HOURS_PER_DAY = 24


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens: input found in the cache, input computed, output. Raises ValueError below 0."""

    hit: float
    miss: float
    output: float

    def __post_init__(self):
        for name in ("hit", "miss", "output"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"price {name} = {getattr(self, name)}: dollars per million tokens cannot be negative")


R1 = Prices(0.14, 0.55, 2.19)
V3 = Prices(0.07, 0.27, 1.10)
DISCOUNT = Prices(0.035, 0.135, 0.55)  # both models at night
DISCOUNT_HOURS = (0.5, 8.5)  # in the clock of the published charts, UTC+8


class Traffic(NamedTuple):
    """Tokens per interval, arrays of one shape: input found in the cache, input computed, output generated."""

    hit: np.ndarray
    miss: np.ndarray
    output: np.ndarray

    @property
    def input(self) -> np.ndarray:
        """Hits and misses together."""
        return self.hit + self.miss

    @property
    def hit_rate(self) -> float:
        """Share of all input tokens that were in the cache; 0 without input."""
        total = float(np.sum(self.input))
        return float(np.sum(self.hit)) / total if total else 0.0


@dataclass(frozen=True)
class Market:
    """How much of the traffic is paid, and at which list.

    paid_share: fraction of all tokens that anyone pays for; v3_share: fraction billed at V3's prices instead of R1's;
    off_peak: whether the night's discount applies. The defaults are those of the published theoretical income.
    Raises ValueError for fractions outside 0 .. 1.
    """

    paid_share: float = 1.0
    v3_share: float = 0.0
    off_peak: bool = False
    prices: Prices = R1

    def __post_init__(self):
        for name in ("paid_share", "v3_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a share is a fraction from 0 to 1")


def income(traffic: Traffic, market: Market = Market(), discounted=0.0) -> np.ndarray:
    """Dollars of each interval. `discounted` is the fraction of each interval that lies in the discount's hours."""
    discounted = np.asarray(discounted, np.float64) if market.off_peak else np.float64(0)
    day = (1 - market.v3_share) * revenue(traffic, market.prices) + market.v3_share * revenue(traffic, V3)
    return market.paid_share * ((1 - discounted) * day + discounted * revenue(traffic, DISCOUNT))


def revenue(traffic: Traffic, prices: Prices) -> np.ndarray:
    """Dollars of each interval if every token were billed at these prices."""
    return (traffic.hit * prices.hit + traffic.miss * prices.miss + traffic.output * prices.output) / 1e6


def revenue_range(traffic: Traffic, prices: Prices = R1, rounding: float = 0.5e9) -> tuple[float, float]:
    """Least and most income of a day whose totals of input, hit and output were each rounded to 2 * `rounding`.

    A unit more of input is a unit more of misses; a unit more of hits is one less of misses.
    """
    total = float(np.sum(revenue(traffic, prices)))
    slack = rounding * (prices.miss + abs(prices.miss - prices.hit) + prices.output) / 1e6
    return total - slack, total + slack


def discounted_share(start_hour: np.ndarray, hours: np.ndarray) -> np.ndarray:
    """Fraction of each interval [start, start + hours) that lies in the discount's hours of any day."""
    overlap = np.zeros(len(start_hour))
    first_day = int(np.floor(np.min(start_hour, initial=0) / HOURS_PER_DAY)) - 1
    last_day = int(np.ceil(np.max(start_hour + hours, initial=0) / HOURS_PER_DAY))
    for day in range(first_day, last_day + 1):
        begin, end = (day * HOURS_PER_DAY + edge for edge in DISCOUNT_HOURS)
        overlap += np.clip(np.minimum(start_hour + hours, end) - np.maximum(start_hour, begin), 0, None)
    return overlap / hours


def cost(node_hours, gpu_hour: float = 2.0):
    """Dollars for `node_hours` nodes of 8 GPUs at `gpu_hour` dollars each."""
    return np.asarray(node_hours) * GPUS_PER_NODE * gpu_hour


def margin(income_total: float, cost_total: float) -> float:
    """Cost profit margin as published: income over cost, less one, as a fraction. Raises ValueError for no cost."""
    if not cost_total > 0:
        raise ValueError(f"cost = {cost_total}: a margin on cost needs a positive cost")
    return income_total / cost_total - 1

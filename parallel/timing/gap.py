"""Where the factor between the bound of a decode step and the published step can go, one factor at a time.

The published data do not identify the factors: this is a range with a residual, never a single number. Factors act
through maxima, so what one of them adds depends on which others are on. For each factor three shares are given: alone
(added to the bound), last (taken away from all), and the mean over all orders (Shapley value).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import factorial
from typing import NamedTuple

import numpy as np

from parallel.schedule import LayerPlan, decode_overlap, sequential
from parallel.schedule.ops import exchange_of
from parallel.timing.imbalance import drawn_popularity, even_placement, loads_of_vector
from parallel.timing.timeline import timeline

FACTORS = {
    "schedule": "the five-stage schedule with two micro-batches instead of perfect overlap",
    "link": "the measured link rate instead of the peak",
    "imbalance": "the rank with the most rows instead of the mean",
    "attention": "the measured rate of core attention instead of the peak",
    "sync": "a fixed time on every exchange: launch, notification, waiting",
}


@dataclass(frozen=True)
class GapInputs:
    """The notebook's decode step (inputs of the same names) and what each factor is set to when it is on.

    link, attention: fractions of peak. imbalance: largest over mean rows of a rank. sync: seconds per exchange.
    Sources: link 39 of 50 GB/s, deepseek-ai/DeepEP README (low latency, EP128, 128 tokens); attention 660 of 989
    TFLOPS, deepseek-ai/FlashMLA README; sync is assumed.
    """

    requests: float = 1850 / 21
    context: float = 4989
    verified: float = 2
    step_layers: int = 62
    routed: int = 8
    hidden: int = 7168
    scale_bytes: float = 224
    attention_params: float = 187e6
    expert_params: float = 44e6
    expert_flop: float = 88e6
    experts_per_gpu: float = 3
    latent: float = 1152
    decode_flop: float = 278528
    bf16: float = 989e12
    fp8: float = 1979e12
    hbm: float = 3.35e12
    nic: float = 50e9
    link: float = 39 / 50
    imbalance: float = 1.15
    attention: float = 660 / 989
    sync: float = 10e-6

    def __post_init__(self):
        if not (0 < self.link <= 1 and 0 < self.attention <= 1):
            raise ValueError(f"link = {self.link}, attention = {self.attention}: fractions of the peak, up to 1")
        if self.imbalance < 1:
            raise ValueError(f"imbalance = {self.imbalance}: the largest load cannot be below the mean")
        if self.sync < 0 or self.step_layers < 1:
            raise ValueError(
                f"sync = {self.sync}, step_layers = {self.step_layers}: no negative time, one layer at least"
            )


class Share(NamedTuple):
    """Seconds that a factor adds to a step: alone, last, and as the mean over all orders."""

    alone: float
    last: float
    mean: float


class Gap(NamedTuple):
    """bound, modelled [s]: no factor and all of them. shares: factor -> Share; the means add up to the difference.
    steps: set of factors -> seconds, for every set."""

    bound: float
    modelled: float
    shares: dict[str, Share]
    steps: dict[frozenset, float]

    def residual(self, published: float) -> float:
        """What the published step is over the modelled one."""
        return published / self.modelled


def step_seconds(inputs: GapInputs, on: frozenset) -> float:
    """A decode step of the most loaded rank with the factors of `on` switched on.

    Without `schedule` the batch stays whole and neither stream waits for the other, as in the notebook's bound. With
    it there are two micro-batches, each of which reads the weights anew.
    """
    split = "schedule" in on
    tokens = inputs.requests * inputs.verified / (2 if split else 1)
    nic = inputs.nic * (inputs.link if "link" in on else 1.0)
    sync = inputs.sync if "sync" in on else 0.0
    rows = tokens * inputs.routed * (inputs.imbalance if "imbalance" in on else 1.0)
    moved = {
        "dispatch": sync + rows * (inputs.hidden + inputs.scale_bytes) / nic,
        "combine": sync + rows * 2 * inputs.hidden / nic,
    }
    seconds = _compute_seconds(inputs, on, tokens, rows)
    layers = LayerPlan((), tuple(range(inputs.step_layers)))
    result = timeline(
        [decode_overlap.build(layers, 0) if split else sequential.build(layers, 0)],
        compute=lambda op: seconds.get(op.stage, 0.0),
        transfer=lambda op: moved[exchange_of(op.stage)] if op.stage.endswith("_send") else 0.0,
        waits=split,
    )
    return result.makespan


def _compute_seconds(inputs, on, tokens, rows):
    """Seconds of the three priced stages for one micro-batch; the bound prices all experts of a rank together."""
    requests = tokens / inputs.verified
    read = inputs.attention_params + requests * inputs.context * inputs.latent
    rate = inputs.bf16 * (inputs.attention if "attention" in on else 1.0)
    routed_read = (inputs.experts_per_gpu - 1) * inputs.expert_params / inputs.hbm
    routed = rows * inputs.expert_flop / inputs.fp8
    shared_read = inputs.expert_params / inputs.hbm
    shared = tokens * inputs.expert_flop / inputs.fp8
    attention = max(read / inputs.hbm, tokens * inputs.context * inputs.decode_flop / rate)
    if "schedule" not in on:
        return {"attn_core": attention, "experts": max(routed_read + shared_read, routed + shared)}
    return {"attn_core": attention, "experts": max(routed_read, routed), "shared": max(shared_read, shared)}


def decompose(inputs: GapInputs) -> Gap:
    """Simulate every set of factors and share the difference between none and all of them."""
    names = tuple(FACTORS)
    steps = {
        frozenset(chosen): step_seconds(inputs, frozenset(chosen))
        for size in range(len(names) + 1)
        for chosen in combinations(names, size)
    }
    none, everything = frozenset(), frozenset(names)
    shares = {
        name: Share(
            steps[frozenset([name])] - steps[none],
            steps[everything] - steps[everything - {name}],
            _shapley(name, names, steps),
        )
        for name in names
    }
    return Gap(steps[none], steps[everything], shares, steps)


def _shapley(name: str, names: tuple[str, ...], steps: Mapping[frozenset, float]) -> float:
    """Mean over all orders of what a factor adds when it comes."""
    others = [other for other in names if other != name]
    total = 0.0
    for size in range(len(others) + 1):
        weight = factorial(size) * factorial(len(others) - size) / factorial(len(names))
        for chosen in combinations(others, size):
            before = frozenset(chosen)
            total += weight * (steps[before | {name}] - steps[before])
    return total


class GapRange(NamedTuple):
    """Decompositions with and without the expert balancer; published [s]: fastest and slowest step the source allows.

    residual: published over modelled with the balancer, low and high: what no factor explains.
    """

    balanced: Gap
    unbalanced: Gap
    published: tuple[float, float]
    residual: tuple[float, float]


def gap_range(inputs: GapInputs, imbalance: tuple[float, float], published: tuple[float, float]) -> GapRange:
    """imbalance: with and without the balancer. published: the fastest and the slowest step the source allows [s]."""
    balanced, unbalanced = (decompose(replace(inputs, imbalance=value)) for value in imbalance)
    return GapRange(balanced, unbalanced, published, (balanced.residual(published[0]), balanced.residual(published[1])))


def balanced_and_not(seen: np.ndarray, counts: np.ndarray, ranks: int, physical: int) -> tuple[float, float]:
    """(with, without the balancer): largest over mean load of `ranks` ranks with `physical` experts in all.

    seen [E]: loads by which the balancer places experts; counts [E]: the rows that then arrive.
    """
    from parallel.eplb import rebalance_experts  # no other estimate needs it

    placed = rebalance_experts(np.asarray(seen, dtype=np.float32)[None, :], physical, 1, 1, ranks)[0][0]  # [P]
    plain = even_placement(len(counts), physical)
    return tuple(loads_of_vector(counts, phy2log, ranks).imbalance for phy2log in (placed, plain))


def drawn_imbalance(
    spread: float, ranks: int, rows: int, seed: int = 0, num_experts: int = 256, physical: int = 288, draws: int = 8
) -> tuple[float, float]:
    """(with, without the balancer), means over `draws` layers, when expert popularity is log-normal.

    The balancer places experts by the popularity that it has seen; the rows are then drawn anew.
    rows: (token, expert) pairs of the whole group in one layer.
    """
    found = []
    for draw in range(draws):
        popularity = drawn_popularity(num_experts, spread, seed + draw)
        counts = np.random.default_rng([seed, draw]).multinomial(rows, popularity)
        found.append(balanced_and_not(popularity, counts, ranks, physical))
    with_balancer, without = np.mean(found, axis=0)
    return float(with_balancer), float(without)

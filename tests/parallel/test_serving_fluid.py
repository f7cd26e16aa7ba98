"""The fluid model of a fleet against the emulated scheduler at small scale: one step is one second, one rank a node."""

import random

import numpy as np
import pytest
from serving_standin import MemoryStore, StandIn

from parallel.serving.economics import Traffic
from parallel.serving.fleet import Day, Rates, need, prefill_without_cache
from parallel.serving.keys import Namespace
from parallel.serving.scheduler import Scheduler, SchedulerConfig

SLOTS, NEW = 4, 20  # requests that a rank decodes at once; tokens of each


def emulate(arrivals_per_step, num_ranks: int) -> list[int]:
    """Decode requests of one prompt token each; running requests after every step."""
    scheduler = Scheduler(StandIn(num_ranks, 200, 4), SchedulerConfig(max_requests=SLOTS, policy="least_1"))
    owed, running = 0.0, []
    for rate in arrivals_per_step:
        owed += rate
        while owed >= 1:
            scheduler.submit(len(scheduler.requests), [len(scheduler.requests) % 50], NEW)
            owed -= 1
        batch = scheduler.begin()
        running.append(sum(map(len, scheduler.running)))
        scheduler.finish(scheduler.engine.step(batch))
    return running, len(scheduler.waiting)


def fluid(rates, steps: int) -> np.ndarray:
    """Ranks in use in each interval of `steps` steps with that many requests per step."""
    tokens = np.array(rates) * NEW * steps
    zero = np.zeros(len(rates))
    day = Day(np.arange(len(rates)) * steps / 3600, np.full(len(rates), steps / 3600), Traffic(zero, zero, tokens))
    return need(day, Rates(prefill=1.0, decode=SLOTS)).decode


def test_ranks_in_use_follow_the_traffic():
    rates, steps = [0.5, 1.1, 0.2], 300
    needed = fluid(rates, steps)
    np.testing.assert_allclose(needed, [2.5, 5.5, 1.0])
    running, waiting = emulate(np.repeat(rates, steps), num_ranks=6)
    assert waiting == 0
    for i, expected in enumerate(needed):
        settled = running[i * steps + 2 * NEW : (i + 1) * steps]
        assert np.mean(settled) / SLOTS == pytest.approx(expected, rel=0.03)


def test_one_rank_too_few_lets_the_queue_grow_as_the_fluid_says():
    steps, rate = 400, 1.1
    assert fluid([rate], steps)[0] == pytest.approx(5.5)
    _, enough = emulate([rate] * steps, num_ranks=6)
    _, backlog = emulate([rate] * steps, num_ranks=5)
    assert enough == 0
    assert backlog == pytest.approx((rate - 5 * SLOTS / NEW) * steps, abs=5)


def test_the_cache_saves_prefill_time_as_the_fluid_says():
    rng = random.Random(0)
    roots = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    prompts = [
        rng.choice(roots)[: rng.choice((24, 32, 40))] + [rng.randrange(50) for _ in range(24)] for _ in range(60)
    ]

    def run(store):
        config = SchedulerConfig(max_requests=8, max_tokens=32, policy="least_3")
        scheduler = Scheduler(StandIn(2, 200, 8), config, store)
        for i, prompt in enumerate(prompts):
            scheduler.submit(i, prompt, 1)
        while scheduler.busy:
            scheduler.step()
        return scheduler.stats

    space = Namespace("stand-in", "int64", "token ids", block_tokens=8)
    run(store := MemoryStore(space))  # fill it
    warm, cold = run(store), run(None)
    assert warm.hit_tokens > 0.5 * warm.input_tokens
    hit, total = float(warm.hit_tokens), float(warm.input_tokens)
    day = Day(np.zeros(1), np.array([1 / 3600]), Traffic(np.array([hit]), np.array([total - hit]), np.zeros(1)))
    rate = total / (2 * warm.steps)  # input tokens of a rank in a step, hits included: how the published rate counts
    assert need(day, Rates(prefill=rate)).prefill[0] == pytest.approx(2 * warm.steps)
    predicted = prefill_without_cache(day, Rates(prefill=rate))[0] / 2  # steps of two ranks without a cache
    assert cold.steps == pytest.approx(predicted, rel=0.1)

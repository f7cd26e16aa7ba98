"""Continuous batching with a model whose tokens are known: nothing lost, nothing leaked, no deadlock, same tokens."""

import random

import pytest
from serving_standin import MemoryStore, StandIn, plain_generation

from parallel.serving.keys import Namespace
from parallel.serving.kv_store import KVStore
from parallel.serving.pages import PagePool
from parallel.serving.requests import Status
from parallel.serving.scheduler import Scheduler, SchedulerConfig


def namespace(page_size: int) -> Namespace:
    return Namespace("stand-in", "int64", "token ids", block_tokens=page_size)


def run_to_the_end(scheduler: Scheduler, limit: int = 10_000) -> int:
    for step in range(limit):
        if not scheduler.busy:
            return step
        scheduler.step()
    raise AssertionError("the scheduler does not come to an end")


def check_no_leak(scheduler: Scheduler) -> None:
    for rank, pool in enumerate(scheduler.pools):
        owned = [page for request in scheduler.running[rank] for page in request.pages]
        assert len(owned) == len(set(owned))
        assert pool.free + len(owned) == pool.num_pages
    held = {request.id for running in scheduler.running for request in running}
    assert scheduler.engine.known <= held, "the engine still keeps a request that left"


def test_one_request_by_hand():
    engine = StandIn(1, 4, 4)
    scheduler = Scheduler(engine, SchedulerConfig(max_tokens=3))
    request = scheduler.submit(7, [1, 2, 3, 4, 5], 3)
    batches = []
    while scheduler.busy:
        batch = scheduler.begin()
        batches.append([(chunk.start, len(chunk.tokens), len(chunk.pages), chunk.final) for chunk in batch[0]])
        scheduler.finish(engine.step(batch))
    # a prompt of 5 in pieces of 3 and 2, then two tokens to decode; the third token needs no row
    assert batches == [[(0, 3, 2, False)], [(3, 2, 2, True)], [(5, 1, 2, True)], [(6, 1, 2, True)]]
    assert request.generated == plain_generation([1, 2, 3, 4, 5], 3)
    assert request.status is Status.FINISHED
    check_no_leak(scheduler)


def test_stop_token_ends_a_request_early():
    expected = plain_generation([3, 1], 20)
    stop = expected[4]
    scheduler = Scheduler(StandIn(1, 20, 4, drafts=2), SchedulerConfig(draft_tokens=2))
    request = scheduler.submit(0, [3, 1], 20, stop=[stop])
    run_to_the_end(scheduler)
    assert request.generated == expected[: expected.index(stop) + 1]


def test_preemption_makes_progress_when_two_requests_do_not_fit():  # inference-sim/inference-sim#1057
    engine = StandIn(1, 5, 2)
    scheduler = Scheduler(engine, SchedulerConfig())
    requests = [scheduler.submit(i, [i + 1, 5], 7) for i in range(2)]  # each needs up to 4 pages of 5
    steps = run_to_the_end(scheduler)
    assert scheduler.stats.preemptions >= 1
    assert requests[0].preemptions == 0  # the oldest is never touched
    assert steps < 20
    for request in requests:
        assert request.generated == plain_generation(request.prompt, 7)


def test_hits_are_counted_once_and_not_after_preemption(tmp_path):  # vllm-project/vllm#25780, #43736
    engine = StandIn(1, 5, 2)
    store = KVStore(tmp_path, namespace(2))
    scheduler = Scheduler(engine, SchedulerConfig(), store)
    requests = [scheduler.submit(i, [i + 1, 5], 7) for i in range(2)]  # nothing in common
    run_to_the_end(scheduler)
    assert scheduler.stats.preemptions >= 1
    assert [request.hit_tokens for request in requests] == [0, 0]
    assert scheduler.stats.hit_tokens == 0
    assert scheduler.stats.input_tokens == 4
    assert scheduler.stats.refetched_tokens > 0  # the preempted one found its own blocks again


def test_a_prefix_is_found_but_never_all_of_the_prompt(tmp_path):  # vllm-project/vllm#25267
    engine = StandIn(1, 20, 4)
    scheduler = Scheduler(engine, SchedulerConfig(), KVStore(tmp_path, namespace(4)))
    prompt = list(range(8))
    for i in range(3):
        scheduler.submit(i, prompt if i < 2 else [*prompt, 9, 9], 2)
        run_to_the_end(scheduler)
    assert [scheduler.requests[i].hit_tokens for i in range(3)] == [0, 4, 8]
    assert scheduler.stats.hit_tokens == 12
    assert scheduler.stats.input_tokens == 8 + 8 + 10
    assert scheduler.stats.computed_tokens == engine.rows


def test_a_second_turn_hits_prompt_and_generated_tail(tmp_path):
    engine = StandIn(2, 20, 4)
    scheduler = Scheduler(engine, SchedulerConfig(), KVStore(tmp_path, namespace(4)))
    first = scheduler.submit(0, [1, 2, 3, 4, 5], 8)
    run_to_the_end(scheduler)
    turn = [*first.tokens, 7, 7]
    second = scheduler.submit(1, turn, 3)
    run_to_the_end(scheduler)
    assert first.length == 13
    assert second.hit_tokens == 12  # the 13th token was never an input, so 12 rows are there
    assert second.generated == plain_generation(turn, 3)


def test_another_tenant_does_not_see_the_prefix(tmp_path):
    hits = []
    for tenant in ("a", "b", "a"):
        space = Namespace("stand-in", "int64", "token ids", block_tokens=4, tenant=tenant)
        scheduler = Scheduler(StandIn(1, 20, 4), SchedulerConfig(), KVStore(tmp_path, space))
        request = scheduler.submit(0, list(range(9)), 2)
        run_to_the_end(scheduler)
        hits.append(request.hit_tokens)
    assert hits == [0, 0, 8]


def test_abort_while_a_step_is_in_flight_keeps_the_pages_until_it_ends():  # sgl-project/sglang#24527
    engine = StandIn(1, 4, 4)
    scheduler = Scheduler(engine)
    scheduler.submit(0, [1, 2, 3], 5)
    batch = scheduler.begin()
    scheduler.abort(0)
    assert scheduler.pools[0].free == 3
    scheduler.submit(1, [4, 5], 2)
    scheduler.finish(engine.step(batch))
    assert scheduler.requests[0].status is Status.ABORTED
    assert scheduler.pools[0].free == 4
    run_to_the_end(scheduler)
    assert scheduler.requests[1].generated == plain_generation([4, 5], 2)


def test_the_oldest_waiting_request_is_not_overtaken():
    scheduler = Scheduler(StandIn(1, 6, 2), SchedulerConfig())
    scheduler.submit(0, [1] * 6, 2)
    scheduler.begin()
    scheduler.submit(1, [1] * 8, 2)  # needs 4 pages of the 3 that are left
    scheduler.submit(2, [1], 2)  # would fit
    scheduler.finish([[[1]]])
    scheduler.begin()
    assert [request.id for request in scheduler.running[0]] == [0]


def test_a_preempted_request_comes_back_before_younger_ones():
    engine = StandIn(1, 5, 2)
    scheduler = Scheduler(engine, SchedulerConfig(max_requests=2))
    for i in range(4):
        scheduler.submit(i, [i + 1, 5], 7)
    while not scheduler.stats.preemptions:
        scheduler.step()
    assert [request.id for request in scheduler.waiting] == [1, 2, 3]
    run_to_the_end(scheduler)


def play(seed: int, policy: str | None = None) -> dict:
    """A random trace: arrivals, lengths, aborts, small caches, drafts, a shared prefix store."""
    rng = random.Random(seed)
    page, drafts = rng.choice([1, 2, 4]), rng.choice([0, 0, 1, 2])
    engine = StandIn(rng.randint(1, 3), rng.randint(6, 20), page, drafts)
    config = SchedulerConfig(
        max_requests=rng.choice([1, 2, 4, 8]),
        max_tokens=rng.choice([1 + drafts, 4 + drafts, 9, 40]),
        draft_tokens=drafts,
        policy=policy or rng.choice(["round_robin", "least_0", "least_3"]),
        window=rng.choice([1, 2, 8]),
    )
    scheduler = Scheduler(engine, config, MemoryStore(namespace(page)) if rng.random() < 0.5 else None)
    longest = engine.num_pages * page - drafts
    shared = [rng.randrange(3) for _ in range(12)]
    to_come, aborted, submitted = rng.randint(1, 12), set(), {}
    for _ in range(5000):
        while to_come and rng.random() < 0.5:
            new = rng.randint(1, max(1, min(10, longest - 1)))
            prompt = (shared[: rng.randint(0, 12)] + [rng.randrange(3) for _ in range(rng.randint(1, 12))])[
                : longest - new + 1
            ]
            stop = [rng.randrange(50)] if rng.random() < 0.2 else []
            scheduler.submit(len(submitted), prompt, new, stop)
            submitted[len(submitted)] = (prompt, new, stop)
            to_come -= 1
        batch = scheduler.begin()
        if submitted and rng.random() < 0.05:
            victim = rng.randrange(len(submitted))
            if scheduler.requests[victim].status in (Status.WAITING, Status.RUNNING):
                aborted.add(victim)
            scheduler.abort(victim)
        scheduler.finish(engine.step(batch))
        check_no_leak(scheduler)
        if not to_come and not scheduler.busy:
            break
    assert not scheduler.busy, "deadlock"
    assert all(pool.free == pool.num_pages for pool in scheduler.pools)
    for i, (prompt, new, stop) in submitted.items():
        request, expected = scheduler.requests[i], plain_generation(prompt, new, stop)
        if i in aborted:
            assert request.status is Status.ABORTED
            assert request.generated == expected[: len(request.generated)]
        else:
            assert request.status is Status.FINISHED
            assert request.generated == expected
        assert request.hit_tokens is None or request.hit_tokens < len(prompt)
    assert engine.widest <= config.max_requests
    admitted = [r for r in scheduler.requests.values() if r.hit_tokens is not None]
    assert scheduler.stats.hit_tokens == sum(r.hit_tokens for r in admitted)
    assert scheduler.stats.input_tokens == sum(len(r.prompt) for r in admitted)
    assert engine.known == set()
    return {
        "preempted": scheduler.stats.preemptions,
        "hits": scheduler.stats.hit_tokens,
        "aborted": len(aborted),
    }


def totals(seeds, policy=None) -> dict:
    traces = [play(seed, policy) for seed in seeds]
    return {name: sum(trace[name] for trace in traces) for name in traces[0]}


def test_random_traces():
    seen = totals(range(300))
    assert seen["preempted"] > 100
    assert seen["hits"] > 500
    assert seen["aborted"] > 50


def test_random_traces_with_the_better_balancer():
    totals(range(1000, 1020), "balanced")


@pytest.mark.long
def test_ten_thousand_random_traces():
    totals(range(2000, 12_000))


def test_pool_refuses_double_use():
    pool = PagePool(3, 4)
    pages = pool.take(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 3"):
        pool.take(2)
    pool.give_back(pages[:1])
    with pytest.raises(ValueError, match=f"page {pages[0]} is given back"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0, 1)


def test_bad_input(tmp_path):
    scheduler = Scheduler(StandIn(1, 4, 2), SchedulerConfig(draft_tokens=1))
    with pytest.raises(ValueError, match="needs up to 9 rows"):
        scheduler.submit(0, [1] * 4, 5)
    scheduler.submit(0, [1] * 4, 4)
    with pytest.raises(ValueError, match="submitted before"):
        scheduler.submit(0, [1], 1)
    with pytest.raises(ValueError, match="0 prompt tokens"):
        scheduler.submit(1, [], 1)
    scheduler.begin()
    with pytest.raises(ValueError, match="begin was called twice"):
        scheduler.begin()
    with pytest.raises(ValueError, match="one list of new tokens per chunk"):
        scheduler.finish([[]])
    with pytest.raises(ValueError, match="a step must hold one token"):
        SchedulerConfig(max_tokens=2, draft_tokens=2)
    with pytest.raises(ValueError, match="one block must be one page"):
        Scheduler(StandIn(1, 4, 2), store=KVStore(tmp_path, namespace(4)))

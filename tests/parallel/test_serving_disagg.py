"""Prefill and decode apart, with a model whose tokens are known: same tokens, hits counted once, no page lost."""

import random

import pytest
from serving_standin import POISON, MemoryStore, StandIn, num_accepted, plain_generation

from parallel.serving.disagg import PrefillDecode
from parallel.serving.keys import Namespace
from parallel.serving.kv_store import KVStore
from parallel.serving.requests import Status
from parallel.serving.scheduler import Scheduler, SchedulerConfig


def namespace(page_size: int) -> Namespace:
    return Namespace("stand-in", "int64", "token ids", block_tokens=page_size)


def run_to_the_end(system, limit: int = 5000, **options) -> int:
    for step in range(limit):
        if not system.busy:
            return step
        system.tick(**options)
    raise AssertionError("the system does not come to an end")


def check_no_leak(system: PrefillDecode) -> None:
    for side in (system.prefill, system.decode):
        assert all(pool.free == pool.num_pages for pool in side.pools)
        assert side.engine.known == set()
    assert not system.prefill.handovers
    assert not system.prefill._targets


def test_64_requests_with_shared_prefixes_on_8_and_8_ranks():
    rng = random.Random(0)
    roots = [[rng.randrange(50) for _ in range(20)] for _ in range(6)]
    store = MemoryStore(namespace(4))
    system = PrefillDecode(
        StandIn(8, 40, 4),
        StandIn(8, 40, 4, drafts=1),
        SchedulerConfig(max_tokens=16),
        SchedulerConfig(draft_tokens=1),
        store,
    )
    prompts = [rng.choice(roots)[: rng.randint(8, 20)] + [rng.randrange(50)] * rng.randint(1, 9) for _ in range(64)]
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(system.submit(i, prompt, 12))
        if i % 4 == 3:
            system.tick()
    run_to_the_end(system)
    for request, prompt in zip(requests, prompts):
        assert request.generated == plain_generation(prompt, 12)
        assert request.hit_tokens < len(prompt)
        assert request.hit_tokens % 4 == 0
        assert system.bytes_sent[request.id]["tokens"] == len(prompt) * 8  # hits are sent too: decode has none of it
        assert system.bytes_sent[request.id]["pages"] == -(-len(prompt) // 4) * 4 * 8
        assert system.bytes_sent[request.id]["metadata"] == 8 + 8 + 8
    moved = {name: system.ledger.matrix(classes=name, stage="hand_over") for name in ("cache", "control")}
    assert moved["cache"][:8, 8:].sum() == moved["cache"].sum() == sum(map(len, prompts)) * 8
    assert moved["control"].sum() == 64 * 24
    assert system.ledger.matrix(link="rdma").sum() == system.ledger.matrix().sum()  # on nodes of their own
    assert system.ledger.matrix(request=5, classes="cache").sum() == len(prompts[5]) * 8
    assert (
        system.decode.stats.hit_tokens == system.prefill.stats.hit_tokens == sum(r.hit_tokens for r in requests) > 200
    )
    assert system.prefill.stats.computed_tokens == sum(map(len, prompts)) - system.prefill.stats.hit_tokens
    check_no_leak(system)


def test_acceptance_is_the_same_as_colocated():  # sgl-project/sglang#10059: the state for the first draft went missing
    prompts = [[i, 3, i + 1] for i in range(10)]
    apart = PrefillDecode(StandIn(1, 60, 4), StandIn(1, 60, 4, 2), None, SchedulerConfig(draft_tokens=2))
    together = Scheduler(StandIn(1, 60, 4, drafts=2), SchedulerConfig(draft_tokens=2))
    for i, prompt in enumerate(prompts):
        apart.submit(i, prompt, 9)
        together.submit(i, prompt, 9)
    run_to_the_end(apart)
    while together.busy:
        together.step()
    decode, colocated = apart.decode.engine, together.engine
    assert (decode.proposed, decode.accepted) == (colocated.proposed, colocated.accepted)
    assert apart.prefill.engine.proposed == 0
    assert 0 < decode.accepted < decode.proposed
    assert num_accepted([1], 2) in (0, 1, 2)


def test_a_second_turn_hits_prompt_and_generated_tail(tmp_path):
    stores = [KVStore(tmp_path, namespace(4)) for _ in range(2)]  # of two processes, say
    system = PrefillDecode(StandIn(1, 20, 4), StandIn(1, 20, 4), store=stores[0], decode_store=stores[1])
    first = system.submit(0, [1, 2, 3, 4, 5], 8)
    run_to_the_end(system)
    turn = [*first.tokens, 7, 7]
    second = system.submit(1, turn, 3)
    run_to_the_end(system)
    assert second.hit_tokens == 12
    assert second.generated == plain_generation(turn, 3)
    assert [store.stats.write_ops for store in stores] == [1 + 0, 2 + 1]  # prompt blocks; generated tails
    assert [store.stats.read_ops for store in stores] == [3, 0]
    assert stores[1].stats.already_there == 0  # decode knows what prefill has written


def test_reserved_pages_are_poison_until_rows_arrive():
    system = PrefillDecode(StandIn(1, 8, 2), StandIn(1, 8, 2))
    system.decode.engine.pages[:] = 7
    request = system.submit(0, [1, 2, 3], 2)
    system._pair()
    assert (system.decode.engine.pages[0, request.pages] == POISON).all()
    run_to_the_end(system)


def test_lost_decode_pages_mean_another_prefill_and_no_second_hit():
    system = PrefillDecode(StandIn(1, 20, 2), StandIn(1, 6, 2), store=MemoryStore(namespace(2)))
    requests = [system.submit(i, [i + 1, 5], 8) for i in range(2)]  # up to 5 pages of 6 each
    run_to_the_end(system)
    assert system.decode.stats.preemptions >= 1
    assert [request.generated for request in requests] == [plain_generation([i + 1, 5], 8) for i in range(2)]
    assert system.decode.stats.hit_tokens == 0
    assert system.decode.stats.input_tokens == 4
    assert system.bytes_sent[1]["tokens"] > 2 * 8  # its rows went over more than once
    check_no_leak(system)


def play(seed: int) -> dict:
    """Random lengths, small caches on both sides, late writes in any order, aborts between and amid steps."""
    rng = random.Random(seed)
    pages = [rng.choice([1, 2, 4]) for _ in range(2)]
    drafts = rng.choice([0, 1, 2])
    store = MemoryStore(namespace(pages[0])) if pages[0] == pages[1] and rng.random() < 0.6 else None
    system = PrefillDecode(
        StandIn(rng.randint(1, 2), rng.randint(8, 16), pages[0]),
        StandIn(rng.randint(1, 2), rng.randint(8, 16), pages[1], drafts),
        SchedulerConfig(rng.choice([1, 2, 8]), rng.choice([1, 3, 40]), policy="least_3"),
        SchedulerConfig(
            rng.choice([1, 2, 8]), rng.choice([1 + drafts, 40]), drafts, policy=rng.choice(["round_robin", "least_0"])
        ),
        store,
    )
    longest = min(side.engine.num_pages * side.engine.page_size for side in (system.prefill, system.decode)) - drafts
    to_come, submitted, aborted = rng.randint(1, 8), {}, set()

    def late(handovers):
        for handover in handovers:
            while handover.under_way and rng.random() < 0.7:
                handover.deliver(rng.randrange(len(handover.under_way)))

    def maybe_abort():
        if submitted and rng.random() < 0.01:
            victim = rng.randrange(len(submitted))
            if system.decode.requests[victim].status not in (Status.FINISHED, Status.ABORTED):
                aborted.add(victim)
                system.abort(victim)

    for _ in range(3000):
        while to_come and rng.random() < 0.5:
            new = rng.randint(1, min(8, longest - 1))
            prompt = [rng.randrange(2) * (k > 3) for k in range(rng.randint(1, longest - new))]
            submitted[len(submitted)] = (system.submit(len(submitted), prompt, new), prompt, new)
            to_come -= 1
        system.tick(late, maybe_abort)
        if not to_come and not system.busy:
            break
    assert not system.busy, "deadlock"
    check_no_leak(system)
    for i, (request, prompt, new) in submitted.items():
        expected = plain_generation(prompt, new)
        if i in aborted:
            assert request.status in (Status.ABORTED, Status.FINISHED)
            assert request.generated == expected[: len(request.generated)]
        else:
            assert request.status is Status.FINISHED
            assert request.generated == expected
    hits = [request.hit_tokens or 0 for request, _, _ in submitted.values()]
    assert system.decode.stats.hit_tokens == sum(hits)
    return {"aborted": len(aborted), "lost": system.decode.stats.preemptions, "hits": sum(hits)}


def test_random_traces():
    seen = [play(seed) for seed in range(150)]
    assert sum(trace["aborted"] for trace in seen) > 30
    assert sum(trace["lost"] for trace in seen) > 30
    assert sum(trace["hits"] for trace in seen) > 100


@pytest.mark.long
def test_many_random_traces():
    for seed in range(1000, 2500):
        play(seed)


def test_bad_input():
    system = PrefillDecode(StandIn(1, 2, 4), StandIn(1, 20, 4))
    with pytest.raises(ValueError, match="9 rows exceed the 2 pages of a prefill rank"):
        system.submit(0, [1] * 5, 5)
    with pytest.raises(ValueError, match="only decoding speculates"):
        PrefillDecode(StandIn(1, 2, 4), StandIn(1, 2, 4), SchedulerConfig(draft_tokens=1))

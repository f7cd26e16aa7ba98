"""A request that moves to another deployment goes on with the bits of staying."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mpi_network import ThreadComm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import TINY, some_ids, tiny_model

from parallel import Deployment, Topology
from parallel.mpi import MpiNetwork
from parallel.residents import Residents
from parallel.serving.engine import ModelEngine
from parallel.serving.scheduler import Scheduler
from refmodel import Model
from refmodel.cache import LatentCache, PagePool
from refmodel.generate import Item

ROW = 40  # C + P of the tiny model: 32 + 8
LAYERS = 4  # three and the MTP layer


def prefill_and_decode(model, ranks=(2, 4), **options):
    return [Deployment(model, Topology(count, 8), **options) for count in ranks]


def run_one(deployment, rank, ids, cache, phase="decode"):
    """Logits of one request on one rank."""
    batch, caches = ([[] for _ in range(deployment.topology.num_ranks)] for _ in range(2))
    batch[rank], caches[rank] = [ids], [cache]
    return deployment.run(batch, caches, phase)[rank][0]


def with_draft(engine, request, ids, cache):
    """Prefill, then let the MTP layer read every pair but the last; its logits."""
    (step,) = engine.step([Item(request, ids, cache, 0)], "prefill")
    (mtp,) = engine.mtp_step([Item(request, ids[1:], cache, 0, step.hidden[:-1])], "prefill")
    return step, mtp


@pytest.mark.parametrize("numerics", ["float64", "float32", "bfloat16", "fp8"])
def test_going_on_elsewhere_gives_the_bits_of_staying(numerics):
    model, ids, more = tiny_model(numerics=numerics), some_ids(70), some_ids(3, seed=1)
    prefill, decode = prefill_and_decode(model)
    prefill.run([[some_ids(5, seed=2)], [ids]])  # request 1 is on rank 1
    cache = prefill.hand_over(1, decode, rank=3)
    stayed = model.new_cache()
    model.forward(ids, stayed)
    assert cache.length == 70
    assert run_one(decode, 3, more, cache).tobytes() == model.forward(more, stayed, "decode").tobytes()
    for layer in range(3):
        assert cache.rows(layer).tobytes() == stayed.rows(layer).tobytes()


def test_rows_of_the_mtp_layer_come_along():
    model, ids, token = tiny_model(numerics="bfloat16"), some_ids(66), some_ids(1, seed=3)
    prefill, decode = prefill_and_decode(model)
    cache, stayed = prefill.new_cache(5), model.new_cache()
    step, _ = with_draft(prefill, 5, ids, cache)
    with_draft(model, 0, ids, stayed)
    arrived = prefill.hand_over(5, decode)
    assert arrived.written == [66, 66, 66, 65]
    assert decode.rank_of(5) == 1  # 5 mod 4, where `decode` itself would place it
    (there,) = decode.mtp_step([Item(5, token, arrived, 65, step.hidden[-1:])], "decode")
    (here,) = model.mtp_step([Item(0, token, stayed, 65, step.hidden[-1:])], "decode")
    assert there.logits.tobytes() == here.logits.tobytes()


def test_every_row_is_in_the_ledger_once():
    model = tiny_model(numerics="bfloat16")
    prefill, decode = prefill_and_decode(model)
    with_draft(prefill, 3, some_ids(66), prefill.new_cache(3))  # rank 1
    before = [len(side.ledger) for side in (prefill, decode)]
    prefill.hand_over(3, decode, rank=2)
    ledger = prefill.hand_over_ledger(decode)
    expected = np.zeros((6, 6), np.int64)
    expected[1, 2 + 2] = (3 * 66 + 65) * ROW * 2
    assert (ledger.matrix(classes="cache", request=3) == expected).all()
    assert (ledger.matrix(link="rdma") == expected).all()  # two deployments share no node
    assert ledger.matrix(unit="rows", layer=3)[1, 4] == 65
    assert ledger.matrix(request=4).sum() == 0
    assert [len(side.ledger) for side in (prefill, decode)] == before
    prefill.run([[some_ids(2)], []])
    prefill.hand_over(0, decode, rank=0)
    assert ledger.matrix(request=0)[0, 2] == 3 * 2 * ROW * 2  # the MTP layer read nothing
    assert decode.hand_over_ledger(prefill).matrix().sum() == 0


def test_the_source_gives_its_pages_back_and_knows_the_request_no_longer():
    model = tiny_model()
    prefill, decode = prefill_and_decode(model, (1, 1))
    cache = prefill.new_cache(0)
    prefill.step([Item(0, some_ids(130), cache, 0)], "prefill")
    free = cache.pool.num_free
    prefill.hand_over(0, decode)
    assert (cache.length, cache.pool.num_free) == (0, free + 3)
    with pytest.raises(ValueError, match="request 0 has run nothing on this deployment; requests that have: none"):
        prefill.hand_over(0, decode)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_requests_that_wander_between_three_deployments_keep_their_bits(seed):
    rng = np.random.default_rng(seed)
    model = tiny_model(numerics="bfloat16")
    sides = prefill_and_decode(model, (1, 2, 4))
    where, caches, alone = {}, {}, {}
    for request in range(3):
        where[request] = sides[rng.integers(3)]
        caches[request], alone[request] = where[request].new_cache(request), model.new_cache()
    moved = 0
    for _ in range(8):
        request = int(rng.integers(3))
        ids, phase = some_ids(rng.integers(1, 40), seed=int(rng.integers(100))), ("prefill", "decode")[rng.integers(2)]
        side = where[request]
        (step,) = side.step([Item(request, ids, caches[request], caches[request].length)], phase)
        assert step.logits.tobytes() == model.forward(ids, alone[request], phase).tobytes()
        target = sides[rng.integers(3)]
        if target is not side:
            moved += 3 * caches[request].length * ROW * 2
            rank = int(rng.integers(target.topology.num_ranks))
            caches[request], where[request] = side.hand_over(request, target, rank=rank), target
            assert target.rank_of(request) == rank
    ledgers = [a.hand_over_ledger(b) for a in sides for b in sides if a is not b]
    assert sum(ledger.matrix(classes="cache").sum() for ledger in ledgers) == moved


def test_refusals_move_nothing():
    model = tiny_model()
    prefill, decode = prefill_and_decode(model)
    ids = some_ids(4)
    prefill.run([[ids], []])

    def refused(words, other=decode, request=0, **options):
        with pytest.raises(ValueError, match=words):
            prefill.hand_over(request, other, **options)

    refused("request 7 has run nothing on this deployment; requests that have: 0", request=7)
    refused("rank = 4: must be between 0 and 3", rank=4)
    refused("the other deployment is this one", prefill)
    refused(
        r"pages of \(layers, width, dtype\) \(4, 40, 'float64'\) and \(4, 40, 'float32'\)",
        Deployment(tiny_model(numerics="float32"), Topology(1)),
    )
    as_vllm = Deployment(tiny_model(like="vllm"), Topology(1))
    refused("hand_over between numerics", as_vllm)
    refused("deployments of two models", Deployment(tiny_model(seed=1), Topology(1)))
    other_scale = Model.random(replace(TINY, routed_scaling_factor=1.0), 0, numerics="float64")
    refused("deployments of two models", Deployment(other_scale, Topology(1)))
    decode.run([[ids], [], [], []])
    refused("request 0 already has a cache where it is to be handed over")
    assert prefill.hand_over_ledger(decode).matrix().sum() == 0
    assert prefill.residents.cache_of(0).length == 4


def test_a_model_that_is_loaded_twice_is_one_model():
    ids, more = some_ids(9), some_ids(2, seed=1)
    prefill, decode = (Deployment(tiny_model(numerics="fp8"), Topology(2)) for _ in range(2))
    assert prefill.model is not decode.model
    prefill.run([[ids], []])
    cache = prefill.hand_over(0, decode)
    stayed = prefill.model.new_cache()
    prefill.model.forward(ids, stayed)
    assert run_one(decode, 0, more, cache).tobytes() == prefill.model.forward(more, stayed, "decode").tobytes()


def test_place():
    deployment = Deployment(tiny_model(numerics="bfloat16"), Topology(4, 2))
    assert deployment.rank_of(6) == 2
    deployment.place(6, 1)
    assert deployment.rank_of(6) == 1
    cache = deployment.new_cache(6)
    deployment.step([Item(6, some_ids(3), cache, 0)], "prefill")
    sent = deployment.ledger.matrix("dispatch", unit="rows", classes="payload")
    assert sent[1].sum() > 0
    assert sent[[0, 2, 3]].sum() == 0
    deployment.place(6, 1)  # where it is already
    with pytest.raises(ValueError, match="request 6 has 3 tokens on rank 1: it cannot go on on rank 0"):
        deployment.place(6, 0)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank = {rank}: must be between 0 and 3"):
            deployment.place(7, rank)


def test_residents_by_hand():
    residents = Residents(3)
    cache = LatentCache(PagePool(1, 2, np.float32))
    residents.place("name", 2)  # any name will do, once it is placed
    residents.keep("name", cache)
    assert (residents.rank_of("name"), residents.cache_of("name"), residents.holds("name")) == (2, cache, False)
    cache.length = 1
    assert residents.holds("name")
    residents.start_anew([1, 1, 0])
    assert [residents.rank_of(request) for request in range(4)] == [1, 1, 0, 0]
    assert not residents.holds("name")


def test_the_serving_engine_places_its_requests_where_the_scheduler_wants_them():
    model, prompts = tiny_model(numerics="bfloat16"), [some_ids(n, seed=n) for n in (5, 9, 3)]
    deployment = Deployment(model, Topology(2))
    scheduler = Scheduler(ModelEngine(deployment, 4))
    requests = [scheduler.submit(number, prompt.tolist(), 4) for number, prompt in enumerate(prompts)]
    seen = set()
    while scheduler.busy:
        scheduler.step()
        seen |= {(request.id, deployment.rank_of(request.id), request.rank) for request in scheduler.running[1]}
    assert {placed == wanted for _, placed, wanted in seen} == {True}
    assert [request.generated for request in requests] == [model.generate(prompt, 4) for prompt in prompts]
    with pytest.raises(ValueError, match="requests that have: none"):  # the engine forgets what has ended
        deployment.residents.cache_of(0)


def test_over_mpi_the_owner_sends_and_the_owner_receives(monkeypatch):
    """Two processes; request 1 goes from a rank of one of them to a rank of the other."""
    model, comm, results = tiny_model(numerics="bfloat16"), ThreadComm(2), {}
    ids, more = some_ids(20), some_ids(2, seed=1)
    monkeypatch.setattr("parallel.deployment._make_network", lambda topology, transport: MpiNetwork(topology, comm))

    def process(number):
        comm.ranks.value = number
        prefill, decode = prefill_and_decode(model, (2, 4), transport="mpi")
        prefill.run([[some_ids(3)], [ids]])
        cache = prefill.hand_over(1, decode, rank=1)
        logits = run_one(decode, 1, more, cache)
        results[number] = logits, prefill.hand_over_ledger(decode).matrix()

    threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stayed = model.new_cache()
    model.forward(ids, stayed)
    expected = model.forward(more, stayed, "decode")
    assert [results[number][0].tobytes() == expected.tobytes() for number in range(2)] == [True, True]
    assert results[0][1].sum() == 0
    assert results[1][1][1, 2 + 1] == results[1][1].sum() == 3 * 20 * ROW * 2

"""A deployment gives the bits of its one-rank reference, whatever is chosen about ranks."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import TINY, some_ids, tiny_model

from parallel import Deployment, Topology
from parallel.dispatch import DIALECTS
from parallel.micro_batches import cut_item
from parallel.placement import Placement
from parallel.replicas import RULES
from parallel.schedule import BUILDERS, DeadlockError, sequential
from refmodel import record
from refmodel.generate import Item

NUMERICS = ("float64", "float32", "bfloat16", "fp8")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def spread(prompts, ranks):
    """Prompts dealt to ranks in turn."""
    return [prompts[rank::ranks] for rank in range(ranks)]


def assert_equals_reference(deployment, batch):
    expected = deployment.reference()
    with record() as tensors:
        logits = deployment.run(batch)
    items = [Item(i, ids, expected.new_cache(), 0) for i, ids in enumerate(ids for rank in batch for ids in rank)]
    with record() as wanted:
        steps = expected.step(items, "prefill")
    flat = [rows for rank in logits for rows in rank]
    assert [len(rank) for rank in logits] == [len(rank) for rank in batch]
    assert all(same(rows, step.logits) for rows, step in zip(flat, steps, strict=True))
    assert set(tensors) == set(wanted)
    for name in wanted:
        assert same(tensors[name], wanted[name]), name


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("dispatch", DIALECTS)
def test_every_dialect_equals_its_reference(dispatch, numerics):
    model = tiny_model(numerics=numerics)
    prompts = [some_ids(n, seed=n) for n in (5, 1, 9, 3, 12)]
    for ranks, per_node in ((1, 8), (2, 8), (4, 2), (8, 2)):
        deployment = Deployment(model, Topology(ranks, per_node), dispatch=dispatch)
        assert_equals_reference(deployment, spread(prompts, ranks))


@pytest.mark.parametrize("dispatch", ["low_latency", "elastic"])
def test_single_reduction_dialects_equal_the_plain_model(dispatch):
    model = tiny_model(numerics="bfloat16")
    options = dict(mode="single") if dispatch == "elastic" else {}
    deployment = Deployment(model, Topology(8, 4), dispatch=dispatch, **options)
    assert deployment.reference() is model
    assert_equals_reference(deployment, spread([some_ids(n, seed=n) for n in (4, 7, 2)], 8))


@pytest.mark.parametrize("dispatch", DIALECTS)
def test_multi_level_sums_stay_near_one_rank_in_float64(dispatch):
    model, ids = tiny_model(), some_ids(20)
    got = Deployment(model, Topology(8, 2), dispatch=dispatch).run([[ids], [], [], [], [], [], [], []])[0][0]
    expected = model.forward(ids)
    assert np.abs(got - expected).max() < 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dispatch", ["low_latency", "normal", "allgather"])
def test_redundant_experts_change_nothing(dispatch, rule):
    # sgl-project/sglang#32962: replicas summed twice
    from parallel.replicas import is_rank_invariant

    model = tiny_model(numerics="bfloat16")
    batch = spread([some_ids(n, seed=n) for n in (6, 2, 9)], 4)
    deployment = Deployment(model, Topology(4, 2), 8, dispatch=dispatch, replica_rule=rule)
    if dispatch == "allgather" and not is_rank_invariant(rule):
        with pytest.raises(ValueError, match="without an all-to-all"):
            deployment.run(batch)
        return
    assert_equals_reference(deployment, batch)


def test_a_placement_in_another_order_moves_the_weights_with_it():
    # vllm-project/vllm#23745: map and loader with different layouts; here strided, and another one per layer
    model, rng = tiny_model(numerics="bfloat16"), np.random.default_rng(0)
    strided = Placement(np.arange(16).reshape(8, 2).T.ravel(), 2)
    batch = spread([some_ids(8), some_ids(5, seed=1)], 2)
    assert_equals_reference(Deployment(model, Topology(2, 8), placement=strided), batch)
    layers = {layer: Placement(rng.permutation(16), 2) for layer in range(1, 4)}
    assert_equals_reference(Deployment(model, Topology(2, 8), placement=layers), batch)


def test_idle_ranks_take_part():
    # sgl-project/sglang#25397
    model = tiny_model(numerics="fp8")
    batch = [[some_ids(5)], [], [], [some_ids(1)]]
    deployment = Deployment(model, Topology(4, 8))
    logits = deployment.run(batch)
    assert [[rows.shape for rows in rank] for rank in logits] == [[(5, 100)], [], [], [(1, 100)]]
    assert_equals_reference(Deployment(model, Topology(4, 8)), batch)
    sent = deployment.ledger.matrix("dispatch", unit="rows", classes="payload")
    assert (sent[[1, 2]] == 0).all()
    assert sent[:, [1, 2]].sum() > 0  # their experts still get rows
    assert deployment.run([[], [], [], []]) == [[], [], [], []]


def test_a_request_keeps_its_cache_over_calls():
    model, ids = tiny_model(numerics="float32"), some_ids(80)
    deployment = Deployment(model, Topology(2, 8))
    caches = [[deployment.new_cache(0)], [deployment.new_cache(1)]]
    first = deployment.run([[ids[:70]], [ids[:3]]], caches)
    second = deployment.run([[ids[70:]], [ids[3:9]]], caches)
    assert same(np.concatenate([first[0][0], second[0][0]]), model.forward(ids))
    assert same(np.concatenate([first[1][0], second[1][0]]), model.forward(ids[:9]))


@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("order", ["rank", 0, 7])
def test_schedules_and_orders_of_ranks_change_nothing(schedule, order):
    # vllm-project/vllm#56031: positions restart at the cut
    model = tiny_model(numerics="bfloat16")
    batch = [[some_ids(40), some_ids(3, seed=1)], [some_ids(1, seed=2)], [], [some_ids(17, seed=3)]]
    assert_equals_reference(Deployment(model, Topology(4, 2), schedule=schedule, order=order), batch)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["prefill_overlap", "decode_overlap", "vllm_dbo"]))
def test_any_split_into_two_micro_batches_changes_nothing(seed, schedule):
    # 1 + 0, mid-request, between requests, empty halves; another cut on every rank
    rng = np.random.default_rng(seed)
    batch = [[some_ids(rng.integers(1, 9), seed=seed % 1000 + i) for i in range(rng.integers(0, 3))] for _ in range(3)]

    def split(mine):
        total = sum(len(item.token_ids) for item, _ in mine)
        cut, halves = int(rng.integers(0, total + 1)), ([], [])
        for item, start in mine:
            first = min(len(item.token_ids), max(cut, 0))
            if first:
                halves[0].append(cut_item(item, start, 0, first))
            if first < len(item.token_ids):
                halves[1].append(cut_item(item, start, first, len(item.token_ids)))
            cut -= first
        return halves

    model = tiny_model(numerics="bfloat16")
    topology = Topology(3, 8)
    deployment = Deployment(model, topology, 2, schedule=schedule, split=split, order=int(seed % 5))
    assert_equals_reference(deployment, batch)


def test_a_half_that_needs_later_keys_is_a_deadlock_that_says_so():
    model = tiny_model()

    def backwards(mine):
        (item, start), *_ = mine
        return [cut_item(item, start, 4, 8)], [cut_item(item, start, 0, 4)]

    deployment = Deployment(model, Topology(1, 8), schedule="prefill_overlap", split=backwards)
    deployment.build = lambda plan, rank: sequential.build(plan, rank, 2)
    with pytest.raises(DeadlockError, match="keys 0 to 7 of layer 0, not yet in the cache"):
        deployment.run([[some_ids(8)]])


@pytest.mark.parametrize("dispatch", ["low_latency", "normal"])
def test_speculative_generation_equals_one_rank(dispatch):
    model = tiny_model(numerics="bfloat16")
    prompts = [some_ids(n, seed=n) for n in (5, 70, 2)]
    settings = dict(speculative=True, num_drafts=2, temperature=0.8, top_p=0.9, seed=3)
    deployment = Deployment(model, Topology(4, 2), 4, dispatch=dispatch, schedule="decode_overlap")
    got = deployment.generate_batch(prompts, 12, **settings)
    expected = deployment.reference().generate_batch(prompts, 12, **settings)
    assert got.tokens == expected.tokens
    assert (got.drafted, got.accepted) == (expected.drafted, expected.accepted)
    for a, b in zip(got.caches, expected.caches):
        for layer in range(TINY.num_layers):
            assert a.rows(layer, a.written[layer]).tobytes() == b.rows(layer, b.written[layer]).tobytes()
    nested = Deployment(model, Topology(2, 2)).generate([[prompts[0]], [prompts[1], prompts[2]]], 5)
    assert nested == [[model.generate(prompts[0], 5)], [model.generate(p, 5) for p in prompts[1:]]]


def test_refusals():
    model = tiny_model()
    for kwargs, words in [
        (dict(dispatch="rdma"), "dispatch = 'rdma'"),
        (dict(schedule="none"), "schedule = 'none'"),
        (dict(transport="tcp"), "transport = 'tcp'"),
        (dict(redundant_experts=-1), "redundant_experts = -1"),
        (dict(redundant_experts=1), "17 physical experts do not divide over 2 ranks"),
    ]:
        with pytest.raises(ValueError, match=words):
            Deployment(model, Topology(2, 8), **kwargs)
    with pytest.raises(ValueError, match="3 ranks"):
        Deployment(model, Topology(3, 8))
    with pytest.raises(ValueError, match="1 rank lists for 2 ranks"):
        Deployment(model, Topology(2, 8)).run([[some_ids(3)]])
    with pytest.raises(ValueError, match="must be at least one rank"):
        Topology(0, 8)


def test_one_mistake_is_seen():
    """These comparisons can fail: a row of one expert scaled on one rank shows in the logits."""
    model = tiny_model(numerics="bfloat16")
    deployment = Deployment(model, Topology(2, 8))
    exchange = deployment.exchange

    def faulty(rank, *args):
        made = exchange(rank, *args)
        if rank == 1:
            send = made.exchange.combine_send
            made.exchange.combine_send = lambda rows: send((rows.astype(np.float32) * 1.01).astype(rows.dtype))
        return made

    deployment.exchange = faulty
    with pytest.raises(AssertionError):
        assert_equals_reference(deployment, [[some_ids(8)], []])

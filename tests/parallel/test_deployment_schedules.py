"""Random legal schedules on a real, tiny deployment give the bits of one rank: logits, MTP logits and caches."""

import random
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from schedule_world import random_schedules

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import TINY, some_ids

from parallel import Deployment, Topology
from parallel.dispatch import DIALECTS
from parallel.micro_batches import cut_item
from parallel.schedule import DeadlockError, LayerPlan, Op, check
from refmodel import Model
from refmodel.generate import Item

SCHEDULE = "prefill_overlap"  # the name under which a deployment takes the random one; it has two micro-batches
TOPOLOGIES = ((1, 8), (2, 8), (4, 2), (4, 8), (3, 8))


@lru_cache
def model_of(layers, dense, numerics):
    return Model.random(replace(TINY, num_hidden_layers=layers, first_k_dense_replace=dense), 0, numerics=numerics)


class Case:
    """A deployment, its requests and how each rank cuts them into two micro-batches, drawn from a seed."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        layers = rng.randint(1, 2)
        dense = rng.randint(0, layers)
        self.model = model_of(layers, dense, rng.choice(("float64", "bfloat16", "fp8")))
        self.ranks, per_node = rng.choice(TOPOLOGIES)
        self.plans = {"embed": LayerPlan.of(layers, dense), "mtp_embed": LayerPlan.mtp(layers)}
        self.lengths = [rng.randint(1, 5) for _ in range(rng.randint(1, 2 * self.ranks))]
        tokens = [sum(self.lengths[rank :: self.ranks]) for rank in range(self.ranks)]
        self.cuts = [rng.choice((0, count, rng.randint(0, count))) for count in tokens]
        self.redundant = {3: 2}.get(self.ranks, rng.choice((0, 0, 4)))
        self.topology = Topology(self.ranks, per_node)
        self.dispatch, self.phase = rng.choice(DIALECTS), rng.choice(("prefill", "decode"))
        self.order = rng.choice(("rank", rng.randrange(1000), lambda movable: movable[-1]))
        spans = [(rank, 0, 1) for rank in range(self.ranks) if self._spans(rank)]
        self.schedules = {}
        for name, plan in self.plans.items():
            self.schedules[name] = random_schedules(rng, self.ranks, plan, spans)
            check(self.schedules[name], plan, spans=spans)

    def _spans(self, rank):
        """Whether the cut goes through a request."""
        ends = np.cumsum([0, *self.lengths[rank :: self.ranks]])
        return self.cuts[rank] not in ends

    def split(self, mine):
        """The two micro-batches of a rank's (item, first row) list."""
        if not mine:
            return [], []
        cut, halves = self.cuts[mine[0][0].request % self.ranks], ([], [])
        for item, start in mine:
            length = len(item.token_ids)
            first = min(length, max(cut, 0))
            if first:
                halves[0].append(cut_item(item, start, 0, first))
            if first < length:
                halves[1].append(cut_item(item, start, first, length))
            cut -= length
        return halves

    def deployment(self):
        return Deployment(
            self.model,
            self.topology,
            self.redundant,
            self.dispatch,
            SCHEDULE,
            order=self.order,
            split=self.split,
        )

    def build(self, plan, rank):
        """A builder that gives the random programs."""
        return self.schedules[plan.embed][rank]


def results(engine, case):
    """Bytes of everything that one pass of the main model and one of the MTP layer give."""
    prompts = [some_ids(length, seed=request) for request, length in enumerate(case.lengths)]
    items = [Item(request, ids, engine.new_cache(request), 0) for request, ids in enumerate(prompts)]
    steps = engine.step(items, case.phase)
    pairs = [
        item._replace(token_ids=np.append(item.token_ids[1:], 7), hidden=step.hidden)
        for item, step in zip(items, steps)
    ]
    mtp = engine.mtp_step(pairs, case.phase)
    found = {}
    for item, step, draft in zip(items, steps, mtp, strict=True):
        found[item.request, "logits"] = step.logits.tobytes()
        found[item.request, "hidden"] = step.hidden.tobytes()
        found[item.request, "MTP logits"] = draft.logits.tobytes()
        for layer in range(case.model.config.num_layers):
            assert item.cache.written[layer] == len(item.token_ids)
            found[item.request, f"cache of layer {layer}"] = item.cache.rows(layer, len(item.token_ids)).tobytes()
    return found


def assert_equals_one_rank(seed):
    case = Case(seed)
    with mock.patch("parallel.deployment.BUILDERS", {SCHEDULE: case.build}):
        deployment = case.deployment()
        got = results(deployment, case)
    expected = results(deployment.reference(), case)
    different = [where for where in expected if got[where] != expected[where]]
    assert not different, (seed, case.dispatch, case.model.numerics.name, different)
    assert not deployment.network.pending()
    assert not deployment.network.under_way()


def test_40_random_legal_schedules_give_the_bits_of_one_rank():
    for seed in range(40):
        assert_equals_one_rank(seed)


@pytest.mark.long
def test_1000_random_legal_schedules_give_the_bits_of_one_rank():
    for seed in range(1000, 2000):
        assert_equals_one_rank(seed)


def test_the_cases_are_of_every_kind():
    cases = [Case(seed) for seed in range(40)]
    assert {case.dispatch for case in cases} == set(DIALECTS)
    assert {case.ranks for case in cases} == {1, 2, 3, 4}
    assert any(case._spans(rank) for case in cases for rank in range(case.ranks))
    assert any(0 in case.cuts for case in cases)  # an empty micro-batch
    interleaved = 0
    for case in cases:
        for ops in case.schedules["embed"]:
            micro_batches = [op.micro_batch for op in ops]
            interleaved += micro_batches not in (sorted(micro_batches), sorted(micro_batches, reverse=True))
    assert interleaved > 60


def test_one_wrong_value_in_one_micro_batch_is_seen():
    """The comparison can fail."""
    case = next(
        case for case in map(Case, range(100)) if case.ranks == 1 and case.cuts[0] > 0 and case.plans["embed"].moe
    )
    with mock.patch("parallel.deployment.BUILDERS", {SCHEDULE: case.build}):
        deployment = case.deployment()
        begin = deployment.begin

        def wrong(work):
            made = begin(work)
            return made._replace(operations=wrong_in_half_0(made.operations))

        deployment.begin = wrong
        assert results(deployment, case) != results(deployment.reference(), case)


def wrong_in_half_0(operations):
    """The same operations; 1 is added to what `shared` of micro-batch 0 made."""
    for operation in operations:
        yield operation
        values = operation.state.values
        if operation.stage.name == "shared" and operation.micro_batch == 0:
            values["shared"] = values["shared"] + np.ones(1, values["shared"].dtype)


def test_a_schedule_that_waits_for_itself_is_a_deadlock():
    case = next(case for case in map(Case, range(100)) if case.ranks == 2 and case.plans["embed"].moe)
    layer = case.plans["embed"].moe[0]
    ops = case.schedules["embed"][1]
    send, receive = (Op("F", 1, 0, layer, stage) for stage in ("dispatch_send", "dispatch_recv"))
    rest = [op for op in ops if op != receive]
    case.schedules["embed"][1] = [*rest[: rest.index(send)], receive, *rest[rest.index(send) :]]
    with mock.patch("parallel.deployment.BUILDERS", {SCHEDULE: case.build}):
        deployment = case.deployment()
        with pytest.raises(DeadlockError, match=rf"rank 1: r1 F dispatch_recv\(m0,l{layer}\) waits for its own"):
            results(deployment, case)

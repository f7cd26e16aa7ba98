"""Any number of ranks, dialect, redundancy and replica rule, with uneven and empty ranks: the bits of the reference."""

import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_deployment import assert_equals_reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import some_ids, tiny_model

from parallel import Deployment, Topology
from parallel.dispatch import DIALECTS
from parallel.placement import Placement
from parallel.replicas import RULES, is_rank_invariant

EXPERTS = 16
model_of = lru_cache(lambda numerics: tiny_model(numerics=numerics))


@st.composite
def deployments(draw):
    """(deployment, batch): 1 to 64 ranks of a model with 16 experts, experts repeated where ranks need more."""
    ranks, per_node = draw(st.sampled_from([(1, 8), (2, 8), (4, 2), (8, 4), (16, 4), (16, 16), (32, 8), (64, 8)]))
    slots = ranks * (-(-EXPERTS // ranks) + draw(st.integers(0, 2)))
    dispatch = draw(st.sampled_from(DIALECTS))
    rules = [rule for rule in RULES if dispatch != "allgather" or is_rank_invariant(rule)]
    options = {"replica_rule": draw(st.sampled_from(rules))} if slots > EXPERTS else {}
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        extra = rng.integers(0, EXPERTS, slots - EXPERTS)
        options["placement"] = Placement(rng.permutation(np.concatenate([np.arange(EXPERTS), extra])), ranks)
    else:
        options["redundant_experts"] = slots - EXPERTS
    if dispatch == "elastic":
        options["mode"] = draw(st.sampled_from(["hybrid", "direct", "single"]))
    model = model_of(draw(st.sampled_from(["float64", "bfloat16", "fp8"])))
    busy = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=4))
    batch = [[] for _ in range(ranks)]
    for request, rank in enumerate(busy):
        batch[rank].append(some_ids(draw(st.integers(1, 6)), seed=request))
    return Deployment(model, Topology(ranks, per_node), dispatch=dispatch, **options), batch


def hold(case):
    deployment, batch = case
    assert_equals_reference(deployment, batch)
    sent = deployment.ledger.matrix("dispatch", unit="rows", classes="payload").sum(axis=1)
    if deployment.topology.num_nodes == 1:  # over several nodes a rank forwards what others send
        assert [count > 0 for count in sent] == [bool(mine) for mine in batch]


@settings(max_examples=25, deadline=None)
@given(deployments())
def test_any_deployment_equals_its_reference(case):
    hold(case)


@pytest.mark.long
@settings(max_examples=600, deadline=None)
@given(deployments())
def test_many_deployments_equal_their_references(case):
    hold(case)

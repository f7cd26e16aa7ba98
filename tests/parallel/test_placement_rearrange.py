"""From one placement to another: fewest receives, who sends, how many bytes, and that nothing arrives stale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.placement import Placement
from parallel.rearrange import apply_rearrangement, expert_bytes, plan_rearrangement
from parallel.topology import Topology


def test_bytes_of_an_expert_with_its_scales():
    assert expert_bytes(7168, 2048) == 44_040_192 + 10_752
    assert expert_bytes(7168, 2048, "bf16") == 88_080_384
    assert expert_bytes(130, 1, "fp8") == 390 + 3 * 4 * 2
    with pytest.raises(ValueError, match="payload = 'int4'"):
        expert_bytes(8, 8, "int4")
    with pytest.raises(ValueError, match="hidden = 0"):
        expert_bytes(0, 8)


# vllm-project/vllm#18343: the second slot of a replicated expert must not stay stale
def test_two_slots_of_one_expert_on_one_rank():
    old, new = Placement([0, 1, 2, 1], 2), Placement([2, 2, 0, 1], 2)
    plan = plan_rearrangement(old, new, Topology(2, 2))
    assert plan.source.tolist() == [2, 2, 0, 3]
    assert plan.kind.tolist() == [2, 1, 2, 0]
    moved = apply_rearrangement(plan, {"weight": old.phy2log * 10, "scale": old.phy2log + 100})
    assert moved["weight"].tolist() == [20, 20, 0, 10]
    assert moved["scale"].tolist() == [102, 102, 100, 101]
    assert plan.matrix(10, 2).tolist() == [[10, 10], [10, 0]]
    assert plan.link_bytes(10, Topology(2, 2)) == {"local": 10, "nvlink": 20, "rdma": 0}
    assert plan.link_bytes(10, Topology(2, 1)) == {"local": 10, "nvlink": 0, "rdma": 20}


def test_who_sends_to_five_receivers():
    """Expert 0 stands on ranks 0 and 1 and goes to ranks 2 to 6, all on one node."""
    old = Placement([0, 1, 0, 2, 1, 3, 1, 4, 1, 5, 2, 6, 3, 4], 7)
    new = Placement([0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 1], 7)
    senders = {}
    for source in ("sglang", "vllm"):
        plan = plan_rearrangement(old, new, Topology(7, 8), source)
        slots = [slot for slot in range(14) if plan.kind[slot] == 2 and new.phy2log[slot] == 0]
        senders[source] = [int(plan.source[slot]) // 2 for slot in slots]
    assert senders == {"sglang": [0, 0, 0, 1, 1], "vllm": [0, 0, 1, 1, 0]}


def test_sglang_keeps_to_the_node_and_vllm_does_not_look():
    """Nodes of two ranks. Expert 0: on rank 1 (node 0) and 2 (node 1); wanted on rank 0 and rank 3 as well."""
    old, new = Placement([1, 0, 0, 2], 4), Placement([0, 1, 2, 0], 4)
    near = plan_rearrangement(old, new, Topology(4, 2))
    assert near.source.tolist() == [1, 0, 3, 2]
    assert near.link_bytes(1, Topology(4, 2)) == {"local": 0, "nvlink": 4, "rdma": 0}


def test_unchanged_placements_move_nothing():
    placement = Placement.contiguous(256, 32, 32)
    plan = plan_rearrangement(placement, placement, Topology(32))
    assert not plan.kind.any()
    assert plan.matrix(expert_bytes(7168, 2048), 32).sum() == 0


@pytest.mark.parametrize(
    ("new", "topology", "source", "words"),
    [
        (Placement([0, 1, 2, 0], 2), Topology(2), "sglang", "must not change: \\(2, 4, 2\\) before"),
        (Placement([0, 1, 1, 0], 2), Topology(4), "sglang", "topology has 4 ranks, the placements 2"),
        (Placement([0, 1, 1, 0], 2), Topology(2), "nccl", "source = 'nccl'"),
    ],
)
def test_mismatches_are_refused(new, topology, source, words):
    with pytest.raises(ValueError, match=words):
        plan_rearrangement(Placement([0, 1, 0, 1], 2), new, topology, source)


@given(st.integers(1, 6), st.integers(0, 4), st.sampled_from(["sglang", "vllm"]), st.randoms(use_true_random=False))
def test_receives_are_minimal_and_every_slot_ends_right(experts, extra, source, random):
    def slots():
        result = list(range(experts)) + [random.randrange(experts) for _ in range(-experts % 4 + 4 * extra)]
        random.shuffle(result)
        return result

    old, new = Placement(slots(), 4), Placement(slots(), 4)
    plan = plan_rearrangement(old, new, Topology(4, 2), source)
    moved = apply_rearrangement(plan, {"weight": old.phy2log})
    assert moved["weight"].tolist() == new.phy2log.tolist()
    fewest = [len(set(new.experts_on(r)) - set(old.experts_on(r))) for r in range(4)]
    received = [int((plan.kind.reshape(4, -1)[r] == 2).sum()) for r in range(4)]
    assert received == fewest
    matrix = plan.matrix(7, 4)
    assert (matrix.sum(axis=0) - np.diag(matrix)).tolist() == [7 * n for n in fewest]
    for slot, kind in enumerate(plan.kind):
        at, came_from = slot // old.slots_per_rank, int(plan.source[slot]) // old.slots_per_rank
        assert (kind == 0) == (old.phy2log[slot] == new.phy2log[slot])
        if kind == 2:
            assert came_from != at

"""Stepping through many ranks: the same bits, rows followed from rank to rank, what is under way and what was sent."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import some_ids, tiny_model

from fp8 import BlockScaled
from parallel import Deployment, Topology
from parallel.dispatch import DIALECTS
from parallel.schedule import BUILDERS, DeadlockError
from parallel.stepper import Hop, RankStepper
from refmodel import record
from refmodel.generate import Item
from refmodel.stepper import Golden, origins_of_row, origins_of_tensor_row, select, whereabouts

PROMPTS = [some_ids(n, seed=n) for n in (5, 1, 4)]


def deployment(ranks=4, per_node=2, numerics="bfloat16", **kwargs):
    return Deployment(tiny_model(numerics=numerics), Topology(ranks, per_node), **kwargs)


def batch_of(ranks):
    return [PROMPTS[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("order", ["rank", 3])
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("dispatch", ["low_latency", "normal"])
def test_stepping_changes_no_bit(dispatch, schedule, order):
    made = deployment(dispatch=dispatch, schedule=schedule, order=order)
    run = RankStepper(made, PROMPTS)
    with record() as expected:
        plain = made.fresh()
        logits = plain.run(batch_of(4))
    moves = 0
    while run.here is not None:
        run.next() if moves % 3 else run.into()
        moves += 1
        if moves == 90:
            run.back(5)
    run.next()
    for request, steps in enumerate(run.steps):
        rank, index = request % 4, request // 4
        assert steps.logits.tobytes() == logits[rank][index].tobytes()
    assert set(run.tensors) == set(expected)
    assert all(run.tensors[name].tobytes() == expected[name].tobytes() for name in expected)
    assert np.array_equal(run.ledger.matrix(), plain.ledger.matrix())
    assert run.mailbox() == []


def global_row(tensors, name, row):
    return select(tensors[name], (row,), tensors.rows(name))


def row_bytes(x, row):
    """What arrived, quantised or not."""
    if isinstance(x, BlockScaled):
        return x.codes[row].tobytes() + x.scale[row].tobytes()
    return x[row].tobytes()


@pytest.mark.parametrize("schedule", ["sequential", "prefill_overlap"])
@pytest.mark.parametrize("numerics", ["bfloat16", "fp8"])
@pytest.mark.parametrize("dispatch", DIALECTS)
def test_every_received_row_is_the_row_of_the_token_it_is_said_to_be(dispatch, numerics, schedule):
    run = RankStepper(deployment(numerics=numerics, dispatch=dispatch, schedule=schedule, redundant_experts=4), PROMPTS)
    rows = 0
    while run.until(stage="experts", layer=1).reason == "operation":
        x, operation = run.values["pairs"].x, run.here
        for row in range(x.shape[0]):
            for origin in origins_of_row(run, operation.rank, row, layer=1, micro_batch=operation.micro_batch):
                token = sum(map(len, PROMPTS[: origin.request])) + origin.token
                names = ("dispatch_send.codes", "dispatch_send.scale") if numerics == "fp8" else ("attn_core.norm",)
                sent = b"".join(global_row(run.tensors, f"layers.1.{name}", token).tobytes() for name in names)
                assert row_bytes(x, row) == sent
                assert origin.token_id == PROMPTS[origin.request][origin.token]
                ids = global_row(run.tensors, "layers.1.attn_core.router.topk_idx", token)
                assert origin.expert == ids[origin.slot]
                assert origin.source == origin.request % 4
                rows += 1
    assert rows == 10 * 4


def test_where_a_token_went_by_hand():
    run = RankStepper(deployment(dispatch="normal"), PROMPTS)
    run.until(stage="combine_send", rank=3, layer=1)
    run.until(stage="combine_recv", rank=0, layer=1)
    topk_idx = run.tensors["layers.1.attn_core.router.topk_idx"]  # [10, 4], 16 experts, 4 on each rank
    origins = whereabouts(run, request=0, token=3, layer=1)
    assert [origin.expert for origin in origins] == topk_idx[3].tolist()
    assert [origin.rank for origin in origins] == (topk_idx[3] // 4).tolist()
    assert [origin.local_expert for origin in origins] == (topk_idx[3] % 4).tolist()
    for origin in origins:
        hops = {
            0: [Hop(0, 0, "local")],
            1: [Hop(0, 1, "nvlink")],
            2: [Hop(0, 2, "rdma")],
            3: [Hop(0, 2, "rdma"), Hop(2, 3, "nvlink")],
        }
        assert run.path(origin) == hops[origin.rank]
        same = [o for o in origins_of_row(run, origin.rank, origin.row, layer=1) if o.slot == origin.slot]
        assert same == [origin]
        assert origins_of_tensor_row(run, "layers.1.experts.out", origin.tensor_row)[3] == [origin]
    for origin in whereabouts(run, request=1, token=0, layer=1):  # on rank 1: through rank 3
        hops = {
            0: [Hop(1, 0, "nvlink")],
            1: [Hop(1, 1, "local")],
            2: [Hop(1, 3, "rdma"), Hop(3, 2, "nvlink")],
            3: [Hop(1, 3, "rdma")],
        }
        assert run.path(origin) == hops[origin.rank]
    assert {origin.rank for origin in whereabouts(run, 1, 0, 1)} & {2, 3}
    direct = RankStepper(deployment(dispatch="low_latency"), PROMPTS)
    direct.until(stage="combine_recv", rank=0, layer=1)
    far = [origin for origin in whereabouts(direct, 0, 3, 1) if origin.rank == 3]
    assert all(direct.path(origin) == [Hop(0, 3, "rdma")] for origin in far)
    direct.restart()
    direct.until("*.router.margin", rank=2)
    assert [direct.path(origin) for origin in whereabouts(direct, 2, 0)] == [[]] * 4


def test_parts_of_ranks_are_there_by_global_row():
    run = RankStepper(deployment(), PROMPTS)
    run.until("layers.0.attn_proj.norm", rank=2)
    assert run.tensors.rows("layers.0.attn_proj.norm").tolist() == [*range(6), 6, 7, 8, 9]
    run.restart()
    run.until("embed.hidden", rank=0)
    assert run.tensors.rows("embed.hidden").tolist() == [0, 1, 2, 3, 4]
    run.until("layers.1.attn_core.norm", rank=1)
    assert run.tensors.rows("layers.1.attn_core.norm").tolist() == [0, 1, 2, 3, 4, 5]


def test_mailbox_and_ledger_by_hand():
    run = RankStepper(deployment(ranks=2), [some_ids(3), some_ids(2, seed=1)])
    assert run.mailbox() == []
    run.until(stage="dispatch_forward", rank=0, layer=1)
    (letter,) = run.mailbox()
    assert letter.message == "layer 1, message dispatch_send of micro-batch 0, step 1"
    assert (letter.senders, letter.readers, letter.parcels, letter.rows) == ((0,), (0, 1), 2, 3 * 4)
    topk_idx = run.tensors["layers.1.attn_core.router.topk_idx"]
    there = int((topk_idx >= 8).sum())
    assert [(p.src, p.dst, p.rows) for p in run.parcels()] == [(0, 0, 12 - there), (0, 1, there)]
    volumes = run.volumes()["dispatch"]
    assert volumes["nvlink"]["payload"] == there * 48 * 2
    assert volumes["nvlink"]["control"] == 8 * 4
    assert volumes["local"]["header"] == (12 - there) * 16
    run.until(stage="experts", rank=1, layer=1)
    assert [letter.readers for letter in run.mailbox()] == [(0,)]  # rank 0 has not taken rank 1's yet
    run.back()
    assert [letter.readers for letter in run.mailbox()] == [(0, 1)]


def test_rank_and_micro_batch_are_entered():
    run = RankStepper(deployment(ranks=2, schedule="prefill_overlap"), PROMPTS)
    assert run.until(micro_batch=1).reason == "operation"
    assert (run.here.rank, run.here.micro_batch) == (0, 1)
    run.until(rank=1)
    assert (run.here.rank, run.here.stage.name) == (1, "embed")
    run.until(rank=1, micro_batch=1, layer=1, stage="experts")
    assert (run.here.rank, run.here.micro_batch, run.here.layer, run.here.stage.name) == (1, 1, 1, "experts")
    with pytest.raises(ValueError, match="rank 2: this run has ranks 0 to 1"):
        run.until(rank=2)


@pytest.mark.parametrize("order", ["rank", 1, "in turn"])
def test_a_stage_stops_at_every_rank(order):
    turn = itertools.count()
    if order == "in turn":  # all ranks do a stage before the next stage
        order = lambda movable: movable[next(turn) % len(movable)]  # noqa: E731
    run, stops = RankStepper(deployment(order=order), PROMPTS), []
    while run.until(stage="shared").reason == "operation":
        stops.append((run.here.layer, run.here.rank))
    assert sorted(stops) == [(layer, rank) for layer in (1, 2) for rank in range(4)]


def test_ranks_are_held_to_a_golden_by_row():
    model = tiny_model(numerics="bfloat16")
    with record() as tensors:
        model.step([Item(i, ids, model.new_cache(), 0) for i, ids in enumerate(PROMPTS)], "prefill")
    golden = dict(tensors)
    check = Golden(golden, exact=True)
    run = RankStepper(deployment(), PROMPTS)
    assert run.until(check=check).reason == "end"
    assert check.compared > len(golden)  # each rank's part
    wrong = golden["layers.2.experts.out"].copy()
    wrong[7 * 4 + 2] += 64  # token row 7 is token 1 of request 2
    run.restart()
    stop = run.until(check=Golden({**golden, "layers.2.experts.out": wrong}))
    assert stop.tensor == "layers.2.experts.out"
    row = int(run.made_rows(stop.tensor)[stop.detail.difference.worst_row.index[0]])
    assert row == 7 * 4 + 2
    request, token, _, (origin,) = origins_of_tensor_row(run, stop.tensor, row)
    assert (request, token, origin.slot, origin.rank) == (2, 1, 2, run.last.rank)


def test_generation_over_ranks():
    made = deployment(dispatch="elastic", schedule="decode_overlap", redundant_experts=4)
    run = RankStepper(made, PROMPTS, 4, speculative=True)
    run.until("step.1.layers.3.experts.out", rank=2)
    run.back()
    assert (run.here.rank, run.here.layer, run.work.prefix, run.work.mtp) == (2, 3, "step.1.", True)
    run.until()
    assert run.generated.tokens == made.fresh().generate_batch(PROMPTS, 4, speculative=True).tokens


def test_32_ranks():
    run = RankStepper(Deployment(tiny_model(), Topology(32, 8), redundant_experts=16), PROMPTS)
    run.until(stage="experts", rank=31, layer=2)
    run.back()
    run.until()
    assert np.concatenate([step.logits for step in run.steps]).shape == (10, 100)
    alone = np.concatenate([tiny_model().forward(ids) for ids in PROMPTS])
    assert np.concatenate([step.logits for step in run.steps]).tobytes() == alone.tobytes()


def test_refusals():
    spread = deployment()
    spread.transport = "mpi"
    with pytest.raises(ValueError, match="transport = 'mpi': a run is stepped through in one process"):
        RankStepper(spread, PROMPTS)
    run = RankStepper(deployment(), PROMPTS)
    run.until(stage="experts", rank=1, layer=1)
    with pytest.raises(ValueError, match="rank 3 has received no rows in layer 2 so far"):
        origins_of_row(run, 3, 0, layer=2)


def test_a_deadlock_is_said_and_one_can_go_back():
    shortened = deployment(ranks=2)
    build = shortened.build
    shortened.build = lambda plan, rank: build(plan, rank)[: 5 if rank else None]
    run = RankStepper(shortened, PROMPTS)
    with pytest.raises(DeadlockError, match=r"rank 0: .*dispatch_recv.* waits for packets"):
        run.until()
    done = len(run.operations)
    assert not run.done
    assert len(run.mailbox()) == 1  # what was sent is there to be looked at
    with pytest.raises(DeadlockError):
        run.next()
    with pytest.raises(DeadlockError):
        run.until("never")
    run.back()
    assert len(run.operations) == done - 1

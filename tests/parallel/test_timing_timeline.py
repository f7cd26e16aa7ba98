"""Timelines: invariants for random durations, the lockstep sum, the bound of the case-study notebook, full scale."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule import BUILDERS, DeadlockError, LayerPlan, sequential
from parallel.schedule.dualpipe import build
from parallel.schedule.pipeline import Durations, simulate
from parallel.timing.costs import Efficiency
from parallel.timing.gap import GapInputs, step_seconds
from parallel.timing.imbalance import Loads
from parallel.timing.prices import PRESETS, Prices, decode_scenario, main_layers, prefill_scenario, stage_table, time_of
from parallel.timing.timeline import COMM, COMPUTE, pipeline_timeline, timeline

SCHEDULES = tuple(BUILDERS)


def programs(name, layers, ranks):
    if name == "sequential":
        return [sequential.build(layers, rank, 2) for rank in range(ranks)]
    return [BUILDERS[name](layers, rank) for rank in range(ranks)]


class Drawn:
    """Random durations, drawn once per operation."""

    def __init__(self, seed, zeros=0.2):
        self.rng, self.known, self.zeros = np.random.default_rng(seed), {}, zeros

    def compute(self, op):
        if op not in self.known:
            self.known[op] = 0.0 if self.rng.random() < self.zeros else float(self.rng.integers(1, 20))
        return self.known[op]

    def transfer(self, op):
        return self.compute(op._replace(kind="transfer"))


def critical_path(schedules, layers, drawn):
    """Longest chain of data dependencies alone, as if every stream were free at once."""
    ops = [op for schedule in schedules for op in schedule]
    ranks = range(len(schedules))
    end = {}

    def finish(op):
        if op in end:
            return end[op]
        reads = [op._replace(layer=layer, stage=stage) for layer, stage in layers.reads(op.layer, op.stage)]
        start = max([finish(read) for read in reads], default=0.0)
        if op.stage.endswith(("_forward", "_recv")):  # every rank's hop before it
            start = max(finish(read._replace(rank=rank)) for read in reads for rank in ranks)
        own = 0.0 if op.stage.endswith("_forward") else drawn.compute(op)
        moved = drawn.transfer(op) if op.stage.endswith(("_send", "_forward")) else 0.0
        end[op] = start + own + moved
        return end[op]

    return max(finish(op) for op in ops)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 1 << 30),
)
def test_invariants_of_every_timeline(name, ranks, moe, dense, seed):
    layers = LayerPlan.of(dense + moe, dense)
    schedules, drawn = programs(name, layers, ranks), Drawn(seed)
    result = timeline(schedules, drawn.compute, drawn.transfer)
    end = {(span.op, span.name): span.end for span in result.spans}
    for rank in range(ranks):
        for stream in (COMPUTE, COMM):
            spans = sorted((span for span in result.of_rank(rank) if span.stream == stream), key=lambda s: s.start)
            for before, after in pairwise(spans):
                assert before.end <= after.start  # no stream runs two things at once
    for span in result.spans:  # nothing starts before its inputs
        for layer, stage in layers.reads(span.op.layer, span.op.stage):
            read = span.op._replace(layer=layer, stage=stage)
            sources = range(ranks) if span.op.stage.endswith(("_recv", "_forward")) else [span.rank]
            for rank in sources:
                for name_of_read in (stage, stage.split("_")[0]):
                    assert end.get((read._replace(rank=rank), name_of_read), 0.0) <= span.start
        if span.stream == COMM and span.op.stage.endswith("_send"):
            assert end.get((span.op, span.op.stage), 0.0) <= span.start
    serial = sum(span.end - span.start for span in result.spans)
    assert critical_path(schedules, layers, drawn) <= result.makespan <= serial
    assert result.makespan == max((span.end for span in result.spans), default=0.0)
    assert sum(result.busy(rank, stream) for rank in range(ranks) for stream in (COMPUTE, COMM)) == serial


@given(st.sampled_from(("prefill_overlap", "decode_overlap", "vllm_dbo")), st.integers(1, 4), st.integers(0, 1 << 30))
def test_one_rank_takes_the_sum_of_slot_maxima(name, moe, seed):
    # lockstep: a slot begins with the send and ends with the receive
    layers = LayerPlan.of(moe, 0)
    schedules, drawn = programs(name, layers, 1), Drawn(seed, zeros=0)
    total = computed = 0.0
    moved = None
    for op in schedules[0]:
        if op.stage.endswith("_send"):
            total += computed + drawn.compute(op)
            computed, moved = 0.0, drawn.transfer(op)
        elif op.stage.endswith("_forward"):
            moved += drawn.transfer(op)
        elif op.stage.endswith("_recv"):
            total += max(computed, moved) + drawn.compute(op)
            computed = 0.0
        else:
            computed += drawn.compute(op)
    assert timeline(schedules, drawn.compute, drawn.transfer).makespan == total + computed


def test_perfect_overlap_is_the_busiest_stream():
    layers = LayerPlan.of(2, 0)
    schedules, drawn = programs("decode_overlap", layers, 2), Drawn(3)
    result = timeline(schedules, drawn.compute, drawn.transfer, waits=False)
    busiest = max(result.busy(rank, stream) for rank in range(2) for stream in (COMPUTE, COMM))
    assert result.makespan == busiest


def test_a_slow_rank_holds_back_the_others():
    layers = LayerPlan.of(1, 0)
    schedules = programs("sequential", layers, 2)
    result = timeline(
        schedules,
        compute=lambda op: 5.0 if op.stage == "experts" and op.rank == 1 else 0.0,
        transfer=lambda op: 1.0 if op.stage.endswith("_send") else 0.0,
    )
    # two micro-batches: dispatch 1, experts 5 on rank 1, combine 1, one after the other
    assert result.makespan == 14.0
    assert result.exposed == [14.0, 4.0]


def test_ranks_that_block_each_other_are_reported():
    layers = LayerPlan.of(1, 0)
    with pytest.raises(DeadlockError, match="1 ranks to enter dispatch_send"):
        timeline([BUILDERS["decode_overlap"](layers, 0), []], lambda op: 0.0, lambda op: 0.0)


def test_the_notebooks_bound_is_the_timeline_with_every_loss_switched_off():
    assert step_seconds(GapInputs(), frozenset()) == pytest.approx(37.976405e-3, abs=5e-10)
    exact = 62 * (1850 / 21 * 2) * 8 * ((7168 + 224) + 7168 * 2) / 50e9
    assert step_seconds(GapInputs(), frozenset()) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize(("phase", "ranks", "spans"), [("decode", 144, 100_000), ("prefill", 32, 20_000)])
def test_61_layers_at_full_scale_take_less_than_ten_seconds(phase, ranks, spans):
    begun = time.process_time()
    scenario = PRESETS[phase].build()
    result = time_of(scenario, PRESETS[phase].schedule)
    assert time.process_time() - begun < 10
    assert scenario.topology.num_ranks == ranks
    assert len(scenario.layers.layers) == {"decode": 62, "prefill": 61}[phase]
    assert len(result.spans) > spans


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_overlap_lies_between_its_bound_and_the_sequential_program(phase):
    build_scenario = {"decode": decode_scenario, "prefill": prefill_scenario}[phase]
    scenario = build_scenario(ranks=8, num_layers=5)
    bound = time_of(scenario, PRESETS[phase].schedule, waits=False).makespan
    overlapped = time_of(scenario, PRESETS[phase].schedule).makespan
    serial = time_of(scenario, "sequential").makespan
    assert bound < overlapped < serial


def test_uneven_loads_slow_the_step_and_even_ones_do_not():
    even = decode_scenario(ranks=16, num_layers=5)
    flat = Loads(np.ones(16), np.full(16, 18.0))
    hot = Loads(np.r_[4.0, np.ones(15)], np.full(16, 18.0))
    base = time_of(even, "decode_overlap").makespan
    assert time_of(decode_scenario(ranks=16, num_layers=5, loads={3: flat}), "decode_overlap").makespan == base
    slow = decode_scenario(ranks=16, num_layers=5, loads={layer: hot for layer in even.layers.moe})
    assert time_of(slow, "decode_overlap").makespan > 1.3 * base
    table = stage_table(slow)
    assert table["combine"].argmax() == 0
    assert table["combine"][0] == pytest.approx(table["combine"][1] * 4 * 16 / 19)  # largest over mean


def test_losses_and_sm_shares_reach_the_prices():
    fast = decode_scenario(ranks=16, num_layers=4)
    slow = decode_scenario(ranks=16, num_layers=4, efficiency=Efficiency(link=0.5, sync=1e-6))
    program = fast.programs("decode_overlap")[0]
    send, core = (next(op for op in program if op.stage == stage) for stage in ("combine_send", "attn_core"))
    assert Prices(slow).transfer(send) == pytest.approx(2 * Prices(fast).transfer(send) + 1e-6)
    assert Prices(fast).compute(core) == Prices(slow).compute(core) > 0
    whole, part = prefill_scenario(compute_sms=132), prefill_scenario(compute_sms=66)
    experts = next(op for op in whole.programs("prefill_overlap")[0] if op.stage == "experts")
    assert Prices(part).compute(experts) == pytest.approx(2 * Prices(whole).compute(experts))


def test_prefill_batches_are_cut_by_attention():
    one = prefill_scenario(ranks=8, prompts=(1000,))
    assert [batch.tokens for batch in one.batches] == [707.0, 293.0]
    assert one.batches[0].pairs == pytest.approx(one.batches[1].pairs, rel=2e-3)
    assert [batch.logits for batch in one.batches] == [0.0, 1.0]
    four = prefill_scenario()
    assert [batch.tokens for batch in four.batches] == [8192.0, 8192.0]


def test_scenarios_are_validated():
    scenario = decode_scenario(ranks=16, num_layers=4)
    with pytest.raises(ValueError, match="known are sequential"):
        scenario.programs("zigzag")
    with pytest.raises(ValueError, match="name 2 ranks of 16"):
        decode_scenario(ranks=16, num_layers=4, loads={3: Loads(np.ones(2), np.ones(2))})
    assert main_layers(2, mtp=True).moe == (2,)


def test_a_training_pipeline_is_a_timeline_too():
    times = Durations(1.0, 2.0, 1.0, 2.5)
    schedules = build(4, 8)
    result = pipeline_timeline(schedules, 4, times)
    found = simulate(schedules, 4, times)
    assert result.makespan == found.makespan
    assert [result.busy(rank, COMPUTE) for rank in range(4)] == found.busy
    assert {span.name for span in result.spans} == {"forward", "backward", "input", "weight", "pair"}

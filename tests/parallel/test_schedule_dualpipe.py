"""DualPipe and DualPipeV: the eight steps, what the published table says of them, and real gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule import Op, ScheduleError
from parallel.schedule.dualpipe import build, build_v
from parallel.schedule.pipeline import Durations, check_pipeline, chunks, dualpipe_bubble, simulate
from parallel.schedule.training import train, train_serial

CASES = [(build, ranks, ranks) for ranks in (2, 4, 8, 16)] + [(build_v, ranks, 2 * ranks) for ranks in (1, 2, 4, 8)]


def words(ops, rank, num_ranks):
    """A program in the notation of the eight steps: local phases only, e.g. `F0 Bz1 W X01`."""
    if any(chunk.stage >= num_ranks for op in ops for chunk in chunks(op)):
        phase_of_stage = {rank: 0, 2 * num_ranks - 1 - rank: 1}
    else:
        flip = rank >= num_ranks // 2
        phase_of_stage = {rank: int(flip), num_ranks - 1 - rank: 1 - int(flip)}
    out = []
    for op in ops:
        if op.kind == "F&B":
            out.append("X" + "".join(str(phase_of_stage[stage]) for stage in op.layer))
        elif op.kind == "W":
            out.append("W")
        else:
            name = {"chunk": "F", "full": "B", "input": "Bz"}[op.stage]
            out.append(f"{name}{phase_of_stage[op.layer]}")
    return " ".join(out)


def rules(half, h, n4):
    """The eight steps as text."""
    middle = half - h - 1
    step4 = ["X01 X10"] * n4
    if middle == 0 and n4:
        step4[0] = "F0 B1 X10"
    step6 = []
    for i in range(h + 1):
        first = "Bz1" if (i > (h + 1) // 2 or (i == (h + 1) // 2 and h % 2 == 1)) else "B1"
        second = "Bz0" if i >= (h + 1) // 2 else "B0"
        step6 += [first, second]
    steps = [
        ["F0"] * (2 * middle),
        ["F0 F1"] * (h + 1),
        ["Bz1 W F1"] * middle,
        step4,
        ["B1 X10"] * middle,
        step6,
        ["W Bz0"] * middle,
        ["W"] * (h + 1),
    ]
    return " ".join(word for step in steps for word in step)


def test_rank_0_of_8_with_20_micro_batches_by_hand():
    expected = (
        "F0 F0 F0 F0 F0 F0 F0 F1 Bz1 W F1 Bz1 W F1 Bz1 W F1 X01 X10 X01 X10 X01 X10 "
        "B1 X10 B1 X10 B1 X10 B1 Bz0 W Bz0 W Bz0 W Bz0 W"
    )
    assert words(build(8, 20)[0], 0, 8) == expected


def test_first_operations_of_the_smallest_pipeline_by_hand():
    up, down = build(2, 4)
    assert up[:3] == [Op("F", 0, 0, 0, "chunk"), Op("F", 0, 2, 1, "chunk"), Op("F", 0, 1, 0, "chunk")]
    assert up[3] == Op("B", 0, 2, 1, "full")
    assert up[4] == Op("F&B", 0, (3, 0), (1, 0), "pair")
    assert down[0] == Op("F", 1, 2, 0, "chunk")
    assert str(up[4]) == "r0 F(m3,s1)&B(m0,s0)"


@pytest.mark.parametrize("extra", [0, 2, 6])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_dualpipe_equals_the_eight_step_rules(num_ranks, extra):
    micro_batches = 2 * num_ranks + extra
    for rank, ops in enumerate(build(num_ranks, micro_batches)):
        h = min(rank, num_ranks - 1 - rank)
        assert words(ops, rank, num_ranks) == rules(num_ranks // 2, h, micro_batches // 2 - num_ranks + h + 1)


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_dualpipev_equals_the_eight_step_rules(num_ranks, extra):
    micro_batches = 2 * num_ranks + extra
    for rank, ops in enumerate(build_v(num_ranks, micro_batches)):
        assert words(ops, rank, num_ranks) == rules(num_ranks, rank, micro_batches - 2 * num_ranks + rank + 1)


@pytest.mark.parametrize("extra", [0, 2, 8])
@pytest.mark.parametrize(("builder", "num_ranks", "pipeline"), CASES)
def test_peaks_bubble_and_counts_of_the_published_table(builder, num_ranks, pipeline, extra):
    micro_batches = 2 * num_ranks + extra
    schedules = builder(num_ranks, micro_batches)
    check_pipeline(schedules, pipeline, micro_batches)
    even = Durations(forward=2.0, backward=4.0, weight=2.0, pair=5.0)  # B - W = F
    result = simulate(schedules, pipeline, even)
    assert set(result.activations) == {pipeline + 1}
    assert max(result.queue) == pipeline // 2
    assert max(result.bubble) == dualpipe_bubble(pipeline, even)
    equal = Durations(2.0, 4.0, 2.0, 6.0)  # also F&B = F + B: every rank waits equally long
    assert set(simulate(schedules, pipeline, equal).bubble) == {dualpipe_bubble(pipeline, equal)}
    for rank, ops in enumerate(schedules):
        depth = min(rank, num_ranks - 1 - rank) if builder is build else rank
        assert sum(op.kind == "W" for op in ops) == sum(op.stage == "input" for op in ops) == pipeline - 1 - depth


@pytest.mark.parametrize(
    ("durations", "largest", "formula"),
    [((10, 20, 8, 26), 60, 66), ((10, 22, 12, 32), 60, 54), ((10, 30, 10, 30), 80, 90)],
)
def test_the_bubble_formula_is_only_near_where_b_minus_w_is_not_f(durations, largest, formula):
    # deepseek-ai/DeepSeek-V3#211, deepseek-ai/DualPipe#23
    times = Durations(*durations)
    assert max(simulate(build(8, 20), 8, times).bubble) == largest
    assert dualpipe_bubble(8, times) == formula


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_v_on_p_ranks_takes_as_long_as_dualpipe_on_2p(num_ranks):
    times = Durations(1.0, 2.0, 1.0, 2.5)
    micro_batches = 2 * num_ranks + 3
    folded = simulate(build_v(num_ranks, micro_batches), 2 * num_ranks, times)
    assert folded.makespan == simulate(build(2 * num_ranks, 2 * micro_batches), 2 * num_ranks, times).makespan


@pytest.mark.parametrize(
    ("builder", "arguments", "text"),
    [
        (build, (4, 6), "at least two per rank, 8"),
        (build, (3, 8), "P must be even"),
        (build, (4, 9), "number must be even"),
        (build, (0, 8), "at least one rank"),
        (build_v, (4, 7), "at least two per rank, 8"),
    ],
)
def test_impossible_pipelines_are_refused(builder, arguments, text):
    with pytest.raises(ValueError, match=text):
        builder(*arguments)


def test_illegal_training_programs_are_refused():
    good = build(2, 4)
    with pytest.raises(ScheduleError, match="missing"):
        check_pipeline([good[0][:-1], good[1]], 2, 4)
    with pytest.raises(ScheduleError, match="repeats"):
        check_pipeline([[*good[0], good[0][0]], good[1]], 2, 4)
    early = [[op for op in good[0] if op.kind == "W"] + [op for op in good[0] if op.kind != "W"], good[1]]
    with pytest.raises(ScheduleError, match="oldest queued"):
        check_pipeline(early, 2, 4)
    backwards = [good[0][::-1], good[1]]
    with pytest.raises(ValueError, match=r"oldest queued|deadlock"):
        check_pipeline(backwards, 2, 4)


def test_a_pipeline_that_blocks_says_what_is_missing():
    good = build(2, 4)
    with pytest.raises(ValueError, match=r"rank 1: .* waits for F\(m0,s0\)"):
        check_pipeline([[good[0][3], *good[0][:3], *good[0][4:]], good[1]], 2, 4)


@given(
    st.sampled_from([(build, 2, 2), (build, 4, 4), (build_v, 1, 2), (build_v, 2, 4), (build_v, 3, 6)]),
    st.integers(0, 3),
    st.integers(0, 1 << 30),
)
def test_gradients_equal_the_serial_ones_bit_for_bit(case, extra, seed):
    builder, num_ranks, num_stages = case
    micro_batches = 2 * num_ranks + 2 * extra
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(num_stages, 5, 5))
    inputs = rng.normal(size=(micro_batches, 3, 5))
    split = micro_batches // 2 if builder is build else None
    expected = train_serial(weights, inputs, split)
    for order in ("rank", seed):
        actual = train(builder(num_ranks, micro_batches), weights, inputs, split, order)
        assert actual.weight_gradients().tobytes() == expected.weight_gradients().tobytes()
        assert actual.input_gradients().tobytes() == expected.input_gradients().tobytes()


def test_serial_gradients_are_the_slope_of_the_loss():
    rng = np.random.default_rng(0)
    weights, inputs = rng.normal(size=(2, 3, 3)) / 2, rng.normal(size=(4, 2, 3))

    def loss(trial):
        y = inputs
        for matrix in trial:
            y = np.tanh(np.einsum("mtd,de->mte", y, matrix))
        return float(np.sum(y * y) / 2)

    gradient = train_serial(weights, inputs).weight_gradients()
    for place in np.ndindex(2, 3, 3):
        nudge = np.zeros_like(weights)
        nudge[place] = 1e-6
        slope = (loss(weights + nudge) - loss(weights - nudge)) / 2e-6
        assert abs(slope - gradient[place]) < 1e-7

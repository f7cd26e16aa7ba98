"""The executor and the checker: nothing moves the result, illegal schedules are refused, deadlocks are explained."""

import random

import pytest
from schedule_world import World, random_case, random_extension, random_schedules, sends_of

from parallel.schedule import BUILDERS, DeadlockError, LayerPlan, Op, ScheduleError, check, execute, program_order


def result_of(make_world, schedules, order="rank"):
    world = make_world()
    execute(schedules, world.run, world.ready, world.waits_for, order)
    assert not world.mail
    return world.result


def serial_result(make_world, layers, ranks):
    return result_of(make_world, [BUILDERS["sequential"](layers, rank, micro_batches=2) for rank in range(ranks)])


def run_random_legal(seed):
    make_world, layers, ranks, rng = random_case(seed)
    spans = make_world().spans()
    schedules = random_schedules(rng, ranks, layers, spans)
    check(schedules, layers, spans=spans)
    expected = serial_result(make_world, layers, ranks)
    for order in ("rank", rng.randrange(1 << 30), lambda movable: movable[-1]):
        assert result_of(make_world, schedules, order) == expected
    name = rng.choice(("prefill_overlap", "decode_overlap", "vllm_dbo"))
    published = [BUILDERS[name](layers, rank) for rank in range(ranks)]
    check(published, layers, spans=spans)
    assert result_of(make_world, published, rng.randrange(1 << 30)) == expected
    world = make_world()
    for op in program_order(schedules):
        assert world.ready(op)
        world.run(op)
    assert world.result == expected


def test_100_random_legal_schedules_and_splits_give_the_serial_result():
    for seed in range(100):
        run_random_legal(seed)


@pytest.mark.long
def test_1000_random_legal_schedules_and_splits_give_the_serial_result():
    for seed in range(100, 1100):
        run_random_legal(seed)


def moved_before(ops, late, early):
    """The program with operation `late` moved to just before operation `early`."""
    rest = [op for op in ops if op != late]
    place = rest.index(early)
    return [*rest[:place], late, *rest[place:]]


def breaks_stream(ops):
    """Slow oracle: do the [send, receive] stretches of two exchanges overlap?"""
    place = {op: index for index, op in enumerate(ops)}
    stretches = [
        (place[op], place[op._replace(stage=op.stage.replace("send", "recv"))])
        for op in ops
        if op.stage.endswith("_send")
    ]
    return any(a[0] < b[0] < a[1] for a in stretches for b in stretches)


def breaks_key(ops):
    place = {op: index for index, op in enumerate(ops)}
    return any(
        place[Op("F", op.rank, 0, op.layer, "attn_proj")] > index
        for op, index in place.items()
        if op.stage == "attn_core" and op.micro_batch == 1
    )


def illegal(rng, rule, layers, ranks, spans):
    """A schedule that breaks one rule on one rank, or None where the draw did not break it."""
    schedules = random_schedules(rng, ranks, layers, spans)
    rank = rng.randrange(ranks)
    ops = schedules[rank]
    pairs = [(0, 1)]
    if rule == "once":
        place = rng.randrange(len(ops))
        foreign = ops[place]._replace(layer=99)
        schedules[rank] = rng.choice(
            ([*ops[:place], *ops[place + 1 :]], [*ops, ops[place]], [*ops[:place], foreign, *ops[place:]])
        )
    elif rule in ("order", "receive"):
        hops = ("_forward", "_recv")
        late = rng.choice([op for op in ops if op.stage.endswith(hops) == (rule == "receive")])
        reads = layers.reads(late.layer, late.stage)
        if not reads:
            return None
        layer, stage = rng.choice(reads)
        schedules[rank] = moved_before(ops, late, Op("F", rank, late.micro_batch, layer, stage))
    elif rule == "stream":
        schedules = random_schedules(rng, ranks, layers, spans, stream=False)
        return schedules if any(map(breaks_stream, schedules)) else None
    elif rule == "key":
        schedules = random_schedules(rng, ranks, layers)
        return schedules if breaks_key(schedules[rank]) else None
    elif rule == "collective":
        if rank == 0:
            return None
        schedules[rank] = random_extension(rng, rank, layers, spans=pairs)
        return schedules if sends_of(schedules[rank]) != sends_of(schedules[0]) else None
    return schedules


def count_refused(seeds):
    rules = ("once", "order", "receive", "stream", "key", "collective")
    refused = dict.fromkeys(rules, 0)
    for seed in seeds:
        rng = random.Random(seed)
        rule = rules[seed % len(rules)]
        layers, ranks = LayerPlan.of(rng.randint(2, 4), rng.randint(0, 1)), rng.randint(2, 3)
        spans = [(rank, 0, 1) for rank in range(ranks)]
        schedules = None
        while schedules is None:
            schedules = illegal(rng, rule, layers, ranks, spans)
        with pytest.raises(ScheduleError) as caught:
            check(schedules, layers, spans=spans)
        assert caught.value.rule == rule, (seed, rule, str(caught.value))
        refused[rule] += 1
    return refused


def test_120_illegal_schedules_are_refused_for_the_right_rule():
    assert set(count_refused(range(120)).values()) == {20}


@pytest.mark.long
def test_1000_illegal_schedules_are_refused_for_the_right_rule():
    assert sum(count_refused(range(200, 1200)).values()) == 1000


def program(text):
    """`stage.micro_batch` words of layer 0 on rank 0 as a program."""
    return [Op("F", 0, int(word[-1]), 0, word[:-2]) for word in text.split()]


def test_each_rule_by_hand():
    layers = LayerPlan.of(1, 1)
    good = "embed.0 attn_proj.0 attn_core.0 mlp.0 final.0"
    check([program(good)], layers, micro_batches=1)
    with pytest.raises(ScheduleError, match=r"mlp.*missing") as caught:
        check([program("embed.0 attn_proj.0 attn_core.0 final.0")], layers, micro_batches=1)
    assert caught.value.rule == "once"
    with pytest.raises(ScheduleError, match="runs before attn_proj of layer 0") as caught:
        check([program("embed.0 attn_core.0 attn_proj.0 mlp.0 final.0")], layers, micro_batches=1)
    assert caught.value.rule == "order"
    assert caught.value.op == Op("F", 0, 0, 0, "attn_core")
    both = "embed.0 embed.1 attn_proj.1 attn_core.1 attn_proj.0 attn_core.0 mlp.0 mlp.1 final.0 final.1"
    check([program(both)], layers)
    with pytest.raises(ScheduleError, match="keys that micro-batch 0 has not written") as caught:
        check([program(both)], layers, spans=[(0, 0, 1)])
    assert caught.value.rule == "key"


def test_an_operation_of_another_rank_has_no_place():
    layers = LayerPlan.of(1, 1)
    with pytest.raises(ScheduleError, match="no place in the program of rank 1"):
        check([BUILDERS["sequential"](layers, 0)] * 2, layers, micro_batches=1)


def test_deadlock_lists_what_each_rank_waits_for():
    layers = LayerPlan.of(1, 0)
    world = World([[2], [1]], [[[0, 1]], [[0]]], layers)
    schedules = [BUILDERS["sequential"](layers, 0, micro_batches=2), []]
    for order in ("rank", 5):
        with pytest.raises(DeadlockError) as caught:
            execute(schedules, world.run, world.ready, world.waits_for, order)
        assert caught.value.waiting == {0: (Op("F", 0, 0, 0, "dispatch_forward"), "packets of ranks 1")}
        assert "rank 0: r0 F dispatch_forward(m0,l0) waits for packets of ranks 1" in str(caught.value)
        assert isinstance(caught.value, ValueError)
        world, schedules = World([[2], [1]], [[[0, 1]], [[0]]], layers), schedules


def test_ranks_in_opposite_exchange_order_block_each_other():
    layers = LayerPlan.of(1, 0)
    schedules = [BUILDERS["decode_overlap"](layers, 0, lead=0), BUILDERS["decode_overlap"](layers, 1, lead=1)]
    with pytest.raises(ScheduleError) as caught:
        check(schedules, layers)
    assert caught.value.rule == "collective"
    world = World([[1], [1]], [[[0]], [[1]]], layers)
    with pytest.raises(DeadlockError) as caught:
        execute(schedules, world.run, world.ready, world.waits_for)
    assert sorted(caught.value.waiting) == [0, 1]
    with pytest.raises(ValueError, match="different exchange stages"):
        program_order(schedules)


# sgl-project/sglang#30238: one sequence with one new token gives micro-batches of 1 and 0 tokens on that rank
@pytest.mark.parametrize("name", ["prefill_overlap", "decode_overlap", "vllm_dbo"])
def test_an_empty_half_still_joins_every_exchange(name):
    layers = LayerPlan.of(3, 1)
    lengths, assignment = [[1], [6]], [[[0]], [[0, 0, 0, 1, 1, 1]]]
    schedules = [BUILDERS[name](layers, rank) for rank in range(2)]

    def make_world():
        return World(lengths, assignment, layers)

    assert make_world().tokens[0, 1] == []
    assert result_of(make_world, schedules, 3) == serial_result(make_world, layers, 2)


def test_program_order_takes_all_ranks_into_a_stage_before_the_next():
    layers = LayerPlan.of(2, 1)
    ordered = program_order([BUILDERS["decode_overlap"](layers, rank) for rank in range(3)])
    stages = [op for op in ordered if "_send" in op.stage or "_recv" in op.stage or "_forward" in op.stage]
    for start in range(0, len(stages), 3):
        group = stages[start : start + 3]
        assert [op.rank for op in group] == [0, 1, 2]
        assert len({(op.micro_batch, op.layer, op.stage) for op in group}) == 1


def test_by_default_at_most_one_rank_holds_what_it_received():
    layers = LayerPlan.of(3, 0)
    held, peak = set(), 0
    world = World([[2], [3], [1]], [[[0, 0]], [[0, 0, 0]], [[0]]], layers)

    def run(op):
        nonlocal peak
        world.run(op)
        if op.stage == "dispatch_recv":
            held.add(op.rank)
        if op.stage == "combine_send":
            held.discard(op.rank)
        peak = max(peak, len(held))

    execute([BUILDERS["sequential"](layers, rank, micro_batches=2) for rank in range(3)], run, world.ready, str)
    assert peak == 1


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'random'"):
        execute([[]], print, print, print, order="random")

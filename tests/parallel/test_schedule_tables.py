"""Schedules against the published tables, slot by slot, and the simple builders."""

import pytest

from parallel.schedule import BUILDERS, LayerPlan, Op, check, sequential
from parallel.schedule.decode_overlap import build_vllm

BOX = {"attn_proj": "ATTN-0", "attn_core": "ATTN-1", "experts": "MLP", "shared": "SHARED"}


def slots(ops, layers):
    """The drawing that a program amounts to: a list of (exchange or None, boxes that run beside it)."""
    found = [(None, [])]
    for op in ops:
        if op.layer not in layers.moe or op.stage in ("embed", "mtp_embed", "final", "merge"):
            continue
        if op.stage.endswith("_send"):
            found.append((f"{op.stage.split('_')[0].upper()}({op.micro_batch},{op.layer})", []))
        elif op.stage.endswith("_recv"):
            found.append((None, []))
        elif op.stage in BOX:
            found[-1][1].append(f"{BOX[op.stage]}({op.micro_batch},{op.layer})")
    return [(exchange, " ".join(boxes)) for exchange, boxes in found if exchange or boxes]


def fill(table, first, last, a, b):
    """A hand-written table for every layer; boxes of layers outside the model vanish, and slots left empty too."""
    rows = []
    for layer in range(first - 1, last + 2):
        for exchange, boxes in table:
            names = [item.format(a=a, b=b, l=layer, p=layer - 1, n=layer + 1) for item in [exchange, *boxes] if item]
            inside = [name for name in names if first <= int(name.split(",")[1][:-1]) <= last]
            head = [name for name in inside if name.startswith(("DISPATCH", "COMBINE"))]
            rest = " ".join(name for name in inside if name not in head)
            if head or rest:
                rows.append((head[0] if head else None, rest))
    return rows


def joined(rows):
    """Neighbouring slots without an exchange are one stretch of computation."""
    out = []
    for exchange, boxes in rows:
        if exchange is None and out and out[-1][0] is None:
            out[-1] = (None, f"{out[-1][1]} {boxes}")
        else:
            out.append((exchange, boxes))
    return out


ATTN_A, ATTN_B = ("ATTN-0({a},{l})", "ATTN-1({a},{l})"), ("ATTN-0({b},{l})", "ATTN-1({b},{l})")
PREFILL = [
    ("COMBINE({b},{p})", [*ATTN_A, "SHARED({b},{p})"]),
    ("DISPATCH({a},{l})", [*ATTN_B]),
    ("DISPATCH({b},{l})", ["MLP({a},{l})"]),
    ("COMBINE({a},{l})", ["MLP({b},{l})", "SHARED({a},{l})"]),
]
DECODE = [
    ("DISPATCH({b},{l})", ["SHARED({b},{l})", "ATTN-0({a},{l})"]),
    (None, ["MLP({b},{l})"]),
    ("COMBINE({b},{l})", ["ATTN-1({a},{l})"]),
    ("DISPATCH({a},{l})", ["SHARED({a},{l})", "ATTN-0({b},{n})"]),
    (None, ["MLP({a},{l})"]),
    ("COMBINE({a},{l})", ["ATTN-1({b},{n})"]),
]
VLLM = [
    ("DISPATCH({a},{l})", [*ATTN_B]),
    ("DISPATCH({b},{l})", ["MLP({a},{l})"]),
    ("COMBINE({a},{l})", ["SHARED({a},{l})", "MLP({b},{l})"]),
    ("COMBINE({b},{l})", ["SHARED({b},{l})", "ATTN-0({a},{n})", "ATTN-1({a},{n})"]),
]
VLLM_MLP = [
    ("DISPATCH({a},{l})", [*ATTN_B, "SHARED({b},{l})"]),
    ("DISPATCH({b},{l})", ["MLP({a},{l})"]),
    ("COMBINE({a},{l})", ["MLP({b},{l})"]),
    ("COMBINE({b},{l})", ["ATTN-0({a},{n})", "ATTN-1({a},{n})", "SHARED({a},{n})"]),
]


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("moe", [1, 2, 3, 5, 58])
@pytest.mark.parametrize(
    ("name", "table", "leader"),
    [("prefill_overlap", PREFILL, "a"), ("decode_overlap", DECODE, "b"), ("vllm_dbo", VLLM, "a")],
)
def test_schedule_equals_the_table_for_any_layer_count(name, table, leader, moe, dense, lead):
    layers = LayerPlan.of(dense + moe, dense)
    ops = BUILDERS[name](layers, 0, lead=lead)
    names = {leader: lead, "ba"[leader == "b"]: 1 - lead}
    assert joined(slots(ops, layers)) == joined(fill(table, dense, dense + moe - 1, **names))
    check([ops], layers, spans=[(0, 0, 1)] if lead == 0 else [(0, 1, 0)] if dense == 0 else [])


@pytest.mark.parametrize("moe", [1, 2, 4])
def test_vllm_has_a_second_order(moe):
    layers = LayerPlan.of(moe, 0)
    ops = build_vllm(layers, 0, order="mlp_overlap")
    assert joined(slots(ops, layers)) == joined(fill(VLLM_MLP, 0, moe - 1, a=0, b=1))
    with pytest.raises(ValueError, match="mlp_shared_overlap, mlp_overlap"):
        build_vllm(layers, 0, order="other")


def test_decode_of_one_layer_by_hand():
    ops = BUILDERS["decode_overlap"](LayerPlan.of(1, 0), 0)
    expected = (
        "embed.0 embed.1 attn_proj.0 attn_core.0 "
        "dispatch_send.0 shared.0 attn_proj.1 dispatch_forward.0 dispatch_recv.0 experts.0 "
        "combine_send.0 attn_core.1 combine_forward.0 combine_recv.0 "
        "dispatch_send.1 shared.1 merge.0 dispatch_forward.1 dispatch_recv.1 experts.1 "
        "combine_send.1 combine_forward.1 combine_recv.1 merge.1 final.0 final.1"
    )
    assert " ".join(f"{op.stage}.{op.micro_batch}" for op in ops) == expected


def test_dense_layers_run_one_micro_batch_after_the_other_first():
    ops = BUILDERS["prefill_overlap"](LayerPlan.of(3, 2), 4)
    head = [f"{op.stage}.{op.micro_batch}.{op.layer}" for op in ops[:14]]
    one = [f"{stage}.{{m}}.{layer}" for layer in (0, 1) for stage in ("attn_proj", "attn_core", "mlp")]
    assert head == [name.format(m=m) for m in (0, 1) for name in ["embed.{m}.0", *one]]
    assert {op.rank for op in ops} == {4}


def test_a_model_without_moe_layers_has_a_program_too():
    layers = LayerPlan.of(2, 2)
    for build in BUILDERS.values():
        stages = [op.stage for op in build(layers, 0)]
        assert stages.count("mlp") == stages.count("embed") * 2
        assert not {"dispatch_send", "merge"} & set(stages)


def test_sequential_runs_stages_in_order():
    ops = sequential.build(LayerPlan.of(2, 1), 3, micro_batches=2)
    assert ops[:4] == [Op("F", 3, 0, 0, stage) for stage in ("embed", "attn_proj", "attn_core", "mlp")]
    assert " ".join(op.stage for op in ops[4:16]) == (
        "attn_proj attn_core dispatch_send dispatch_forward dispatch_recv experts "
        "combine_send combine_forward combine_recv shared merge final"
    )
    assert [op.micro_batch for op in ops] == [0] * 16 + [1] * 16
    with pytest.raises(ValueError, match="at least one"):
        sequential.build(LayerPlan.of(1, 1), 0, micro_batches=0)


def test_mtp_layer_is_an_ordinary_moe_layer():
    layers = LayerPlan.mtp(61)
    ops = BUILDERS["decode_overlap"](layers, 0)
    assert ops[0] == Op("F", 0, 0, 61, "mtp_embed")
    assert {op.layer for op in ops} == {61}
    check([ops], layers)


@pytest.mark.parametrize("name", ["prefill_overlap", "decode_overlap", "vllm_dbo"])
def test_the_leader_is_one_of_two(name):
    with pytest.raises(ValueError, match="lead = 2"):
        BUILDERS[name](LayerPlan.of(2, 1), 0, lead=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(((), ()), "without layers"), (((1,), (0,)), "dense layers first"), (((0,), (2,)), "gap"), (((), (0,), "x"), "x")],
)
def test_layer_plans_are_validated(arguments, text):
    with pytest.raises(ValueError, match=text):
        LayerPlan(*arguments)

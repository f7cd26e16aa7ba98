"""Stepping through one rank: the same bits, every stop, back, and what breaks off."""

import bdb
import io
import pdb

import numpy as np
import pytest
from tiny import some_ids, tiny_model

from refmodel import record
from refmodel.model import main_program
from refmodel.stepper import Golden, Stepper, has_nan, origins_of_row, origins_of_tensor_row, whereabouts

NUMERICS = ("float64", "float32", "bfloat16", "fp8")


def stepper(numerics="float64", counts=(5,), **settings):
    return Stepper(tiny_model(numerics=numerics), [some_ids(n, seed=n) for n in counts], **settings)


def walked(operations):
    return [(operation.stage.name, operation.layer) for operation in operations]


@pytest.mark.parametrize("numerics", NUMERICS)
def test_stepping_changes_no_bit(numerics):
    model, ids = tiny_model(numerics=numerics), some_ids(7)
    with record() as expected:
        logits = model.forward(ids)
    run = Stepper(model, [ids])
    while run.here is not None:  # a mixture of all moves
        run.next()
        run.into()
        run.into()
        if len(run.operations) in (7, 19):
            run.back(2)
            run.until(stage=run.here.stage.name)
    run.next()  # may be inside the last operation still
    assert run.done
    assert run.steps[0].logits.tobytes() == logits.tobytes()
    assert list(run.tensors) == list(expected)
    assert all(run.tensors[name].tobytes() == expected[name].tobytes() for name in expected)


def test_next_walks_the_program():
    run, program = stepper(), []
    while (operation := run.next()) is not None:
        program.append(operation)
    assert walked(program) == [(stage.name, layer) for stage, layer in main_program(run.config)]
    assert walked(run.operations) == walked(program)
    assert run.next() is None
    assert run.into() is None
    assert run.until().reason == "end"


def test_into_shows_one_tensor_after_the_other():
    run = stepper()
    assert run.into() == "embed.hidden"
    assert run.into() == "layers.0.attn_proj.norm"
    assert list(run.tensors) == ["embed.hidden", "layers.0.attn_proj.norm"]
    assert run.made == ["layers.0.attn_proj.norm"]
    assert run.at.stage.name == "attn_proj"
    assert run.here.stage.name == "attn_core"  # what runs next
    assert run.next().stage.name == "attn_proj"  # finishes it
    assert run.inside is None
    assert run.made[-1] == "layers.0.attn_proj.k_pe"
    run.until(stage="dispatch_forward")
    assert run.into() is None  # it names no tensor
    assert run.last.stage.name == "dispatch_forward"


def test_until_a_tensor_a_pattern_a_stage_a_layer():
    run = stepper()
    stop = run.until("layers.1.attn_core.router.topk_idx")
    assert (stop.reason, stop.tensor) == ("tensor", "layers.1.attn_core.router.topk_idx")
    assert "layers.1.attn_core.router.topk_weights" not in run.tensors  # made after it
    assert run.until("*.router.*").tensor == "layers.1.attn_core.router.topk_weights"
    assert run.until("*.router.*", layer=2).tensor == "layers.2.attn_core.router.logits"
    run.restart()
    assert run.until(layer=1).reason == "operation"
    assert (run.here.stage.name, run.here.layer) == ("attn_proj", 1)
    assert run.until(layer=1).reason == "end"  # it is entered once
    run.restart()
    stages = []
    while run.until(stage="experts").reason == "operation":
        stages.append(run.here.layer)
    assert stages == [1, 2]
    assert run.until("never").reason == "end"


def test_until_stops_between_operations_when_asked():
    run = stepper()
    assert run.until("final.logits", interrupted=lambda: len(run.operations) == 4).reason == "interrupted"
    assert len(run.operations) == 4
    assert run.until(interrupted=lambda: True).reason == "interrupted"
    assert run.until().reason == "end"


def test_back_is_before_the_last_operation():
    run = stepper()
    for _ in range(6):
        run.next()
    seen = {name: run.tensors[name].tobytes() for name in run.tensors}
    last = run.last.stage.name
    run.back()
    assert run.here.stage.name == last
    assert len(run.operations) == 5
    run.next()
    assert {name: run.tensors[name].tobytes() for name in run.tensors} == seen
    run.until("layers.2.attn_core.out")
    run.back()  # from inside an operation to before it
    assert (run.here.stage.name, run.here.layer, run.inside) == ("attn_core", 2, None)
    run.back(1000)
    assert (run.here.stage.name, len(run.tensors)) == ("embed", 0)
    with pytest.raises(ValueError, match="this is the beginning"):
        run.back()
    with pytest.raises(ValueError, match="back 0: must be at least 1"):
        run.back(0)


def test_values_are_those_of_the_operation_at_hand():
    run = stepper()
    assert run.values == {}
    run.until(stage="experts")
    assert set(run.values) == {"hidden", "ffn_input", "topk_idx", "topk_weights", "exchange", "pairs"}
    assert run.values["hidden"].shape == (5, 48)


@pytest.mark.parametrize("speculative", [False, True])
def test_generation_is_stepped_through_to_its_end(speculative):
    model, prompts = tiny_model(numerics="bfloat16"), [some_ids(4), some_ids(9, seed=1)]
    settings = dict(speculative=speculative, temperature=0.8, seed=5)
    run = Stepper(model, prompts, 4, **settings)
    assert run.until(step=2).reason == "operation"
    assert run.work.prefix == "step.2."
    assert run.until("step.2.final.logits", step=1).reason == "end"  # no such thing in step 1
    assert run.generated.tokens == model.generate_batch(prompts, 4, **settings).tokens
    assert any(work.mtp for work in run.works) == speculative
    if speculative:
        request, token, token_id, _ = origins_of_tensor_row(run, "layers.3.attn_proj.norm", 4)
        # the MTP layer's rows are shifted: slot 0 of request 1 holds its token 1
        assert (request, token, token_id) == (1, 0, int(prompts[1][1]))


def test_a_failing_operation_leaves_one_before_it():
    run = stepper()
    run.until(stage="combine_send")
    before = len(run.operations)
    rows = run.values["expert_rows"]
    run.values["expert_rows"] = rows[:-1]
    with pytest.raises(ValueError):  # noqa: PT011 - any
        run.next()
    assert not run.done
    assert run.next().stage.name == "combine_send"  # ran again, from the start, with what it had made
    assert len(run.operations) == before + 1
    assert run.until().reason == "end"


def test_an_interrupt_in_an_operation_leaves_one_before_it(monkeypatch):
    run = stepper()
    expected = tiny_model().forward(some_ids(5, seed=5)).tobytes()
    run.until(stage="merge")
    with monkeypatch.context() as patch:
        patch.setattr("refmodel.layer.add_branch", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.next()
        with pytest.raises(KeyboardInterrupt):  # also in running again what came before
            run.next()
    assert run.next().stage.name == "merge"
    run.until()
    assert run.steps[0].logits.tobytes() == expected


def test_first_nan():
    model, ids = tiny_model(), some_ids(5)
    run = Stepper(model, [ids])
    assert run.until(check=has_nan).reason == "end"
    run.restart()
    run.until(layer=2)
    hidden = run.values["hidden"].copy()
    hidden[3, 7] = np.nan
    hidden[4, 1] = np.inf
    run.values["hidden"] = hidden
    with np.errstate(all="ignore"):
        stop = run.until(check=has_nan)
    assert stop.tensor == "layers.2.attn_proj.norm"
    assert stop.detail.endswith("of 240, first at [3, 0]")


def test_first_difference_from_a_golden():
    model, ids = tiny_model(numerics="bfloat16"), some_ids(6)
    with record() as tensors:
        model.forward(ids)
    golden = dict(tensors)
    check = Golden(golden)
    assert Stepper(model, [ids]).until(check=check).reason == "end"
    assert check.compared == len(golden)
    wrong = golden["layers.1.merge.moe"].copy()
    wrong[2, 5] += 64
    golden["layers.1.merge.moe"] = wrong
    stop = Stepper(model, [ids]).until(check=Golden(golden))
    assert stop.tensor == "layers.1.merge.moe"
    assert stop.detail.difference.worst_abs.index == (2, 5)
    small = golden["layers.0.mlp.out"].copy()
    small[0, 0] = np.nextafter(small[0, 0].astype(np.float32) * np.float32(1.01), np.float32(0)).astype(small.dtype)
    assert small[0, 0] != golden["layers.0.mlp.out"][0, 0]
    golden["layers.0.mlp.out"] = small
    assert Stepper(model, [ids]).until(check=Golden(golden)).tensor == "layers.1.merge.moe"  # within the tolerance
    assert Stepper(model, [ids]).until(check=Golden(golden, exact=True)).tensor == "layers.0.mlp.out"
    with pytest.raises(ValueError, match=r"embed\.hidden has 6 rows, this run makes 5"):
        Golden(golden).check_rows(5, 4, "embed.hidden")
    with pytest.raises(ValueError, match="has no tensor 'x'"):
        Golden(golden).judge(tensors, "x")


def test_where_a_token_went_on_one_rank():
    run = stepper(counts=(3, 4))
    run.until(stage="experts", layer=1)
    topk_idx = run.tensors["layers.1.attn_core.router.topk_idx"]  # [7, 4]
    weights = run.tensors["layers.1.attn_core.router.topk_weights"]
    pairs = run.values["pairs"]
    for origin in whereabouts(run, request=1, token=2):
        assert origin.expert == topk_idx[5, origin.slot]  # 3 rows of request 0 before it
        assert origin.weight == weights[5, origin.slot]
        assert (origin.rank, origin.source, origin.layer, origin.row) == (0, 0, 1, 5)
        assert (pairs.row[origin.pair], pairs.expert[origin.pair]) == (5, origin.expert)
        assert origin.tensor_row == 5 * 4 + origin.slot
    assert [origin.slot for origin in origins_of_row(run, 0, 5)] == sorted(range(4), key=lambda slot: topk_idx[5, slot])
    run.next()
    request, token, token_id, origins = origins_of_tensor_row(run, "layers.1.experts.out", 21)
    assert (request, token, token_id) == (1, 2, int(some_ids(4, seed=4)[2]))
    assert [(origin.slot, origin.expert) for origin in origins] == [(1, topk_idx[5, 1])]
    assert origins_of_tensor_row(run, "layers.1.attn_core.norm", 3)[:2] == (1, 0)


def test_where_a_token_went_before_it_arrives():
    run = stepper()
    with pytest.raises(ValueError, match="token 1 of request 0 was not routed in any layer so far"):
        whereabouts(run, 0, 1)
    run.until(stage="dispatch_send")
    assert all(origin.rank is None for origin in whereabouts(run, 0, 1))
    with pytest.raises(ValueError, match="rank 0 has received no rows so far"):
        origins_of_row(run, 0, 0)
    for request, token, words in [(0, 5, "computes tokens 0 to 4 of request 0"), (2, 0, "this pass has requests 0")]:
        with pytest.raises(ValueError, match=words):
            whereabouts(run, request, token)
    run.until(stage="experts")
    with pytest.raises(ValueError, match="row 5: rank 0 received 5 rows in layer 1"):
        origins_of_row(run, 0, 5)
    with pytest.raises(ValueError, match="no tensor 'x' so far"):
        origins_of_tensor_row(run, "x", 0)
    with pytest.raises(ValueError, match="has no row 5 so far"):
        origins_of_tensor_row(run, "embed.hidden", 5)


@pytest.mark.parametrize("command", ["c", "n\nr\nc", "n\nn\nn\nn\nn\nn\nn\nn\nn\nn\nn\nn"])
def test_pdb_runs_the_next_operation_in_its_first_line(command):
    run, out = stepper(), io.StringIO()
    expected = tiny_model().forward(some_ids(5, seed=5)).tobytes()
    run.until(stage="merge")
    run.debug(pdb.Pdb(stdin=io.StringIO(f"p sorted(values)[0]\n{command}\n"), stdout=out, skip=["refmodel.stepper.*"]))
    assert "merge()" in out.getvalue()
    assert run.last.stage.name == "merge"
    run.until()
    assert run.steps[0].logits.tobytes() == expected


def test_pdb_inside_an_operation_stops_where_the_tensor_is_named():
    run, out = stepper(), io.StringIO()
    run.until("layers.1.attn_core.out")
    run.debug(pdb.Pdb(stdin=io.StringIO("p out.shape\np 'residual' in dir()\nc\n"), stdout=out))
    assert "attn_core()" in out.getvalue()
    assert "(5, 48)" in out.getvalue()
    assert (run.last.stage.name, run.inside) == ("attn_core", None)
    assert run.until().reason == "end"


def test_quitting_pdb_leaves_one_before_the_operation():
    run = stepper()
    run.until(stage="experts")
    with pytest.raises(bdb.BdbQuit):
        run.debug(pdb.Pdb(stdin=io.StringIO("n\nn\nq\n"), stdout=io.StringIO()))
    assert run.next().stage.name == "experts"
    assert run.until().reason == "end"
    run.debug(pdb.Pdb(stdin=io.StringIO(""), stdout=io.StringIO()))  # at the end there is nothing to run


def test_refusals():
    model = tiny_model()
    with pytest.raises(ValueError, match="no prompts"):
        Stepper(model, [])
    with pytest.raises(ValueError, match="token id 100 at position 1"):
        Stepper(model, [[3, 100]])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        Stepper(model, [[]], 3)
    run = stepper()
    for target, words in [
        (dict(stage="moe"), "stage 'moe': must be one of embed, "),
        (dict(layer=4), "layer 4: this model has layers 0 to 3"),
        (dict(rank=1), "rank 1: this run has ranks 0 to 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            run.until(**target)
    assert len(run.operations) == 0

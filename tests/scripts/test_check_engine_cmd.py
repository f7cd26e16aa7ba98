import json
from dataclasses import replace

import numpy as np
import pytest
from engine_mistakes import WRONG, WRONG_ROUTING, routes
from engine_oracle import CONFIG, TOKENS, fake_capture, write_small_checkpoint

from refmodel.golden.mistakes import MISTAKES
from refmodel.model import Model
from scripts.engine_check import check_capture


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_checkpoint(tmp_path_factory.mktemp("engine") / "model")


def check(folder, captured, like="hf", **options):
    return check_capture(captured, folder, prompts=lambda config: [TOKENS], engine=like, like=like, **options)


def test_an_engine_that_computes_as_we_do_agrees(folder):
    model = Model.from_pretrained(folder, numerics="float32", compute="float32", like="hf")
    result = check(folder, fake_capture(model, mtp=True), mtp=True)
    assert result.ok
    assert result.headline.startswith("equal: ")
    assert set(result.worst) == {"embed", "layers.0", "layers.1", "layers.2", "final"}
    assert max(value for _, value in result.worst.values()) < 1e-4
    assert 0 < result.logits < 1e-4
    json.dumps(result.to_json())


@pytest.mark.parametrize("like", ["hf", "vllm", "mlx"])
def test_in_bfloat16_operators_are_held_to_their_own_inputs(folder, like):
    """Drift is no difference; the other side of a rounding is not seen as a fault either, but is counted."""
    model = Model.from_pretrained(folder, numerics="bfloat16", compute="float32", like=like)
    result = check(folder, fake_capture(model, mtp=like != "mlx"), like, dtype="bfloat16", mtp=like != "mlx")
    assert result.ok, result.details
    assert result.headline.startswith("every operator holds on its own inputs: ")


def test_in_bfloat16_the_wrong_operator_is_named(folder):
    captured = fake_capture(Model.from_pretrained(folder, numerics="bfloat16", like="hf"))
    name = "layers.1.attn_core.out"
    tensors = {**captured.tensors, name: captured.tensors[name] * 2}
    result = check(folder, replace(captured, tensors=tensors, ranks=(tensors,)), dtype="bfloat16")
    assert not result.ok
    assert (result.first, result.mistake) == (name, "o_reduced_twice")
    assert result.details[0] == "operator: o_proj, layer 1"
    expected, actual = (float(part.split()[-1]) for part in result.details[2].split(", actual"))
    assert actual == 2 * expected
    assert result.details[-1].startswith("cause: it equals ours added up twice over the ranks (which leaves 0 of ")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.mistake}-{wrong.like}")
def test_every_wrong_engine_is_found_and_its_mistake_named(folder, wrong):
    model = Model.from_pretrained(folder, numerics="float32", like=wrong.like)
    result = check(folder, fake_capture(wrong.change(model), wrong.mtp), wrong.like, mtp=wrong.mtp)
    assert not result.ok
    assert result.mistake == wrong.mistake, result.details
    assert result.cause == next(mistake.text for mistake in MISTAKES if mistake.name == wrong.mistake)


def with_routing(captured, layer, ids, weights):
    """The capture with another selection of experts in one layer, and what follows from it left out."""
    tensors = dict(captured.tensors)
    names = list(tensors)
    prefix = f"layers.{layer}.attn_core.router."
    for name in names[names.index(f"{prefix}topk_weights") + 1 :]:
        del tensors[name]
    tensors[f"{prefix}topk_idx"], tensors[f"{prefix}topk_weights"] = ids, weights.astype(np.float32)
    return replace(captured, tensors=tensors, ranks=(tensors,))


@pytest.mark.parametrize("wrong", WRONG_ROUTING[1:], ids=lambda wrong: wrong.mistake)
def test_every_wrong_routing_is_found_and_named(folder, wrong):
    model = Model.from_pretrained(folder, numerics="float32", like="hf")
    captured = fake_capture(model)
    bias = model.weights.layer(1).correction_bias
    ids, weights = routes(captured.tensors["layers.1.attn_core.router.logits"], bias, CONFIG, wrong)
    result = check(folder, with_routing(captured, 1, ids, weights))
    assert not result.ok
    assert result.first.startswith("layers.1.attn_core.router.topk_")
    assert result.mistake == wrong.mistake


def test_zero_fill_shows_only_where_choices_are_negative():
    """vllm-project/vllm#13474: two groups of two experts, one group kept; all choices negative but for the bias."""
    config = replace(CONFIG, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    logits = np.log([[0.8 / 0.2, 0.6 / 0.4, 0.7 / 0.3, 0.1 / 0.9]])  # scores .8 .6 | .7 .1
    right, zero_fill = replace(WRONG_ROUTING[0], masked=-np.inf), WRONG_ROUTING[0]
    for bias, expected in ((0.0, [0, 1]), (-3.0, [2, 3])):
        ids, _ = routes(logits, np.full(4, bias), config, zero_fill)
        assert ids.tolist() == [expected]
    ids, weights = routes(logits, np.full(4, -3.0), config, right)
    assert ids.tolist() == [[0, 1]]
    assert np.allclose(weights, [[0.8 / 1.4 * 2.5, 0.6 / 1.4 * 2.5]])


def test_rope_is_named_where_only_the_rotated_part_differs(folder):
    model = Model.from_pretrained(folder, numerics="float32", like="hf")
    captured = fake_capture(model)
    q = captured.tensors["layers.0.attn_proj.q"].copy()
    q[5:, 1, -1] += 1
    captured.tensors["layers.0.attn_proj.q"] = q
    result = check(folder, captured)
    assert result.first == "layers.0.attn_proj.q"
    assert result.details[0].startswith("operator: RoPE of the query, layer 0")
    assert result.details[1] == f"first wrong token 5 (id {TOKENS[5]})"
    assert result.details[2].startswith(f"at [5, 1, {CONFIG.qk_head_dim - 1}] expected ")
    assert result.cause is None


def test_the_rank_that_is_wrong_is_named(folder):
    captured = fake_capture(Model.from_pretrained(folder, numerics="float32", like="hf"))
    name = "layers.0.attn_proj.q"
    whole = captured.tensors[name].copy()
    whole[3, 1, 0] += 1  # head 1 lives on rank 1
    ranks = ({**captured.tensors, name: whole[:, :1]}, {**captured.tensors, name: whole[:, 1:]})
    captured.result.joins[name] = "concat:1"
    result = check(folder, replace(captured, tensors={**captured.tensors, name: whole}, ranks=ranks))
    assert "rank 1 holds it" in result.details


def test_generated_tokens_and_drafts_are_compared(folder):
    model = Model.from_pretrained(folder, numerics="float32", like="hf")
    generated = model.generate_batch([TOKENS], 6, speculative=True)
    counters = {
        "vllm:spec_decode_num_draft_tokens": generated.drafted,
        "vllm:spec_decode_num_accepted_tokens": generated.accepted,
    }
    plain = check(folder, fake_capture(model, generated=generated.tokens), new_tokens=6)
    assert plain.ok, plain.details
    wrong = [[*generated.tokens[0][:-1], (generated.tokens[0][-1] + 1) % 300]]
    result = check(folder, fake_capture(model, generated=wrong), new_tokens=6)
    assert not result.ok
    assert any("new token 5" in line for line in result.details)
    drafts = [[0] * generated.drafted]
    result = check(
        folder,
        fake_capture(model, True, generated=generated.tokens, counters=counters, drafts=drafts),
        new_tokens=6,
        mtp=True,
    )
    assert not result.ok
    assert result.speculation["drafted"] == result.speculation["engine_drafted"]
    assert not result.speculation["drafts_equal"]


def test_logprobs_are_reported(folder):
    model = Model.from_pretrained(folder, numerics="float64")
    logits = model.forward(TOKENS)[:-1]
    logprobs = logits[range(39), TOKENS[1:]] - np.log(np.exp(logits).sum(axis=1))
    result = check(folder, fake_capture(model, logprobs=logprobs.tolist()))
    assert any(note.startswith("log-probabilities of 39 prompt tokens differ by at most") for note in result.notes)

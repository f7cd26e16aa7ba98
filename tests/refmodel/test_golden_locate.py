import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

from refmodel import Model, ModelConfig, record
from refmodel.generate import generate
from refmodel.golden import Step, locate
from refmodel.golden.mistakes import MISTAKES, VARIANTS
from refmodel.golden.mutants import Engine, Mutant, example_engine, score, summary
from refmodel.golden.operators import Context, mtp_operators, operators
from refmodel.golden.replay import Replay
from refmodel.presets import EXAMPLE
from refmodel.random_weights import RandomTensors
from refmodel.switches import ENGINES

NUMERICS = ("float64", "float32", "bfloat16", "fp8")
IDS = np.frombuffer(b"one two three four five six seven", np.uint8).astype(np.int64)


def recorded(model, ids=IDS):
    with record() as tensors:
        model.forward(ids)
    return {name: tensors[name] for name in tensors}


# the two decompositions of one model, by stages and by tensors, are held to each other
@pytest.mark.parametrize("numerics", NUMERICS)
def test_every_operator_makes_the_recorded_bits(numerics):
    check_operators(Model.from_pretrained(EXAMPLE, numerics=numerics))


@pytest.mark.parametrize("like", ENGINES)
def test_every_operator_takes_the_sides_of_an_engine(like):
    check_operators(Model.from_pretrained(EXAMPLE, numerics="bfloat16", like=like))


def check_operators(model):
    tensors = recorded(model)
    context = Context(model, IDS, (len(IDS),))
    made = {}
    for op in operators(model):
        made |= dict(zip(op.outputs, op.run(context, *(tensors[name] for name in op.inputs))))
    assert sorted(made) == sorted(tensors)
    for name, array in tensors.items():
        assert (made[name].dtype, made[name].shape) == (array.dtype, array.shape), name
        assert made[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("like", [None, "vllm"])
def test_mtp_operators_make_the_recorded_bits(like):
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16", like=like)
    main = recorded(model)
    shifted = np.roll(IDS, -1)
    with record() as tensors:
        model.mtp_logits(shifted, main["final.norm"])
    tensors = main | {name: tensors[name] for name in tensors}
    shift = model.numerics.switches.mtp_position_shift
    context = Context(model, shifted, (len(IDS),), position_shift=shift)
    for op in mtp_operators(model):
        for name, array in zip(op.outputs, op.run(context, *(tensors[name] for name in op.inputs))):
            assert array.tobytes() == tensors[name].tobytes(), name


def test_requests_and_the_absorbed_form_are_replayed():
    model = Model.from_pretrained(EXAMPLE, numerics="fp8")
    cache = model.new_cache()
    with record() as tensors:
        model.forward(IDS, cache, phase="decode")
    assert locate(model, dict(tensors), token_ids=IDS, phase="decode").ok
    assert not locate(model, dict(tensors), token_ids=IDS, phase="prefill").ok
    with pytest.raises(ValueError, match="add up to 5 rows; there are 33"):
        locate(model, dict(tensors), token_ids=IDS, lengths=(2, 3))


def test_a_sound_engine_holds_to_the_bit_and_drift_is_no_fault():
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    same = locate(model, recorded(model), token_ids=IDS)
    assert same.ok
    assert same.headline.startswith("every operator holds on its own inputs")
    assert set(same.report.counts()) == {"identical"}
    # every input of every operator off by noise: each still follows from its own inputs
    drifted = recorded(Model.from_pretrained(EXAMPLE, numerics="bfloat16", compute="float32"))
    assert locate(model, drifted, token_ids=IDS).ok


@functools.cache
def engine(numerics="bfloat16"):
    return example_engine(numerics, tokens=24)


def mutant(name, tensor, rank=None):
    return Mutant(next(m for m in MISTAKES if m.name == name), tensor, rank)


# vllm-project/vllm#12002, huggingface/transformers#41647
def test_the_headline_names_tensor_and_cause():
    made = engine()
    tensors = made.run(mutant("bias_in_weights", "layers.2.attn_core.router.topk_idx"))
    location = made.locate(tensors)
    assert location.exit_code == 1
    assert location.headline.startswith("layers.2.attn_core.router.topk_weights does not follow from its inputs")
    assert "it equals ours with the correction bias left in" in location.headline
    assert location.to_json()["findings"][0]["mistake"] == "bias_in_weights"


def test_weights_of_an_engine_with_another_order_of_slots_are_diagnosed():
    made = engine()
    tensors = dict(made.run(mutant("factor_squared", "layers.2.attn_core.router.topk_idx")))
    for name in ("topk_idx", "topk_weights"):
        name = f"layers.2.attn_core.router.{name}"
        tensors[name] = tensors[name][:, ::-1].copy()
    location = made.locate({n: x for n, x in tensors.items() if ".experts." not in n})
    assert location.first.name == "layers.2.attn_core.router.topk_weights"
    assert location.findings[0].mistake == "factor_squared"


def test_what_was_not_captured_is_bridged_and_the_cause_still_found():
    made = engine()
    tensors = made.run(mutant("mscale_missing", "layers.1.attn_core.heads"))
    sparse = {n: x for n, x in tensors.items() if n.endswith(("residual", "hidden", "logits"))}
    location = made.locate(sparse)
    assert location.first.name == "layers.1.attn_core.residual"
    assert (location.findings[0].mistake, location.findings[0].tensor) == ("mscale_missing", "layers.1.attn_core.heads")
    assert "with mscale missing in the softmax scale, at layers.1.attn_core.heads" in location.headline
    assert any("not captured and are recomputed" in note for note in location.report.notes)


def test_dumps_in_a_wider_dtype_are_taken_as_they_are():
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    tensors = {n: x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x for n, x in recorded(model).items()}
    assert locate(model, tensors, token_ids=IDS).ok


def test_without_token_ids_the_embedding_is_taken_as_given():
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    location = locate(model, recorded(model))
    assert location.ok
    assert "embed.hidden" not in [r.name for r in location.report.results]


def test_what_cannot_be_located_is_refused():
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    tensors = recorded(model)
    with pytest.raises(ValueError, match="none of its 1 tensors"):
        locate(model, {"something": np.zeros(3)}, token_ids=IDS)
    with pytest.raises(ValueError, match="how many tokens"):
        locate(model, {"something": np.zeros(3)})
    with pytest.raises(ValueError, match="phase='train'"):
        locate(model, tensors, phase="train")
    with pytest.raises(ValueError, match="do not fit the model"):
        locate(model, tensors | {"embed.hidden": tensors["embed.hidden"][:, :100]})
    wrong = locate(model, tensors | {"layers.0.attn_core.out": tensors["layers.0.attn_core.out"][:5]}, token_ids=IDS)
    assert "layers.0.attn_core.out has shape [5, 256], [33, 256] follows" in wrong.headline


def corrupted(kind, x):
    x = x.copy()
    half = len(x) // 2
    if kind == "block":
        x[:, :128] = 0
    elif kind == "row":
        x[half] = x[half - 1]
    elif kind == "swap":
        x[[2, 3]] = x[[3, 2]]
    elif kind == "nan":
        x[half, 0] = np.nan
    elif kind == "last":
        x[-1] *= 2
    elif kind == "tail":
        x[half:] = 0
    return x


# faults that no table knows: a block, a row, two rows, one element, the last token
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("block", "layers.0.attn_core.out"),
        ("row", "layers.1.shared.out"),
        ("swap", "layers.2.combine_recv.routed"),
        ("nan", "layers.0.attn_proj.q_a"),
        ("last", "layers.1.experts.out"),
        ("tail", "final.norm"),
    ],
)
def test_unknown_faults_are_located_and_not_explained_away(kind, name):
    made = engine()
    wrong = corrupted(kind, made.clean[name])
    op = next(o for o in made.operators if name in o.outputs)
    before = {}
    for o in made.operators:
        if o is op:
            break
        before |= {n: made.clean[n] for n in o.outputs}
    tensors = made._run(before | {name: wrong}, {}, None)
    assert made.locate(tensors).first.name == name


class TiedTensors(RandomTensors):
    """Every odd expert is routed to like the even one before it: exact ties in every row."""

    def array(self, name):
        x = super().array(name)
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            x = x.copy()
            x[1::2] = x[0::2]
        return x


def flipped(tensors, rng):
    """Another choice at ties, and the slots of each row in another order, as an engine may have them."""
    tensors = dict(tensors)
    for name in [n for n in tensors if n.endswith("topk_idx")]:
        idx = tensors[name]
        twin = idx ^ 1
        alone = (twin[:, :, None] != idx[:, None, :]).all(axis=2)  # the twin was not chosen: either would do
        idx = np.where(alone & (rng.random(idx.shape) < 0.5), twin, idx)
        order = rng.permuted(np.tile(np.arange(idx.shape[1]), (len(idx), 1)), axis=1)
        weights = name.replace("topk_idx", "topk_weights")
        tensors[name] = np.take_along_axis(idx, order, axis=1)
        tensors[weights] = np.take_along_axis(tensors[weights], order, axis=1)
    return tensors


def noisy_engine(seed, numerics):
    """A sound engine: float32 arithmetic, other choices at ties, slots in another order."""
    config = ModelConfig.preset("tiny")
    parts = [Model.random(config, seed, numerics=numerics, compute=c) for c in ("float64", "float32")]
    models = [type(m)(TiedTensors(config, seed), config, m.numerics) for m in parts]
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, 20)
    made = Engine(*models, ids, (13, 7))
    return made, rng


def sound_run(seed, numerics):
    made, rng = noisy_engine(seed, numerics)
    tensors: dict = {}
    for context, ops in ((made.context, made.operators), (made.mtp_context, made.mtp_operators)):
        for op in ops:
            outputs = dict(zip(op.outputs, Replay(context, tensors, ops).run(op)))
            tensors |= flipped(outputs, rng) if op.kind == "router" else outputs
    return made.locate(tensors, diagnose=False)


@pytest.mark.parametrize("numerics", ["float32", "bfloat16", "fp8"])
def test_sound_runs_raise_no_alarm(numerics):
    for seed in range(2):
        location = sound_run(seed, numerics)
        assert location.ok, location.headline
        assert location.report.counts().get("tie", 0) >= 1


@pytest.mark.long
def test_fifty_sound_runs_raise_no_alarm():
    alarms = []
    for seed in range(51):
        location = sound_run(100 + seed, ("float32", "bfloat16", "fp8")[seed % 3])
        alarms += [] if location.ok else [location.headline]
    assert alarms == []


SAMPLE = (
    ("norm_weight_twice", "layers.1.attn_proj.norm", None),
    ("rope_pairing", "layers.0.attn_proj.k_pe", None),
    ("rope_position_plus_1", "layers.2.attn_proj.q", 3),
    ("kv_b_split", "layers.0.attn_core.heads", None),
    ("lse_base_2", "layers.1.attn_core.heads", None),
    ("mask_leak", "layers.0.attn_core.heads", None),
    ("residual_missing", "layers.1.merge.residual", 1),
    ("factor_squared", "layers.2.attn_core.router.topk_idx", None),
    ("scale_rounded_late", "layers.1.dispatch_send.codes", None),
    ("codes_fnuz", "layers.1.dispatch_send.codes", None),
    ("expert_local_ids", "layers.2.experts.gate", None),
    ("combine_counted_twice", "layers.1.combine_recv.routed", 2),
    ("shared_per_rank_8", "layers.2.merge.moe", None),
    ("eh_proj_order", "layers.3.mtp_embed.hidden", None),
)


def test_a_sample_of_planted_faults_is_located_and_diagnosed():
    made = engine("fp8")
    outcomes = score(made, [mutant(*sample) for sample in SAMPLE])
    assert len(outcomes) == len(SAMPLE)
    assert all(o.located and o.diagnosed for o in outcomes), summary(outcomes)


@pytest.mark.long
@pytest.mark.parametrize("numerics", ["float32", "fp8"])
def test_all_planted_faults_are_located_and_nine_in_ten_diagnosed(numerics):
    made = engine(numerics)
    mutants = list(made.mutants())
    if numerics == "fp8":  # what FP8 adds, and a third of the rest
        mutants = [m for i, m in enumerate(mutants) if i % 3 == 0 or "quantize" in m.mistake.kinds]
    outcomes = [o for o in score(made, mutants) if not o.equal]
    assert len({o.mutant.mistake.name for o in outcomes}) >= 60
    assert all(o.located for o in outcomes), summary(outcomes)
    assert sum(o.diagnosed for o in outcomes) >= 0.9 * len(outcomes), summary(outcomes)


def speculative_run(model):
    """All tensors of a prefill and the decode steps after it, two requests, and what stood in each step."""
    steps = []

    class Watched:
        config, new_cache = model.config, staticmethod(model.new_cache)
        mtp_step = staticmethod(model.mtp_step)

        @staticmethod
        def step(items, phase, prefix=""):
            steps.append((items, phase))
            return model.step(items, phase, prefix)

    with record() as tensors:
        generate(Watched, [IDS[:9], IDS[9:14]], 6, speculative=True)
    described = [
        Step(
            tuple(len(i.token_ids) for i in items),
            np.concatenate([i.token_ids for i in items]),
            phase,
            tuple(i.request for i in items),
            tuple(i.slot for i in items),
        )
        for items, phase in steps
    ]
    return {name: tensors[name] for name in tensors}, described


# vllm-project/vllm#47448: faults that show only in decode
@pytest.mark.parametrize("numerics", ["fp8", "float32"])
def test_later_steps_are_replayed_from_the_cache_of_those_before(numerics):
    model = Model.from_pretrained(EXAMPLE, numerics=numerics)
    tensors, (first, *later) = speculative_run(model)
    assert len(later) >= 3
    assert any(length > 1 for step in later for length in step.lengths)
    options = dict(token_ids=first.token_ids, lengths=first.lengths, steps=later)
    location = locate(model, tensors, **options)
    assert location.ok, location.headline
    main = [r for r in location.report.results if r.name.startswith("step.2.")]
    assert len(main) > 50
    assert {r.status for r in main} == {"identical"}
    name = "step.2.layers.1.attn_core.heads"
    rows = tensors[name]
    wrong = {**tensors, name: np.roll(rows, 1, axis=1)}
    assert locate(model, wrong, **options).first.name == name
    stale = {
        **tensors,
        "step.1.layers.1.attn_proj.k_pe": tensors["step.1.layers.1.attn_proj.k_pe"] * rows.dtype.type(1.5),
    }
    found = locate(model, stale, **options)
    assert found.first.name == "step.1.layers.1.attn_proj.k_pe"


def test_steps_that_cannot_be_are_refused():
    model = Model.from_pretrained(EXAMPLE, numerics="bfloat16")
    tensors = recorded(model)
    for step, words in ((Step((1, 1)), "there are"), (Step((1,), slots=(99,)), "behind the ends")):
        with pytest.raises(ValueError, match=words):
            locate(model, tensors, token_ids=IDS, steps=[step])
    options = dict(token_ids=IDS, mtp_token_ids=IDS)
    for steps, words in (
        ([Step((1,), mtp_token_ids=IDS[:2])], r"step 1: mtp_token_ids \(2,\) must be one for each of 1 rows"),
        ([Step((1,)), Step((1,), mtp_token_ids=IDS[:1])], "step 2: mtp_token_ids are stated for 1 of the 2 passes"),
    ):
        with pytest.raises(ValueError, match=words):
            locate(model, tensors, steps=steps, **options)
    with pytest.raises(ValueError, match="step 1: mtp_token_ids are stated for 0 of the 1 passes"):
        locate(model, tensors, token_ids=IDS, steps=[Step((1,), mtp_token_ids=IDS[:1])])


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"n_shared_experts": 0},
        {"first_k_dense_replace": 0},
        {"n_group": 1, "topk_group": 1},
        {"rope_scaling": None},
        {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_members_of_the_family_are_replayed(changes):
    config = dataclasses.replace(ModelConfig.preset("tiny"), **changes)
    model = Model.random(config, 3, numerics="bfloat16")
    ids = np.arange(11) * 7 % config.vocab_size
    tensors = recorded(model, ids)
    location = locate(model, tensors, token_ids=ids)
    assert location.ok, location.headline
    assert set(location.report.counts()) == {"identical"}
    judged = {r.name for r in location.report.results}
    assert {n for n in tensors if not n.endswith("margin")} == judged


# transformers' eager attention in bfloat16, and heads that give bfloat16 logits, are no faults
@pytest.mark.parametrize(("name", "kind"), [("scores_narrow", "attention"), ("logits_narrow", "logits")])
def test_what_sound_engines_do_differently_is_recognised(name, kind):
    made = engine("bfloat16")
    variant = next(v for v in VARIANTS if v.name == name)
    op = next(o for o in made.operators if o.kind == kind)
    tensors = made.run(Mutant(variant, op.outputs[0], None))
    location = made.locate(tensors)
    assert location.ok, location.headline
    assert f"of them {variant.text}, first {op.outputs[0]}" in location.headline
    wrong = {**tensors, op.outputs[0]: tensors[op.outputs[0]] * tensors[op.outputs[0]].dtype.type(1.05)}
    assert made.locate(wrong).first.name == op.outputs[0]

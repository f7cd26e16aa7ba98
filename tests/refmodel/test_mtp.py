"""The MTP layer: pairing of tokens and states, order of the two halves, and its switches."""

import model_oracle
import numpy as np
import pytest
from tiny import TINY, some_ids, tiny_model

from refmodel import record
from refmodel.layer import run_stage
from refmodel.mtp import MTP_EMBED
from refmodel.numerics import Numerics
from refmodel.random_weights import RandomTensors
from refmodel.state import Batch, State
from refmodel.trace import Scope


def states_and_shifted(model, ids):
    with record() as tensors:
        model.forward(ids)
    return tensors["final.norm"], np.append(ids[1:], 7)


def test_equals_the_oracle():
    ids = some_ids(9)
    states, shifted = states_and_shifted(tiny_model(), ids)
    expected = model_oracle.mtp(RandomTensors(TINY, 0), TINY, shifted, states)
    got = tiny_model().mtp_logits(shifted, states)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_a_constant_shift_of_positions_changes_nothing():
    # so position tests must check the pairing, not the offset
    ids = some_ids(20)
    states, shifted = states_and_shifted(tiny_model(), ids)
    own, previous = (tiny_model(), tiny_model(like="sglang"))
    assert own.numerics.switches.mtp_position_shift == 1
    assert previous.numerics.switches.mtp_position_shift == 0
    a, b = own.mtp_logits(shifted, states), previous.mtp_logits(shifted, states)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(a).max())


def test_position_0_is_kept_by_default_and_zeroed_like_vllm():
    # vllm-project/vllm#33299: row 0 holds the real token t_1
    ids = some_ids(24)
    states, shifted = states_and_shifted(tiny_model(), ids)
    kept, zeroed = tiny_model(like="hf"), tiny_model(like="vllm")
    with record() as tensors:
        zeroed.mtp_logits(shifted, states)
    assert (tensors["layers.3.mtp_embed.enorm"][0] == 0).all()
    difference = np.abs(kept.mtp_logits(shifted, states) - zeroed.mtp_logits(shifted, states)).max(axis=1)
    assert (difference > 1e-6).all()  # through attention it reaches every later row


class _Weights:
    """Just enough weights for the stage before the layer: D = 2."""

    def __init__(self, eh_proj):
        from refmodel.linear import DenseWeight

        self.embedding = np.array([[3.0, 4.0], [1.0, 7.0]])
        self.config = type("Config", (), dict(rms_norm_eps=1e-6))
        self.numerics = Numerics("float64")
        self._layer = type(
            "Layer", (), dict(enorm=np.ones(2), hnorm=np.ones(2), eh_proj=DenseWeight.from_rows(np.asarray(eh_proj)))
        )

    def layer(self, index):
        return self._layer


@pytest.mark.parametrize(
    ("eh_proj", "expected"),
    [([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], "embedding"), ([[0, 0, 1.0, 0], [0, 0, 0, 1.0]], "hidden")],
)
def test_embedding_comes_first(eh_proj, expected):
    # NVIDIA/Megatron-LM#1588: the paper's figure has it the other way round
    batch = Batch(np.array([0]), np.array([1]), (), "prefill")
    state = State(_Weights(eh_proj), batch, None, Scope(), {"mtp_input": np.array([[1.0, -1.0]])})
    run_stage(state, MTP_EMBED, 5)
    want = np.array([[3.0, 4.0]]) / np.sqrt(12.5) if expected == "embedding" else np.array([[1.0, -1.0]])
    np.testing.assert_allclose(state.values["hidden"], want, rtol=1e-5)


def test_state_before_or_after_the_final_norm():
    # deepseek-ai/DeepSeek-V3#839
    from dataclasses import replace

    from refmodel.generate import Item
    from refmodel.model import Model
    from refmodel.numerics import Switches

    ids, results = some_ids(6), {}
    for kind in ("post_norm", "pre_norm"):
        numerics = Numerics("float64", switches=Switches(mtp_hidden=kind))
        model = Model(RandomTensors(TINY, 0), TINY, numerics)
        with record() as tensors:
            results[kind] = model.step([Item(0, ids, model.new_cache(), 0)], "prefill")[0].hidden
        name = "final.norm" if kind == "post_norm" else "layers.2.merge.residual"
        assert results[kind].tobytes() == tensors[name].tobytes()
    assert not np.allclose(results["post_norm"], results["pre_norm"])
    # by hand: h = [1, 1], final-norm weight [1, 3], hnorm weight 1, eps 0
    from refmodel import rms_norm

    h, weight, one = np.array([[1.0, 1.0]]), np.array([1.0, 3.0]), np.ones(2)
    np.testing.assert_allclose(rms_norm(rms_norm(h, weight, 0), one, 0), [[0.4472136, 1.3416408]], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(h, one, 0), [[1.0, 1.0]])
    assert replace(TINY, num_nextn_predict_layers=0).num_layers == 3


def test_refuses_a_model_without_the_layer():
    from dataclasses import replace

    from refmodel import Model

    model = Model.random(replace(TINY, num_nextn_predict_layers=0), 0)
    with pytest.raises(ValueError, match="no MTP layer"):
        model.mtp_logits([1], np.zeros((1, 48)))
    with pytest.raises(ValueError, match="needs an MTP layer"):
        model.generate([1], 4, speculative=True)

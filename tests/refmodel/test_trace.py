import numpy as np
import pytest
from tiny import some_ids, tiny_model

from refmodel import record
from refmodel.layer import MOE_LAYER, stages_of
from refmodel.model import main_program
from refmodel.trace import Recording, Scope


def test_names_in_execution_order():
    with record() as tensors:
        tiny_model().forward(some_ids(3))
    names = list(tensors)
    assert names[0] == "embed.hidden"
    assert names[-1] == "final.logits"
    assert "layers.0.mlp.product" in names
    assert names.index("layers.2.attn_core.router.topk_idx") < names.index("layers.2.experts.out")
    for name in ("q_a", "q", "kv_a", "kv_latent", "k_pe"):
        assert f"layers.1.attn_proj.{name}" in names


def test_recording_changes_nothing_and_copies_nothing():
    model, ids = tiny_model(numerics="fp8"), some_ids(20)
    plain = model.forward(ids)
    kept = []
    with record(lambda name, array: kept.append(array)) as tensors:
        assert model.forward(ids).tobytes() == plain.tobytes()
    assert tensors["embed.hidden"] is kept[0]
    assert not tensors["layers.1.attn_core.norm"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tensors["final.logits"][0, 0] = 1


def test_parts_are_joined_by_row():
    recording = Recording()
    recording.add("x", np.array([[3], [1]]), np.array([3, 1]))
    recording.add("x", np.array([[0], [2]]), np.array([0, 2]))
    assert recording["x"].tolist() == [[0], [1], [2], [3]]
    recording.add("y", np.array([1]), np.array([0]))
    recording.add("y", np.array([2]), np.array([0]))
    with pytest.raises(ValueError, match="y: a row was recorded twice"):
        recording["y"]
    recording.add("z", np.array([1]), None)
    recording.add("z", np.array([2]), None)
    with pytest.raises(ValueError, match="z was recorded 2 times"):
        recording["z"]


def test_nothing_is_kept_without_a_recording():
    array = np.zeros(3)
    Scope("a.").emit("b", array)
    assert array.flags.writeable


class _Watched(dict):
    def __init__(self, *args):
        super().__init__(*args)
        self.read, self.wrote = set(), set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def pop(self, key, *default):
        self.read.add(key)
        return super().pop(key, *default)

    def __setitem__(self, key, value):
        self.wrote.add(key)
        super().__setitem__(key, value)


def test_stages_read_and_write_what_they_declare():
    from refmodel.experts import LocalExchange
    from refmodel.generate import Item
    from refmodel.layer import run_stage
    from refmodel.model import make_batch
    from refmodel.state import State

    model = tiny_model()
    batch = make_batch([Item(0, some_ids(4), model.new_cache(), 0)], "prefill")
    state = State(model.weights, batch, lambda layer: LocalExchange(model.numerics), Scope(), {})
    for stage, layer in main_program(model.config):
        state.values = _Watched(state.values)
        run_stage(state, stage, layer)
        assert state.values.read <= set(stage.reads), stage.name
        assert state.values.wrote <= set(stage.writes), stage.name


def test_stage_lists():
    config = tiny_model().config
    assert [stage.name for stage in stages_of(config, 0)] == ["attn_proj", "attn_core", "mlp"]
    assert stages_of(config, 1) is MOE_LAYER
    assert stages_of(config, config.num_hidden_layers) is MOE_LAYER  # the MTP layer

"""Random faults in a checkpoint: it is refused in one line, or every tensor it gives is the right one."""

import json

import numpy as np
import pytest
from checkpoint_changes import apart
from checkpoint_variants import base
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.checkpoint import Checkpoint
from refmodel.tensor_file import save_tensors

FAULTS = ["drop", "rename", "reshape", "cut", "integers", "layer", "expert", "config"]
COUNTS = [
    "num_hidden_layers",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "q_lora_rank",
    "n_group",
]
COUNTS += ["num_nextn_predict_layers", "num_attention_heads", "kv_lora_rank", "v_head_dim", "moe_intermediate_size"]


def damage(draw, variant):
    """One fault; a swap of two tensors of one shape is left out, for nothing in a header could betray it."""
    kind = draw(st.sampled_from(FAULTS))
    name = draw(st.sampled_from(sorted(variant.tensors)))
    value = variant.tensors.get(name)
    if kind == "config":
        variant.config[draw(st.sampled_from(COUNTS))] = draw(st.integers(0, 9))
        return
    if kind == "reshape":
        variant.tensors[name] = value.reshape(-1, 1) if value.ndim == 1 else value.reshape(value.shape[::-1])
        return
    if kind == "integers":
        variant.tensors[name] = np.zeros(value.shape, np.int16)
        return
    if kind == "cut":
        variant.tensors[name] = value[:-1]
        return
    del variant.tensors[name]
    if kind == "rename":
        variant.tensors[name + draw(st.sampled_from(["x", ".weight", ".bias"]))] = value
    elif kind == "layer":
        variant.tensors[name.replace("layers.2.", "layers.7.")] = value
    elif kind == "expert":
        variant.tensors[name.replace("experts.3.", "experts.9.")] = value


def right_or_refused(directory, variant, right):
    save_tensors(directory / "model.safetensors", variant.tensors)
    (directory / "config.json").write_text(json.dumps(variant.config))
    try:
        checkpoint = Checkpoint.open(directory)
    except ValueError as error:
        return str(error)
    for name in checkpoint.names():
        if checkpoint.is_fp8(name):
            read, scale = checkpoint.block_scaled(name), right[f"{name}_scale_inv"]
            assert read.codes.tobytes() == right[name].tobytes()
            assert read.scale.tobytes() == scale.tobytes()
        else:
            assert checkpoint.array(name).tobytes() == right[name].tobytes()
    return None


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@given(data=st.data(), kind=st.sampled_from(["bfloat16", "fp8"]))
@settings(max_examples=60)
def test_random_faults(directory, data, kind):
    variant = base(kind)
    apart(variant)
    right = dict(variant.tensors)
    for _ in range(data.draw(st.integers(1, 2))):
        damage(data.draw, variant)
    message = right_or_refused(directory, variant, right)
    if message is not None:
        assert message.startswith(str(directory))
        assert message.isprintable()
        assert len(message) < 600 + len(str(directory))


def test_without_a_fault_it_loads(directory):
    variant = base("fp8")
    apart(variant)
    assert right_or_refused(directory, variant, dict(variant.tensors)) is None

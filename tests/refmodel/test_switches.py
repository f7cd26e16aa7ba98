"""Every switch changes what it says, and nothing in float64 that is only an order of roundings or of storage."""

from dataclasses import fields, replace

import numpy as np
import pytest
from tiny import TINY, some_ids

from refmodel import Model, record
from refmodel.numerics import Numerics
from refmodel.random_weights import RandomTensors
from refmodel.switches import ENGINES, Switches

CONFIG = replace(TINY, rms_norm_eps=1e-3)


def run(switches, numerics="bfloat16"):
    model = Model(RandomTensors(CONFIG, 0), CONFIG, Numerics(numerics, switches=switches))
    ids = some_ids(12)
    with record() as tensors:
        model.forward(ids)
        model.mtp_logits(ids, tensors["final.norm"])
    return dict(tensors)


OTHER = {
    "inner_norm_eps": None,
    "norm_order": "cast_then_multiply",
    "norm_input": "sum",
    "rope_dtype": "activation",
    "k_pe_order": "half_split",
    "silu_dtype": "activation",
    "router_dtype": "activation",
    "router_norm_eps": 0.1,
    "routed_scale_on": "output",
    "mtp_zero_position_0": True,
    "mtp_position_shift": 0,
}
FIRST = {  # the first tensor that each one touches
    "inner_norm_eps": "layers.0.attn_proj.q_a_norm",
    "norm_order": "layers.0.attn_proj.norm",
    "norm_input": "layers.0.attn_core.norm",
    "rope_dtype": "layers.0.attn_proj.q",
    "yarn_max_seq_len": "layers.0.attn_proj.q",
    "k_pe_order": "layers.0.attn_proj.q",
    "silu_dtype": "layers.0.mlp.product",
    "router_dtype": "layers.1.attn_core.router.logits",
    "router_norm_eps": "layers.1.attn_core.router.topk_weights",
    "routed_scale_on": "layers.1.attn_core.router.topk_weights",
    "mtp_zero_position_0": "layers.3.mtp_embed.enorm",
    "mtp_position_shift": "layers.3.attn_proj.q",
}


@pytest.mark.parametrize("name", OTHER)
def test_a_switch_first_changes_its_own_tensor(name):
    default, changed = run(Switches()), run(Switches(**{name: OTHER[name]}))
    different = [key for key in default if default[key].tobytes() != changed[key].tobytes()]
    assert different[0] == FIRST[name]


ROUNDINGS = ["norm_order", "norm_input", "rope_dtype", "k_pe_order", "silu_dtype", "routed_scale_on", "router_dtype"]


@pytest.mark.parametrize("name", ROUNDINGS)
def test_orders_of_rounding_and_storage_vanish_in_float64(name):
    default, changed = run(Switches(), "float64"), run(Switches(**{name: OTHER[name]}), "float64")
    np.testing.assert_allclose(changed["final.logits"], default["final.logits"], rtol=1e-11, atol=1e-11)


def test_k_pe_order_is_the_permutation_that_hugging_face_caches():
    default, changed = run(Switches()), run(Switches(k_pe_order="half_split"))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert changed["layers.0.attn_proj.k_pe"].tobytes() == default["layers.0.attn_proj.k_pe"][:, order].tobytes()


def test_rope_that_rounds_each_step_by_hand():
    import ml_dtypes

    from refmodel import apply_rope

    bf16 = lambda value: float(np.float64(np.float32(value)).astype(ml_dtypes.bfloat16))  # noqa: E731
    x = np.array([[[1.0, 3.0]]])
    got = apply_rope(x, np.array([1]), np.array([1.0]), cast_each=np.dtype(ml_dtypes.bfloat16))
    cos, sin = bf16(np.cos(1.0)), bf16(np.sin(1.0))
    assert got.ravel().tolist() == [bf16(cos) - bf16(3 * sin), bf16(sin) + bf16(3 * cos)]


def test_silu_that_is_rounded_before_it_meets_up_by_hand():
    """silu(1.5) = 1.22636 rounds to 1.2265625; times 1.0078125 that is 1.236145..., without it 1.235945..."""
    import ml_dtypes

    from refmodel import swiglu

    gate, up = np.array([1.5]), np.array([1.0078125])
    assert swiglu(gate, up, cast_silu=ml_dtypes.bfloat16).tolist() == [1.2265625 * 1.0078125]
    assert abs(swiglu(gate, up)[0] - 1.5 / (1 + np.exp(-1.5)) * 1.0078125) < 1e-15


def test_every_engine_names_real_switches():
    names = {field.name for field in fields(Switches)}
    for engine, values in ENGINES.items():
        assert set(values) <= names
        assert Switches.like(engine) == Switches(**values)
    assert Switches.like(None) == Switches()
    with pytest.raises(ValueError, match="switch norm_order = 'x'"):
        Switches(norm_order="x")


def test_the_demo_s_rule_for_yarn():
    # deepseek-ai/DeepSeek-V3 inference/model.py: YaRN only where max_seq_len exceeds the original length (64 here)
    plain = replace(CONFIG, rope_scaling=None)
    without = Model(RandomTensors(plain, 0), plain, Numerics("float64")).forward(some_ids(12))
    for longest, expected in ((64, without), (65, run(Switches(), "float64")["final.logits"])):
        got = run(Switches(yarn_max_seq_len=longest), "float64")["final.logits"]
        assert got.tobytes() == expected.tobytes()

"""Configs: published values, every spelling read back, every contradiction refused with field, value and rule."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.config import ModelConfig, Quantization, RopeScaling
from refmodel.presets import PRESETS
from refmodel.quantization_json import is_excluded

V3 = ModelConfig.preset("v3")
TINY = ModelConfig.preset("tiny")


def test_v3_is_the_published_model():
    assert (V3.vocab_size, V3.hidden_size, V3.intermediate_size, V3.moe_intermediate_size) == (
        129280,
        7168,
        18432,
        2048,
    )
    assert (V3.num_hidden_layers, V3.first_k_dense_replace, V3.num_layers) == (61, 3, 62)
    assert (V3.n_routed_experts, V3.num_experts_per_tok, V3.n_group, V3.topk_group) == (256, 8, 8, 4)
    assert (V3.q_lora_rank, V3.kv_lora_rank, V3.qk_head_dim, V3.v_head_dim) == (1536, 512, 192, 128)
    assert V3.rope_scaling == RopeScaling(40, 4096, 32, 1, 1.0, 1.0)
    assert V3.max_position_embeddings == 4096 * 40
    assert V3.quantization_config == Quantization((128, 128), scale_fmt=None, activation_scheme="dynamic")
    assert [V3.is_moe_layer(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert ModelConfig.preset("v3.1").quantization_config.scale_fmt == "ue8m0"
    assert ModelConfig.preset("v3.2").index_topk == 2048


def test_members_of_the_family_differ_where_they_should():
    kimi, moonlight, glm = (ModelConfig.preset(name) for name in ("kimi_k2", "moonlight", "glm_4.7_flash"))
    assert (kimi.n_routed_experts, kimi.n_group, kimi.num_attention_heads) == (384, 1, 64)
    assert kimi.routed_scaling_factor == 2.827
    assert (moonlight.q_lora_rank, moonlight.rope_scaling, moonlight.rms_norm_eps) == (None, None, 1e-5)
    assert moonlight.shared_intermediate_size == 2816
    assert (glm.qk_head_dim, glm.v_head_dim, glm.num_attention_heads) == (256, 256, 20)
    assert ModelConfig.preset("example").hidden_size == 256
    assert [replace(TINY, moe_layer_freq=2).is_moe_layer(layer) for layer in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("name", [*PRESETS, "example"])
def test_a_preset_is_read_back_as_equal(name, tmp_path):
    config = ModelConfig.preset(name)
    content = json.loads(json.dumps(config.to_dict()))
    (tmp_path / "config.json").write_text(json.dumps(content))
    for source in (content, tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert ModelConfig.from_pretrained(source) == config
    expected = 1 if config.index_topk else 0
    assert len(ModelConfig.from_pretrained(content).assumed) == expected


def test_an_unknown_preset_is_refused_with_the_list():
    with pytest.raises(ValueError, match="no preset 'v4'; there are: example, v3, r1"):
        ModelConfig.preset("v4")


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        V3.hidden_size = 1


def test_the_vendors_spelling_is_v3():
    """deepseek-ai/DeepSeek-V3 inference/configs/config_671B.json, by ModelArgs' names and defaults."""
    vendor = {
        "vocab_size": 129280,
        "dim": 7168,
        "inter_dim": 18432,
        "moe_inter_dim": 2048,
        "n_layers": 61,
        "n_dense_layers": 3,
        "n_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_activated_experts": 8,
        "n_expert_groups": 8,
        "n_limited_groups": 4,
        "route_scale": 2.5,
        "score_func": "sigmoid",
        "q_lora_rank": 1536,
        "dtype": "fp8",
    }
    expected = replace(V3, num_nextn_predict_layers=0, bos_token_id=None, eos_token_id=None)
    assert ModelConfig.from_pretrained(vendor) == expected
    ue8m0 = replace(expected, quantization_config=Quantization(scale_fmt="ue8m0"))
    assert ModelConfig.from_pretrained({**vendor, "scale_fmt": "ue8m0"}) == ue8m0


def test_an_absent_mscale_is_not_a_zero_one():
    content = V3.to_dict()
    absent = {key: value for key, value in content["rope_scaling"].items() if not key.startswith("mscale")}
    read = ModelConfig.from_pretrained({**content, "rope_scaling": absent})
    assert (read.rope_scaling.mscale, read.rope_scaling.mscale_all_dim) == (None, None)
    assert [text[:30] for text in read.assumed] == ["rope_scaling.mscale: absent; i", "rope_scaling.mscale_all_dim: a"]
    zero = ModelConfig.from_pretrained({**content, "rope_scaling": {**absent, "mscale": 0, "mscale_all_dim": 0}})
    assert (zero.rope_scaling.mscale, zero.rope_scaling.mscale_all_dim) == (0, 0)
    assert zero.assumed == ()


REFUSED = {
    "vocab_size": [0, -1, 1.5, "8", True, 2**31],
    "num_attention_heads": [0, None],
    "first_k_dense_replace": [-1, 4],
    "moe_layer_freq": [0, [0, 1, 1]],
    "qk_rope_head_dim": [0, 7],
    "q_lora_rank": [-1, "none"],
    "n_group": [3, 8, 0],
    "topk_group": [5, 0],
    "num_experts_per_tok": [0, 5],
    "n_routed_experts": [7, 2**20],
    "scoring_func": ["sqrtsoftplus", 1],
    "topk_method": ["topk", ["noaux_tc"]],
    "norm_topk_prob": [1, "true"],
    "routed_scaling_factor": [0, -1.0, float("nan"), float("inf")],
    "rms_norm_eps": [0, "1e-6"],
    "rope_theta": [1, float("inf")],
    "rope_interleave": [0],
    "attention_bias": [True],
    "hidden_act": ["relu"],
    "torch_dtype": ["int8", 3],
    "bos_token_id": [64, -1, 0.5],
    "eos_token_id": [(1, 64), 99],
    "index_topk": [0],
    "num_nextn_predict_layers": [-1],
    "n_shared_experts": [-1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_cannot_be_is_refused_by_field_and_value(name, value):
    with pytest.raises(ValueError, match=r"^config: ") as error:
        replace(TINY, **{name: value})
    message = str(error.value)
    blamed = {"n_routed_experts": "n_group", "n_group": "n_group", "topk_group": "topk_group"}.get(name, name)
    assert message.startswith((f"config: {name} = {value!r}: ", f"config: {blamed} = ", f"config: {name} = "))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"factor": 0.5}, "factor = 0.5: must be >= 1"),
        ({"factor": "40"}, "factor = '40': must be a number"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0"),
        ({"beta_fast": 0.5}, "beta_fast = 0.5: must not be below beta_slow = 1"),
        ({"beta_slow": 0}, "beta_slow = 0: must be > 0"),
        ({"mscale": -1}, "mscale = -1: must be >= 0"),
    ],
)
def test_yarn_is_checked(values, words):
    with pytest.raises(ValueError, match=words):
        replace(V3.rope_scaling, **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"weight_block_size": (128,)}, "weight_block_size = \\(128,\\): must be two integers"),
        ({"weight_block_size": (128, 0)}, "must be two integers >= 1"),
        ({"scale_fmt": "e8m0"}, "scale_fmt = 'e8m0'"),
        ({"activation_scheme": "none"}, "activation_scheme = 'none'"),
    ],
)
def test_quantization_is_checked(values, words):
    with pytest.raises(ValueError, match=words):
        Quantization(**values)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for content, words in [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, not a list"),
        ("[" * 10**5, "JSON"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
            ModelConfig.from_pretrained(path)


@pytest.mark.parametrize(
    ("pattern", "module", "covered"),
    [
        ("model.layers.61*", "model.layers.61.eh_proj", True),
        ("model.layers.61*", "model.layers.61.mlp.experts.3.up_proj", True),
        ("model.layers.61*", "model.layers.610.self_attn.o_proj", False),
        ("model.layers.2.self_attn*", "model.layers.2.self_attn.o_proj", True),
        ("model.layers.2.self_attn*", "model.layers.20.self_attn.o_proj", False),
        ("model.layers.2.self_attn*", "model.layers.21.self_attn.o_proj", False),
        ("model.layers.2", "model.layers.2.mlp.up_proj", True),
        ("model.layers.2", "model.layers.21.mlp.up_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_norm", False),
        ("self_attn", "model.layers.2.self_attn.o_proj", True),
        ("*.mlp.gate", "model.layers.2.mlp.gate", True),
        ("*.mlp.gate", "model.layers.2.mlp.gate_proj", False),
        ("re:.*self_attn.*", "model.layers.2.self_attn.o_proj", True),
        ("re:.*lm_head", "model.layers.2.self_attn.o_proj", False),
        ("re:(", "model.layers.2.self_attn.o_proj", False),
    ],
)
def test_exclusion_patterns_match_whole_components(pattern, module, covered):
    """Patterns as in nvidia/DeepSeek-V3-0324-NVFP4 hf_quant_config.json, as copied by ai-dynamo/aiconfigurator."""
    assert is_excluded(pattern, module) is covered


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([0, 1, 10**400]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = sorted({*TINY.to_dict(), *V3.to_dict(), "rope_parameters", "dtype", "num_mtp_layers", "text_config", "head_dim"})
INNER = ["type", "factor", "mscale", "beta_fast", "original_max_position_embeddings", "quant_method", "ignore", "fmt"]
INNER += ["weight_block_size", "scale_fmt", "config_groups", "rope_theta", "quant_algo", "modules_to_not_convert"]


@given(data=st.data())
@settings(max_examples=400)
def test_any_json_is_a_config_or_a_clear_error(data):
    content = {**V3.to_dict(), "mlp_layer_types": None}
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*KEYS, "mlp_layer_types"]))
        if isinstance(content.get(key), dict) and data.draw(st.booleans()):
            content[key] = {**content[key], data.draw(st.sampled_from(INNER)): data.draw(ANY)}
        elif data.draw(st.booleans()):
            content.pop(key, None)
        else:
            content[key] = data.draw(ANY)
    config, message = read(content)
    if config is None:
        assert message.startswith("config: ")
        return
    assert ModelConfig.from_pretrained(config.to_dict()) == config or config.quantization_config.unsupported


def read(content):
    """(config, None) or (None, message); anything but a ValueError goes through."""
    try:
        return ModelConfig.from_pretrained(content), None
    except ValueError as error:
        return None, str(error)


VENDOR_KEYS = [
    "n_layers",
    "n_expert_groups",
    "original_seq_len",
    "rope_factor",
    "score_func",
    "dtype",
    "scale_fmt",
    "mscale",
]


@given(key=st.sampled_from(VENDOR_KEYS), value=ANY)
@settings(max_examples=150)
def test_any_vendor_config_is_a_config_or_a_clear_error(key, value):
    content = {"vocab_size": 8, "dim": 8, "inter_dim": 8, "moe_inter_dim": 8, "n_layers": 2, "n_heads": 2}
    content |= {"n_routed_experts": 8, "n_activated_experts": 2, key: value}
    config, message = read(content)
    assert (config.hidden_size == 8) if config else message.startswith("config: ")

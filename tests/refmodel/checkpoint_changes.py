"""Changes to a small checkpoint, one for each way in which writers of the family differ, or go wrong."""

import ml_dtypes
import numpy as np
from checkpoint_variants import BLOCK, MOE, MTP, TINY, base, random_tensors

from fp8 import BlockScaled, quantize

BF16 = ml_dtypes.bfloat16


def fields(**values):
    return lambda v: v.config.update(values)


def without(*names):
    def change(v):
        for name in names:
            del v.config[name]

    return change


def rope_of_transformers_5(v):
    scaling = v.config.pop("rope_scaling")
    kind = scaling.pop("type")
    v.config["rope_parameters"] = {"rope_type": kind, "rope_theta": v.config.pop("rope_theta"), **scaling}


def rope_twice(**other):
    def change(v):
        scaling = {**v.config["rope_scaling"], **other}
        scaling["rope_type"] = scaling.pop("type")
        v.config["rope_parameters"] = {"rope_theta": v.config["rope_theta"], **scaling}

    return change


def scaling(drop=(), **values):
    def change(v):
        v.config["rope_scaling"].update(values)
        for name in drop:
            del v.config["rope_scaling"][name]

    return change


def nested(outside=()):
    def change(v):
        text = {name: value for name, value in v.config.items() if name not in outside}
        v.config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"depth": 2}}
        v.config.update({name: value for name, value in base("fp8").config.items() if name in outside})
        v.rename(lambda name: f"language_model.{name}")

    return change


VENDOR = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_layernorm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attn.wkv_a",
    "self_attn.kv_a_layernorm": "attn.kv_norm",
    "self_attn.kv_b_proj": "attn.wkv_b",
    "self_attn.o_proj": "attn.wo",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate.e_score_correction_bias": "gate.bias",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "mlp.": "ffn.",
    "model.layers": "layers",
    "weight_scale_inv": "scale",
}


def vendor_name(name: str) -> str:
    for ours, theirs in VENDOR.items():
        name = name.replace(ours, theirs)
    return name


def vendor_names(v):
    apart(v)
    v.drop(MTP)  # the vendor's converter leaves it out
    v.rename(vendor_name)


def vendor_config(v):
    vendor_names(v)
    c = TINY
    v.config = {
        "vocab_size": c.vocab_size,
        "dim": c.hidden_size,
        "inter_dim": c.intermediate_size,
        "moe_inter_dim": c.moe_intermediate_size,
        "n_layers": c.num_hidden_layers,
        "n_dense_layers": c.first_k_dense_replace,
        "n_heads": c.num_attention_heads,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": 1,
        "n_activated_experts": c.num_experts_per_tok,
        "n_expert_groups": c.n_group,
        "n_limited_groups": c.topk_group,
        "route_scale": 2.5,
        "score_func": "sigmoid",
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "original_seq_len": 64,
    }


def apart(v):
    """BlockScaled weights taken apart into codes and `..._scale_inv`, to change one of them."""
    flat = {}
    for name, value in v.tensors.items():
        if isinstance(value, BlockScaled):
            flat[name], flat[f"{name}_scale_inv"] = value.codes, value.scale
        else:
            flat[name] = value
    v.tensors = flat


def scales(rename=None, dtype=np.float32):
    def change(v):
        apart(v)
        v.tensors = {
            (name.replace("weight_scale_inv", rename) if rename else name): (
                value.astype(dtype) if name.endswith("_scale_inv") else value
            )
            for name, value in v.tensors.items()
        }

    return change


def bad_scale(value):
    def change(v):
        apart(v)
        scale = v.tensors[f"{MOE}mlp.experts.5.up_proj.weight_scale_inv"].copy()
        scale[0, 0] = value
        v.tensors[f"{MOE}mlp.experts.5.up_proj.weight_scale_inv"] = scale

    return change


def drop(*parts, **config):
    def change(v):
        apart(v)
        v.drop(*parts)
        v.config.update(config)

    return change


def add(name, value, **config):
    def change(v):
        v.tensors[name] = value
        v.config.update(config)

    return change


def cast(dtype, only=""):
    def change(v):
        for name, value in v.tensors.items():
            if only in name and not isinstance(value, BlockScaled) and not name.endswith("correction_bias"):
                v.tensors[name] = value.astype(dtype)

    return change


def fuse_experts(v):
    for layer in (1, 2, 3):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([v.tensors.pop(f"{stem}.{e}.{part}.weight") for e in range(TINY.n_routed_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        v.tensors[f"{stem}.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        v.tensors[f"{stem}.down_proj"] = parts["down_proj"]


def plain_mtp(v):
    plain = random_tensors(TINY)
    v.tensors = {
        name: value.dequantize(BF16) if name.startswith(MTP) and isinstance(value, BlockScaled) else value
        for name, value in v.tensors.items()
    }
    assert v.tensors.keys() == plain.keys()


def nvfp4(v):
    v.files["hf_quant_config.json"] = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    for name in [name for name in v.tensors if ".mlp.experts." in name]:
        v.tensors[name] = np.zeros((v.tensors[name].shape[0], v.tensors[name].shape[1] // 2), np.uint8)


def int4(v):
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    v.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }
    v.rename(lambda name: name.replace("_proj.weight", "_proj.weight_packed") if ".experts." in name else name)


def compressed_fp8(v):
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [16, 16]}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    v.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    scales("weight_scale", BF16)(v)


def indexer(**config):
    def change(v):
        for layer in range(4):
            stem = f"model.layers.{layer}.self_attn.indexer"
            v.tensors[f"{stem}.wk.weight"] = np.zeros((8, 32), ml_dtypes.float8_e4m3fn)
            v.tensors[f"{stem}.wk.weight_scale_inv"] = np.ones((1, 2), np.float32)
            v.tensors[f"{stem}.weights_proj.weight"] = np.zeros((2, 32), BF16)
        v.config.update(config)

    return change


def both(*changes):
    def change(v):
        for one in changes:
            one(v)

    return change


def fp8_eh_proj(v):
    name = f"{MTP}eh_proj.weight"
    v.tensors[name] = quantize(v.tensors[name].astype(np.float32), BLOCK, scale_format="ue8m0")

"""The vendor's own spelling of a config (`ModelArgs` in DeepSeek-V3 inference/model.py), as Hugging Face's."""

NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "inter_dim": "intermediate_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "n_heads": "num_attention_heads",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "n_activated_experts": "num_experts_per_tok",
    "n_expert_groups": "n_group",
    "n_limited_groups": "topk_group",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_theta": "rope_theta",
}
# what ModelArgs has for fields that its JSON files leave out
DEFAULTS = {
    "n_dense_layers": 1,
    "n_shared_experts": 2,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "score_func": "softmax",
    "route_scale": 1.0,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
}
YARN = {"original_seq_len": 4096, "rope_factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}


def from_vendor(raw: dict) -> dict:
    """`raw` itself unless it is in the vendor's spelling. ModelArgs' one `mscale` is what others call mscale_all_dim;
    it never scales the rotated values, so that the other one must equal it. The vendor normalises sigmoid weights only.
    """
    if not {"dim", "inter_dim", "n_layers"} <= raw.keys():
        return raw
    filled = {**DEFAULTS, **YARN, **raw}
    result = {name: filled[vendor] for vendor, name in NAMES.items() if vendor in filled}
    sigmoid = result["scoring_func"] == "sigmoid"
    grouped = "greedy" if filled["n_expert_groups"] == 1 else "group_limited_greedy"
    length, factor = filled["original_seq_len"], filled["rope_factor"]
    result.update(
        topk_method="noaux_tc" if sigmoid else grouped,
        norm_topk_prob=sigmoid,
        rms_norm_eps=1e-6,
        max_position_embeddings=length * factor if type(length) is int and type(factor) is int else length,
        torch_dtype="bfloat16",
        rope_scaling={
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "beta_fast": filled["beta_fast"],
            "beta_slow": filled["beta_slow"],
            "mscale": filled["mscale"],
            "mscale_all_dim": filled["mscale"],
        },
    )
    if filled.get("dtype") == "fp8":
        result["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": filled.get("scale_fmt"),
        }
    return result

"""What must come of each variant of a config: spellings, fields left out, fields that contradict the tensors."""

from dataclasses import replace

import numpy as np
from checkpoint_changes import (
    BF16,
    add,
    both,
    drop,
    fields,
    fuse_experts,
    nested,
    rope_of_transformers_5,
    rope_twice,
    scaling,
    vendor_config,
    vendor_names,
    without,
)
from checkpoint_variants import MOE, MTP, TINY, Case

NO_GROUPS = replace(TINY, n_group=1, topk_group=1, num_nextn_predict_layers=0)
NO_MTP = replace(TINY, num_nextn_predict_layers=0)
NO_Q = replace(TINY, q_lora_rank=None)
KIMI = replace(NO_GROUPS, model_type="kimi_k2", rms_norm_eps=1e-5, rope_theta=50000.0, routed_scaling_factor=2.827)
GLM = replace(
    NO_GROUPS,
    model_type="glm4_moe_lite",
    qk_nope_head_dim=12,
    v_head_dim=16,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    eos_token_id=(1, 2, 3),
)
V2 = replace(NO_GROUPS, model_type="deepseek_v2", scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)

SHARED2 = replace(TINY, n_shared_experts=2)
NO_SHARED = replace(TINY, n_shared_experts=0)


CONFIG_CASES = (
    # spellings of one and the same config
    Case("as published, bfloat16", lambda v: None),
    Case("as published, FP8", lambda v: None, "fp8"),
    Case("rope_parameters of transformers 5", rope_of_transformers_5),
    Case("both rope entries, equal", rope_twice()),
    Case("both rope entries, contradicting", rope_twice(factor=8), refused=("rope_scaling", "contradicts")),
    Case("dtype instead of torch_dtype", both(without("torch_dtype"), fields(dtype="torch.bfloat16"))),
    Case("no dtype", without("torch_dtype"), notices=("torch_dtype: absent",)),
    Case("num_mtp_layers", both(without("num_nextn_predict_layers"), fields(num_mtp_layers=1))),
    Case("contradicting MTP counts", fields(num_mtp_layers=2), refused=("num_nextn_predict_layers = 1", "contradicts")),
    Case("integral floats", fields(hidden_size=32.0, num_hidden_layers=3.0)),
    Case("a list of eos tokens", fields(eos_token_id=[1, 2])),
    Case(
        "nested under text_config",
        nested(),
        "fp8",
        notices=("text_config",),
        source="ai-dynamo/aiconfigurator#403",
    ),
    Case(
        "nested, quantization_config outside",
        nested(("quantization_config",)),
        "fp8",
        notices=("text_config",),
    ),
    Case("vendor's tensor names", both(vendor_names, fields(num_nextn_predict_layers=0)), "fp8"),
    Case(
        "vendor's config and tensor names",
        vendor_config,
        config=replace(TINY, rope_scaling=replace(TINY.rope_scaling, mscale_all_dim=1.0)),
    ),
    # the router
    Case(
        "no scoring_func: the bias tells",
        without("scoring_func", "topk_method"),
        notices=("scoring_func: absent, 'sigmoid' assumed: the router has", "topk_method: absent, 'noaux_tc'"),
        source="ggml-org/llama.cpp#18980",
    ),
    Case(
        "no routed_scaling_factor: 1, never 0",
        without("routed_scaling_factor"),
        notices=("routed_scaling_factor: absent, 1.0 assumed",),
    ),
    Case("no norm_topk_prob", without("norm_topk_prob"), notices=("norm_topk_prob: absent, True assumed",)),
    Case("softmax routing without bias", lambda v: None, config=V2),
    Case(
        "softmax routing, not said",
        without("scoring_func", "topk_method", "norm_topk_prob"),
        config=V2,
        notices=("scoring_func: absent, 'softmax'", "topk_method: absent, 'greedy'", "norm_topk_prob: absent, False"),
    ),
    Case("a bias that the method does not read", fields(topk_method="greedy"), refused=("correction_bias", "'greedy'")),
    Case("a bias that is missing", drop("correction_bias"), refused=("3 tensors are missing", "correction_bias")),
    Case("Kimi-like: one group, eps 1e-5", lambda v: None, config=KIMI),
    Case(
        "no groups declared",
        without("n_group", "topk_group"),
        config=KIMI,
        notices=("n_group: absent, 1", "topk_group: absent, 1"),
    ),
    Case("groups that do not divide", fields(n_group=5), refused=("n_group = 5", "divide n_routed_experts = 8")),
    Case("more groups chosen than there are", fields(topk_group=5), refused=("topk_group = 5", "n_group = 4")),
    Case(
        "correction biases stored as bfloat16",
        lambda v: v.tensors.update({n: b.astype(BF16) for n, b in v.tensors.items() if n.endswith("correction_bias")}),
        notices=("3 correction biases are BF16",),
        source="vllm-project/vllm#23640",
    ),
    # experts
    Case(
        "fewer experts than the file",
        fields(n_routed_experts=4),
        config=NO_GROUPS,
        refused=("shape [8, 32]", "n_routed_experts"),
    ),
    Case("more experts than the file", fields(n_routed_experts=16), refused=("missing", "experts.8.gate_proj")),
    Case(
        "experts beyond those routed to",
        add(f"{MOE}mlp.experts.8.up_proj.weight", np.zeros((16, 32), BF16)),
        refused=("experts.8.up_proj", "n_routed_experts = 8"),
    ),
    Case("experts fused as in memory", fuse_experts),
    Case("two shared experts", lambda v: None, config=SHARED2),
    Case(
        "shared experts, not said",
        without("n_shared_experts"),
        config=SHARED2,
        notices=("n_shared_experts: absent, 2",),
    ),
    Case("no shared expert", lambda v: None, config=NO_SHARED),
    Case("shared expert not counted", fields(n_shared_experts=0), refused=("shared_experts", "n_shared_experts = 0")),
    # attention
    Case("no q latent: null", lambda v: None, config=NO_Q, source="ikawrakow/ik_llama.cpp#737"),
    Case("no q latent: 0", fields(q_lora_rank=0), config=NO_Q),
    Case("q latent not said", without("q_lora_rank"), notices=("q_lora_rank: absent, 24 assumed: layer 0 has",)),
    Case("q latent denied, yet there", fields(q_lora_rank=None), refused=("q_proj.weight", "q_lora_rank = None")),
    Case("GLM-like widths", fields(head_dim=8), config=GLM, notices=("head_dim = 8: ignored",)),
    Case(
        "mlp_layer_types of transformers 5",
        both(without("first_k_dense_replace"), fields(mlp_layer_types=["dense", "sparse", "sparse"])),
    ),
    Case("mlp_layer_types, mixed", fields(mlp_layer_types=["sparse", "dense", "sparse"]), refused=("mlp_layer_types",)),
    Case("num_key_value_heads says otherwise", fields(num_key_value_heads=1), notices=("num_key_value_heads = 1",)),
    Case("biases in attention", fields(attention_bias=True), refused=("attention_bias", "not computed")),
    Case(
        "a bias in the file",
        add(f"{MOE}self_attn.q_a_proj.bias", np.zeros(24, BF16)),
        refused=("q_a_proj.bias", "biases are not computed"),
    ),
    Case("a foreign tensor in a layer", add(f"{MOE}mlp.w4.weight", np.zeros(3, BF16)), refused=("w4", "no place")),
    Case("rotary table in the file", add(f"{MOE}self_attn.rotary_emb.inv_freq", np.zeros(4, np.float32))),
    Case(
        "tensors of another modality",
        add("vision_tower.patch_embed.weight", np.zeros((2, 2), BF16)),
        notices=("1 tensors outside the language model: ignored: vision_tower.patch_embed.weight",),
    ),
    # RoPE
    Case("plain RoPE: null", lambda v: None, config=replace(TINY, rope_scaling=None)),
    Case("plain RoPE: type none", fields(rope_scaling={"type": "none"}), config=replace(TINY, rope_scaling=None)),
    Case(
        "plain RoPE: default",
        fields(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        config=replace(TINY, rope_scaling=None),
    ),
    Case("another scaling", fields(rope_scaling={"type": "linear", "factor": 4}), refused=("'linear'", "only 'yarn'")),
    Case("YaRN without a type", scaling(("type",)), notices=("rope_scaling.type: absent, yarn assumed",)),
    Case("YaRN without a length", scaling(("original_max_position_embeddings",)), refused=("missing", "original_max")),
    Case("YaRN with an unknown field", scaling(attention_factor=1.2), refused=("attention_factor", "not computed")),
    Case("odd RoPE width", fields(qk_rope_head_dim=7), refused=("qk_rope_head_dim = 7", "even")),
    # layers
    Case("dense layers not said", without("first_k_dense_replace"), notices=("first_k_dense_replace: absent, 1",)),
    Case("too many dense layers", fields(first_k_dense_replace=2), refused=("layer 1 has experts", "replace = 2")),
    Case("too few dense layers", fields(first_k_dense_replace=0), refused=("layer 0 has a dense MLP", "replace = 0")),
    Case("more layers than the file", fields(num_hidden_layers=9), refused=("no layer 4", "num_hidden_layers = 9")),
    Case(
        "a shortened model: layer 2 is no MTP layer",
        both(drop(MTP), fields(num_hidden_layers=2)),
        notices=("layer 2: an ordinary layer", "MTP unavailable"),
        source="sgl-project/sglang#3075",
    ),
    Case(
        "hidden_size that does not fit", fields(hidden_size=40), refused=("shape [64, 32]", "[64, 40]", "hidden_size")
    ),
    Case("vocab_size that does not fit", fields(vocab_size=65), refused=("[65, 32]", "vocab_size")),
    # what cannot be right
    Case("no hidden_size", without("hidden_size", "v_head_dim"), refused=("missing: hidden_size, v_head_dim",)),
    Case("a string for a size", fields(hidden_size="32"), refused=("hidden_size = '32'", "integer")),
    Case("a negative epsilon", fields(rms_norm_eps=-1e-6), refused=("rms_norm_eps", "> 0")),
    Case("another activation", fields(hidden_act="gelu"), refused=("hidden_act = 'gelu'", "silu")),
    Case("sliding window", fields(sliding_window=128), refused=("sliding_window = 128", "not computed")),
    Case(
        "a token id outside the vocabulary", fields(bos_token_id=64), refused=("bos_token_id = 64", "vocab_size = 64")
    ),
)

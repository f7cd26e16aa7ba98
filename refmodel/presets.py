"""Published members of the family, by the values of their `config.json`, and a tiny one for trials."""

from dataclasses import replace
from pathlib import Path

from refmodel.config import ModelConfig, Quantization, RopeScaling

EXAMPLE = Path(__file__).parent / "example"

_FP8 = Quantization()
_UE8M0 = Quantization(scale_fmt="ue8m0")
_YARN = RopeScaling(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0)

_V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_scaling=_YARN,
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_id=1,
    quantization_config=_FP8,
)

_KIMI_K2 = replace(
    _V3,
    model_type="kimi_k2",
    vocab_size=163840,
    num_attention_heads=64,
    first_k_dense_replace=1,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.827,
    rope_theta=50000.0,
    rope_scaling=RopeScaling(32, 4096, 1, 1, mscale=1.0, mscale_all_dim=1.0),
    max_position_embeddings=131072,
    num_nextn_predict_layers=0,
    bos_token_id=163584,
    eos_token_id=163585,
)

_V2_LITE = replace(
    _V3,
    model_type="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    first_k_dense_replace=1,
    num_attention_heads=16,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=1,
    topk_group=1,
    scoring_func="softmax",
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    q_lora_rank=None,
    rope_scaling=RopeScaling(40, 4096, 32, 1, mscale=0.707, mscale_all_dim=0.707),
    num_nextn_predict_layers=0,
    bos_token_id=100000,
    eos_token_id=100001,
    quantization_config=None,
)

_MOONLIGHT = replace(
    _V2_LITE,
    model_type="deepseek_v3",
    vocab_size=163840,
    intermediate_size=11264,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    bos_token_id=163584,
    eos_token_id=163586,
)

_GLM_FLASH = replace(
    _MOONLIGHT,
    model_type="glm4_moe_lite",
    vocab_size=154880,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    num_hidden_layers=47,
    num_attention_heads=20,
    n_shared_experts=1,
    num_experts_per_tok=4,
    routed_scaling_factor=1.8,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    rope_theta=1000000.0,
    max_position_embeddings=202752,
    num_nextn_predict_layers=1,
    bos_token_id=None,
    eos_token_id=(154820, 154827, 154829),
)

_TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=2,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    rope_scaling=RopeScaling(40, 64, 32, 1, mscale=1.0, mscale_all_dim=0.707),
    max_position_embeddings=2560,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_id=1,
)

PRESETS = {
    "v3": _V3,
    "r1": _V3,
    "v3.1": replace(_V3, quantization_config=_UE8M0),
    "v3.2": replace(
        _V3,
        model_type="deepseek_v32",
        quantization_config=_UE8M0,
        index_topk=2048,
        index_n_heads=64,
        index_head_dim=128,
    ),
    "kimi_k2": _KIMI_K2,
    "moonlight": _MOONLIGHT,
    "glm_4.7_flash": _GLM_FLASH,
    "v2_lite_like": _V2_LITE,
    "tiny": _TINY,
}


def preset(name: str) -> ModelConfig:
    """The config of that name; ValueError lists the names if there is none."""
    if name == "example":
        return ModelConfig.from_pretrained(EXAMPLE)
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are: example, {', '.join(PRESETS)}")
    return PRESETS[name]

"""Small configs that hide nothing: widths all differ, groups are limited, norms and biases are random."""

from dataclasses import replace

import numpy as np

from refmodel import Model, ModelConfig
from refmodel.config import RopeScaling

YARN = RopeScaling(40, 64, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7)

TINY = ModelConfig(
    vocab_size=100,
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=3,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope_scaling=YARN,
    num_nextn_predict_layers=1,
    torch_dtype="float32",
)

VARIANTS = {
    "v3": TINY,
    "no_q_lora": replace(TINY, q_lora_rank=None),
    "one_group": replace(TINY, n_group=1, topk_group=1),
    "no_yarn": replace(TINY, rope_scaling=None),
    "no_shared": replace(TINY, n_shared_experts=0),
    "all_dense": replace(TINY, first_k_dense_replace=3),
    "wide_values": replace(TINY, qk_nope_head_dim=16, v_head_dim=40),
}


def tiny_model(name="v3", numerics="float64", seed=0, **kwargs):
    return Model.random(VARIANTS[name], seed, numerics=numerics, **kwargs)


def some_ids(count, seed=0, vocab=TINY.vocab_size):
    return np.random.default_rng(seed).integers(0, vocab, count)

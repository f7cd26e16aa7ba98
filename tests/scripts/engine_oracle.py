"""A small checkpoint on disk, and captures of it that no engine made: our own model, right or with a known mistake."""

import numpy as np

from refmodel.checkpoint_writer import write_checkpoint
from refmodel.config import ModelConfig
from refmodel.model import Model
from refmodel.random_weights import RandomTensors
from refmodel.schema import needed_tensors
from scripts.adapters.request import Result
from scripts.engine_check import recorded
from scripts.engines import Capture

CONFIG = ModelConfig.from_pretrained(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 2560,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "float32",
    }
)
TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()

#: tensors that no adapter can see
UNSEEN = (".experts.", ".margin", ".lse", ".gate", ".up", ".product", ".codes", ".scale")


def write_small_checkpoint(folder):
    """The checkpoint on disk; q_a and kv_a are small, so that epsilons matter, biases large, so that bfloat16 does."""
    source = RandomTensors(CONFIG, 3)
    tensors = {name: np.asarray(source.array(name), np.float32) for name, _ in needed_tensors(CONFIG)}
    for name in tensors:
        if name.endswith("self_attn.q_a_proj.weight"):
            tensors[name] = tensors[name] * np.float32(2e-3)
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name] = tensors[name].copy()
            tensors[name][: CONFIG.kv_lora_rank] *= np.float32(2e-3)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name] + np.float32(2)
    write_checkpoint(folder, CONFIG, tensors)
    return folder


def fake_capture(model: Model, mtp: bool = False, **result) -> Capture:
    """What an adapter would bring back from an engine that computes as `model` does."""
    ours = recorded(model, TOKENS, mtp)
    seen = {name: np.array(array) for name, array in ours.items() if not any(part in name for part in UNSEEN)}
    return Capture(seen, (seen,), Result(engine="imitation 1.0", **result), "nowhere")

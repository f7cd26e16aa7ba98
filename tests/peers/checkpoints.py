"""Small random checkpoints of the V3 family, drawn so that mistakes show.

Default-initialised weights hide mistakes: norm weights of one hide a norm that is left out or applied twice, biases of
zero hide a bias used as a weight. So here norm weights are 1 + 0.3 N(0, 1), correction biases have both signs and an
offset, the nope, rope and value widths differ, fewer groups are kept than there are, and projections are wide enough
that attention is far from uniform. Nothing here imports this project: the files are what another program would write.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}

BASE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 288,
    "moe_intermediate_size": 80,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 72,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2560,
    "rope_theta": 10000.0,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "use_cache": True,
}


@dataclass(frozen=True)
class Spec:
    """One checkpoint: what differs from `BASE`, how it is spelled, and how its values are drawn."""

    name: str
    config: dict = field(default_factory=dict)
    spelling: str = "rope_scaling"  # or "rope_parameters", as transformers 5 writes it
    embed_std: float = 1.0
    low_rank_gain: float = 1.0  # of q_a and kv_a: small values make the epsilon of the inner norms matter
    bias_offset: float = 0.0
    seed: int = 0

    @property
    def full_config(self) -> dict:
        """The config.json of this checkpoint."""
        config = {**BASE, **self.config}
        if self.spelling == "rope_scaling":
            return config
        scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
        return {**config, "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}}


SPECS = (
    Spec("v3_shape", seed=1),
    Spec("no_q_lora", {"q_lora_rank": None}, bias_offset=-3.0, seed=2),
    Spec("one_group", {"n_group": 1, "topk_group": 1, "n_routed_experts": 12, "n_shared_experts": 2}, seed=3),
    Spec("mscale_differs", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}}, seed=4),
    Spec("no_yarn", {"rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 1.0}, seed=5),
    Spec("two_dense", {"first_k_dense_replace": 2, "num_hidden_layers": 4}, spelling="rope_parameters", seed=6),
    Spec("three_dense", {"first_k_dense_replace": 3, "num_hidden_layers": 4}, bias_offset=5.0, seed=7),
    Spec("eps_1e-5", {"rms_norm_eps": 1e-5}, embed_std=3e-3, low_rank_gain=2e-3, seed=8),
    Spec("half_split_rope", {"rope_interleave": False}, bias_offset=-1.0, seed=10),
    Spec("weights_not_renormalised", {"norm_topk_prob": False, "num_experts_per_tok": 2}, seed=9),
)

# Widths that vLLM's MLA kernels for the CPU accept: latent 512, rope 64, value 128.
ENGINE_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
ENGINE_SPECS = (
    Spec("engine_v3_shape", {**ENGINE_WIDTHS, "hidden_size": 256, "moe_intermediate_size": 64}, seed=11),
    Spec(
        "engine_three_dense",
        {**ENGINE_WIDTHS, "hidden_size": 256, "first_k_dense_replace": 3, "num_hidden_layers": 4, "q_lora_rank": None},
        bias_offset=-3.0,
        seed=12,
    ),
    Spec(
        "engine_mscale_differs",
        {**ENGINE_WIDTHS, "hidden_size": 256, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
        bias_offset=2.0,
        seed=13,
    ),
    Spec(
        "engine_no_yarn",
        {
            **ENGINE_WIDTHS,
            "hidden_size": 256,
            "rope_scaling": None,
            "rope_theta": 50000.0,
            "n_group": 1,
            "topk_group": 1,
        },
        seed=14,
    ),
)


def write_checkpoint(spec: Spec, folder: Path) -> Path:
    """Write `spec` as a Hugging Face directory (config.json, model.safetensors in float32); return the directory."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.full_config, indent=1))
    save_file(dict(random_tensors(spec)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_tensors(spec: Spec) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 array) of every tensor of the checkpoint, MTP layer included, under its public name."""
    config, rng = spec.full_config, np.random.default_rng(spec.seed)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]

    embed = _normal(rng, (vocab, hidden), spec.embed_std)
    head = _linear(rng, vocab, hidden)
    yield "model.embed_tokens.weight", embed
    yield "model.norm.weight", _norm(rng, hidden)
    yield "lm_head.weight", head
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _attention(rng, config, prefix, spec.low_rank_gain)
        yield from _feed_forward(rng, config, prefix, spec.bias_offset, layer >= config["first_k_dense_replace"])
        if layer >= layers:
            yield prefix + "embed_tokens.weight", embed.copy()
            yield prefix + "shared_head.head.weight", head.copy()
            yield prefix + "shared_head.norm.weight", _norm(rng, hidden)
            yield prefix + "enorm.weight", _norm(rng, hidden)
            yield prefix + "hnorm.weight", _norm(rng, hidden)
            yield prefix + "eh_proj.weight", _linear(rng, hidden, 2 * hidden)


def _attention(rng, config, prefix, low_rank_gain):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope, q_rank = config["kv_lora_rank"], config["qk_rope_head_dim"], config["q_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield prefix + "input_layernorm.weight", _norm(rng, hidden)
    yield prefix + "post_attention_layernorm.weight", _norm(rng, hidden)
    if q_rank is None:
        yield prefix + "self_attn.q_proj.weight", _linear(rng, heads * (nope + rope), hidden, 1.5)
    else:
        yield prefix + "self_attn.q_a_proj.weight", _linear(rng, q_rank, hidden, low_rank_gain)
        yield prefix + "self_attn.q_a_layernorm.weight", _norm(rng, q_rank)
        yield prefix + "self_attn.q_b_proj.weight", _linear(rng, heads * (nope + rope), q_rank, 1.5)
    kv_a = _linear(rng, latent + rope, hidden, low_rank_gain)
    kv_a[latent:] *= 1.5 / low_rank_gain  # the rotary rows are not normalised afterwards
    yield prefix + "self_attn.kv_a_proj_with_mqa.weight", kv_a
    yield prefix + "self_attn.kv_a_layernorm.weight", _norm(rng, latent)
    yield prefix + "self_attn.kv_b_proj.weight", _linear(rng, heads * (nope + value), latent, 1.2)
    yield prefix + "self_attn.o_proj.weight", _linear(rng, hidden, heads * value)


def _feed_forward(rng, config, prefix, bias_offset, routed):
    hidden, experts, width = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    if not routed:
        yield from _mlp(rng, prefix + "mlp.", hidden, config["intermediate_size"])
        return
    bias = _normal(rng, (experts,), 0.3) + np.float32(bias_offset)
    yield prefix + "mlp.gate.weight", _linear(rng, experts, hidden)
    yield prefix + "mlp.gate.e_score_correction_bias", bias
    yield from _mlp(rng, prefix + "mlp.shared_experts.", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        yield from _mlp(rng, f"{prefix}mlp.experts.{expert}.", hidden, width)


def _mlp(rng, prefix, hidden, width):
    yield prefix + "gate_proj.weight", _linear(rng, width, hidden)
    yield prefix + "up_proj.weight", _linear(rng, width, hidden)
    yield prefix + "down_proj.weight", _linear(rng, hidden, width)


def _linear(rng, out, in_, gain=1.0):
    return _normal(rng, (out, in_), gain / math.sqrt(in_))


def _norm(rng, width):
    return 1 + _normal(rng, (width,), 0.3)


def _normal(rng, shape, std):
    return (rng.standard_normal(shape) * std).astype(np.float32)

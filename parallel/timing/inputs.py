"""Inputs of the estimates: published statistics, model and hardware constants, prices."""

from parallel.timing.estimate import Input

_DAY = "deepseek-ai/open-infra-index, day 6"
_NOTEBOOK = "case-study notebook"
_CONFIG = "DeepSeek-V3 config.json"
_ISCA = "Insights into DeepSeek-V3, ISCA 2025"

INPUTS = {
    "nodes": Input(226.75, "nodes", "average nodes occupied", _DAY),
    "gpus": Input(8, "GPUs", "GPUs per node", _DAY),
    "gpu_hour": Input(2.0, "$/h", "price of a GPU hour", _DAY),
    "input_tokens": Input(608e9, "tokens/day", "input tokens", _DAY),
    "hit_tokens": Input(342e9, "tokens/day", "input tokens found in the cache on disk", _DAY),
    "output_tokens": Input(168e9, "tokens/day", "output tokens", _DAY),
    "prefill_node": Input(73.7e3, "tokens/s", "input tokens per second and prefill node, hits included", _DAY),
    "decode_node": Input(14.8e3, "tokens/s", "output tokens per second and decode node", _DAY),
    "user_tps": Input(21, "tokens/s", "output speed of a request", _NOTEBOOK + ": the middle of 20 to 22 (day 6)"),
    "context": Input(4989, "tokens", "keys per output token", _DAY),
    "price_hit": Input(0.14, "$/M", "price of input tokens that hit", _DAY),
    "price_miss": Input(0.55, "$/M", "price of input tokens that miss", _DAY),
    "price_output": Input(2.19, "$/M", "price of output tokens", _DAY),
    "revenue_published": Input(562027, "$/day", "theoretical revenue as published", _DAY),
    "layers": Input(61, "layers", "layers of the main model", _CONFIG),
    "moe_layers": Input(58, "layers", "MoE layers of the main model", _CONFIG),
    "step_layers": Input(62, "layers", "layers of a decode step, the MTP layer included", _NOTEBOOK),
    "hidden": Input(7168, "values", "hidden size", _CONFIG),
    "vocab": Input(129280, "tokens", "vocabulary", _CONFIG),
    "routed": Input(8, "experts", "routed experts per token", _CONFIG),
    "attention_params": Input(187e6, "B", "attention weights per layer, FP8", _NOTEBOOK + ": 187,105,280 exactly"),
    "expert_params": Input(44e6, "B", "weights of one expert, FP8", _NOTEBOOK + ": 44,040,192 exactly"),
    "expert_flop": Input(88e6, "FLOP", "one token through one expert", _NOTEBOOK + ": 88,080,384 exactly"),
    "experts_per_gpu": Input(3, "experts", "routed and shared experts per decode GPU", _DAY + ": 2 + 1"),
    "latent": Input(1152, "B", "cached latent per token and layer, BF16", _NOTEBOOK + ": 576 values"),
    "decode_flop": Input(
        278528, "FLOP", "absorbed attention per query, key and layer", _NOTEBOOK + ": 2*128*(576+512)"
    ),
    "prefill_flop": Input(81920, "FLOP", "naive attention per query, key and layer", _NOTEBOOK + ": 2*128*(192+128)"),
    "scale_bytes": Input(224, "B", "scales of one FP8 row", _NOTEBOOK + ": 7168/128 float32"),
    "activated": Input(37e9, "params", "parameters that a token activates", _NOTEBOOK),
    "mtp": Input(1.8, "tokens", "tokens that a request advances per step", _NOTEBOOK + ": one draft, 80 % accepted"),
    "verified": Input(2, "tokens", "tokens that a request computes per step", _NOTEBOOK + ": one draft"),
    "bf16": Input(989e12, "FLOP/s", "BF16 peak", _NOTEBOOK),
    "fp8": Input(1979e12, "FLOP/s", "FP8 peak", _NOTEBOOK),
    "hbm": Input(3.35e12, "B/s", "memory bandwidth", _NOTEBOOK),
    "nic": Input(50e9, "B/s", "network bandwidth per GPU", _NOTEBOOK),
    "memory": Input(80e9, "B", "memory of a GPU", _NOTEBOOK),
    "decode_gpus": Input(144, "GPUs", "GPUs of a decode unit", _DAY),
    "physical_experts": Input(288, "experts", "routed experts with redundant ones", _DAY + ": 256 + 32"),
    "dense_layers": Input(3, "layers", "dense layers", _CONFIG),
    "dense_width": Input(18432, "values", "width of a dense feed-forward layer", _CONFIG),
    "buffer_tokens": Input(
        128, "tokens", "tokens per rank that low-latency buffers hold", "deepseek-ai/DeepEP README.md"
    ),
    "gqa_layers": Input(94, "layers", "layers of the GQA exercise", _NOTEBOOK + ": Qwen3-235B-A22B"),
    "gqa_heads": Input(4, "heads", "KV heads of the GQA exercise", _NOTEBOOK),
    "gqa_width": Input(128, "values", "head size of the GQA exercise", _NOTEBOOK),
    "gqa_requests": Input(88, "requests", "requests per GPU as the exercise rounds them", _NOTEBOOK),
    "gqa_context": Input(5000, "tokens", "keys per request as the exercise rounds them", _NOTEBOOK),
    "tp": Input(4, "GPUs", "tensor-parallel GPUs of the GQA exercise", _NOTEBOOK),
    "faster_nic": Input(100e9, "B/s", "network bandwidth of the 800 Gb/s exercise", _NOTEBOOK),
    "fp8_latent": Input(656, "B", "cached latent per token and layer, FP8", "deepseek-ai/FlashMLA README.md"),
    "sparse_keys": Input(2048, "keys", "keys that sparse attention keeps per query", "DeepSeek-V3.2-Exp report"),
    "isca_tokens": Input(32, "tokens", "tokens per device in the paper's bound", _ISCA),
    "isca_targets": Input(9, "experts", "targets per token in the paper's bound, shared expert included", _ISCA),
    "isca_hidden": Input(7000, "values", "hidden size as the paper rounds it", _ISCA),
    "isca_nvlink": Input(900e9, "B/s", "NVLink bandwidth of GB200 NVL72", _ISCA),
}


def defaults() -> dict[str, float]:
    """name -> value of every input."""
    return {name: entry.value for name, entry in INPUTS.items()}

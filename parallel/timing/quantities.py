"""The numbers of the case-study notebook, of its exercises, and of the ISCA paper's bound, as formulas."""

from parallel.timing.estimate import Quantity as Q

SECTIONS = {
    "memory": "Decode: requests per GPU, and memory",
    "step": "Decode: the bound of a step against the published speed",
    "experts": "How many tokens feed an expert",
    "prefill": "Prefill: computed tokens and utilisation",
    "cost": "Cost and revenue at list prices",
    "checks": "Cross-checks of the published day",
    "gqa": "Exercise 1: a GQA model instead of MLA",
    "faster": "Exercise 2: a network of 800 Gb/s, and what then",
    "isca": "The bound of the ISCA paper",
}

MEMORY = (
    Q("decode_gpu", "memory", "tokens/s", "decode_node / gpus", "output tokens per second and GPU"),
    Q("requests", "memory", "requests", "decode_gpu / user_tps", "requests served at once by a GPU",
      "84.1 at 22 tokens/s and 92.5 at 20, both of which the source allows"),
    Q("kv_token", "memory", "B", "latent * layers", "cache per token",
      "without the MTP layer, although the step below has 62 layers"),
    Q("kv", "memory", "B", "requests * context * kv_token", "cache per GPU"),
    Q("attention_weights", "memory", "B", "layers * attention_params", "attention weights, one copy per GPU"),
    Q("expert_weights", "memory", "B", "moe_layers * experts_per_gpu * expert_params", "routed and shared experts"),
    Q("vocab_weights", "memory", "B", "2 * vocab * hidden", "embedding and head at 1 byte each",
      "real checkpoints keep both in BF16: twice this"),
    Q("weights", "memory", "B", "attention_weights + expert_weights + vocab_weights", "weights per GPU"),
    Q("used", "memory", "B", "kv + weights", "cache and weights"),
    Q("left_dense", "memory", "B", "dense_layers * 3 * hidden * dense_width", "left out: dense feed-forward layers"),
    Q("left_mtp", "memory", "B", "attention_params + experts_per_gpu * expert_params + 2 * hidden * hidden",
      "left out: weights of the MTP layer, its projection at 1 byte"),
    Q("left_mtp_kv", "memory", "B", "requests * context * latent", "left out: cache of the MTP layer"),
    Q("left_vocab", "memory", "B", "vocab_weights", "left out: the second byte of embedding and head"),
    Q("left_buffers", "memory", "B", "4 * physical_experts * buffer_tokens * (2 * hidden + hidden / 32)",
      "left out: low-latency buffers, send and receive, two of each",
      "deepseek-ai/DeepEP csrc/config.hpp; signals apart"),
    Q("used_with_left", "memory", "B", "used + left_dense + left_mtp + left_mtp_kv + left_vocab + left_buffers",
      "cache and weights with what was left out", "activations and CUDA graphs still missing"),
    Q("spare", "memory", "B", "memory - used_with_left", "memory that remains"),
)  # fmt: skip

STEP = (
    Q("tokens", "step", "tokens", "requests * verified", "tokens per GPU and step"),
    Q("attn_memory", "step", "s", "(attention_params + requests * context * latent) / hbm", "attention: read"),
    Q("attn_compute", "step", "s", "tokens * context * decode_flop / bf16", "attention: core arithmetic",
      "projections are not counted"),
    Q("attn", "step", "s", "max(attn_memory, attn_compute)", "attention per layer"),
    Q("moe_memory", "step", "s", "experts_per_gpu * expert_params / hbm", "experts: read weights"),
    Q("moe_compute", "step", "s", "tokens * (routed + 1) * expert_flop / fp8", "experts: arithmetic"),
    Q("moe", "step", "s", "max(moe_memory, moe_compute)", "experts per layer"),
    Q("dispatch", "step", "s", "tokens * routed * (hidden + scale_bytes) / nic", "dispatch per layer",
      "all 8 copies by the NIC, the ones to the own node too; no header"),
    Q("combine", "step", "s", "tokens * routed * (2 * hidden) / nic", "combine per layer"),
    Q("comm", "step", "s", "tokens * routed * ((hidden + scale_bytes) + hidden * 2) / nic", "both exchanges per layer"),
    Q("step_bound", "step", "s", "step_layers * max(attn + moe, comm)", "bound of a step: perfect overlap",
      "left out: gate, norms, head, sampling, dense layers, latency, imbalance, synchronisation"),
    Q("step_serial", "step", "s", "step_layers * (attn + moe + comm)", "the same without any overlap"),
    Q("step_published", "step", "s", "mtp / user_tps", "step that the published speed amounts to",
      "81.8 ms at 22 tokens/s to 90.0 ms at 20"),
    Q("gap", "step", "ratio", "step_published / step_bound", "published over bound",
      "rule of thumb of the source: 1.5 to 2.5"),
)  # fmt: skip

EXPERTS = (
    Q("rows_per_expert", "experts", "rows", "tokens * decode_gpus * routed / physical_experts", "rows per expert"),
    Q("ridge_rows", "experts", "rows", "fp8 / (2 * hbm)", "rows at which an expert computes as long as it reads"),
    Q("ridge_tokens", "experts", "tokens", "fp8 * experts_per_gpu * expert_params / (hbm * (routed + 1) * expert_flop)",
      "tokens per GPU and step at which both moe terms above are equal", "counts the shared expert as the source does"),
    Q("ridge_requests", "experts", "requests", "ridge_tokens / verified", "the same in requests per GPU"),
    Q("attn_ridge_requests", "experts", "requests",
      "attention_params / (context * (verified * decode_flop * hbm / bf16 - latent))",
      "requests per GPU at which both attention terms are equal"),
)  # fmt: skip

PREFILL = (
    Q("hit_rate", "prefill", "fraction", "hit_tokens / input_tokens", "input tokens that hit",
      "exactly 0.5625, which prints as 56.2 or 56.3 % by the rule for ties"),
    Q("computed", "prefill", "tokens/s", "prefill_node * (1 - hit_tokens / input_tokens) / gpus", "computed per GPU"),
    Q("prefill_token_flop", "prefill", "FLOP", "2 * activated + layers * (context / 2) * prefill_flop",
      "arithmetic per token", "takes the decode context as prompt length, and no cached prefix to attend to"),
    Q("prefill_flops", "prefill", "FLOP/s", "computed * prefill_token_flop", "arithmetic per second and GPU"),
    Q("prefill_of_fp8", "prefill", "fraction", "prefill_flops / fp8", "of FP8 peak"),
    Q("prefill_of_bf16", "prefill", "fraction", "prefill_flops / bf16", "of BF16 peak"),
    Q("prefill_prefix_flops", "prefill", "FLOP/s",
      "computed * (2 * activated + layers * ((1 + hit_rate) * context / 2) * prefill_flop)",
      "the same when computed tokens also attend to the cached prefix"),
)  # fmt: skip

COST = (
    Q("cost", "cost", "$/day", "nodes * gpus * 24 * gpu_hour", "cost of a day"),
    Q("revenue", "cost", "$/day",
      "(hit_tokens * price_hit + (input_tokens - hit_tokens) * price_miss + output_tokens * price_output) / 1e6",
      "revenue of a day if every token were billed",
      "published 562,027: token totals are rounded; most traffic is free, V3 is cheaper, nights are discounted"),
    Q("margin", "cost", "fraction", "revenue / cost - 1", "cost profit margin", "published 545 %: from 562,027"),
    Q("margin_published", "cost", "fraction", "revenue_published / cost - 1", "the margin from the published revenue"),
    Q("cost_per_million", "cost", "$/M", "cost / (output_tokens / 1e6)", "all cost per million output tokens",
      "charges prefill to output tokens too"),
)  # fmt: skip

CHECKS = (
    Q("prefill_nodes", "checks", "nodes", "input_tokens / (prefill_node * 86400)", "prefill nodes by the rates"),
    Q("decode_nodes", "checks", "nodes", "output_tokens / (decode_node * 86400)", "decode nodes by the rates"),
    Q("implied_nodes", "checks", "nodes", "prefill_nodes + decode_nodes", "together", "published 226.75"),
    Q("revenue_low", "checks", "$/day",
      "((hit_tokens + 0.5e9) * price_hit + (input_tokens - hit_tokens - 1e9) * price_miss"
      " + (output_tokens - 0.5e9) * price_output) / 1e6", "least revenue that totals rounded to a billion allow",
      "totals are rounded on their own: the most hits with the least input give the least revenue"),
    Q("revenue_high", "checks", "$/day",
      "((hit_tokens - 0.5e9) * price_hit + (input_tokens - hit_tokens + 1e9) * price_miss"
      " + (output_tokens + 0.5e9) * price_output) / 1e6", "most revenue that they allow"),
)  # fmt: skip

GQA = (
    Q("gqa_token", "gqa", "B", "gqa_layers * 2 * gqa_heads * gqa_width * 2", "cache per token, BF16",
      "192,512 B are 188 KiB; the source writes KB"),
    Q("gqa_ratio", "gqa", "ratio", "gqa_token / kv_token", "over MLA"),
    Q("gqa_kv", "gqa", "B", "gqa_requests * gqa_context * gqa_token", "cache per GPU",
      "the source multiplies by 188e3 and gets 83 GB"),
    Q("gqa_tp_request", "gqa", "B", "gqa_context * gqa_token / tp", "cache of one request on each GPU of a TP group"),
    Q("gqa_tp_kv", "gqa", "B", "gqa_requests * gqa_tp_request", "TP: per GPU when the group serves as many requests"),
    Q("gqa_tp_same_kv", "gqa", "B", "tp * gqa_requests * gqa_tp_request", "TP: per GPU when each GPU's share stays",
      "TP alone saves nothing per GPU at equal requests per GPU; it lets the group serve fewer"),
    Q("gqa_fp8_kv", "gqa", "B", "gqa_kv / 2", "cache per GPU at one byte per value", "scales apart"),
)  # fmt: skip

FASTER = (
    Q("faster_comm", "faster", "s", "comm * nic / faster_nic", "both exchanges per layer"),
    Q("compute", "faster", "s", "attn + moe", "computation per layer"),
    Q("faster_step", "faster", "s", "step_layers * max(compute, faster_comm)", "bound of a step",
      "the bottleneck is now attention arithmetic"),
    Q("fp8_attn", "faster", "s", "max(attn_memory, attn_compute * bf16 / fp8)", "attention with core products in FP8"),
    Q("fp8_step", "faster", "s", "step_layers * max(fp8_attn + moe, faster_comm)", "bound with FP8 attention",
      "the network limits again"),
    Q("fp8_cache_attn", "faster", "s",
      "max((attention_params + requests * context * fp8_latent) / hbm, attn_compute * bf16 / fp8)",
      "attention with an FP8 cache as well"),
    Q("fp8_cache_step", "faster", "s", "step_layers * max(fp8_cache_attn + moe, faster_comm)", "bound with both"),
    Q("sparse_attn", "faster", "s",
      "max((attention_params + requests * min(verified * sparse_keys, context) * latent) / hbm,"
      " tokens * min(sparse_keys, context) * decode_flop / bf16)", "attention over the kept keys",
      "the indexer that picks the keys is left out"),
    Q("sparse_step", "faster", "s", "step_layers * max(sparse_attn + moe, faster_comm)", "bound with sparse attention"),
)  # fmt: skip

ISCA = (
    Q("isca_exchange", "isca", "s", "(1 + 2) * isca_tokens * isca_targets * isca_hidden / nic", "dispatch and combine",
      "counts the shared expert as a target, no scales; 7168 values would give 123.86 us"),
    Q("isca_layer", "isca", "s", "2 * isca_exchange", "two micro-batches"),
    Q("isca_step", "isca", "s", "layers * isca_layer", "time per output token"),
    Q("isca_tps", "isca", "tokens/s", "1 / isca_step", "tokens per second and request", "the paper prints 67"),
    Q("isca_nvl_exchange", "isca", "s", "isca_exchange * nic / isca_nvlink", "dispatch and combine within one NVL72"),
    Q("isca_nvl_step", "isca", "s", "layers * 2 * isca_nvl_exchange", "time per output token there"),
    Q("isca_nvl_tps", "isca", "tokens/s", "1 / isca_nvl_step", "tokens per second there", "the paper: about 1200"),
)  # fmt: skip

QUANTITIES = MEMORY + STEP + EXPERTS + PREFILL + COST + CHECKS + GQA + FASTER + ISCA

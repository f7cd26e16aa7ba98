"""What a stage costs on one rank: FLOPs and bytes from real counts, seconds by roofline and by alpha-beta.

Counts follow the shapes of the DeepSeek-V3 report, section 4.2, and the precision of the published inference system:
matrix products and dispatch in FP8, core attention and combine in BF16.
"""

from dataclasses import dataclass
from typing import NamedTuple

from parallel.timing.hardware import Hardware

BLOCK = 128  # values that share one FP8 scale


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that costs depend on, under their Hugging Face names; defaults are DeepSeek-V3's.

    `refmodel.ModelConfig` has the same names and may be used in its place.
    """

    hidden_size: int = 7168
    num_hidden_layers: int = 61
    first_k_dense_replace: int = 3
    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 2048
    intermediate_size: int = 18432
    vocab_size: int = 129280


V3 = ModelShape()


class Batch(NamedTuple):
    """One micro-batch of one rank.

    tokens: query tokens. pairs: (query, key) pairs of core attention, per head. keys: cached latents that it reads.
    logits: tokens that need logits. phase: `prefill` (naive attention) or `decode` (absorbed).
    """

    tokens: float
    pairs: float
    keys: float
    logits: float
    phase: str


class Work(NamedTuple):
    """FLOPs in each precision and bytes of device memory."""

    fp8_flop: float = 0.0
    bf16_flop: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Efficiency:
    """What fraction of each peak a system reaches, and the time that each exchange adds on every rank.

    attention, matmul, memory, link: fractions in (0, 1]. sms: fraction of SMs that compute. sync: seconds.
    """

    attention: float = 1.0
    matmul: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    sms: float = 1.0
    sync: float = 0.0

    def __post_init__(self):
        for name in ("attention", "matmul", "memory", "link", "sms"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} = {value}: an efficiency is a fraction above 0 and up to 1")
        if self.sync < 0:
            raise ValueError(f"sync = {self.sync}: a time cannot be negative")


def decode_batch(requests: float, context: float, draft_tokens: int = 1) -> Batch:
    """Every request computes one token and `draft_tokens` drafts, each against `context` keys."""
    tokens = requests * (1 + draft_tokens)
    return Batch(tokens, tokens * context, requests * context, tokens, "decode")


def prefill_batch(lengths, cached=None) -> Batch:
    """Whole prompts of `lengths` new tokens, each behind `cached` keys."""
    cached = [0] * len(lengths) if cached is None else cached
    pairs = sum(n * c + n * (n + 1) / 2 for n, c in zip(lengths, cached))
    return Batch(float(sum(lengths)), pairs, float(sum(lengths) + sum(cached)), float(len(lengths)), "prefill")


def expert_parameters(shape=V3) -> int:
    """Parameters of one routed expert: gate, up and down."""
    return 3 * shape.hidden_size * shape.moe_intermediate_size


def attention_parameters(shape=V3) -> int:
    """Parameters of one layer's attention: q_a, q_b, kv_a, kv_b, o."""
    heads, nope, rope, value = (
        shape.num_attention_heads,
        shape.qk_nope_head_dim,
        shape.qk_rope_head_dim,
        shape.v_head_dim,
    )
    return (
        shape.hidden_size * shape.q_lora_rank
        + shape.q_lora_rank * heads * (nope + rope)
        + shape.hidden_size * (shape.kv_lora_rank + rope)
        + shape.kv_lora_rank * heads * (nope + value)
        + heads * value * shape.hidden_size
    )


def latent_bytes(shape=V3) -> int:
    """Bytes that one token and layer keep in a BF16 cache."""
    return 2 * (shape.kv_lora_rank + shape.qk_rope_head_dim)


def core_flop_per_pair(phase: str, shape=V3) -> int:
    """FLOPs of core attention per (query, key) pair, all heads: absorbed for decode, naive for prefill."""
    if phase == "decode":
        width = (shape.kv_lora_rank + shape.qk_rope_head_dim) + shape.kv_lora_rank
    else:
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    return 2 * shape.num_attention_heads * width


def stage_work(stage: str, batch: Batch, shape=V3, expert_rows: float = 0.0, experts: float = 0.0) -> Work:
    """Work of a compute stage on one rank.

    expert_rows: (token, expert) pairs that this rank computes; experts: its experts that have at least one row.
    Exchange stages do no work here: their time is that of the link.
    Raises ValueError for an unknown stage.
    """
    tokens, d = batch.tokens, shape.hidden_size
    heads, kv = shape.num_attention_heads, shape.kv_lora_rank
    per_expert = expert_parameters(shape)
    if stage == "attn_proj":
        return _attn_proj(batch, shape)
    if stage == "attn_core":
        value_up = heads * shape.v_head_dim * kv if batch.phase == "decode" else 0
        out = heads * shape.v_head_dim * d
        gate = d * shape.n_routed_experts
        core = batch.pairs * core_flop_per_pair(batch.phase, shape)
        if batch.phase == "decode":
            read = batch.keys * latent_bytes(shape)
        else:
            read = 2 * batch.keys * heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim)
        return Work(2 * tokens * out, core + 2 * tokens * (value_up + gate), out + 2 * (value_up + gate) + read)
    if stage == "experts":
        return Work(2 * expert_rows * per_expert, 0.0, experts * per_expert + expert_rows * 3 * d)
    if stage == "shared":
        return Work(2 * tokens * per_expert, 0.0, per_expert + tokens * 3 * d)
    if stage == "mlp":
        dense = 3 * d * shape.intermediate_size
        return Work(2 * tokens * dense, 0.0, dense + tokens * 4 * d)
    if stage == "merge":
        return Work(0.0, 0.0, 8 * tokens * d)  # residual, routed and shared rows in, one row out, 2 bytes each
    if stage == "embed":
        return Work(0.0, 0.0, 4 * tokens * d)
    if stage == "mtp_embed":
        return Work(0.0, 4 * tokens * d * d, 4 * d * d + 8 * tokens * d)
    if stage == "final":
        head = d * shape.vocab_size
        return Work(0.0, 2 * batch.logits * head, 2 * head)
    raise ValueError(f"stage {stage!r} has no computation that could be priced")


def _attn_proj(batch, shape):
    """Down and up projections; the absorbed form multiplies the query by the key half of kv_b, in BF16."""
    heads, d, kv = shape.num_attention_heads, shape.hidden_size, shape.kv_lora_rank
    down = d * (shape.q_lora_rank + kv + shape.qk_rope_head_dim)
    query_up = shape.q_lora_rank * heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    written = batch.tokens * latent_bytes(shape)
    if batch.phase == "decode":
        absorb = heads * shape.qk_nope_head_dim * kv
        fp8 = down + query_up
        return Work(2 * batch.tokens * fp8, 2 * batch.tokens * absorb, fp8 + 2 * absorb + written)
    fp8 = down + query_up + kv * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return Work(2 * batch.tokens * fp8, 0.0, fp8 + written)


def roofline(work: Work, gpu: Hardware, efficiency: Efficiency | None = None, attention: bool = False) -> float:
    """Seconds: the larger of arithmetic and memory time. attention: whether BF16 work is core attention."""
    efficiency = efficiency or Efficiency()
    bf16 = efficiency.attention if attention else efficiency.matmul
    arithmetic = work.fp8_flop / (gpu.fp8_flops * efficiency.matmul) + work.bf16_flop / (gpu.bf16_flops * bf16)
    return max(arithmetic / efficiency.sms, work.bytes / (gpu.hbm * efficiency.memory))


def dispatch_row_bytes(shape=V3) -> int:
    """Payload and scales of one FP8 row."""
    return shape.hidden_size + 4 * -(-shape.hidden_size // BLOCK)


def combine_row_bytes(shape=V3) -> int:
    """Payload of one BF16 row."""
    return 2 * shape.hidden_size

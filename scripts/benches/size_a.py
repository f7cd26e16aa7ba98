"""Size A, the standard size of the model benchmarks, a tiny one, and batches to run on either."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parallel import Deployment, Topology
from refmodel import Model, ModelConfig
from refmodel.generate import Item
from refmodel.numerics import Numerics
from refmodel.random_weights import RandomTensors

SIZE_A = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=8,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    q_lora_rank=192,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    torch_dtype="float32",
)


TINY = replace(
    SIZE_A,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    n_routed_experts=16,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)


class Size(NamedTuple):
    """A model and the batches that are run on it."""

    config: ModelConfig
    tokens: int  # of a prompt, and cached by a request that decodes
    prompts: tuple[int, ...]  # requests in a prefill
    decoding: tuple[int, ...]  # requests in a decode step
    square: int  # of the product that stands for the machine's peak


STANDARD = Size(SIZE_A, 512, (1, 4), (1, 32, 128), 2048)
QUICK = Size(TINY, 16, (1, 2), (1, 2), 64)


def flop_per_token(config, context: float) -> float:
    """Multiply-adds times two of one token at a mean context, naive form: what a perfect program must do."""
    D, H = config.hidden_size, config.num_attention_heads
    N, P, V, C = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    Q = config.q_lora_rank
    attention = D * Q + Q * H * (N + P) + D * (C + P) + C * H * (N + V) + H * V * D + context * H * (N + P + V)
    dense = 3 * D * config.intermediate_size
    experts = (config.num_experts_per_tok + config.n_shared_experts) * 3 * D * config.moe_intermediate_size
    moe = experts + D * config.n_routed_experts
    layers = config.num_hidden_layers * attention
    layers += sum(moe if config.is_moe_layer(layer) else dense for layer in range(config.num_hidden_layers))
    return 2 * layers


class EvenTensors(RandomTensors):
    """Random weights without correction biases, so that routing is spread over all experts as a trained router's is."""

    def array(self, name: str) -> np.ndarray:
        drawn = super().array(name)
        return np.zeros_like(drawn) if name.endswith("e_score_correction_bias") else drawn


def make_model(config, numerics: str = "float32", compute: str = "float32") -> Model:
    """A model of any size with `EvenTensors`; its `weights.source` has them for a peer."""
    return Model(EvenTensors(config, 0), config, Numerics(numerics, np.dtype(compute)))


def prompts(config, batch: int, tokens: int) -> np.ndarray:
    """int64 [batch, tokens]: the first rows are the same for every batch."""
    return np.stack([np.random.default_rng(i).integers(0, config.vocab_size, tokens) for i in range(batch)])


def next_tokens(config, batch: int) -> np.ndarray:
    """int64 [batch, 1]: what each request decodes."""
    return np.random.default_rng(1).integers(0, config.vocab_size, (batch, 1))


def prefill(model, batch: int, tokens: int):
    """A function that prefills `batch` prompts of `tokens` and returns the logits of their last tokens [B, vocab]."""
    ids = prompts(model.config, batch, tokens)

    def run():
        pool = model.new_pool()
        items = [Item(i, ids[i], model.new_cache(i, pool), 0) for i in range(batch)]
        return np.concatenate([step.logits for step in model.step(items, "prefill", last_only=True)])

    return run


def decode(model, batch: int, context: int):
    """A function that decodes one token of each of `batch` requests and returns their logits [B, vocab].

    Every request has the same `context` cached tokens, in pages of its own.
    """
    first = model.new_cache()
    model.step([Item(0, prompts(model.config, 1, context)[0], first, 0)], "prefill", last_only=True)
    pool = model.new_pool()
    caches = []
    for i in range(batch):
        cache = model.new_cache(i, pool)
        for layer in range(model.config.num_layers):
            cache.write(layer, 0, first.rows(layer))
        cache.length = context
        caches.append(cache)
    ids = next_tokens(model.config, batch)

    def run():
        steps = model.step([Item(i, ids[i], cache, context) for i, cache in enumerate(caches)], "decode")
        for cache in caches:
            cache.truncate(context)
        return np.concatenate([step.logits for step in steps])

    return run


def one_pass(
    model, requests: int, tokens: int, redundant: int = 0, dispatch: str | None = None, ranks: int | None = None
):
    """A function that prefills `requests` prompts of `tokens` on as many `ranks`; with no dialect on one rank.

    All logits are wanted. Each call starts from an empty ledger and empty caches.
    """
    ids, engine = prompts(model.config, requests, tokens), model
    if dispatch is not None:
        engine = Deployment(model, Topology(ranks or requests), redundant_experts=redundant, dispatch=dispatch)

    def run():
        fresh = engine.fresh()
        pool = fresh.new_pool() if dispatch is None else None
        caches = [fresh.new_cache(i) if pool is None else fresh.new_cache(i, pool) for i in range(requests)]
        fresh.step([Item(i, ids[i], cache, 0) for i, cache in enumerate(caches)], "prefill")

    return run

"""Multi-head latent attention: projections into the cache row, and attention from it in both forms.

Naive (prefill): keys and values of every head are expanded from the latent by kv_b. Absorbed (decode, verify): W_UK
moves into the query and W_UV behind the sum, so attention runs on the latent itself, as one key head of C + P whose
first C numbers are also the value. In FP8 the forms differ by definition: the absorbed one uses kv_b in bfloat16.
Source: DeepSeek-V2 report 2.1; deepseek-ai/DeepSeek-V3 inference/model.py.
"""

import numpy as np

from refmodel.attention import attend_blocks, attend_requests
from refmodel.cache import PAGE_SIZE
from refmodel.expansion import expand
from refmodel.experts import project
from refmodel.groups import FEW_TOKENS, with_tokens
from refmodel.linear import matmul_rows
from refmodel.norm import normalise
from refmodel.rope import rotate
from refmodel.threads import MULTIPLY_ADD, each


def project_query_and_latent(state, weights, x, scope):
    """(query [T, H, N + P] with RoPE, cache row [T, C + P]) from the normed input x [T, D]."""
    config, numerics = state.config, state.numerics
    C, P, H = config.kv_lora_rank, config.qk_rope_head_dim, config.num_attention_heads
    down = project(x, weights.down, numerics)  # [T, Q + C + P], or [T, H (N + P) + C + P] without a query latent
    q, kv_a = down[:, : -(C + P)], down[:, -(C + P) :]
    if config.q_lora_rank is not None:
        scope.emit("q_a", q)
        q = _inner_norm(state, q, weights.q_a_norm)
        scope.emit("q_a_norm", q)
        q = project(q, weights.q_b, numerics)
    q = q.reshape(len(q), H, config.qk_head_dim)
    heads = np.empty((len(q), H + 1, P), numerics.activation)  # the rope parts of the query heads, and the one rope key
    heads[:, :H], heads[:, H] = q[:, :, -P:], kv_a[:, C:]
    heads = _rotate(state, heads)
    q[:, :, -P:] = heads[:, :H]
    scope.emit("q", q)
    scope.emit("kv_a", kv_a)
    row = np.empty((len(q), C + P), numerics.activation)
    row[:, :C], row[:, C:] = _inner_norm(state, kv_a[:, :C], weights.kv_a_norm), heads[:, H]  # k_pe is not normed
    scope.emit("kv_latent", row[:, :C])
    scope.emit("k_pe", row[:, C:])
    return q, row


def _rotate(state, x):
    """RoPE of the batch's positions on x [T, heads, P], rounded."""
    numerics = state.numerics
    turned = rotate(x, state.rotation, numerics.rope_cast)
    if numerics.switches.k_pe_order == "half_split" and state.config.rope_interleave:
        turned = np.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)  # queries too: scores do not change
    return numerics.store(turned, "rope")


def _inner_norm(state, x, weight):
    eps = state.numerics.switches.inner_norm_eps
    return normalise(x, weight, state.config.rms_norm_eps if eps is None else eps, state.numerics)


def attend_batch(state, weights, layer, query):
    """(value heads [T, H, V], lse [T, H]), both rounded: each request's queries over its own cache."""
    for segment in state.batch.segments:
        written = segment.cache.written[layer]
        if written < segment.keys:
            raise ValueError(f"layer {layer}: attention over {segment.keys} keys, but only {written} are in the cache")
    form = _attend_naive if state.batch.phase == "prefill" else _attend_absorbed
    heads, lse = form(state, weights, layer, query)
    return heads, state.numerics.store(lse, "lse")


def _attend_naive(state, weights, layer, query):
    config, numerics = state.config, state.numerics
    heads = np.empty((*query.shape[:2], config.v_head_dim), numerics.compute)  # [T, H, V]
    lse = np.empty(query.shape[:2], numerics.compute)
    q = numerics.widen(query)

    def attend_segment(segment):
        rows = slice(segment.start, segment.stop)
        k, v = expand(state, weights, segment.cache, layer, segment.keys)
        part = attend_blocks(q[rows], k, v, segment.keys, state.weights.softmax_scale, segment.cache_offset)
        heads[rows], lse[rows] = part

    each(attend_segment, with_tokens(state.batch.segments), q.size * config.kv_lora_rank * MULTIPLY_ADD)
    return numerics.store(heads, "attention"), lse


def _attend_absorbed(state, weights, layer, query):
    config, numerics = state.config, state.numerics
    N, C = config.qk_nope_head_dim, config.kv_lora_rank
    q = np.empty((*query.shape[:2], C + config.qk_rope_head_dim), numerics.compute)  # [T, H, C + P]
    q_nope = numerics.widen(query[:, :, :N]).transpose(1, 0, 2)  # [H, T, N]
    absorbed = numerics.store(matmul_rows(q_nope, weights.w_uk), "linear")  # [H, T, C]
    q[:, :, :C] = numerics.widen(absorbed).transpose(1, 0, 2)
    q[:, :, C:] = numerics.widen(query[:, :, N:])
    scale = state.weights.softmax_scale

    def attend_group(group):
        segments, rows, keys = group
        blocks = np.empty((len(segments), group.blocks, PAGE_SIZE, q.shape[-1]), q.dtype)
        for segment, count, out in zip(segments, keys, blocks):
            segment.cache.read_blocks(layer, count, out)  # [nb, 64, C + P]
        if group.new_tokens > FEW_TOKENS:
            return attend_blocks(q[rows], blocks, blocks[..., :C], keys[0], scale, segments[0].cache_offset)
        return attend_requests(q[rows], blocks, blocks[..., :C], keys, scale)

    if len(state.groups) == 1:
        latent, lse = attend_group(state.groups[0])  # [T, H, C], [T, H]
    else:
        latent, lse = np.empty((*query.shape[:2], C), numerics.compute), np.empty(query.shape[:2], numerics.compute)

        def place(group):
            latent[group.rows], lse[group.rows] = attend_group(group)

        most_keys = max((group.keys[0] for group in state.groups), default=0)
        each(place, state.groups, 2 * q.size * most_keys * MULTIPLY_ADD)
    latent = numerics.widen(numerics.store(latent, "attention")).transpose(1, 0, 2)  # [H, T, C]
    heads = matmul_rows(latent, weights.w_uv)  # [H, T, V]
    return numerics.store(heads, "linear").transpose(1, 0, 2), lse

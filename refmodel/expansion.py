"""Keys and values of every head, expanded from latent cache rows: the naive form of attention."""

import numpy as np

from refmodel.cache import PAGE_SIZE
from refmodel.experts import project
from refmodel.threads import MULTIPLY_ADD, each


def expand(state, weights, cache, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Key and value blocks [H, nb, 64, N + P] and [H, nb, 64, V] of a request's first `tokens`, in the compute dtype.

    Keys lie transposed, [H, nb, N + P, 64] in memory, as their product with queries wants them. What lies behind the
    last token is zero. Every key and value is rounded as the linear kv_b rounds.
    """
    config, numerics = state.config, state.numerics
    rows = np.empty((-(-tokens // PAGE_SIZE), PAGE_SIZE, cache.pool.width), numerics.compute)
    cache.read_blocks(layer, tokens, rows)  # [nb, 64, C + P]
    H, N, V, C = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    k = np.empty((H, len(rows), config.qk_head_dim, PAGE_SIZE), numerics.compute)
    v = np.empty((H, len(rows), PAGE_SIZE, V), numerics.compute)
    k[:, :, N:] = rows[..., C:].swapaxes(1, 2)  # one rope key for all heads
    fill = _by_codes if numerics.fp8 else _by_heads
    fill(numerics, weights, rows[..., :C], k[:, :, :N], v)
    return k.swapaxes(2, 3), v


def _by_heads(numerics, weights, latent, k, v):
    """Fill k [H, nb, N, 64] and v [H, nb, 64, V] from latents [nb, 64, C], by a product a head and block.

    A token has the same place in products of the same shape whatever comes with it: no rule about row counts is needed.
    """
    w_uk, w_uv = weights.w_uk, weights.w_uv  # [H, N, C], [H, C, V]
    turned = np.ascontiguousarray(latent.swapaxes(1, 2))  # [nb, C, 64]
    direct = numerics.activation == numerics.compute  # nothing to round

    def fill(h):
        if direct:
            np.matmul(w_uk[h], turned, out=k[h])
            np.matmul(latent, w_uv[h], out=v[h])
        else:
            k[h] = numerics.widen(numerics.store(np.matmul(w_uk[h], turned), "linear"))
            v[h] = numerics.widen(numerics.store(np.matmul(latent, w_uv[h]), "linear"))

    each(fill, range(len(k)), latent.size * (k.shape[2] + v.shape[3]) * len(k) * MULTIPLY_ADD)


def _by_codes(numerics, weights, latent, k, v):
    """Fill k and v from latents [nb, 64, C] by the FP8 linear kv_b; a row of zeros stays one."""
    H, blocks, N, _ = k.shape
    product = project(latent.reshape(blocks * PAGE_SIZE, -1), weights.kv_b, numerics)
    by_block = numerics.widen(product).reshape(blocks, PAGE_SIZE, H, -1)
    k[...] = by_block[..., :N].transpose(2, 0, 3, 1)
    v[...] = by_block[..., N:].transpose(2, 0, 1, 3)

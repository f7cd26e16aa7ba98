"""Operators of attention. Keywords are mistakes (see `mistakes`); without them each is what `refmodel.mla` does."""

from dataclasses import replace

import numpy as np

from fp8.rounding import to_bfloat16
from refmodel.attention import Attended, attend
from refmodel.cache import LatentCache, PagePool
from refmodel.experts import project
from refmodel.golden.norm_operators import norm
from refmodel.mla import attend_batch
from refmodel.numerics import widen
from refmodel.rope import apply_rope, yarn_frequencies, yarn_mscale
from refmodel.state import Batch, Segment, State


def down(context, x, *, layer, part, factor=1.0):
    """q_a or kv_a: a part of the product that both share."""
    width = context.config.kv_lora_rank + context.config.qk_rope_head_dim
    out = project(x, context.weights.layer(layer).down, context.numerics)
    out = out[:, :-width] if part == "q" else out[:, -width:]
    if factor != 1.0:
        out = context.numerics.store(context.numerics.widen(out) * factor, "linear")
    return (out,)


def rotate(
    context, x, *, other_pairs=False, shift=0, plain=False, base=None, amplitude=None, conjugate=False, halves=False
):
    """RoPE on x [T, heads, P], rounded; `halves`: the right rotation, written in the other order."""
    config, numerics = context.weights.rope_config, context.numerics
    config = config if base is None else replace(config, rope_theta=base)
    interleaved = config.rope_interleave != other_pairs
    inv_freq, usual = yarn_frequencies(config)
    if plain:
        P = config.qk_rope_head_dim
        inv_freq = 1.0 / config.rope_theta ** (np.arange(0, P, 2, dtype=np.float64) / P)
    if amplitude == "mscale":
        usual = usual * _mscale(config)
    out = apply_rope(
        x,
        context.positions() + shift,
        -inv_freq if conjugate else inv_freq,
        interleaved,
        amplitude=usual,
        dtype=numerics.compute,
        cast_each=numerics.rope_cast,
    )
    if halves != (interleaved and numerics.switches.k_pe_order == "half_split"):
        out = np.concatenate([out[..., 0::2], out[..., 1::2]], axis=-1)
    return numerics.store(out, "rope")


def _mscale(config) -> float:
    scaling = config.rope_scaling
    return 1.0 if scaling is None else yarn_mscale(scaling.factor, scaling.mscale_all_dim or 1.0)


def query(context, x, *, layer, rotated=True, front=False, rope_first=False, heads_inside=False, **rope):
    """q_b (or q without a latent) and RoPE on the last P of each head: [T, H, N + P]."""
    config, numerics = context.config, context.numerics
    H, P = config.num_attention_heads, config.qk_rope_head_dim
    weights = context.weights.layer(layer)
    if config.q_lora_rank is None:
        q = project(x, weights.down, numerics)[:, : -(config.kv_lora_rank + P)]
    else:
        q = project(x, weights.q_b, numerics)
    q = q.reshape(len(q), -1, H).transpose(0, 2, 1) if heads_inside else q.reshape(len(q), H, -1)
    q = q.copy()
    if rope_first:
        q = np.concatenate([q[:, :, P:], q[:, :, :P]], axis=2)
    if rotated:
        part = slice(0, P) if front else slice(-P, None)
        q[:, :, part] = rotate(context, q[:, :, part], **rope)
    return (q,)


def latent(context, kv_a, *, layer, over_all=False, **mistake):
    """The normed latent [T, C] that the cache keeps."""
    C, numerics = context.config.kv_lora_rank, context.numerics
    if over_all:  # the mean square taken over latent and rope part together
        wide = numerics.widen(kv_a)
        w = numerics.widen(context.weights.layer(layer).kv_a_norm)
        inverse = 1 / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6)
        return (numerics.store(wide[:, :C] * inverse * w, "norm"),)
    return norm(context, np.ascontiguousarray(kv_a[:, :C]), layer=layer, weight="kv_a_norm", **mistake)


def k_pe(context, kv_a, *, layer, rotated=True, normed=False, first=False, **rope):
    """The rotated key part [T, P] that all heads share; it has no norm."""
    P, numerics = context.config.qk_rope_head_dim, context.numerics
    raw = kv_a[:, :P] if first else kv_a[:, -P:]
    if normed:
        wide = numerics.widen(raw)
        raw = numerics.store(wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6), "norm")
    return (rotate(context, raw[:, None], **rope)[:, 0] if rotated else raw.copy(),)


def attention(context, q, kv_latent, k_pe, *, layer, **mistake):
    """(value heads [T, H, V], lse [T, H]): every request over its own rows."""
    if mistake:
        return _attention_with(context, q, kv_latent, k_pe, layer, **mistake)
    rows = np.concatenate([kv_latent, k_pe], axis=1)  # [T, C + P]
    segments = []
    for here, offset, all_rows in context.requests(layer, rows):
        cache = LatentCache(PagePool(layer + 1, rows.shape[1], rows.dtype))
        cache.write(layer, 0, all_rows)
        segments.append(Segment(cache, offset, here.start, here.stop))
    none = np.empty(0, np.int64)  # attention reads neither token ids nor positions
    state = State(context.weights, Batch(none, none, tuple(segments), context.phase), exchange=None)
    return attend_batch(state, context.weights.layer(layer), layer, q)


def _expanded(context, kv_latent, layer, split):
    """Keys without position [T, H, N] and values [T, H, V] by kv_b."""
    config, numerics = context.config, context.numerics
    H, N, V = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    kv = project(kv_latent, context.weights.layer(layer).kv_b, numerics)
    if split == "all_k_all_v":
        return kv[:, : H * N].reshape(-1, H, N), kv[:, H * N :].reshape(-1, H, V)
    kv = kv.reshape(-1, H, N + V)
    return (kv[..., V:], kv[..., :V]) if split == "v_first" else (kv[..., :N], kv[..., N:])


def _attention_with(
    context,
    q,
    kv_latent,
    k_pe,
    layer,
    *,
    scale=None,
    offset=0,
    causal=True,
    split=None,
    without_rope=False,
    base2=False,
    lse_base2=False,
    lse_unscaled=False,
    heads_rolled=0,
    leak=False,
    narrow_scores=False,
):
    """The naive form with a mistake in it, request by request, or over all rows as one (`leak`)."""
    config, numerics = context.config, context.numerics
    C, P, N = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    factors = {
        None: context.weights.softmax_scale,
        "no_mscale": (N + P) ** -0.5,
        "mscale_once": (N + P) ** -0.5 * _mscale(config),
        "latent": context.weights.softmax_scale * ((N + P) / (C + P)) ** 0.5,
        "nope": context.weights.softmax_scale * ((N + P) / N) ** 0.5,
        "none": 1.0,
    }
    factor = factors[scale] * (np.log(2.0) if base2 else 1.0)
    rows = np.concatenate([kv_latent, k_pe], axis=1)  # [T, C + P]
    requests = context.requests(layer, rows)
    if leak:
        if context.past is not None:
            raise ValueError("keys of other requests are visible: meant for rows without a past")
        requests = [(slice(0, len(q)), 0, rows)]
    outs = []
    for here, before, all_rows in requests:
        k_nope, v = _expanded(context, all_rows[:, :C], layer, split)
        rope = np.repeat(all_rows[:, None, C:], k_nope.shape[1], axis=1)
        k = np.concatenate([k_nope, np.zeros_like(rope) if without_rope else rope], axis=2)
        wide = (numerics.widen(x) for x in (q[here], k, v))
        visible = before + offset if causal else None
        run = _attend_narrow if narrow_scores else attend
        outs.append(run(*wide, factor, visible, dtype=numerics.compute))
    heads = np.concatenate([o.out for o in outs])
    lse = np.concatenate([o.lse for o in outs])
    lse = lse / np.log(2.0) if lse_base2 or base2 else lse
    lse = lse / factor if lse_unscaled else lse
    heads = np.roll(heads, heads_rolled, axis=1)
    return numerics.store(heads, "attention"), numerics.store(lse, "lse")


def _attend_narrow(q, k, v, scale, causal_offset, *, dtype) -> Attended:
    """`attend` whose scores are rounded to bfloat16 before and after the scale, and whose probabilities are rounded to
    it before they meet the values. The lse is that of the rounded scores."""

    def narrow(x):
        return widen(to_bfloat16(x), dtype)

    scores = narrow(narrow(np.einsum("thd,shd->hts", q, k)) * dtype.type(scale))
    hidden = np.arange(len(k)) > causal_offset + np.arange(len(q))[:, None]  # [T, S]
    scores[:, hidden] = -np.inf
    top = scores.max(axis=2, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=2, keepdims=True)
    out = np.einsum("hts,shd->thd", narrow(p / total), v)
    return Attended(out, (np.log(total) + top)[:, :, 0].T)


def output(context, heads, *, layer, heads_inside=False, factor=1.0):
    """o: the concatenated value heads [T, H V] -> [T, D]."""
    heads = heads.swapaxes(1, 2) if heads_inside else heads
    flat = np.ascontiguousarray(heads).reshape(len(heads), -1)
    out = project(flat, context.weights.layer(layer).o, context.numerics)
    if factor != 1.0:
        out = context.numerics.store(context.numerics.widen(out) * factor, "linear")
    return (out,)

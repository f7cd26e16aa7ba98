"""A whole forward pass written out slowly from the rules, in float64, one token at a time, without a cache."""

import math

import numpy as np


def forward(source, config, token_ids):
    """Logits [T, vocab] and final hidden states [T, D]."""
    get = lambda name: source.array(name).astype(np.float64)  # noqa: E731
    hidden = [get("model.embed_tokens.weight")[token] for token in token_ids]
    for layer in range(config.num_hidden_layers):
        hidden = run_layer(get, config, layer, hidden, list(range(len(hidden))))
    normed = [norm(h, get("model.norm.weight"), config.rms_norm_eps) for h in hidden]
    return np.array([get("lm_head.weight") @ h for h in normed]), np.array(normed)


def mtp(source, config, token_ids, states):
    """Logits of the MTP layer for (state i, token i + 1) pairs."""
    get = lambda name: source.array(name).astype(np.float64)  # noqa: E731
    layer, eps = config.num_hidden_layers, config.rms_norm_eps
    pre = f"model.layers.{layer}."
    hidden = []
    for token, state in zip(token_ids, states):
        e = norm(get("model.embed_tokens.weight")[token], get(pre + "enorm.weight"), eps)
        h = norm(state, get(pre + "hnorm.weight"), eps)
        hidden.append(get(pre + "eh_proj.weight") @ np.concatenate([e, h]))
    hidden = run_layer(get, config, layer, hidden, [i + 1 for i in range(len(hidden))])
    return np.array([get("lm_head.weight") @ norm(h, get(pre + "shared_head.norm.weight"), eps) for h in hidden])


def norm(x, weight, eps):
    return x / math.sqrt(np.mean(x * x) + eps) * weight


def silu_mlp(get, prefix, x):
    gate, up = get(prefix + "gate_proj.weight") @ x, get(prefix + "up_proj.weight") @ x
    return get(prefix + "down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)


def run_layer(get, config, layer, hidden, positions):
    pre = f"model.layers.{layer}."
    normed = [norm(h, get(pre + "input_layernorm.weight"), config.rms_norm_eps) for h in hidden]
    attended = attention(get, config, pre + "self_attn.", normed, positions)
    hidden = [h + a for h, a in zip(hidden, attended)]
    normed = [norm(h, get(pre + "post_attention_layernorm.weight"), config.rms_norm_eps) for h in hidden]
    ffn = moe if config.is_moe_layer(layer) else lambda get, config, prefix, x: silu_mlp(get, prefix, x)
    return [h + ffn(get, config, pre + "mlp.", x) for h, x in zip(hidden, normed)]


def rotate(config, x, position):
    P, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    out = np.empty(P)
    for i in range(P // 2):
        f, amplitude = theta ** (-2 * i / P), 1.0
        if scaling:
            bound = lambda r: (  # noqa: E731
                P * math.log(scaling.original_max_position_embeddings / (2 * math.pi * r)) / (2 * math.log(theta))
            )
            low, high = max(math.floor(bound(32)), 0), min(math.ceil(bound(1)), P - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            f = f / scaling.factor * ramp + f * (1 - ramp)
            m = lambda s: 0.1 * s * math.log(scaling.factor) + 1  # noqa: E731
            amplitude = m(scaling.mscale) / m(scaling.mscale_all_dim)
        turned = complex(x[2 * i], x[2 * i + 1]) * amplitude * complex(math.cos(position * f), math.sin(position * f))
        out[2 * i], out[2 * i + 1] = turned.real, turned.imag
    return out


def attention(get, config, pre, xs, positions):
    H, N, P, V, C = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    scale = (N + P) ** -0.5
    if config.rope_scaling and config.rope_scaling.mscale_all_dim:
        scale *= (0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor) + 1) ** 2
    keys, values, out = [], [], []
    for x, position in zip(xs, positions):
        if config.q_lora_rank:
            latent = norm(get(pre + "q_a_proj.weight") @ x, get(pre + "q_a_layernorm.weight"), 1e-6)
            q = (get(pre + "q_b_proj.weight") @ latent).reshape(H, N + P)
        else:
            q = (get(pre + "q_proj.weight") @ x).reshape(H, N + P)
        kv_a = get(pre + "kv_a_proj_with_mqa.weight") @ x
        kv = (get(pre + "kv_b_proj.weight") @ norm(kv_a[:C], get(pre + "kv_a_layernorm.weight"), 1e-6)).reshape(
            H, N + V
        )
        k_pe = rotate(config, kv_a[C:], position)
        keys.append([np.concatenate([kv[h, :N], k_pe]) for h in range(H)])
        values.append([kv[h, N:] for h in range(H)])
        heads = []
        for h in range(H):
            query = np.concatenate([q[h, :N], rotate(config, q[h, N:], position)])
            scores = np.array([scale * (query @ key[h]) for key in keys])
            p = np.exp(scores - scores.max())
            heads.append(sum(w * value[h] for w, value in zip(p / p.sum(), values)))
        out.append(get(pre + "o_proj.weight") @ np.concatenate(heads))
    return out


def moe(get, config, pre, x):
    scores = 1 / (1 + np.exp(-(get(pre + "gate.weight") @ x)))
    choice = (scores + get(pre + "gate.e_score_correction_bias")).tolist()
    size = config.n_routed_experts // config.n_group
    group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(config.n_group)]
    kept = sorted(range(config.n_group), key=lambda g: -group[g])[: config.topk_group]
    if config.n_group == 1:
        kept = [0]
    allowed = [e for e in range(config.n_routed_experts) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) + 1e-20
    y = sum(config.routed_scaling_factor * scores[e] / total * silu_mlp(get, f"{pre}experts.{e}.", x) for e in chosen)
    return y + silu_mlp(get, pre + "shared_experts.", x) if config.n_shared_experts else y

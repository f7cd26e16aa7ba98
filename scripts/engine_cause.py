"""Name the operator behind a diverging tensor, and the known mistake that reproduces an engine's result."""

from collections.abc import Mapping

import numpy as np

from refmodel.golden.locate import Location, locate

#: what stands between a tensor's name within its layer and the one before it
OPERATORS = {
    "attn_proj.norm": "input_layernorm",
    "attn_proj.q_a": "q_a_proj",
    "attn_proj.q_a_norm": "q_a_layernorm",
    "attn_proj.kv_a": "kv_a_proj_with_mqa",
    "attn_proj.kv_latent": "kv_a_layernorm",
    "attn_proj.k_pe": "RoPE of the shared key",
    "attn_core.heads": "core attention (kv_b_proj, softmax scale, mask, values)",
    "attn_core.out": "o_proj",
    "attn_core.residual": "residual addition after attention",
    "attn_core.norm": "post_attention_layernorm",
    "attn_core.router.logits": "router projection (mlp.gate)",
    "attn_core.router.topk_idx": "selection of experts",
    "attn_core.router.topk_weights": "weights of the selected experts",
    "combine_recv.routed": "routed experts and their weighted sum",
    "shared.out": "shared experts",
    "merge.moe": "sum of routed and shared experts",
    "merge.residual": "residual addition after the experts",
    "mlp.out": "dense MLP",
    "mlp.residual": "residual addition after the MLP",
    "mtp_embed.enorm": "embedding of the next token and enorm",
    "mtp_embed.hnorm": "hidden state fed to the MTP layer and hnorm",
    "mtp_embed.hidden": "eh_proj",
    "final.norm": "the MTP layer's own norm",
    "final.logits": "head",
}


def describe(name: str, expected, actual, config, tolerance: float) -> str:
    """The operator in words: `RoPE of the query, layer 0`, not only the tensor's name."""
    if not name.startswith("layers."):
        return {"embed.hidden": "embedding", "final.norm": "final norm", "final.logits": "lm_head"}.get(name, name)
    _, layer, point = name.split(".", 2)
    if point != "attn_proj.q":
        return f"{OPERATORS.get(point, point)}, layer {layer}"
    width, size = config.qk_nope_head_dim, np.sqrt(np.square(expected, dtype=np.float64).mean())
    plain = np.abs(actual[..., :width].astype(np.float64) - expected[..., :width]).max() / size
    if plain <= tolerance:
        return f"RoPE of the query, layer {layer} (the part of q without position agrees)"
    return f"query projection, layer {layer} (the part of q without position differs already)"


def locate_main(model, tokens: list[int], captured: Mapping) -> Location:
    """Replay every captured operator of the main model on the engine's own inputs."""
    mtp = f"layers.{model.config.num_hidden_layers}."
    main = {name: array for name, array in captured.items() if not name.startswith((mtp, "engine."))}
    return locate(model, main, token_ids=tokens)


def locate_with_mtp(model, tokens: list[int], captured: Mapping) -> Location:
    """The same with the MTP layer behind it, in the slots that it has: all but the last token's.

    The main model's last row is cut off, which no other row of it can see.
    """
    mtp = f"layers.{model.config.num_hidden_layers}."
    cut = {
        name: array if name.startswith(mtp) else array[:-1]
        for name, array in captured.items()
        if not name.startswith("engine.")
    }
    return locate(model, cut, token_ids=tokens[:-1], mtp_token_ids=tokens[1:])


def locate_capture(model, tokens: list[int], captured: Mapping) -> Location:
    """The first operator of the main model that is wrong on its own inputs, else the first of the MTP layer."""
    main = locate_main(model, tokens, captured)
    mtp = f"layers.{model.config.num_hidden_layers}."
    if not main.ok or not any(name.startswith(mtp) for name in captured):
        return main
    return locate_with_mtp(model, tokens, captured)

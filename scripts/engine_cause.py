"""Name the operator behind a diverging tensor, and the known mistake that reproduces an engine's result."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from refmodel.model import Model
from refmodel.schema import needed_tensors
from scripts.known_mistakes import ROUTING_VARIANTS, changed_models, routes

#: a model with more parameters is not run again for every known mistake
REPLAY_LIMIT = 500_000_000

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


def find_cause(
    name: str, model: Model, tokens: list[int], captured: Mapping, recorded: Callable, tolerance: float
) -> str | None:
    """The known mistake under which we compute what the engine computed, or None.

    A wrong routing is explained from the engine's own router logits; anything else by running our model again with
    each known mistake and comparing what diverged and all that the engine has of the last logits.
    """
    if ".router.topk_" in name and (cause := _routing_cause(name, model, captured)):
        return cause
    if sum(math.prod(needed.shape) for _, needed in needed_tensors(model.config)) > REPLAY_LIMIT:
        return None
    mtp = int(name.split(".")[1]) >= model.config.num_hidden_layers if name.startswith("layers.") else False
    last = f"layers.{model.config.num_hidden_layers}.final.logits" if mtp else "final.logits"
    judged = [key for key in (name, last) if key in captured and ".router.topk_" not in key]
    for text, changed in changed_models(model) if judged else ():
        ours = recorded(changed, tokens, mtp)
        if all(key in ours and _near(ours[key], captured[key], tolerance) for key in judged):
            return text
    return None


def _near(ours, theirs, tolerance: float) -> bool:
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return bool(np.abs(ours - theirs).max() <= tolerance * np.sqrt(np.square(theirs).mean()))


def _routing_cause(name: str, model: Model, captured: Mapping) -> str | None:
    prefix, layer = name.rsplit(".", 1)[0], int(name.split(".")[1])
    needed = [f"{prefix}.{part}" for part in ("logits", "topk_idx", "topk_weights")]
    if any(key not in captured for key in needed) or model.config.scoring_func != "sigmoid":
        return None
    logits, ids, weights = (captured[key] for key in needed)
    order = np.argsort(ids, axis=1, kind="stable")
    ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
    bias = model.weights.layer(layer).correction_bias
    for variant in ROUTING_VARIANTS:
        their_ids, their_weights = routes(logits, bias, model.config, variant)
        if np.mean((their_ids == ids).all(axis=1)) > 0.99 and _near(their_weights, weights, 1e-3):
            return variant.text
    return None

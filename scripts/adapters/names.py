"""The names under which an engine's tensors are stored: the same that this project's own `record()` uses.

An adapter knows its engine's modules; this file alone knows our names. It runs inside the engine's own environment and
imports nothing of this project. Tensors are kept as the engine has them: where engines legitimately differ, in the
order of k_pe or in where a factor is applied, our model takes that engine's side.
"""

EMBED = "embed.hidden"
FINAL_NORM = "final.norm"
LOGITS = "final.logits"

# What one layer computes, in execution order: short name of the point -> its name under `layers.L.`
LAYER_POINTS = {
    "attn_norm": "attn_proj.norm",  # [T, D]
    "q_a": "attn_proj.q_a",  # [T, Q]
    "q_a_norm": "attn_proj.q_a_norm",  # [T, Q]
    "q": "attn_proj.q",  # [T, H, N+P], rotated
    "kv_a": "attn_proj.kv_a",  # [T, C+P]
    "kv_latent": "attn_proj.kv_latent",  # [T, C]
    "k_pe": "attn_proj.k_pe",  # [T, P], rotated
    "attention": "attn_core.heads",  # [T, H, V]
    "o": "attn_core.out",  # [T, D]
    "attn_residual": "attn_core.residual",  # [T, D]
    "ffn_norm": "attn_core.norm",  # [T, D]
    "router_logits": "attn_core.router.logits",  # [T, E]
    "topk_idx": "attn_core.router.topk_idx",  # [T, K]
    "topk_weights": "attn_core.router.topk_weights",  # [T, K]
    "routed": "combine_recv.routed",  # [T, D]
    "shared": "shared.out",  # [T, D]
    "moe": "merge.moe",  # [T, D], routed + shared
    "mlp": "mlp.out",  # [T, D], a dense layer
    "hidden": "merge.residual",  # [T, D], the layer's output
    "dense_hidden": "mlp.residual",  # [T, D], the same of a dense layer
}


def layer_name(layer: int, point: str) -> str:
    """Full name of one point of one layer: layer_name(3, "q_a") is `layers.3.attn_proj.q_a`."""
    return f"layers.{layer}.{LAYER_POINTS[point]}"


def mtp_name(layer: int, point: str) -> str:
    """Name of what stands around an MTP layer: `enorm`, `hnorm`, `eh_proj`; its own `norm` and `logits`."""
    stage = "final" if point in ("norm", "logits") else "mtp_embed"
    return f"layers.{layer}.{stage}.{'hidden' if point == 'eh_proj' else point}"

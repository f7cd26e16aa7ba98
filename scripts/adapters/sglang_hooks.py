"""Hooks inside SGLang's scheduler process, attached by its own `forward_hooks` option. Not yet run on SGLang itself.

SGLang imports `keep` by name and calls it once for each entry of `forward_hooks` (sgl-project/sglang
python/sglang/srt/model_executor/hook_manager.py); the entries are made here, by `hook_entries`.
"""

import torch
from names import EMBED, FINAL_NORM, layer_name
from safetensors.torch import save_file

SEEN: dict[str, torch.Tensor] = {}

# module within a layer -> [(point, part of the output)]
ATTENTION = {
    "input_layernorm": [("attn_norm", "first")],
    "self_attn.kv_a_layernorm": [("kv_latent", "first")],
    "self_attn.o_proj": [("o", "first")],
    "post_attention_layernorm": [("ffn_norm", "first"), ("attn_residual", "second")],
}
WITH_Q_LATENT = {
    "self_attn.fused_qkv_a_proj_with_mqa": [("q_a", "before"), ("kv_a", "after")],
    "self_attn.q_a_layernorm": [("q_a_norm", "first")],
}
WITHOUT_Q_LATENT = {"self_attn.kv_a_proj_with_mqa": [("kv_a", "first")]}
DENSE = {"mlp": [("mlp", "first")], "": [("dense_hidden", "sum")]}
MOE = {
    "mlp.gate": [("router_logits", "first")],
    "mlp.topk": [("topk_weights", "topk_weights"), ("topk_idx", "topk_ids")],
    "mlp": [("moe", "first")],
    "": [("hidden", "sum")],
}


def hook_entries(config: dict, rows: int, file: str) -> list[dict]:
    """`forward_hooks` for one prefill of `rows` tokens; `config` is the checkpoint's config.json."""

    def entry(module, name, part, last=False):
        settings = {"name": name, "part": part, "rows": rows, "q_rank": config.get("q_lora_rank") or 0}
        settings["file"] = file if last else ""
        return {"name": name, "target_modules": [module], "hook_factory": "sglang_hooks:keep", "config": settings}

    entries = [entry("model.embed_tokens", EMBED, "first")]
    for layer in range(config["num_hidden_layers"]):
        points = ATTENTION | (WITH_Q_LATENT if config.get("q_lora_rank") else WITHOUT_Q_LATENT)
        points = points | (MOE if layer >= config["first_k_dense_replace"] else DENSE)
        for module, kept in points.items():
            path = f"model.layers.{layer}.{module}".rstrip(".")
            entries += [entry(path, layer_name(layer, point), part) for point, part in kept]
    return [*entries, entry("model.norm", FINAL_NORM, "first", last=True)]


def keep(config: dict):
    """The forward hook of one entry: keep its part of the output; after the last one write the file."""

    def hook(module, args, output):
        tensor = _part(output, config["part"], config["q_rank"])
        if tensor.shape[0] == config["rows"] and config["name"] not in SEEN:
            SEEN[config["name"]] = tensor.detach().to("cpu", copy=True).contiguous()
            if config["file"]:
                save_file(SEEN, config["file"])

    return hook


def _part(output, part: str, q_rank: int) -> torch.Tensor:
    if part == "topk_ids":
        return output.topk_ids.to(torch.int64)
    if part == "topk_weights":
        return output.topk_weights
    first = output[0] if isinstance(output, tuple) else output
    if part == "before":
        return first[..., :q_rank]
    if part == "after":
        return first[..., q_rank:]
    if part == "second":
        return output[1]
    return output[0] + output[1] if part == "sum" else first

"""One name for every tensor: Hugging Face's (`model.layers.3.self_attn.o_proj.weight`), whatever a file calls it."""

SCALE = "weight_scale_inv"
# names of the scale of a weight: Hugging Face's own, compressed-tensors', the vendor's converted files
SCALE_NAMES = (SCALE, "weight_scale", "scale")
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
OUTSIDE = ("lm_head",)  # parts that stand beside `model.`

# deepseek-ai/DeepSeek-V3 inference/convert.py, read backwards; always whole path components
VENDOR_TOP = {"embed": "embed_tokens", "norm": "norm", "head": "lm_head"}
VENDOR_LAYER = {
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
VENDOR_ATTENTION = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
VENDOR_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def canonical_name(stored: str) -> str:
    """The Hugging Face name of a tensor as any writer of the family stores it; a foreign name comes back as it is.

    Scales become `...weight_scale_inv`. Sources: transformers DeepSeek-V3, vLLM and SGLang weight loaders,
    deepseek-ai/DeepSeek-V3 inference/convert.py.
    """
    if stored.startswith("model.layers.") and stored.endswith((".weight", f".{SCALE}")):
        block = stored[stored.find(".", len("model.layers.")) + 1 :]
        if block.startswith(("self_attn.", "mlp.")):
            return stored  # as almost every tensor is called: the rest of this function would change nothing
    name = stored
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 2:
        parts[2:] = _layer_parts(parts[2:])
    elif parts[0] in VENDOR_TOP and len(parts) == 2:
        parts[0] = VENDOR_TOP[parts[0]]
    elif parts[0] not in ("embed_tokens", *OUTSIDE):
        return stored
    if parts[-1] in SCALE_NAMES:
        parts[-1] = SCALE
    name = ".".join(parts)
    return name if parts[0] in OUTSIDE else f"model.{name}"


def _layer_parts(parts: list[str]) -> list[str]:
    """The part of a name after `layers.L.`, vendor's names replaced."""
    if parts[0] not in VENDOR_LAYER:
        return parts
    block, rest = VENDOR_LAYER[parts[0]], parts[1:]
    if parts[0] == "attn" and rest:
        rest = [VENDOR_ATTENTION.get(rest[0], rest[0]), *rest[1:]]
    elif parts[0] == "ffn":
        if rest == ["gate", "bias"]:
            rest = ["gate", "e_score_correction_bias"]
        rest = [VENDOR_MLP.get(part, part) for part in rest]
    return [block, *rest]


def scale_name(weight: str) -> str:
    """The canonical name of the scale that belongs to a canonical `....weight`."""
    return f"{weight}_scale_inv"


def layer_of(name: str) -> int | None:
    """The layer index in a canonical name; None outside the layers."""
    parts = name.split(".", 3)
    if len(parts) < 4 or parts[0] != "model" or parts[1] != "layers":
        return None
    number = parts[2]
    return int(number) if len(number) <= 6 and number.isascii() and number.isdigit() else None

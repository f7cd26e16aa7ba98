"""Whether a checkpoint's tensors fit its config: presence, shapes, dtypes, scales; from headers, before any compute."""

from collections.abc import Mapping

from refmodel.config import ModelConfig
from refmodel.names import SCALE, layer_of, scale_name
from refmodel.quantization_json import is_excluded
from refmodel.schema import Needed, mtp_shared_tensors, needed_tensors
from refmodel.shards import Stored
from refmodel.tensor_header import shorten

FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32", "F64")
ROTARY_TABLE = "rotary_emb.inv_freq"  # old writers store what the config says already
OTHER_SCALES = (".k_scale", ".v_scale", ".input_scale")  # of the cache and of activations


def check_tensors(config: ModelConfig, tensors: Mapping[str, Stored], aliases: Mapping[str, str]) -> dict[str, Needed]:
    """All tensors that the config calls for, present and of the right shape and kind; or one ValueError."""
    needed = dict(needed_tensors(config))
    for layer in range(config.num_hidden_layers, config.num_layers):
        needed.update((name, need) for name, need in mtp_shared_tensors(config, layer) if name not in aliases)
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ValueError(_explain_missing(config, tensors, missing))
    for name, need in needed.items():
        stored = tensors[name]
        if stored.shape != need.shape:
            raise ValueError(
                f"{stored.file.path.name}: tensor {name}: shape {list(stored.shape)}, but the config makes it "
                f"{list(need.shape)} = [{', '.join(need.formula)}]"
            )
        if stored.dtype not in FLOATS and not (stored.dtype == FP8 and need.matrix):
            raise ValueError(
                f"{stored.file.path.name}: tensor {name}: dtype {stored.dtype}; "
                f"{'a weight' if need.matrix else 'this tensor'} is stored as {', '.join(FLOATS)}"
                f"{' or ' + FP8 if need.matrix else ', never quantised'}"
            )
    return needed


def _explain_missing(config: ModelConfig, tensors: Mapping[str, Stored], missing: list[str]) -> str:
    name = missing[0]
    text = f"{len(missing)} tensors are missing, first {name}"
    if len(missing) > 1:
        text = f"{len(missing)} tensors are missing: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
    layer = layer_of(name)
    if layer is None:
        return text
    prefix = f"model.layers.{layer}."
    if not any(other.startswith(prefix) for other in tensors):
        return f"{text}; there is no layer {layer}: num_hidden_layers = {config.num_hidden_layers}"
    dense, routed = f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.gate.weight"
    if ".mlp." in name and config.is_moe_layer(layer) and dense in tensors:
        return f"{text}; layer {layer} has a dense MLP: first_k_dense_replace = {config.first_k_dense_replace}"
    if ".mlp." in name and not config.is_moe_layer(layer) and routed in tensors:
        return f"{text}; layer {layer} has experts: first_k_dense_replace = {config.first_k_dense_replace}"
    if ".self_attn.q_" in name and (f"{prefix}self_attn.q_proj.weight" in tensors) == (config.q_lora_rank is not None):
        return f"{text}; the query projection in the file does not fit q_lora_rank = {config.q_lora_rank}"
    return text


def check_scales(config: ModelConfig, tensors: Mapping[str, Stored], needed: Mapping[str, Needed]) -> None:
    """Every FP8 weight has a scale of ceil(out / block) x ceil(in / block); ValueError names both otherwise.

    The block is the config's, never derived from shapes (NVIDIA/TensorRT-Model-Connect#1115).
    """
    rows, columns = block_size(config)
    for name in needed:
        weight = tensors[name]
        if weight.dtype != FP8:
            continue
        scale = tensors.get(scale_name(name))
        where = f"{weight.file.path.name}: tensor {name} is {FP8}"
        if scale is None:
            raise ValueError(f"{where}, but its scale {scale_name(name)} is missing")
        if scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
            raise ValueError(f"{where}; its scale {scale_name(name)} is {scale.dtype}, not F32, BF16, F16 or F8_E8M0")
        need = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        if scale.shape != need:
            raise ValueError(
                f"{where} of shape {list(weight.shape)}; its scale {scale_name(name)} is {list(scale.shape)}, but "
                f"blocks of {rows} x {columns} (weight_block_size) make {list(need)}"
            )


def block_size(config: ModelConfig) -> tuple[int, int]:
    """(out, in) elements per scale; 128 x 128 where the config does not say."""
    return config.quantization_config.weight_block_size if config.quantization_config else (128, 128)


def check_unused(
    config: ModelConfig,
    tensors: Mapping[str, Stored],
    needed: Mapping[str, Needed],
    aliases: Mapping[str, str],
    notices: list[str],
) -> None:
    """Tensors that nothing reads: harmless ones are reported, those whose effect would be lost are refused."""
    orphans, indexers, outside, scales = [], [], [], []
    for name, stored in tensors.items():
        if name in needed or name in aliases or name.endswith(ROTARY_TABLE):
            continue
        layer = stored.layer
        if layer is not None and layer >= config.num_layers:
            continue  # reported as a layer
        if name.endswith(OTHER_SCALES):
            scales.append(name)
        elif ".self_attn.indexer." in name:
            indexers.append(name)
        elif name.endswith(f".{SCALE}"):
            weight = name.removesuffix("_scale_inv")
            if weight not in needed or tensors[weight].dtype != FP8:
                orphans.append(name)
        elif layer is None:
            outside.append(name)
        else:
            raise ValueError(f"{stored.file.path.name}: {_explain_unused(config, name)}")
    for names, text in (
        (orphans, "scales without an FP8 weight: ignored"),
        (indexers, "tensors of the sparse-attention indexer: not used, attention is dense"),
        (scales, "scales of activations or cache: not used"),
        (outside, "tensors outside the language model: ignored"),
    ):
        if names:
            notices.append(_count(names, text))


def _explain_unused(config: ModelConfig, name: str) -> str:
    text = f"tensor {shorten(name)} has no place in this model; its effect would be lost"
    parts = name.split(".")
    if parts[3:5] == ["mlp", "experts"] and len(parts) == 8:
        return f"{text}: n_routed_experts = {config.n_routed_experts}"
    if "shared_experts" in parts:
        return f"{text}: n_shared_experts = {config.n_shared_experts}"
    if parts[-1] == "e_score_correction_bias":
        return f"{text}: topk_method = {config.topk_method!r}"
    if parts[-1] == "bias":
        return f"{text}: biases are not computed"
    return text


def describe_dtypes(
    config: ModelConfig, tensors: Mapping[str, Stored], needed: Mapping[str, Needed], notices: list[str]
) -> str:
    """'fp8', 'bfloat16', 'float32' or 'float64', by the weights; `notices` gains where the config disagrees."""
    by_dtype: dict[str, list[str]] = {}
    for name, need in needed.items():
        if need.quantized:
            by_dtype.setdefault(tensors[name].dtype, []).append(name)
    unusual = [name for name, need in needed.items() if not need.quantized and tensors[name].dtype == FP8]
    if unusual:
        notices.append(_count(unusual, "tensors that the family leaves unquantised are FP8: their values are used"))
    biases = [name for name in needed if name.endswith("e_score_correction_bias") and tensors[name].dtype != "F32"]
    if biases:
        kind = tensors[biases[0]].dtype
        notices.append(_count(biases, f"correction biases are {kind}, not F32: near-ties may choose other experts"))
    if FP8 in by_dtype:
        _mention_fp8(config, by_dtype, notices)
        return "fp8"
    if config.quantization_config is not None:
        notices.append("quantization_config is present, but no weight is FP8: taken as an unquantised copy")
    if len(by_dtype) > 1:
        counts = ", ".join(f"{len(names)} {dtype}" for dtype, names in sorted(by_dtype.items()))
        notices.append(f"weights of several dtypes ({counts}): the widest decides")
    widest = max(by_dtype, key=FLOATS.index)
    if widest == "F16":
        notices.append("weights are float16: computed as float32, which holds them exactly")
    return {"BF16": "bfloat16", "F16": "float32", "F32": "float32", "F64": "float64"}[widest]


def _mention_fp8(config: ModelConfig, by_dtype: dict[str, list[str]], notices: list[str]) -> None:
    stored = config.quantization_config
    if stored is None:
        notices.append("no quantization_config, but weights are FP8: 128 x 128 blocks assumed, the scales' shapes fit")
    elif stored.unsupported:
        notices.append(f"quantization_config names {stored.unsupported}, but the weights are FP8 with block scales")
    elif stored.activation_scheme == "static":
        notices.append("activation_scheme is 'static': FP8 activations are scaled by their own values all the same")
    plain = [name for dtype, names in by_dtype.items() if dtype != FP8 for name in names]
    if plain:
        notices.append(_count(plain, "weights are not FP8: used as they are stored"))
    patterns = stored.excluded if stored is not None else ()
    against = [name for name in by_dtype[FP8] if any(is_excluded(p, name.removesuffix(".weight")) for p in patterns)]
    if against:
        notices.append(_count(against, "weights are excluded from FP8 by the config, yet are FP8: the tensors decide"))


def _count(names: list[str], text: str) -> str:
    shown = ", ".join(shorten(name)[1:-1] for name in names[:3])
    return f"{len(names)} {text}: {shown}{', ...' if len(names) > 3 else ''}"

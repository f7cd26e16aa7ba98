"""What a checkpoint's tensors say about its config, and whether the two fit: decided from headers, before any compute."""

from collections.abc import Mapping
from dataclasses import replace

from refmodel.config import ModelConfig
from refmodel.config_json import Inferred
from refmodel.names import SCALE, layer_of, scale_name
from refmodel.quantization_json import is_excluded
from refmodel.schema import MTP_PARTS, MTP_SHARED_PARTS, Needed, mtp_shared_tensors, needed_tensors
from refmodel.shards import Stored

FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32", "F64")
# tensors that some writers add and that do not change the result
HARMLESS = ("rotary_emb.inv_freq", "k_scale", "v_scale", "input_scale", "num_batches_tracked")


def infer(raw: Mapping, tensors: Mapping[str, Stored]) -> dict[str, Inferred]:
    """What the tensors say about fields that a config may lack, by field name."""
    found: dict[str, Inferred] = {}
    layers = sorted({layer for layer in map(layer_of, tensors) if layer is not None})
    query = tensors.get("model.layers.0.self_attn.q_a_proj.weight")
    if query is not None and query.shape:
        found["q_lora_rank"] = Inferred(query.shape[0], f"layer 0 has a q_a_proj of {query.shape[0]} rows")
    routed = [layer for layer in layers if f"model.layers.{layer}.mlp.gate.weight" in tensors]
    if routed:
        first = routed[0]
        found["first_k_dense_replace"] = Inferred(first, f"layer {first} is the first with a router")
        biased = f"model.layers.{first}.mlp.gate.e_score_correction_bias" in tensors
        if biased:
            reason = "the router has an e_score_correction_bias"
            found["topk_method"] = Inferred("noaux_tc", reason)
            found["scoring_func"] = Inferred("sigmoid", reason)
        shared = tensors.get(f"model.layers.{first}.mlp.shared_experts.gate_proj.weight")
        width = raw.get("moe_intermediate_size")
        if shared is not None and type(width) is int and width > 0 and shared.shape[0] % width == 0:
            count = shared.shape[0] // width
            found["n_shared_experts"] = Inferred(count, f"the shared expert is {shared.shape[0]} wide")
    hidden = raw.get("num_hidden_layers")
    if f"model.layers.{hidden}.eh_proj.weight" in tensors:
        found["num_nextn_predict_layers"] = Inferred(1, f"layer {hidden} has an eh_proj")
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        found["tie_word_embeddings"] = Inferred(True, "there is no lm_head")
    return found


def settle_mtp(config: ModelConfig, tensors: Mapping[str, Stored], notices: list[str]) -> ModelConfig:
    """The config with as many MTP layers as are there; ValueError if one is there in part.

    An MTP layer is known by `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`, not by its index
    (sgl-project/sglang#3075).
    """
    first = config.num_hidden_layers
    beyond = sorted({layer for layer in map(layer_of, tensors) if layer is not None and layer >= first})
    drafting = []
    for layer in beyond:
        parts = [part for part in MTP_PARTS if f"model.layers.{layer}.{part}" in tensors]
        if not parts:
            notices.append(
                f"layer {layer}: an ordinary layer beyond num_hidden_layers = {first}, not an MTP layer: not loaded"
            )
        else:
            drafting.append(layer)
    wanted = list(range(first, first + config.num_nextn_predict_layers))
    for layer in drafting:
        if layer not in wanted:
            notices.append(
                f"layer {layer}: an MTP layer that num_nextn_predict_layers = {config.num_nextn_predict_layers} "
                "does not count: ignored"
            )
    usable = [layer for layer in wanted if layer in drafting]
    if usable != wanted[: len(usable)]:
        raise ValueError(f"MTP layer {wanted[0]} is missing, but {usable} are there")
    if len(usable) < len(wanted):
        notices.append(
            f"MTP unavailable: num_nextn_predict_layers = {len(wanted)}, but layer {wanted[len(usable)]} is not there"
        )
    return replace(config, num_nextn_predict_layers=len(usable))


def shared_with_main(config: ModelConfig, tensors: Mapping[str, Stored], notices: list[str]) -> dict[str, str]:
    """Tensors that are read from another: tied head, MTP embedding and head that the file leaves out."""
    aliases = {}
    if config.tie_word_embeddings:
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
        if "lm_head.weight" in tensors:
            notices.append("tie_word_embeddings is true: the lm_head in the file is not used")
    for layer in range(config.num_hidden_layers, config.num_layers):
        for part, main in MTP_SHARED_PARTS.items():
            name = f"model.layers.{layer}.{part}"
            if name not in tensors:
                aliases[name] = aliases.get(main, main)
                notices.append(f"{name}: absent, {aliases[name]} is used: the MTP layer shares it")
    return aliases


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
                f"{stored.file.path}: tensor {name}: shape {list(stored.shape)}, but the config makes it "
                f"{list(need.shape)} = [{', '.join(need.formula)}]"
            )
        if stored.dtype not in FLOATS and not (stored.dtype == FP8 and need.matrix):
            raise ValueError(
                f"{stored.file.path}: tensor {name}: dtype {stored.dtype}; "
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
        where = f"{weight.file.path}: tensor {name} is {FP8}"
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
    scales = {scale_name(name) for name, need in needed.items() if need.matrix}
    orphans, indexers, outside = [], [], []
    for name, stored in tensors.items():
        if name in needed or name in aliases or name.endswith(HARMLESS):
            continue
        layer = layer_of(name)
        if layer is not None and layer >= config.num_layers:
            continue  # reported as a layer
        if name in scales and tensors[name.removesuffix("_scale_inv")].dtype == FP8:
            continue
        if name.endswith(f".{SCALE}"):
            orphans.append(name)
        elif ".self_attn.indexer." in name:
            indexers.append(name)
        elif layer is None:
            outside.append(name)
        else:
            raise ValueError(f"{stored.file.path}: {_explain_unused(config, name)}")
    for names, text in (
        (orphans, "scales without an FP8 weight: ignored"),
        (indexers, "tensors of the sparse-attention indexer: not used, attention is dense"),
        (outside, "tensors outside the language model: ignored"),
    ):
        if names:
            notices.append(f"{len(names)} {text}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")


def _explain_unused(config: ModelConfig, name: str) -> str:
    text = f"tensor {name} has no place in this model; its effect would be lost"
    parts = name.split(".")
    if parts[3:5] == ["mlp", "experts"] and parts[5].isdecimal() and int(parts[5]) >= config.n_routed_experts:
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
        if need.matrix:
            by_dtype.setdefault(tensors[name].dtype, []).append(name)
    stored = config.quantization_config
    if FP8 in by_dtype:
        _mention_fp8(config, by_dtype, notices)
        return "fp8"
    if stored is not None:
        notices.append("quantization_config is present, but no weight is FP8: taken as an unquantised copy")
    if len(by_dtype) > 1:
        counts = ", ".join(f"{len(names)} {dtype}" for dtype, names in sorted(by_dtype.items()))
        notices.append(f"weights of several dtypes ({counts}): the widest decides")
    widest = max(by_dtype, key=lambda dtype: FLOATS.index(dtype))
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
        notices.append("activation_scheme is 'static': the activations' own scales in the file are not used")
    plain = [name for dtype, names in by_dtype.items() if dtype != FP8 for name in names]
    if plain:
        notices.append(f"{len(plain)} weights are not FP8, first {plain[0]}: used as they are stored")
    if stored is not None and stored.excluded:
        modules = [name.removesuffix(".weight") for name in by_dtype[FP8]]
        against = [name for name in modules if any(is_excluded(pattern, name) for pattern in stored.excluded)]
        if against:
            notices.append(
                f"{len(against)} weights are excluded from FP8 by the config, first {against[0]}, yet are FP8"
            )

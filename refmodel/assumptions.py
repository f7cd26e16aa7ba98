"""What the tensors say beyond the config: fields that it lacks, MTP layers that are there, tensors that are shared."""

from collections.abc import Mapping
from dataclasses import replace

from refmodel.config import ModelConfig
from refmodel.config_json import Inferred, flatten
from refmodel.schema import MTP_PARTS, MTP_SHARED_PARTS
from refmodel.shards import Stored


def infer(raw: Mapping, tensors: Mapping[str, Stored]) -> dict[str, Inferred]:
    """What the tensors say about fields that a config may lack, by field name."""
    raw = flatten(raw)
    layers = sorted({stored.layer for stored in tensors.values()} - {None})
    found: dict[str, Inferred] = {}
    query = tensors.get("model.layers.0.self_attn.q_a_proj.weight")
    if query is not None and query.shape:
        found["q_lora_rank"] = Inferred(query.shape[0], f"layer 0 has a q_a_proj of {query.shape[0]} rows")
    routed = [layer for layer in layers if f"model.layers.{layer}.mlp.gate.weight" in tensors]
    if routed:
        found.update(_infer_router(raw, tensors, routed[0]))
    main = raw.get("num_hidden_layers")
    if f"model.layers.{main}.eh_proj.weight" in tensors:
        found["num_nextn_predict_layers"] = Inferred(1, f"layer {main} has an eh_proj")
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        found["tie_word_embeddings"] = Inferred(True, "there is no lm_head")
    if any(".self_attn.indexer." in name for name in tensors):
        found["index_topk"] = Inferred(2048, "there is an indexer, and 2048 is the published count")
    return found


def _infer_router(raw: Mapping, tensors: Mapping[str, Stored], first: int) -> dict[str, Inferred]:
    found = {"first_k_dense_replace": Inferred(first, f"layer {first} is the first with a router")}
    if f"model.layers.{first}.mlp.gate.e_score_correction_bias" in tensors:
        reason = "the router has an e_score_correction_bias"
        found["topk_method"] = Inferred("noaux_tc", reason)
        found["scoring_func"] = Inferred("sigmoid", reason)
    shared = tensors.get(f"model.layers.{first}.mlp.shared_experts.gate_proj.weight")
    width = raw.get("moe_intermediate_size")
    if shared is not None and shared.shape and type(width) is int and width > 0 and shared.shape[0] % width == 0:
        reason = f"the shared expert is {shared.shape[0]} wide"
        found["n_shared_experts"] = Inferred(shared.shape[0] // width, reason)
    return found


def settle_mtp(config: ModelConfig, tensors: Mapping[str, Stored], notices: list[str]) -> ModelConfig:
    """The config with as many MTP layers as are there; ValueError if one is there in part.

    An MTP layer is known by `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`, not by its index
    (sgl-project/sglang#3075).
    """
    first = config.num_hidden_layers
    beyond = sorted(layer for layer in {stored.layer for stored in tensors.values()} - {None} if layer >= first)
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

"""Which tensors a config calls for, with the shape of each and the config fields that it follows from."""

from collections.abc import Iterator
from typing import NamedTuple

from refmodel.config import ModelConfig


class Needed(NamedTuple):
    """One tensor: `shape`, the config fields behind each size, whether it is a weight that may be FP8, and
    whether the family's FP8 checkpoints store it so."""

    shape: tuple[int, ...]
    formula: tuple[str, ...]
    matrix: bool
    quantized: bool


_D, _V, _I, _M = "hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size"
_Q, _C, _E = "q_lora_rank", "kv_lora_rank", "n_routed_experts"
_QUERY = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
_KEY_VALUE = "num_attention_heads * (qk_nope_head_dim + v_head_dim)"
_VALUE = "num_attention_heads * v_head_dim"
_LATENT = "kv_lora_rank + qk_rope_head_dim"
_SHARED = "n_shared_experts * moe_intermediate_size"
_PAIR = "2 * hidden_size"

_NORMS = {"input_layernorm.weight": (_D,), "post_attention_layernorm.weight": (_D,)}
_QUERY_PLAIN = {"self_attn.q_proj.weight": (_QUERY, _D)}
_QUERY_LORA = {
    "self_attn.q_a_proj.weight": (_Q, _D),
    "self_attn.q_a_layernorm.weight": (_Q,),
    "self_attn.q_b_proj.weight": (_QUERY, _Q),
}
_LATENT_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": (_LATENT, _D),
    "self_attn.kv_a_layernorm.weight": (_C,),
    "self_attn.kv_b_proj.weight": (_KEY_VALUE, _C),
    "self_attn.o_proj.weight": (_D, _VALUE),
}
_ROUTER = {"mlp.gate.weight": (_E, _D)}
_ROUTER_BIAS = {"mlp.gate.e_score_correction_bias": (_E,)}
_MTP = {
    "enorm.weight": (_D,),
    "hnorm.weight": (_D,),
    "eh_proj.weight": (_D, _PAIR),
    "shared_head.norm.weight": (_D,),
}
_MTP_SHARED = {"embed_tokens.weight": (_V, _D), "shared_head.head.weight": (_V, _D)}
_ENDS = {"model.embed_tokens.weight": (_V, _D), "model.norm.weight": (_D,)}
_HEAD = {"lm_head.weight": (_V, _D)}

MTP_PARTS = tuple(_MTP)  # what makes a layer an MTP layer
MTP_SHARED_PARTS = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
ROUTER_PARTS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


def _mlp(prefix: str, width: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, _D),
        f"{prefix}.up_proj.weight": (width, _D),
        f"{prefix}.down_proj.weight": (_D, width),
    }


def sizes(config: ModelConfig) -> dict[str, int]:
    """The value of every expression that shapes are written in."""
    heads = config.num_attention_heads
    return {
        _D: config.hidden_size,
        _V: config.vocab_size,
        _I: config.intermediate_size,
        _M: config.moe_intermediate_size,
        _Q: config.q_lora_rank or 0,
        _C: config.kv_lora_rank,
        _E: config.n_routed_experts,
        _QUERY: heads * config.qk_head_dim,
        _KEY_VALUE: heads * (config.qk_nope_head_dim + config.v_head_dim),
        _VALUE: heads * config.v_head_dim,
        _LATENT: config.kv_lora_rank + config.qk_rope_head_dim,
        _SHARED: config.shared_intermediate_size,
        _PAIR: 2 * config.hidden_size,
    }


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Needed]:
    """Names within the layer (`self_attn.o_proj.weight`) of a main or MTP layer, in a fixed order.

    An MTP layer's own copies of embedding and head are not among them: a checkpoint may leave them out.
    """
    table = dict(_NORMS)
    table.update(_QUERY_PLAIN if config.q_lora_rank is None else _QUERY_LORA)
    table.update(_LATENT_ATTENTION)
    if config.is_moe_layer(layer):
        table.update(_ROUTER)
        if config.topk_method == "noaux_tc":
            table.update(_ROUTER_BIAS)
        if config.n_shared_experts:
            table.update(_mlp("mlp.shared_experts", _SHARED))
        for expert in range(config.n_routed_experts):
            table.update(_mlp(f"mlp.experts.{expert}", _M))
    else:
        table.update(_mlp("mlp", _I))
    if layer >= config.num_hidden_layers:
        table.update(_MTP)
    return _resolve(table, sizes(config))


# these stay in bfloat16 in every FP8 checkpoint of the family (DeepSeek-V3 README_WEIGHTS.md)
_NOT_QUANTIZED = {*_ROUTER, *_MTP, *_MTP_SHARED, *_ENDS, *_HEAD}
_TABLES = {"model.embed_tokens.weight", "embed_tokens.weight"}  # looked up, not multiplied with


def _resolve(table: dict[str, tuple[str, ...]], size: dict[str, int]) -> dict[str, Needed]:
    result = {}
    for name, formula in table.items():
        matrix = len(formula) == 2 and name not in _TABLES
        result[name] = Needed(
            tuple(size[part] for part in formula), formula, matrix, matrix and name not in _NOT_QUANTIZED
        )
    return result


def needed_tensors(config: ModelConfig) -> Iterator[tuple[str, Needed]]:
    """Every tensor of the main model and its MTP layers by canonical name, in the order of the computation."""
    size = sizes(config)
    ends = _resolve(_ENDS, size)
    yield "model.embed_tokens.weight", ends["model.embed_tokens.weight"]
    tables: dict[tuple[bool, bool], dict[str, Needed]] = {}
    for layer in range(config.num_layers):
        kind = (config.is_moe_layer(layer), layer >= config.num_hidden_layers)
        if kind not in tables:
            tables[kind] = layer_tensors(config, layer)
        for name, needed in tables[kind].items():
            yield f"model.layers.{layer}.{name}", needed
    yield "model.norm.weight", ends["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "lm_head.weight", _resolve(_HEAD, size)["lm_head.weight"]


def mtp_shared_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Needed]]:
    """The copies of embedding and head that an MTP layer may carry."""
    for name, needed in _resolve(_MTP_SHARED, sizes(config)).items():
        yield f"model.layers.{layer}.{name}", needed

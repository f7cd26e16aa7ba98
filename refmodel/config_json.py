"""Read a `config.json` in any spelling of the family. What it does not say is assumed aloud, or refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from refmodel.config import ModelConfig, RopeScaling
from refmodel.quantization_json import read_quantization
from refmodel.vendor_config import from_vendor

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
REQUIRED += ("num_attention_heads", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank")
REQUIRED += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
INTEGERS = (*REQUIRED, "q_lora_rank", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "n_group")
INTEGERS += ("topk_group", "max_position_embeddings", "num_nextn_predict_layers", "bos_token_id", "eos_token_id")
INTEGERS += ("index_topk", "index_n_heads", "index_head_dim")
PLAIN = (*INTEGERS, "scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps")
PLAIN += ("rope_theta", "rope_interleave", "tie_word_embeddings", "attention_bias", "hidden_act", "model_type")
# one field, several names: transformers 4, transformers 5, others
ALIASES = {
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
    "torch_dtype": ("torch_dtype", "dtype"),
    "n_routed_experts": ("n_routed_experts", "num_local_experts"),
}
ROPE_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
ROPE_OTHER = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
# what would change the result and is not computed, with the values that change nothing
NOT_COMPUTED = {
    "sliding_window": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "swiglu_limit": (None,),
    "mlp_bias": (None, False),
    "use_qk_norm": (None, False),
    "hc_mult": (None, 1),
}
SIGMOID_FAMILIES = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")


class Inferred(NamedTuple):
    """A value taken for a field that the config does not have, and why."""

    value: object
    reason: str


def read_config(source, inferred: Mapping[str, Inferred] | None = None) -> ModelConfig:
    """A `ModelConfig` from a dict, a `config.json` or a directory with one.

    `inferred` holds, by field name, what the tensors say about fields that a config may lack.
    Raises ValueError that names the file, the field, the value and the rule.
    """
    raw, where = load_config_json(source)
    try:
        return _from_dict(raw, dict(inferred or {}))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def load_config_json(source) -> tuple[dict, str]:
    """The JSON object at `source` (or `source` itself, if it is a dict), and how to call it in a message."""
    if isinstance(source, Mapping):
        return dict(source), "config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, not a {type(raw).__name__}")
    return raw, str(path)


def _from_dict(raw: dict, inferred: dict[str, Inferred]) -> ModelConfig:
    nested = isinstance(raw.get("text_config"), dict)
    raw = from_vendor(flatten(raw))
    for name, neutral in NOT_COMPUTED.items():
        if raw.get(name) not in neutral:
            raise ValueError(f"{name} = {raw[name]!r}: not part of the family, not computed")
    assumed = ["the language model is read from text_config: other parts of the model are ignored"] if nested else []
    values = {name: _take(raw, name) for name in PLAIN}
    values = {name: value for name, value in values.items() if value is not None}
    values["torch_dtype"] = _torch_dtype(raw, assumed)
    rope = _rope(raw, assumed)
    values["rope_scaling"] = rope.pop("rope_scaling")
    values.update(rope)
    if "q_lora_rank" in raw:  # null, and 0 in the vendor's own spelling, mean: none
        values["q_lora_rank"] = values.get("q_lora_rank") or None
    _layer_types(raw, values)
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}: these are needed to know the model's shape")
    _assume(values, raw, {**_family_defaults(values), **inferred}, assumed)
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    values["quantization_config"] = read_quantization(raw.get("quantization_config"), assumed)
    _mention(raw, values, assumed)
    return ModelConfig(**values, assumed=tuple(assumed))


def flatten(raw: Mapping) -> dict:
    """The part of a config that describes the language model: Kimi-K2.5 nests it under `text_config`."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return dict(raw)
    outer = raw.get("quantization_config")
    return text if outer is None or text.get("quantization_config") else {**text, "quantization_config": outer}


def _take(raw: dict, name: str):
    """The value of a field under any of its names; None if absent or null."""
    found = {alias: raw[alias] for alias in ALIASES.get(name, (name,)) if raw.get(alias) is not None}
    if not found:
        return None
    first = next(iter(found))
    for alias, value in found.items():
        if value != found[first]:
            raise ValueError(f"{first} = {found[first]!r} contradicts {alias} = {value!r}: they are one field")
    value = found[first]
    if name in INTEGERS and type(value) is float and value.is_integer():
        return int(value)
    return value


def _layer_types(raw: dict, values: dict) -> None:
    """`mlp_layer_types` (transformers 5) lists "dense" and "sparse"; here it is a number of dense layers in front."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != values.get("num_hidden_layers"):
        raise ValueError(f"mlp_layer_types = {str(kinds)[:80]}: must be a list with one entry for each layer")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ValueError(f"mlp_layer_types = {str(kinds)[:80]}: must be dense layers, then sparse ones")
    if values.setdefault("first_k_dense_replace", dense) != dense:
        told = values["first_k_dense_replace"]
        raise ValueError(f"first_k_dense_replace = {told!r} contradicts {dense} dense layers in mlp_layer_types")


def _torch_dtype(raw: dict, assumed: list[str]) -> str:
    value = _take(raw, "torch_dtype")
    if value is None:
        assumed.append("torch_dtype: absent, bfloat16 assumed; the tensors' own dtypes are what is used")
        return "bfloat16"
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _rope(raw: dict, assumed: list[str]) -> dict:
    """`rope_scaling`, and `rope_theta` if it stands in the transformers 5 entry `rope_parameters`."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for name, entry in (("rope_scaling", old), ("rope_parameters", new)):
        if entry is not None and not isinstance(entry, dict):
            raise ValueError(f"{name} = {entry!r}: must be an object or null")
    result = {}
    theta = (new or {}).get("rope_theta", (old or {}).get("rope_theta"))
    if theta is not None:
        if raw.get("rope_theta") not in (None, theta):
            raise ValueError(f"rope_theta = {raw['rope_theta']!r} contradicts {theta!r} in rope_parameters")
        result["rope_theta"] = theta
    scalings = [_scaling(entry, assumed) for entry in (old, new) if entry]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(f"rope_scaling = {old!r} contradicts rope_parameters = {new!r}")
    result["rope_scaling"] = scalings[-1] if scalings else None
    return result


def _scaling(entry: dict, assumed: list[str]) -> RopeScaling | None:
    kinds = [entry[key] for key in ("type", "rope_type") if entry.get(key) is not None]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise ValueError(f"rope_scaling type {entry['type']!r} contradicts rope_type {entry['rope_type']!r}")
    values = {key: value for key, value in entry.items() if key not in ROPE_OTHER and value is not None}
    if entry.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor = {entry['partial_rotary_factor']!r}: the rotated width is its own field"
        )
    kind = kinds[0] if kinds else None
    if kind is None and values:
        if not values.keys() >= {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}:
            raise ValueError(f"rope_scaling = {entry!r}: no type, and the fields do not tell")
        kind = "yarn"
        assumed.append("rope_scaling.type: absent, yarn assumed because beta_fast and beta_slow are given")
    if kind in (None, "default", "none"):
        return None
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(f"rope_scaling type {kind!r}: only 'yarn' and 'default' are computed")
    unknown = values.keys() - ROPE_KEYS
    if unknown:
        raise ValueError(f"rope_scaling: {', '.join(sorted(unknown))}: not part of the family's YaRN, not computed")
    lacking = [key for key in ("factor", "original_max_position_embeddings") if key not in values]
    if lacking:
        raise ValueError(f"rope_scaling: missing {', '.join(lacking)}: YaRN's frequencies depend on it")
    for key in ("mscale", "mscale_all_dim"):
        if key not in values:
            assumed.append(f"rope_scaling.{key}: absent; implementations differ on what that means (0 or 1)")
    return RopeScaling(**values)


def _family_defaults(values: dict) -> dict[str, Inferred]:
    """What the family's own code takes for a field that a config lacks."""
    family = values.get("model_type", "")
    sigmoid = values.get("scoring_func", "sigmoid" if family in SIGMOID_FAMILIES else "softmax") == "sigmoid"
    grouped = values.get("n_group", 1) > 1 if type(values.get("n_group", 1)) is int else False
    greedy = "group_limited_greedy" if grouped else "greedy"
    of_family = f"because model_type is {family!r}" if family else "because neither model_type nor tensors tell"
    return {
        "scoring_func": Inferred("sigmoid" if sigmoid else "softmax", of_family),
        "topk_method": Inferred("noaux_tc" if sigmoid else greedy, of_family),
        "norm_topk_prob": Inferred(sigmoid, "as sigmoid routing normalises its weights and softmax routing does not"),
        "n_group": Inferred(1, "the router has no groups"),
        "topk_group": Inferred(1, "the router has no groups"),
        "routed_scaling_factor": Inferred(1.0, "weights are not scaled"),
        "n_shared_experts": Inferred(0, "no shared expert is declared"),
        "first_k_dense_replace": Inferred(0, "no dense layer is declared"),
        "rms_norm_eps": Inferred(1e-6, "the vendor's own constant"),
        "rope_theta": Inferred(10000.0, "the vendor's own constant"),
        "max_position_embeddings": Inferred(4096, "no effect on the result"),
    }


def _assume(values: dict, raw: dict, defaults: dict[str, Inferred], assumed: list[str]) -> None:
    for name, (value, reason) in defaults.items():
        if name not in values:
            values[name] = value
            assumed.append(f"{name}: absent, {value!r} assumed: {reason}")


def _mention(raw: dict, values: dict, assumed: list[str]) -> None:
    """Fields that are commonly read for something that they do not say in this family."""
    heads = raw.get("num_key_value_heads")
    if heads not in (None, values["num_attention_heads"]):
        assumed.append(f"num_key_value_heads = {heads!r}: ignored, latent attention caches one latent for all heads")
    width = raw.get("head_dim")
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    if width is not None and type(nope) is int and type(rope) is int and width != nope + rope:
        assumed.append(
            f"head_dim = {width!r}: ignored, a query head is qk_nope_head_dim + qk_rope_head_dim = {nope + rope}"
        )
    if values.get("index_topk") is not None:
        assumed.append(
            f"index_topk = {values['index_topk']}: dense attention is exact up to that many keys, no further"
        )

"""Read the `quantization_config` entry of a `config.json`, in the spellings of the tools that write FP8 checkpoints."""

from fnmatch import fnmatchcase
from re import error as PatternError
from re import match

from refmodel.config import Quantization


def read_quantization(entry, assumed: list[str]) -> Quantization | None:
    """The entry as a `Quantization`; a scheme that is not read is named in `.unsupported`, not raised.

    Whether it matters is for the tensors to say: a bfloat16 copy may still carry the entry of its original.
    """
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise ValueError(f"quantization_config = {entry!r}: must be an object or null")
    method = entry.get("quant_method")
    excluded = _excluded(entry)
    if method == "compressed-tensors":
        return _compressed_tensors(entry, excluded)
    if method not in ("fp8", None):
        bits = entry.get("bits")
        scheme = entry.get("quant_algo") or (f"{bits}-bit" if bits else "quantised")
        return Quantization(quant_method=str(method), excluded=excluded, unsupported=f"{scheme} ({method})")
    if entry.get("quant_algo") is not None:
        return Quantization(quant_method="modelopt", excluded=excluded, unsupported=f"{entry['quant_algo']} (modelopt)")
    if entry.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return Quantization(excluded=excluded, unsupported=f"fmt {entry['fmt']!r} (fp8)")
    block = entry.get("weight_block_size")
    if block is None:
        block = [128, 128]
        assumed.append("weight_block_size: absent, [128, 128] assumed; the scales' shapes decide")
    scheme = entry.get("activation_scheme")
    if scheme is None:
        scheme = "dynamic"
        assumed.append("activation_scheme: absent, 'dynamic' assumed")
    return Quantization(
        weight_block_size=tuple(block) if isinstance(block, list) else block,
        scale_fmt=entry.get("scale_fmt"),
        activation_scheme=scheme,
        excluded=excluded,
    )


def read_modelopt(entry: dict) -> Quantization:
    """The content of a separate `hf_quant_config.json`, as NVIDIA's modelopt writes it."""
    quantization = entry.get("quantization") if isinstance(entry.get("quantization"), dict) else {}
    algorithm = quantization.get("quant_algo") or "unknown algorithm"
    excluded = tuple(str(name) for name in quantization.get("exclude_modules") or ())
    return Quantization(quant_method="modelopt", excluded=excluded, unsupported=f"{algorithm} (modelopt)")


def _excluded(entry: dict) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore"):
        if isinstance(entry.get(key), list):
            return tuple(str(name) for name in entry[key])
    return ()


def _compressed_tensors(entry: dict, excluded: tuple[str, ...]) -> Quantization:
    """FP8 in blocks is read; anything else is named."""
    groups = entry.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    weights = [group for group in weights if isinstance(group, dict)]
    block = weights[0].get("block_structure") if len(weights) == 1 else None
    if isinstance(block, list) and weights[0].get("type") == "float" and weights[0].get("num_bits") == 8:
        return Quantization(tuple(block), quant_method="compressed-tensors", excluded=excluded)
    kinds = {f"{group.get('type')}{group.get('num_bits')}" for group in weights} or {"unknown"}
    scheme = f"{', '.join(sorted(kinds))} {entry.get('format', '')}".strip()
    return Quantization(
        quant_method="compressed-tensors", excluded=excluded, unsupported=f"{scheme} (compressed-tensors)"
    )


def is_excluded(pattern: str, module: str) -> bool:
    """Whether an exclusion pattern covers a module such as `model.layers.2.self_attn.o_proj`.

    A pattern is a module name, a name of a parent, a glob, or `re:` and a regular expression; it always matches
    whole path components, so `model.layers.2` does not cover layer 20.
    """
    if pattern.startswith("re:"):
        try:
            return match(pattern[3:], module) is not None
        except PatternError:
            return False
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(module, pattern) and _whole_components(pattern, module)
    return module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f".{module}."


def _whole_components(pattern: str, module: str) -> bool:
    """`model.layers.61*` is meant for layer 61 and what is in it, not for layer 610."""
    stem = pattern.rstrip("*")
    if pattern == stem or not stem[-1:].isdigit() or any(sign in stem for sign in "*?["):
        return True
    return not module[len(stem) : len(stem) + 1].isdigit()

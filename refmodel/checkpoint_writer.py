"""Write a checkpoint directory as the family's own are: `config.json`, shards, and an index where there are several."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fp8 import BlockScaled
from refmodel.config import ModelConfig
from refmodel.names import scale_name
from refmodel.shards import INDEX
from refmodel.tensor_file import save_tensors


def write_checkpoint(
    directory,
    config: ModelConfig | Mapping,
    tensors: Mapping[str, np.ndarray | BlockScaled],
    max_shard_bytes: int = 4_300_000_000,
) -> None:
    """Write `config` (a ModelConfig, or the content of a config.json) and `tensors` by Hugging Face name.

    A `BlockScaled` is written as its FP8 codes and `..._scale_inv`. Tensors fill shards of at most `max_shard_bytes`
    of data in the order given, a larger one has a shard to itself; one shard is `model.safetensors`, without an index.
    Equal input gives equal files. An existing checkpoint in the directory is not removed: ValueError if there is one.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory}: holds .safetensors files already; write into an empty directory")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be at least 1")
    content = config.to_dict() if isinstance(config, ModelConfig) else dict(config)
    shards = _fill(_flat(tensors), max_shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(directory / name, shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        total = sum(array.nbytes for shard in shards for array in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX, index)
    _write_json(directory / "config.json", content)


def _flat(tensors: Mapping[str, np.ndarray | BlockScaled]) -> dict[str, np.ndarray]:
    flat = {}
    for name, value in tensors.items():
        if isinstance(value, BlockScaled):
            flat[name] = value.codes
            flat[scale_name(name)] = value.scale
        else:
            flat[name] = np.asarray(value)
    return flat


def _fill(tensors: dict[str, np.ndarray], limit: int) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for name, array in tensors.items():
        if shards[-1] and used + array.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = array
        used += array.nbytes
    return shards


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

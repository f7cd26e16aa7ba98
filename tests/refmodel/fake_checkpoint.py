"""Checkpoints without data: right names, shapes, dtypes and file sizes, in sparse files that take no space."""

import json
import math

from refmodel.names import scale_name
from refmodel.schema import mtp_shared_tensors, needed_tensors
from refmodel.tensor_header import DTYPES


def family_entries(config, mtp_copies=True):
    """(name, dtype, shape) of every tensor of a checkpoint as the family stores it, scales and MTP copies included."""
    fp8 = config.quantization_config is not None
    needed = list(needed_tensors(config))
    for layer in range(config.num_hidden_layers, config.num_layers):
        if mtp_copies:
            needed += mtp_shared_tensors(config, layer)
    for name, need in needed:
        if need.quantized and fp8:
            yield name, "F8_E4M3", need.shape
            rows, columns = config.quantization_config.weight_block_size
            yield scale_name(name), "F32", (-(-need.shape[0] // rows), -(-need.shape[1] // columns))
        else:
            yield name, "F32" if name.endswith("e_score_correction_bias") else "BF16", need.shape


def write_sparse_file(path, entries):
    """A valid .safetensors file of these entries whose data is one hole."""
    header, position = {}, 0
    for name, dtype, shape in entries:
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def write_sparse_checkpoint(directory, config, max_shard_bytes=4_300_000_000):
    """A whole checkpoint directory, sharded as the published ones are."""
    shards, used = [[]], 0
    for name, dtype, shape in family_entries(config):
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, dtype, shape))
        used += size
    weight_map = {}
    for number, entries in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_sparse_file(directory / name, entries)
        weight_map.update((entry[0], name) for entry in entries)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_dict()))

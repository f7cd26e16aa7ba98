"""A V3 checkpoint cut to four layers, of which only layer 3, the first with experts, holds data: 11.6 GB.

The other tensors are holes in a sparse file, so whoever reads one gets zeros: what a layer dump must not do.
"""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from refmodel import ModelConfig
from refmodel.schema import needed_tensors


def config() -> ModelConfig:
    """V3's own widths; three dense layers and one with experts."""
    return replace(ModelConfig.preset("v3"), num_hidden_layers=4, num_nextn_predict_layers=0)


def write(directory: Path, layer: int = 3) -> None:
    """Write the checkpoint: one sparse `.safetensors` file and its config."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config().to_dict()))
    header, offset = {}, 0
    for name, dtype, shape in _stored():
        size = math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        base = file.tell()
        file.truncate(base + offset)
        for number, (name, entry) in enumerate(header.items()):
            if name.startswith(f"model.layers.{layer}."):
                file.seek(base + entry["data_offsets"][0])
                file.write(_data(number, entry["dtype"], entry["shape"], name))


def _stored():
    """(name, dtype, shape) as the released checkpoint stores them."""
    for name, needed in needed_tensors(config()):
        if needed.quantized:
            yield name, "F8_E4M3", needed.shape
            rows, columns = needed.shape
            yield f"{name}_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
        else:
            yield name, "F32" if name.endswith("correction_bias") else "BF16", needed.shape


_BELL = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)
_CODES = (_BELL * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _data(number, dtype, shape, name):
    count = math.prod(shape)
    if dtype == "F8_E4M3":
        turned = np.roll(_CODES, 12345 * number)
        return np.resize(turned, count).tobytes()
    values = np.resize(np.roll(_BELL, 999 * number), count)
    if dtype == "F32":
        bias = name.endswith("correction_bias")
        return (2.0 + 0.1 * values if bias else np.abs(values) * 1e-4 + 1e-5).astype(np.float32).tobytes()
    if len(shape) == 1:
        return (1 + 0.3 * values).astype(ml_dtypes.bfloat16).tobytes()
    return (values / math.sqrt(shape[1])).astype(ml_dtypes.bfloat16).tobytes()


if __name__ == "__main__":
    import sys

    write(Path(sys.argv[1]))

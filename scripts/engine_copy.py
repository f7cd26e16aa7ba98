"""A copy of a checkpoint that any engine reads: FP8 weights multiplied out, the MTP layer left out where asked."""

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from refmodel.checkpoint import Checkpoint
from refmodel.checkpoint_writer import write_checkpoint
from refmodel.names import layer_of

#: bytes that a copy may have: copies are for small models, an engine on its own hardware reads the original
COPY_LIMIT = 16 << 30

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def plain_copy(source, target, dtype: str = "float32", mtp: bool = True) -> Path:
    """Write `source` (a checkpoint directory) into the empty directory `target` without FP8; return `target`.

    An FP8 weight becomes code x scale, one product rounded to `dtype` ("float32" or "bfloat16"); every other tensor
    keeps its dtype and its values. config.json is kept as it is spelled, without `quantization_config`. `mtp` False
    leaves the MTP layers out. Raises ValueError for another dtype, and for a copy of more than COPY_LIMIT bytes.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: a copy can be written in {' or '.join(DTYPES)}")
    checkpoint = Checkpoint.open(source)
    names = [name for name in checkpoint.names() if mtp or not _is_mtp(checkpoint, name)]
    tensors = dict(_within_limit(checkpoint, names, dtype))
    write_checkpoint(target, _config(Path(source), dtype, mtp), tensors)
    return Path(target)


def _is_mtp(checkpoint: Checkpoint, name: str) -> bool:
    layer = layer_of(name)
    return layer is not None and layer >= checkpoint.config.num_hidden_layers


def _within_limit(checkpoint: Checkpoint, names: list[str], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    done = 0
    for name in names:
        array = _plain(checkpoint, name, DTYPES[dtype])
        done += array.nbytes
        if done > COPY_LIMIT:
            raise ValueError(
                f"{checkpoint.path}: a copy in {dtype} would exceed {COPY_LIMIT >> 30} GiB; "
                "let the engine read the original (--as-stored)"
            )
        yield name, array


def _plain(checkpoint: Checkpoint, name: str, dtype: np.dtype) -> np.ndarray:
    return checkpoint.block_scaled(name).dequantize(dtype) if checkpoint.is_fp8(name) else checkpoint.array(name)


def _config(source: Path, dtype: str, mtp: bool) -> dict:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
        for key in ("torch_dtype", "dtype"):
            if key in part:
                part[key] = dtype
        if not mtp and "num_nextn_predict_layers" in part:
            part["num_nextn_predict_layers"] = 0
    return config

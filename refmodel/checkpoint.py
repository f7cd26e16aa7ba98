"""A checkpoint directory, opened: headers, index, scales and shapes are checked before anything is computed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp8 import BlockScaled
from refmodel import assumptions
from refmodel import checkpoint_checks as checks
from refmodel.config import ModelConfig
from refmodel.config_json import load_config_json, read_config
from refmodel.names import scale_name
from refmodel.presets import EXAMPLE
from refmodel.quantization_json import read_modelopt
from refmodel.schema import Needed
from refmodel.shards import Stored, read_shards

__all__ = ["EXAMPLE", "Checkpoint", "StoredSize"]


class StoredSize(NamedTuple):
    """One tensor as stored: canonical name, dtype (safetensors name), shape, bytes, and bytes of its scale."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scale_nbytes: int


class Checkpoint:
    """The tensors of one model, under canonical Hugging Face names, read only when asked for.

    `config` is what the config says with what the tensors add; its `num_nextn_predict_layers` counts the MTP layers
    that are really there. `dtype_of_weights` is 'fp8', 'bfloat16', 'float32' or 'float64'; `block_size` is (out, in)
    elements per scale.
    """

    def __init__(self, path: Path, config: ModelConfig, tensors: dict[str, Stored], notices: list[str]):
        self.path = path
        self._notices = notices
        self._scales_read = self._scales_uneven = 0
        self.config = assumptions.settle_mtp(config, tensors, notices)
        self._aliases = assumptions.shared_with_main(self.config, tensors, notices)
        self._needed = _needed_and_there(self.config, tensors, self._aliases)
        checks.check_unused(self.config, tensors, self._needed, self._aliases, notices)
        self.dtype_of_weights = checks.describe_dtypes(self.config, tensors, self._needed, notices)
        self.block_size = checks.block_size(self.config)
        self._tensors = tensors

    @classmethod
    def open(cls, path) -> "Checkpoint":
        """Open a directory with `config.json` and one `.safetensors` file, or shards with an index.

        Reads headers only. Raises ValueError that names file, tensor or field, and the rule that is broken.
        """
        path = Path(path)
        notices: list[str] = []
        tensors = read_shards(path, notices)
        raw = load_config_json(path)[0]
        config = _with_modelopt(path, read_config(path, assumptions.infer(raw, tensors)))
        try:
            return cls(path, config, tensors, [*config.assumed, *notices])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def notices(self) -> list[str]:
        """What was assumed, ignored or found odd, and why; grows where scales, once read, are not as declared."""
        if not self._scales_uneven:
            return list(self._notices)
        return [
            *self._notices,
            f"scale_fmt is 'ue8m0', but {self._scales_uneven} of {self._scales_read} scales read so far are not powers "
            "of two: used as they are",
        ]

    @property
    def has_mtp(self) -> bool:
        """Whether there is an MTP layer to draft with."""
        return self.config.num_nextn_predict_layers > 0

    def names(self) -> Iterator[str]:
        """Every tensor of the model, in the order of the computation; scales are part of their weight."""
        yield from self._needed
        yield from self._aliases

    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({stored.file.path for stored in self._tensors.values()})

    def stored_sizes(self) -> Iterator[StoredSize]:
        """Name, dtype, shape and bytes of every tensor of the model, from the headers alone."""
        for name in self._needed:
            stored = self._tensors[name]
            scale = self._tensors[scale_name(name)] if stored.dtype == checks.FP8 else None
            yield StoredSize(name, stored.dtype, stored.shape, stored.nbytes, scale.nbytes if scale else 0)

    def is_fp8(self, name: str) -> bool:
        """Whether the weight is stored as FP8 codes with block scales."""
        return self._find(name).dtype == checks.FP8

    def array(self, name: str) -> np.ndarray:
        """A tensor that is not FP8, as it is stored: a read-only view of the file. ValueError for an FP8 weight."""
        stored = self._find(name)
        if stored.dtype == checks.FP8:
            raise ValueError(f"{name} is FP8: take block_scaled({name!r}), codes alone are not its values")
        return stored.read()

    def block_scaled(self, name: str) -> BlockScaled:
        """An FP8 weight [out, in] with its scale as float32 [ceil(out / bm), ceil(in / bn)].

        The scale multiplies, whatever its name says. Raises ValueError for a weight that is not FP8, and for a
        scale that is not a finite number >= 0.
        """
        stored = self._find(name)
        if stored.dtype != checks.FP8:
            raise ValueError(f"{name} is {stored.dtype}, not FP8: take array({name!r})")
        scale = self._tensors[scale_name(self._aliases.get(name, name))].read().astype(np.float32)
        if not (np.isfinite(scale) & (scale >= 0)).all():
            raise ValueError(f"{self.path}: {scale_name(name)} holds a value that is not a finite number >= 0")
        self._count_uneven(scale)
        return BlockScaled(stored.read(), scale, self.block_size)

    def _count_uneven(self, scale: np.ndarray) -> None:
        """Where powers of two are declared, count the scales that are none (deepseek-ai/DeepSeek-V3#961)."""
        declared = self.config.quantization_config
        if declared is not None and declared.scale_fmt == "ue8m0":
            self._scales_read += scale.size
            self._scales_uneven += int(np.count_nonzero(np.frexp(scale)[0] != 0.5))

    def _find(self, name: str) -> Stored:
        name = self._aliases.get(name, name)
        if name not in self._needed:
            raise ValueError(f"{self.path}: no tensor {name!r} in this model")
        return self._tensors[name]


def _needed_and_there(config: ModelConfig, tensors: dict[str, Stored], aliases: dict[str, str]) -> dict[str, Needed]:
    """The tensors that the config calls for; where they do not fit and the scheme is a foreign one, that is why."""
    try:
        needed = checks.check_tensors(config, tensors, aliases)
        checks.check_scales(config, tensors, needed)
    except ValueError as error:
        scheme = config.quantization_config.unsupported if config.quantization_config else ""
        if scheme:
            raise ValueError(f"unsupported: {scheme}") from error
        raise
    return needed


def _with_modelopt(path: Path, config: ModelConfig) -> ModelConfig:
    """The config with the quantisation that modelopt declares in a file of its own."""
    beside = path / "hf_quant_config.json"
    if config.quantization_config is not None or not beside.is_file():
        return config
    return replace(config, quantization_config=read_modelopt(load_config_json(beside)[0]))

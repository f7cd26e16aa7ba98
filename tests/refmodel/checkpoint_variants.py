"""A small model of the family to make variants of, and what a variant must come to."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from fp8 import quantize
from refmodel.config import ModelConfig, Quantization
from refmodel.schema import mtp_shared_tensors, needed_tensors

TINY = ModelConfig.preset("tiny")
BLOCK = (16, 16)
MTP = "model.layers.3."
MOE = "model.layers.1."


@dataclass
class Variant:
    """`config`: a config.json; `tensors`: canonical name -> array or BlockScaled; `files`: further JSON files."""

    config: dict
    tensors: dict
    files: dict = field(default_factory=dict)

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): value for name, value in self.tensors.items()}

    def drop(self, *parts: str) -> None:
        self.tensors = {name: value for name, value in self.tensors.items() if not any(p in name for p in parts)}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """bfloat16 weights, norms around 1, float32 biases; MTP copies of embedding and head are equal to the main's.

    Every value is a few eighths, so that each float dtype down to E4M3 holds it exactly.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, need in needed_tensors(config):
        value = rng.integers(-15, 16, need.shape).astype(np.float32) / 8
        if len(need.shape) == 1:
            value = 1 + value / 4
        keep = name.endswith("e_score_correction_bias")
        tensors[name] = value if keep else value.astype(ml_dtypes.bfloat16)
    for layer in range(config.num_hidden_layers, config.num_layers):
        for name, _ in mtp_shared_tensors(config, layer):
            source = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
            tensors[name] = tensors[source if source in tensors else "model.embed_tokens.weight"]
    return tensors


def quantized(config: ModelConfig, tensors: dict, block=BLOCK) -> dict:
    """The same with the family's FP8 weights; scales are powers of two, so that every scale dtype holds them."""
    fp8 = {name for name, need in needed_tensors(config) if need.quantized}
    return {
        name: quantize(value.astype(np.float32), block, scale_format="ue8m0") if name in fp8 else value
        for name, value in tensors.items()
    }


def base(kind: str = "bfloat16", config: ModelConfig = TINY) -> Variant:
    """`kind` "bfloat16", or "fp8" in blocks of 16 x 16, of which some are partial, or "fp8-128"."""
    tensors = random_tensors(config)
    if kind != "bfloat16":
        block = BLOCK if kind == "fp8" else (128, 128)
        tensors = quantized(config, tensors, block)
        config = replace(config, quantization_config=Quantization(block))
    return Variant(config.to_dict(), tensors)


@dataclass(frozen=True)
class Case:
    """A change to a base, after which the checkpoint loads to exactly the base's values, or is refused.

    `notices`: one fragment for each notice, in order. `refused`: words of the one message. `source`: a public report.
    """

    name: str
    change: Callable[[Variant], object]
    kind: str = "bfloat16"
    config: ModelConfig = TINY
    notices: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    source: str = ""

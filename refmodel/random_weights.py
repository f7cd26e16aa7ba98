"""Random weights for any config, each tensor drawn from (seed, its name) when it is asked for."""

import zlib

import numpy as np

from refmodel.schema import needed_tensors


class RandomTensors:
    """A source of float32 tensors under Hugging Face names that hide no mistake.

    Norm weights are 1 + 0.3 N, so that a norm left out or applied twice shows; correction biases 0.3 N have both signs;
    matrices N / sqrt(inputs) keep the residual stream from fading.
    """

    def __init__(self, config, seed: int):
        self._shapes = {name: needed.shape for name, needed in needed_tensors(config)}
        self._seed = seed

    def is_fp8(self, name: str) -> bool:
        """Nothing is stored as FP8; the fp8 numerics quantise what they need."""
        return False

    def array(self, name: str) -> np.ndarray:
        """float32 tensor. Raises ValueError for a name that the config does not call for."""
        if name not in self._shapes:
            raise ValueError(f"no tensor {name!r} in this config")
        shape = self._shapes[name]
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        drawn = rng.standard_normal(shape, np.float32)
        if name.endswith("e_score_correction_bias"):
            drawn *= np.float32(0.3)
        elif len(shape) == 1:
            drawn = np.float32(1) + np.float32(0.3) * drawn
        elif "embed_tokens" not in name:
            drawn *= np.float32(1 / np.sqrt(shape[1]))
        return drawn

"""What the stages of one micro-batch share: whose tokens they are, and the values made so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from refmodel.cache import LatentCache
from refmodel.groups import Group, alike
from refmodel.rope import Rotation, rotation
from refmodel.trace import Scope


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in a batch: rows start .. stop, the first of which is token `cache_offset` of it."""

    cache: LatentCache
    cache_offset: int
    start: int
    stop: int

    @property
    def keys(self) -> int:
        """Tokens of the request up to its last one here: the keys that this one sees."""
        return self.cache_offset + self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Token rows that are computed together. RoPE positions and cache offsets are separate things: the MTP layer's
    slot i holds the token of position i + 1."""

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], for RoPE
    segments: tuple[Segment, ...]
    phase: str  # "prefill": naive MLA; "decode": absorbed MLA

    def __post_init__(self):
        if self.phase not in ("prefill", "decode"):
            raise ValueError(f"phase = {self.phase!r}: must be 'prefill' (naive MLA) or 'decode' (absorbed MLA)")


@dataclass
class State:
    """What the stages of one micro-batch share: the model's constants, its batch, and the values made so far."""

    weights: object  # refmodel.weights.Weights
    batch: Batch
    exchange: Callable[[int], object]  # layer -> a fresh exchange
    scope: Scope = field(default_factory=Scope)
    values: dict = field(default_factory=dict)

    def __post_init__(self):
        self.config, self.numerics = self.weights.config, self.weights.numerics

    @cached_property
    def rotation(self) -> Rotation:
        """cos and sin of the batch's positions, for all layers."""
        numerics, (inv_freq, amplitude) = self.numerics, self.weights.frequencies
        interleaved = self.config.rope_interleave
        return rotation(self.batch.positions, inv_freq, interleaved, amplitude, numerics.compute, numerics.rope_cast)

    @cached_property
    def groups(self) -> list[Group]:
        """Requests that absorbed attention takes together, for all layers."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        return list(alike(self.batch.segments, width * self.numerics.compute.itemsize))

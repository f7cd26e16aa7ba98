"""Which value is rounded to which dtype, and where.

Inside an operator arithmetic is wide (float64, or float32 where speed is asked for); the result is rounded once, to
the dtype that the real system stores at that point. Every such point has a name in ROUNDING_POINTS, and nothing is
rounded anywhere else. Two points are ordered float32 sums because the real systems define them so: the promotion of
FP8 block products (`fp8.gemm`) and the sums of combine (`weighted_row`, `combine_sum`).
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from fp8.rounding import to_bfloat16
from refmodel.switches import ENGINES, Switches

__all__ = ["ENGINES", "PRESETS", "ROUNDING_POINTS", "Numerics", "Switches", "round_to", "widen"]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)

#: Name of a rounding point -> its class: `activation` (the residual stream's dtype) or `wide` (float32 in every
#: preset but float64).
ROUNDING_POINTS = {
    "embedding": "activation",
    "norm": "activation",
    "linear": "activation",
    "rope": "activation",
    "attention": "activation",
    "activation_product": "activation",  # silu(gate) * up
    "expert_row": "activation",
    "combined_row": "activation",
    "moe_output": "activation",  # routed + shared
    "residual": "activation",
    "weighted_row": "wide",  # topk_weight * expert row, inside combine
    "combine_sum": "wide",  # the running sum of combine, in its stated order
    "router_logits": "wide",
    "router_scores": "wide",
    "router_weights": "wide",
    "lse": "wide",
    "logits": "wide",
}

PRESETS = ("float64", "float32", "bfloat16", "fp8")


@dataclass(frozen=True)
class Numerics:
    """One preset: the dtype of each class of rounding points, and the dtype that operators compute in."""

    name: str
    compute: np.dtype = float64
    #: how FP8 inputs are quantised: a recipe of `fp8.RECIPES` and the scale format that the checkpoint declares
    recipe: str = "deepseek_v3"
    scale_format: str = "float32"
    switches: Switches = field(default_factory=Switches)
    #: dtype of the residual stream and of every `activation` rounding point
    activation: np.dtype = field(init=False, repr=False, compare=False)
    #: dtype of every `wide` rounding point
    wide: np.dtype = field(init=False, repr=False, compare=False)
    # where an engine rounds once more, to the activation dtype, or None:
    #: the factors and products of RoPE
    rope_cast: np.dtype | None = field(init=False, repr=False, compare=False)
    #: silu(gate), before it meets up
    silu_cast: np.dtype | None = field(init=False, repr=False, compare=False)
    #: a norm, before it applies its weight
    norm_cast: np.dtype | None = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.name not in PRESETS:
            raise ValueError(f"numerics = {self.name!r}: must be one of {', '.join(PRESETS)}")
        compute = np.dtype(self.compute)
        object.__setattr__(self, "compute", compute)
        if compute not in (float64, float32):
            raise ValueError(f"compute = {compute}: operators compute in float64 or float32")
        if self.name == "float64" and compute != float64:
            raise ValueError("numerics float64 with compute float32: float64 results need float64 arithmetic")
        activation = {"float64": float64, "float32": float32}.get(self.name, bfloat16)
        wide = float64 if self.name == "float64" else float32
        dtypes = {point: {"activation": activation, "wide": wide}[kind] for point, kind in ROUNDING_POINTS.items()}
        object.__setattr__(self, "activation", activation)
        object.__setattr__(self, "wide", wide)
        object.__setattr__(self, "_dtypes", dtypes)
        switches = self.switches
        object.__setattr__(self, "rope_cast", activation if switches.rope_dtype == "activation" else None)
        object.__setattr__(self, "silu_cast", activation if switches.silu_dtype == "activation" else None)
        cast_norm = switches.norm_order == "cast_then_multiply"
        object.__setattr__(self, "norm_cast", activation if cast_norm else None)

    @property
    def fp8(self) -> bool:
        """Whether the inputs of FP8 linears are quantised."""
        return self.name == "fp8"

    def store(self, x: np.ndarray, point: str) -> np.ndarray:
        """Round `x` once to the dtype of the named rounding point."""
        return round_to(x, self._dtypes[point])

    def widen(self, x: np.ndarray) -> np.ndarray:
        """`x` in the compute dtype, exactly."""
        return widen(x, self.compute)


def round_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float64 or float32 values once, to nearest even. `x` itself where nothing changes."""
    if x.dtype == dtype:
        return x
    if dtype == bfloat16:
        return to_bfloat16(x)
    return x.astype(dtype)


def widen(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A narrower float as float64 or float32; every bfloat16 and float32 value is kept exactly in either."""
    if x.dtype == dtype:
        return x
    if x.dtype == bfloat16:
        as_float32 = (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return as_float32 if dtype == float32 else as_float32.astype(dtype)
    return x.astype(dtype)

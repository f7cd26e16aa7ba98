"""Root-mean-square normalisation."""

import numpy as np

from refmodel.numerics import round_to, widen


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, *, dtype=np.float64, cast_before_weight=None) -> np.ndarray:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, unrounded.

    x [..., D] any float dtype; weight [D]; result [..., D] in `dtype`.
    `cast_before_weight` names a dtype to which the normalised value is rounded before the weight is applied:
    Hugging Face's order in bfloat16 (transformers, models/deepseek_v3/modeling_deepseek_v3.py). The default is the
    vendor's order, one rounding after the product (deepseek-ai/DeepSeek-V3 inference/model.py).
    Raises ValueError when the widths differ.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm: x {x.shape} and weight {weight.shape} must agree in their last axis")
    # C-contiguous rows: NumPy sums a strided last axis in another order, and a row must not know its layout
    x = np.ascontiguousarray(widen(x, np.dtype(dtype)))  # [..., D]
    mean_square = np.vecdot(x, x)[..., None] / x.shape[-1]  # [..., 1]
    y = x / np.sqrt(mean_square + eps)  # [..., D]
    if cast_before_weight is not None:
        y = widen(round_to(y, np.dtype(cast_before_weight)), x.dtype)
    y *= widen(weight, x.dtype)
    return y


def normalise(x, weight, eps: float, numerics) -> np.ndarray:
    """`rms_norm` of the model: in its compute dtype, rounded at the `norm` point, in the order that a switch says."""
    y = rms_norm(x, weight, eps, dtype=numerics.compute, cast_before_weight=numerics.norm_cast)
    return numerics.store(y, "norm")

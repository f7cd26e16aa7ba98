"""Powers of two as scales: the rules by which libraries round a float32 scale to one.

All work on float32 arrays and return float32. `ceil_power_of_two` is what "ue8m0" means in this project.
"""

import numpy as np

_MANTISSA = np.uint32(0x007FFFFF)


def _as_float32(scale) -> np.ndarray:
    scale = np.asarray(scale)
    if scale.dtype != np.float32:
        raise ValueError(f"scales are float32, not {scale.dtype}")
    return scale


def is_power_of_two(scale) -> np.ndarray:
    """bool array: which float32 scales are powers of two that E8M0 holds (2^-127 to 2^127)."""
    scale = _as_float32(scale)
    mantissa, exponent = np.frexp(scale)
    return (mantissa == 0.5) & (exponent - 1 >= -127)


def require_powers_of_two(scale, what: str) -> None:
    """Raise ValueError, with the count, if some of the scales are not powers of two that E8M0 holds."""
    bad = ~is_power_of_two(scale)
    if bad.any():
        raise ValueError(
            f"{np.count_nonzero(bad)} of {bad.size} scales are not powers of two from 2^-127 to 2^127 (the first is "
            f"{float(np.asarray(scale)[bad][0])!r}), but {what} keeps only the exponent and would cut the rest off; "
            "quantise with scale_format='ue8m0', which rounds the scale before the values are scaled"
        )


def ceil_power_of_two(scale) -> np.ndarray:
    """The smallest power of two not below each scale, from the exponent bits; at least 2^-126, at most 2^127.

    Zero gives 2^-126; NaN and infinity give NaN (E8M0 has no infinity). Raises ValueError for negative scales.
    Source: deepseek-ai/DeepGEMM deep_gemm/utils/math.py `ceil_to_ue8m0`.
    """
    scale = _as_float32(scale)
    if (scale < 0).any():
        raise ValueError(f"{np.count_nonzero(scale < 0)} scales are negative; a scale is the size of a block's values")
    bits = np.ascontiguousarray(scale).view(np.uint32)
    exponent = (bits >> np.uint32(23)) + ((bits & _MANTISSA) != 0)
    rounded = (np.clip(exponent, 1, 254).astype(np.uint32) << np.uint32(23)).view(np.float32)
    return np.where(np.isfinite(scale), rounded, np.float32(np.nan)).reshape(scale.shape)


def ceil_power_of_two_by_log2(scale) -> np.ndarray:
    """exp2(ceil(log2(scale))) with the logarithm rounded to float32, as several Triton kernels do.

    Just above a power of two far from 1 the logarithm rounds down to a whole number, and the result is half of what
    `ceil_power_of_two` gives (sgl-project/sglang#29954). The logarithm here is the float64 one rounded to float32, so
    that it does not depend on the CPU; a GPU's approximation may differ in its last bit.
    """
    scale = _as_float32(scale)
    with np.errstate(divide="ignore"):
        logarithm = np.log2(scale.astype(np.float64)).astype(np.float32)
    exponent = np.ceil(logarithm)
    with np.errstate(over="ignore"):
        return np.exp2(exponent.astype(np.float64)).astype(np.float32)


def floor_power_of_two(scale) -> np.ndarray:
    """Each scale with its mantissa bits cleared, as TransformerEngine does with its quantisation scale (448 / amax)."""
    scale = _as_float32(scale)
    bits = np.ascontiguousarray(scale).view(np.uint32) & ~_MANTISSA
    return bits.view(np.float32).reshape(scale.shape)

"""Rotary position embedding with YaRN frequencies (arXiv 2309.00071), as V3 uses it."""

import math

import numpy as np

from refmodel.numerics import round_to, widen


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 where the context is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_frequencies(config) -> tuple[np.ndarray, float]:
    """(inv_freq float64 [P/2] in radians per position, amplitude of cos and sin).

    Without `rope_scaling`: theta^(-2i/P) and 1. With YaRN: a ramp between the correction bounds of beta_fast and
    beta_slow blends the plain frequency into frequency / factor, for short prompts too; the amplitude is the ratio
    of the two mscales, and the mscale of 1 where either is absent or 0
    (transformers, modeling_rope_utils.py; deepseek-ai/DeepSeek-V3 inference/model.py).
    """
    P, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    freq = 1.0 / theta ** (np.arange(0, P, 2, dtype=np.float64) / P)  # [P/2]
    if scaling is None:
        return freq, 1.0

    def correction(rotations):  # dimension that turns `rotations` times over the original context
        return (
            P * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), P - 1)
    if low == high:
        high += 0.001  # no division by zero: one step from plain to stretched
    ramp = np.clip((np.arange(P // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)  # [P/2]
    inv_freq = freq / scaling.factor * ramp + freq * (1.0 - ramp)
    return inv_freq, _amplitude(scaling)


def _amplitude(scaling) -> float:
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def softmax_scale(config) -> float:
    """(N + P)^-1/2, times yarn_mscale(mscale_all_dim)^2 where that field is present and not 0.

    The width is that of a query head (nope + rope), never that of the latent.
    """
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def apply_rope(
    x: np.ndarray,
    positions: np.ndarray,
    inv_freq: np.ndarray,
    interleaved: bool = True,
    *,
    amplitude: float = 1.0,
    dtype=np.float64,
    cast_each=None,
) -> np.ndarray:
    """Rotate pairs of the last axis by position * inv_freq, unrounded.

    x [..., T, heads, P]; positions [T] integers; inv_freq [P/2]; result like x in `dtype`.
    `interleaved`: pairs are (0, 1), (2, 3), ... and stay there (the vendor's code, vLLM). Otherwise pair i is
    (i, i + P/2): right only for weights whose rope rows were permuted that way. Angles are float64 in either dtype.
    `cast_each` names a dtype to which cos, sin and both products are rounded, as engines do that rotate in bfloat16.
    Raises ValueError when P is odd or the lengths do not fit.
    """
    P = x.shape[-1]
    if P % 2:
        raise ValueError(f"apply_rope: the last axis is {P}; pairs need an even width")
    if len(inv_freq) != P // 2 or len(positions) != x.shape[-3]:
        raise ValueError(
            f"apply_rope: x {x.shape} needs {P // 2} frequencies and {x.shape[-3]} positions, "
            f"got {len(inv_freq)} and {len(positions)}"
        )
    cos, sin = rotation(positions, inv_freq, amplitude, np.dtype(dtype), cast_each)
    return rotate(x, cos, sin, interleaved, cast_each)


def rotation(positions, inv_freq, amplitude, dtype, cast_each=None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, 1, P/2] in `dtype` for `rotate`: computed once for all layers."""
    angle = np.asarray(positions, np.float64)[:, None] * inv_freq  # [T, P/2]
    cos, sin = ((wave(angle) * amplitude).astype(dtype)[:, None, :] for wave in (np.cos, np.sin))
    return _cast(cos, cast_each), _cast(sin, cast_each)


def rotate(x, cos, sin, interleaved: bool = True, cast_each=None) -> np.ndarray:
    """`apply_rope` with its cos and sin at hand; the result has their dtype."""
    half = x.shape[-1] // 2
    x = widen(x, cos.dtype)
    out = np.empty(x.shape, cos.dtype)
    if interleaved:
        real, imag, to_real, to_imag = x[..., 0::2], x[..., 1::2], out[..., 0::2], out[..., 1::2]
    else:
        real, imag, to_real, to_imag = x[..., :half], x[..., half:], out[..., :half], out[..., half:]
    real, imag = np.ascontiguousarray(real), np.ascontiguousarray(imag)  # each is read twice
    np.subtract(_cast(real * cos, cast_each), _cast(imag * sin, cast_each), out=to_real)
    np.add(_cast(real * sin, cast_each), _cast(imag * cos, cast_each), out=to_imag)
    return out


def _cast(value, dtype):
    """Rounded to a narrower dtype and back."""
    return value if dtype is None else widen(round_to(value, dtype), value.dtype)

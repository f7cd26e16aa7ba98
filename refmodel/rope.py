"""Rotary position embedding with YaRN frequencies (arXiv 2309.00071), as V3 uses it."""

import math
from functools import cache
from typing import NamedTuple

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
    return rotate(x, rotation(positions, inv_freq, interleaved, amplitude, np.dtype(dtype), cast_each), cast_each)


class Rotation(NamedTuple):
    """What RoPE multiplies with, for rows of P numbers: x * cos + x[partner] * sin."""

    cos: np.ndarray  # [T, 1, P], that of a pair at both of its places
    sin: np.ndarray  # [T, 1, P], negative at a pair's first place
    partner: np.ndarray  # int [P]: where the other one of a pair stands


def rotation(positions, inv_freq, interleaved, amplitude, dtype, cast_each=None) -> Rotation:
    """A Rotation in `dtype`, computed once for all layers; arguments as of `apply_rope`."""
    angle = np.asarray(positions, np.float64)[:, None] * inv_freq  # [T, P/2]
    cos, sin = (_cast((wave(angle) * amplitude).astype(dtype), cast_each) for wave in (np.cos, np.sin))
    first, second, partner = _places(2 * len(inv_freq), interleaved)
    wide_cos, wide_sin = np.empty((2, len(angle), 1, len(partner)), dtype)
    wide_cos[:, 0, first] = wide_cos[:, 0, second] = cos
    wide_sin[:, 0, first], wide_sin[:, 0, second] = -sin, sin
    return Rotation(wide_cos, wide_sin, partner)


@cache
def _places(P, interleaved):
    """Slices of the first and of the second ones of all pairs, and where each one's partner stands."""
    half = P // 2
    first, second = (np.s_[0::2], np.s_[1::2]) if interleaved else (np.s_[:half], np.s_[half:])
    place = np.arange(P)
    partner = np.empty(P, np.intp)
    partner[first], partner[second] = place[second], place[first]
    partner.flags.writeable = False
    return first, second, partner


def rotate(x, by: Rotation, cast_each=None) -> np.ndarray:
    """`apply_rope` with its Rotation at hand; the result has its dtype."""
    x = widen(x, by.cos.dtype)
    crossed = _cast(x.take(by.partner, axis=-1) * by.sin, cast_each)
    return np.add(_cast(x * by.cos, cast_each), crossed, out=crossed)


def _cast(value, dtype):
    """Rounded to a narrower dtype and back."""
    return value if dtype is None else widen(round_to(value, dtype), value.dtype)

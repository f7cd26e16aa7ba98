"""When a tensor counts as equal: a rule with its reason, and the rule that dtype and depth suggest."""

import re
from dataclasses import asdict, dataclass, fields

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """An element holds if any of the element rules allows it; a tensor holds if all its elements do
    and the two tensor rules hold as well.

    Element rules: `rtol` of |reference|, `atol`, `rms` of the root mean square of the reference tensor (which
    lets a near-zero element carry the noise of its neighbours), `ulps` representable values. The largest
    counts: they are not summed. All zero means exact.
    Tensor rules: `differing`, the fraction of elements that may differ at all; `scale`, how far the fitted scale
    factor may be from 1, which catches a small systematic factor that every single element would pass; `norm`, the
    norm of the error over that of the reference; `row`, the same for each row (all axes but the last).
    `reason` says where the numbers come from. Raises ValueError for a negative or undefined number.
    """

    rtol: float = 0.0
    atol: float = 0.0
    rms: float = 0.0
    ulps: int = 0
    differing: float = 1.0
    scale: float = float("inf")
    norm: float = float("inf")
    row: float = float("inf")
    reason: str = ""

    def __post_init__(self):
        for name in ("rtol", "atol", "rms", "ulps", "differing", "scale", "norm", "row"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"tolerance {name}={value!r}: a number of 0 or more is required")

    @property
    def exact(self) -> bool:
        """Whether no element may differ."""
        return not (self.rtol or self.atol or self.rms or self.ulps)

    def to_dict(self) -> dict:
        """Only what differs from the exact rule, for metadata and JSON."""
        default = Tolerance()
        return {k: v for k, v in asdict(self).items() if v != getattr(default, k)}

    @classmethod
    def from_dict(cls, values: dict) -> "Tolerance":
        """The rule that `to_dict` wrote. Raises ValueError for a field that no rule has."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"tolerance field {unknown[0]!r} is unknown; fields are {', '.join(sorted(known))}")
        return cls(**values)

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        parts = [f"{name} {getattr(self, name):.3g}" for name in ("rtol", "atol", "rms") if getattr(self, name)]
        parts += [f"{self.ulps} ulp"] if self.ulps else []
        parts += [f"at most {self.differing:.3g} of elements"] if self.differing < 1 else []
        parts += [f"scale within {self.scale:.3g}"] if np.isfinite(self.scale) else []
        parts += [f"{name} {getattr(self, name):.3g}" for name in ("norm", "row") if np.isfinite(getattr(self, name))]
        return ", ".join(parts)


EXACT = Tolerance(reason="exact")

# Unit roundoff of one rounding to the format.
UNIT_ROUNDOFF = {
    np.dtype(np.float64): 2.0**-53,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float16): 2.0**-11,
    np.dtype(ml_dtypes.bfloat16): 2.0**-9,
    np.dtype(ml_dtypes.float8_e4m3fn): 2.0**-4,
    np.dtype(ml_dtypes.float8_e4m3fnuz): 2.0**-4,
    np.dtype(ml_dtypes.float8_e5m2): 2.0**-3,
    np.dtype(ml_dtypes.float8_e5m2fnuz): 2.0**-3,
}
NUMERICS_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "fp8": 2.0**-6}
# fp8: two runs whose bfloat16 inputs differ by 2^-9 quantise a few values to the neighbouring E4M3 code;
# a step of 2^-3 taken with probability 2^-9 / 2^-3 has a root mean square of sqrt(2^-9 * 2^-3) = 2^-6.

# The largest margin between experts at which another choice is noise: scores are sigmoids of size 1, and near a tie
# their error is that of the router's input.
TIE_MARGINS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-7, "fp8": 2.0**-5}
DOT_PRODUCT = 64.0  # float32 sums are rounded at each of their terms: sqrt(4096)
ROUNDINGS_PER_LAYER = 12  # stored intermediate results between one residual and the next
WORST_OF_MANY = 8.0  # the worst of millions of roundings, in units of their root mean square
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def depth_of(name: str) -> int:
    """Number of layers a tensor has passed through, by its name: `layers.3.…` is 4, `embed…` is 0.

    The ends (`final`, `logits`) are unknown without a config and count as 0; give `depth` for them.
    """
    match = _LAYER.search(name)
    return int(match.group(1)) + 1 if match else 0


def suggest(dtype, depth: int = 0, numerics: str | None = None, size: int = 1 << 20) -> Tolerance:
    """The rule for a tensor of `dtype` and `size` elements after `depth` layers of a run in `numerics`.

    Rounding errors of unit roundoff u (the larger of the dtype's and the numerics') add up like a random walk
    over the stored results before the tensor: u * sqrt(12 * depth + 1), in float32 times the 64 of a dot
    product of 4096 terms; the worst of many elements is taken as 8 of those. Near-zero elements are judged
    against the root mean square of the tensor. A scale factor common to all elements averages the noise out
    and is held to one of those, or to 8 / sqrt(size). Integers and booleans are exact. The suggested rule is
    no proof: `locate` replays single operators and needs no allowance for depth.
    """
    dtype = np.dtype(dtype)
    if numerics is not None and numerics not in NUMERICS_ROUNDOFF:
        raise ValueError(f"numerics {numerics!r} is unknown; one of {', '.join(NUMERICS_ROUNDOFF)} is required")
    if dtype not in UNIT_ROUNDOFF:
        return Tolerance(reason=f"{dtype}: exact")
    own = UNIT_ROUNDOFF[dtype]
    unit = max(own, NUMERICS_ROUNDOFF[numerics]) if numerics else own
    if unit < 2.0**-24:
        return Tolerance(rtol=1e-12, rms=1e-12, reason="float64: 1e-12 relative")
    factor = DOT_PRODUCT if unit == 2.0**-24 else 1.0
    noise = unit * factor * float(np.sqrt(ROUNDINGS_PER_LAYER * depth + 1))
    bound = min(WORST_OF_MANY * noise, 0.5)
    source = f"{numerics} numerics" if numerics and unit > own else str(dtype)
    reason = f"{source} (unit roundoff 2^{int(np.log2(unit))}), {depth} layers deep: 8 x u x sqrt(12 x {depth} + 1)"
    reason += " x sqrt(4096)" if factor > 1 else ""
    scale = min(bound, noise * max(1.0, 8.0 / float(np.sqrt(max(size, 1)))))
    return Tolerance(rtol=bound, rms=bound, scale=scale, reason=reason)


def suggest_for(name: str, dtype, size: int, numerics: str, layers: int) -> Tolerance:
    """The suggested rule for a tensor by its name, in a model of `layers` layers.

    Outside of layers everything but the embedding comes after all of them. `margin` is a difference of scores, so
    what counts is its absolute error.
    """
    if name.rsplit(".", 1)[-1] == "margin":
        limit = TIE_MARGINS[numerics]
        return Tolerance(atol=limit, reason=f"a difference of scores in {numerics} numerics: {limit:.3g} absolute")
    depth = depth_of(name)
    if not depth and "embed" not in name:
        depth = layers
    return suggest(dtype, depth, numerics, size)


def reproduce(dtype) -> Tolerance:
    """The rule for the same computation on another machine: narrow formats byte for byte, float32 at most
    1 ulp in 1e-6 of the elements, float64 1e-12 relative."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return Tolerance(rtol=1e-12, rms=1e-12, reason="float64 on another machine: 1e-12 relative")
    if dtype == np.float32:
        return Tolerance(ulps=1, differing=1e-6, reason="float32 on another machine: 1 ulp in 1e-6 of the elements")
    return Tolerance(reason=f"{dtype} on another machine: byte for byte")


def one_operator(dtype, numerics: str, size: int, operators: int = 1, sensitivity: float = 1.0) -> Tolerance:
    """The rule for the output of one operator whose inputs agree to the bit.

    An implementation rounds a few intermediate results that this one keeps wide: 24 roundings of the output's format
    (32 of float32) against the root mean square, 3 as a norm, 4 as the norm of a row. What transformers and vLLM give
    for the example model stays below two thirds of each. A factor common to all elements cannot come from rounding at
    all. Where operands are quantised to FP8, another way of dividing by the scale moves single codes to a neighbour.
    `operators` of them in a row, of which only the last one's output is known, add up like a random walk, whose steps
    are a third of what one may reach.
    sensitivity: how much the operator magnifies the rounding of its wide arithmetic (an exponential of a score of
    size 10 by 10), which counts where the output is as wide as that arithmetic.
    """
    dtype = np.dtype(dtype)
    if dtype not in UNIT_ROUNDOFF:
        return Tolerance(reason=f"{dtype}: exact")
    own = UNIT_ROUNDOFF[dtype]
    unit = max(own, NUMERICS_ROUNDOFF["bfloat16" if numerics == "fp8" else numerics])
    if dtype.itemsize == 1:
        return Tolerance(ulps=1, differing=0.02, reason="E4M3 codes: a neighbour, in 2 % of the elements")
    if unit < 2.0**-24:
        return Tolerance(rtol=1e-12, rms=1e-12, reason="float64: 1e-12 relative")
    most = 32 if unit == 2.0**-24 else 24
    unit *= DOT_PRODUCT / 8 * sensitivity if unit == 2.0**-24 else 1.0
    unit *= (2 + float(np.sqrt(operators))) / 3
    scale = unit / 4 + 8 * unit / float(np.sqrt(max(size, 1)))
    count = f"{operators} operators" if operators > 1 else "one operator"
    reason = f"{count} in {numerics}: {most} roundings of {unit:.2g}, as a norm 3, by row 4"
    return Tolerance(rtol=most * unit, rms=most * unit, scale=scale, norm=3 * unit, row=4 * unit, reason=reason)

"""The narrow formats: how many bits each field has, and the value of each of the 256 codes.

E4M3 (`float8_e4m3fn`) has no infinity and one NaN per sign; E4M3FNUZ has no negative zero either, and twice the
exponent bias range of AMD's MI300; E5M2 is a truncated float16; E8M0 is a bare power of two, used for scales.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0 for E8M0;
arXiv 2206.02915 for the FNUZ variants.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """An 8-bit format; `nan_codes` and `inf_codes` override the value that the bit fields would give.

    `signed=False` means: no sign bit, no zero and no subnormals (E8M0).
    """

    name: str
    dtype: np.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_codes: tuple[int, ...]
    inf_codes: tuple[int, ...] = ()
    signed: bool = True

    def __post_init__(self):
        if self.signed + self.exponent_bits + self.mantissa_bits != 8:
            raise ValueError(f"{self.name}: sign, exponent and mantissa must fill 8 bits")

    def values(self) -> np.ndarray:
        """float64 [256]: the value of each code, from the bit fields."""
        code = np.arange(256)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        if not self.signed:
            value = np.ldexp(np.ones(256), exponent - self.bias)
        else:
            implicit = np.where(exponent > 0, 1 << self.mantissa_bits, 0)
            step = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
            value = np.ldexp((implicit + mantissa).astype(np.float64), step)
            value = np.where(code >> 7, -value, value)
        for inf in self.inf_codes:
            value[inf] = np.copysign(np.inf, value[inf])
        value[list(self.nan_codes)] = np.nan
        return value

    @property
    def max(self) -> float:
        """The largest finite value."""
        value = self.values()
        return float(value[np.isfinite(value)].max())

    @property
    def min_normal_exponent(self) -> int:
        """Exponent of the smallest normal value; below it the step between values stays the same."""
        return 1 - self.bias

    @property
    def smallest_step(self) -> float:
        """The distance between neighbours around zero: every finite value is a whole multiple of it."""
        return 2.0 ** (self.min_normal_exponent - self.mantissa_bits)


E4M3 = Format("E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, 7, nan_codes=(0x7F, 0xFF))
E4M3FNUZ = Format("E4M3FNUZ", np.dtype(ml_dtypes.float8_e4m3fnuz), 4, 3, 8, nan_codes=(0x80,))
E5M2 = Format(
    "E5M2",
    np.dtype(ml_dtypes.float8_e5m2),
    5,
    2,
    15,
    nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
    inf_codes=(0x7C, 0xFC),
)
E8M0 = Format("E8M0", np.dtype(ml_dtypes.float8_e8m0fnu), 8, 0, 127, nan_codes=(0xFF,), signed=False)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E4M3FNUZ, E5M2, E8M0)}


def format_of(dtype) -> Format:
    """The format whose codes have this NumPy dtype. Raises ValueError for any other dtype."""
    for fmt in FORMATS.values():
        if fmt.dtype == np.dtype(dtype):
            return fmt
    known = ", ".join(str(fmt.dtype) for fmt in FORMATS.values())
    raise ValueError(f"codes of dtype {np.dtype(dtype)} belong to no 8-bit format; known are {known}")

"""From E4M3FN to E4M3FNUZ and back, for hardware (AMD MI300) whose E4M3 has another bias.

The same byte means half as much in FNUZ, so codes stay and scales double; 0x80 is minus zero in FN and NaN in FNUZ and
must become 0x00. Reading FN bytes as FNUZ without this halves every weight (sgl-project/sglang#2667).
"""

import numpy as np

from fp8.blockscaled import BlockScaled
from fp8.formats import E4M3, E4M3FNUZ

_MINUS_ZERO = 0x80


def to_fnuz(matrix: BlockScaled) -> BlockScaled:
    """The same values in E4M3FNUZ: scales doubled, minus zero made zero. Raises ValueError for NaN codes or formats."""
    if matrix.codes.dtype != E4M3.dtype:
        raise ValueError(f"codes are {matrix.codes.dtype}; to_fnuz takes {E4M3.dtype}")
    raw = matrix.codes.view(np.uint8)
    num_nan = np.count_nonzero((raw & 0x7F) == 0x7F)
    if num_nan:
        raise ValueError(f"{num_nan} codes are NaN; FNUZ would read those bytes as 240 and -240")
    codes = np.where(raw == _MINUS_ZERO, 0, raw).astype(np.uint8)
    return BlockScaled(codes.view(E4M3FNUZ.dtype), matrix.scale * np.float32(2.0), matrix.block)


def from_fnuz(matrix: BlockScaled) -> BlockScaled:
    """The same values in E4M3FN: scales halved.

    Raises ValueError for other formats and for the codes that FN reads as NaN: 0x7F and 0xFF are +-240 in FNUZ.
    """
    if matrix.codes.dtype != E4M3FNUZ.dtype:
        raise ValueError(f"codes are {matrix.codes.dtype}; from_fnuz takes {E4M3FNUZ.dtype}")
    raw = matrix.codes.view(np.uint8)
    bad = np.count_nonzero(((raw & 0x7F) == 0x7F) | (raw == _MINUS_ZERO))
    if bad:
        raise ValueError(f"{bad} codes are 240, -240 or NaN, whose bytes mean something else in E4M3FN")
    return BlockScaled(raw.view(E4M3.dtype), matrix.scale * np.float32(0.5), matrix.block)

"""The 656-byte latent row that FlashMLA reads in sparse decode.

512 E4M3 codes, then 4 float32 scales (one per 128 codes, each a power of two), then 64 bfloat16 RoPE numbers, which
stay as they are. Source: FlashMLA flash_mla_interface.py and tests/quant.py (layout V32_FP8Sparse).
"""

import ml_dtypes
import numpy as np

from fp8.codec import decode, encode
from fp8.formats import E4M3
from fp8.rounding import to_bfloat16

LATENT = 512
ROPE = 64
TILE = 128
NUM_TILES = LATENT // TILE
ROW_WIDTH = LATENT + ROPE  # numbers of a row before packing
ROW_BYTES = LATENT + 4 * NUM_TILES + 2 * ROPE  # 656
MIN_SCALE = 1e-4
E4M3_MAX = 448.0


def pack_rows(rows) -> np.ndarray:
    """Rows `[..., 576]` (bfloat16, or float32 and float64, whose RoPE part is rounded to bfloat16) as uint8 [..., 656].

    scale = 2 ** ceil(log2(max(amax / 448, 1e-4))) in float32. Raises ValueError for another width.
    """
    rows = np.asarray(rows)
    if rows.shape[-1:] != (ROW_WIDTH,):
        raise ValueError(f"a latent row has {ROW_WIDTH} numbers ({LATENT} latent, {ROPE} RoPE), not shape {rows.shape}")
    lead = rows.shape[:-1]
    latent = rows[..., :LATENT].astype(np.float32).reshape(*lead, NUM_TILES, TILE)
    scale = tile_scales(np.abs(latent).max(axis=-1))  # [..., 4]
    codes = encode(latent / scale[..., None], E4M3)
    packed = np.empty((*lead, ROW_BYTES), np.uint8)
    packed[..., :LATENT] = codes.view(np.uint8).reshape(*lead, LATENT)
    packed[..., LATENT : LATENT + 4 * NUM_TILES] = np.ascontiguousarray(scale).view(np.uint8)
    packed[..., LATENT + 4 * NUM_TILES :] = np.ascontiguousarray(to_bfloat16(rows[..., LATENT:])).view(np.uint8)
    return packed


def unpack_rows(packed) -> np.ndarray:
    """uint8 (or E4M3) `[..., 656]` back as bfloat16 `[..., 576]`: code x scale rounded once. Raises ValueError."""
    packed = np.asarray(packed)
    if packed.shape[-1:] != (ROW_BYTES,) or packed.dtype.itemsize != 1:
        raise ValueError(f"packed rows are bytes [..., {ROW_BYTES}], not {packed.dtype} {packed.shape}")
    lead = packed.shape[:-1]
    packed = np.ascontiguousarray(packed).view(np.uint8)
    codes = packed[..., :LATENT].view(ml_dtypes.float8_e4m3fn)
    scale = np.ascontiguousarray(packed[..., LATENT : LATENT + 4 * NUM_TILES]).view(np.float32)  # [..., 4]
    value = decode(codes, np.float64).reshape(*lead, NUM_TILES, TILE) * scale[..., None].astype(np.float64)
    rows = np.empty((*lead, ROW_WIDTH), ml_dtypes.bfloat16)
    rows[..., :LATENT] = to_bfloat16(value).reshape(*lead, LATENT)
    rows[..., LATENT:] = np.ascontiguousarray(packed[..., LATENT + 4 * NUM_TILES :]).view(ml_dtypes.bfloat16)
    return rows


def tile_scales(amax: np.ndarray) -> np.ndarray:
    """float32 powers of two for the largest magnitudes `amax` (float32) of the tiles.

    The logarithm is rounded to float32 before the ceiling, as the source does: just above a power of two it may fall
    on the power itself, and then the largest code saturates instead of the scale doubling.
    """
    share = np.maximum(amax.astype(np.float32) / np.float32(E4M3_MAX), np.float32(MIN_SCALE))
    exponent = np.ceil(np.log2(share.astype(np.float64)).astype(np.float32))
    return np.exp2(exponent).astype(np.float32)

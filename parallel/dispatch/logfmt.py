"""LogFMT-10: bfloat16 rows with a sign and nine bits of logarithm for each value, where a chunk allows it.

A row travels as (amax, amin) in bfloat16 for each block of 128 values, then its chunks: 10 bits a value where every
block of the chunk has amax < 1 and amin < amax, plain bfloat16 elsewhere.
Source: DeepEP csrc/kernels/legacy/internode_ll.cu (logfmt_encode, decode_and_accumulate). The kernels take logarithms
by lg2.approx and ex2.approx, which may differ from these in the last bits.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 128
GROUP = 16  # values packed together: 144 bits of codes, then 16 of signs
GROUP_BYTES = 20
CLIP = np.float32(32.0)  # the logarithms of a block span at most 2^5
STEPS = np.float32(510.0)  # codes 1 to 511 are values, 0 is zero


class Encoded(NamedTuple):
    """Rows one after the other as bytes."""

    data: np.ndarray  # uint8 [sum of lengths]
    lengths: np.ndarray  # int64 [n]


class _Blocks(NamedTuple):
    """The logarithms [n, blocks] that both sides derive from (amax, amin), and the chunks [n, chunks] that are cast."""

    log_amin: np.ndarray
    step: np.ndarray
    cast: np.ndarray


def chunk_size(hidden: int) -> int:
    """Values per chunk: 1,024 where that divides a row, else 512."""
    return 1024 if hidden % 1024 == 0 else 512


def row_bounds(hidden: int) -> tuple[int, int]:
    """The least and the most bytes of a row: every chunk cast, or none. Only the values tell which."""
    meta = 4 * -(-hidden // BLOCK)
    return meta + hidden * GROUP_BYTES // GROUP, meta + 2 * hidden


def encode(rows: np.ndarray) -> Encoded:
    """bfloat16 rows [n, H] as bytes; raises ValueError for another dtype or where H is no multiple of 128."""
    if rows.dtype != ml_dtypes.bfloat16 or rows.ndim != 2 or rows.shape[1] % BLOCK:
        raise ValueError(
            f"LogFMT takes bfloat16 rows [n, H] with H a multiple of {BLOCK}, not {rows.dtype} {rows.shape}"
        )
    count, hidden = rows.shape
    magnitude = np.abs(rows.astype(np.float32)).reshape(count, hidden // BLOCK, BLOCK)
    extremes = np.stack([magnitude.max(axis=2), magnitude.min(axis=2)], axis=2).astype(ml_dtypes.bfloat16)
    blocks = _blocks(extremes, hidden)
    packed = _pack(_codes(magnitude, blocks).reshape(count, hidden), np.signbit(rows.astype(np.float32)))
    spans, lengths = _spans(blocks.cast, hidden)
    data = np.empty(int(lengths.sum()), np.uint8)
    base = np.cumsum(lengths) - lengths
    meta = extremes.reshape(count, hidden // BLOCK * 2).view(np.uint8)
    data[base[:, None] + np.arange(meta.shape[1])] = meta
    plain = np.ascontiguousarray(rows).view(np.uint8)
    for chunk, first in enumerate(range(0, hidden, chunk_size(hidden))):
        stop = min(first + chunk_size(hidden), hidden)
        for cast, source, scale in ((True, packed, (GROUP_BYTES, GROUP)), (False, plain, (2, 1))):
            picked = np.flatnonzero(blocks.cast[:, chunk] == cast)
            values = source[picked, first * scale[0] // scale[1] : stop * scale[0] // scale[1]]
            data[(base[picked] + spans[picked, chunk])[:, None] + np.arange(values.shape[1])] = values
    return Encoded(data, lengths)


def decode(encoded: Encoded, hidden: int) -> np.ndarray:
    """float32 rows [n, H]: what the reduction multiplies by the weights (it is not rounded to bfloat16 before)."""
    count = len(encoded.lengths)
    base = np.cumsum(encoded.lengths) - encoded.lengths
    meta = encoded.data[base[:, None] + np.arange(hidden // BLOCK * 4)]
    blocks = _blocks(meta.view(ml_dtypes.bfloat16).reshape(count, hidden // BLOCK, 2), hidden)
    spans, lengths = _spans(blocks.cast, hidden)
    if (lengths != encoded.lengths).any():
        raise ValueError("LogFMT rows are not as long as their minima and maxima say: they are damaged")
    out = np.empty((count, hidden), np.float32)
    for chunk, first in enumerate(range(0, hidden, chunk_size(hidden))):
        stop = min(first + chunk_size(hidden), hidden)
        for cast in (True, False):
            picked = np.flatnonzero(blocks.cast[:, chunk] == cast)
            width = (stop - first) * GROUP_BYTES // GROUP if cast else (stop - first) * 2
            data = encoded.data[(base[picked] + spans[picked, chunk])[:, None] + np.arange(width)]
            if cast:
                out[picked, first:stop] = _values(data, blocks, picked, first // BLOCK)
            else:
                out[picked, first:stop] = data.view(ml_dtypes.bfloat16)
    return out


def _blocks(extremes: np.ndarray, hidden: int) -> _Blocks:
    """From bfloat16 (amax, amin) [n, blocks, 2]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(extremes.astype(np.float64)).astype(np.float32)
        log_amax = logs[..., 0]
        log_amin = np.maximum(logs[..., 1], log_amax - CLIP)
        step = (log_amax - log_amin) / STEPS
        fits = (log_amax < 0) & (log_amin < log_amax)
    per_chunk = chunk_size(hidden) // BLOCK
    cast = np.stack([fits[:, i : i + per_chunk].all(axis=1) for i in range(0, fits.shape[1], per_chunk)], axis=1)
    return _Blocks(log_amin, step, cast)


def _codes(magnitude: np.ndarray, blocks: _Blocks) -> np.ndarray:
    """Codes 0 to 511 [n, blocks, 128]; meaningless where the block's chunk is not cast.

    The threshold between two codes lies at the mean of their values, not of their logarithms.
    """
    one, two, half = np.float32(1), np.float32(2), np.float32(0.5)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = one / blocks.step
        rounding = two - np.log2((one + np.exp2(blocks.step)) * half) * inverse
        logs = np.log2(magnitude.astype(np.float64)).astype(np.float32)
        scaled = logs * inverse[..., None] + (rounding - blocks.log_amin * inverse)[..., None]
        return np.nan_to_num(np.clip(np.floor(scaled), 0, 511)).astype(np.uint16)


def _pack(codes: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """uint8 [n, H * 20 / 16]: nine bits of each of 16 codes, lowest first, then their 16 signs."""
    groups = codes.reshape(len(codes), codes.shape[1] // GROUP, GROUP)
    bits = (groups[..., None] >> np.arange(9, dtype=np.uint16)) & np.uint16(1)
    bits = bits.astype(np.uint8).reshape(*groups.shape[:2], GROUP * 9)
    signs = negative.reshape(groups.shape).astype(np.uint8)
    return np.packbits(np.concatenate([bits, signs], axis=2), axis=2, bitorder="little").reshape(
        len(codes), groups.shape[1] * GROUP_BYTES
    )


def _values(data: np.ndarray, blocks: _Blocks, picked: np.ndarray, first_block: int) -> np.ndarray:
    """float32 [m, chunk] from packed bytes [m, chunk * 20 / 16] of the picked rows."""
    count, groups = len(data), data.shape[1] // GROUP_BYTES
    bits = np.unpackbits(data.reshape(count, groups, GROUP_BYTES), axis=2, bitorder="little")
    codes = bits[..., : GROUP * 9].reshape(count, groups, GROUP, 9).astype(np.int64) @ (1 << np.arange(9))
    codes = codes.reshape(count, groups * GROUP // BLOCK, BLOCK)
    mine = slice(first_block, first_block + codes.shape[1])
    step, log_amin = blocks.step[picked, mine, None], blocks.log_amin[picked, mine, None]
    logs = (codes - 1).astype(np.float32) * step + log_amin
    values = np.where(codes == 0, np.float32(0), np.exp2(logs.astype(np.float64)).astype(np.float32))
    negative = bits[..., GROUP * 9 :].reshape(values.shape).astype(bool)
    return np.where(negative, -values, values).reshape(count, groups * GROUP)


def _spans(cast: np.ndarray, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """(where each chunk begins in its row [n, chunks], bytes of each row [n])."""
    widths = np.array([min(chunk_size(hidden), hidden - i) for i in range(0, hidden, chunk_size(hidden))])
    sizes = np.where(cast, widths * GROUP_BYTES // GROUP, widths * 2)
    meta = hidden // BLOCK * 4
    return meta + np.cumsum(sizes, axis=1) - sizes, meta + sizes.sum(axis=1)

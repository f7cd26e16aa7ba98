"""Core attention over key blocks, and the merge of two partial results.

A query row's bits do not depend on how many queries are computed with it, on how a prompt was cut into chunks, or
on how many keys were cached before: keys are taken in blocks of BLOCK counted from absolute position 0, the maximum
runs over the visible keys, every block is summed at its full length (the last one filled with zeros), and blocks are
added in ascending order.
"""

from typing import NamedTuple

import numpy as np

from refmodel.linear import matmul_rows
from refmodel.numerics import widen
from refmodel.sums import add_in_order
from refmodel.threads import MULTIPLY_ADD, each

#: keys per block: the page size of the latent cache, FlashMLA's
BLOCK = 64
# queries per tile: bounds the score matrix, and lets a causal tile skip the blocks after it
_TILE = 64
_SLOTS = np.arange(BLOCK)
_LOWEST = {np.dtype(dtype): np.finfo(dtype).min for dtype in (np.float32, np.float64)}
# numbers of the blocks' results that are computed in one go before they are added up
_VALUES = 1 << 20


class Attended(NamedTuple):
    out: np.ndarray  # [T, H, dv]
    lse: np.ndarray  # [T, H] natural log of the sum of exponentials


def attend(q, k, v, scale: float, causal_offset: int | None = None, *, dtype=np.float64) -> Attended:
    """softmax(scale * q k^T) v for one request, unrounded.

    q [T, H, d], k [S, H or 1, d], v [S, H or 1, dv], any float dtype; computed and returned in `dtype`.
    Key s is visible to query t when s <= causal_offset + t; no `causal_offset` means that every key is.
    A row that sees no key gives out 0 and lse -inf (FlashMLA's own functions give +inf, see `refmodel.flashmla`).
    Raises ValueError when the shapes do not fit.
    """
    _, H, d = q.shape
    S, heads_k, _ = k.shape
    if k.shape[2] != d or v.shape[:2] != k.shape[:2] or heads_k not in (1, H):
        raise ValueError(f"attend: q {q.shape}, k {k.shape}, v {v.shape} must be [T, H, d], [S, H or 1, d], [S, ., dv]")
    dtype = np.dtype(dtype)
    blocks = -(-S // BLOCK)
    k_blocks, v_blocks = _blocks(k, blocks, dtype), _blocks(v, blocks, dtype)  # [Hk, nb, 64, d], [Hk, nb, 64, dv]
    return attend_blocks(widen(q, dtype), k_blocks, v_blocks, S, scale, causal_offset)


def _blocks(x, blocks, dtype):
    S, heads, d = x.shape
    out = np.zeros((heads, blocks * BLOCK, d), dtype)  # the tail is zero: whatever stood there is never multiplied
    out[:, :S] = widen(x, dtype).transpose(1, 0, 2)
    return out.reshape(heads, blocks, BLOCK, d)


def attend_blocks(q, k_blocks, v_blocks, S: int, scale: float, causal_offset: int | None = None) -> Attended:
    """`attend` on keys that already lie in zero-filled blocks.

    q [T, H, d], k_blocks [H or 1, nb, 64, d], v_blocks [H or 1, nb, 64, dv], all in one compute dtype; S keys.
    """
    T, H, d = q.shape
    heads_k, dv = k_blocks.shape[0], v_blocks.shape[-1]
    out, lse = np.zeros((T, H, dv), q.dtype), np.full((T, H), -np.inf, q.dtype)

    def attend_tile(start):
        stop = min(start + _TILE, T)
        last = S if causal_offset is None else min(S, causal_offset + stop)  # keys that any query of the tile sees
        if last <= 0:
            return
        visible = np.full(stop - start, last)
        if causal_offset is not None:
            visible = np.minimum(np.arange(start, stop) + causal_offset + 1, S)  # keys each query sees
        # with a single key head all query heads are rows of one product per block
        rows = q[start:stop].reshape(1, -1, d) if heads_k == 1 else q[start:stop].transpose(1, 0, 2)
        seen = -(-last // BLOCK)
        part, part_lse = _attend_rows(rows, k_blocks[:, :seen], v_blocks[:, :seen], visible[None], scale)
        out[start:stop] = part.transpose(1, 0, 2).reshape(stop - start, H, dv)
        lse[start:stop] = part_lse.T.reshape(stop - start, H)

    each(attend_tile, range(0, T, _TILE), T * H * S * (d + dv) * MULTIPLY_ADD)
    return Attended(out, lse)


def attend_requests(q, k_blocks, v_blocks, keys: list[int], scale: float) -> Attended:
    """Several requests with equally many new tokens and key blocks at once, one key head each: the same bits as alone.

    q [R t, H, d], k_blocks [R, nb, 64, d], v_blocks [R, nb, 64, dv], keys of each request: the last t are the new
    tokens.
    """
    T, H, d = q.shape
    R, t = len(keys), T // len(keys)
    visible = np.array(keys)[:, None] - np.arange(t)[::-1]  # [R, t]
    out, lse = _attend_rows(q.reshape(R, t * H, d), k_blocks, v_blocks, visible, scale)
    return Attended(out.reshape(T, H, -1), lse.reshape(T, H))


def _attend_rows(q, k_blocks, v_blocks, visible, scale):
    """Groups of query rows over their keys: q [G, rows, d], blocks [G, nb, 64, .], keys that are seen [G or 1, t].

    The rows of a group are t tokens in order, each with equally many heads.
    """
    q = np.multiply(q, q.dtype.type(scale), order="C")[:, None]  # [G, 1, rows, d]
    scores = matmul_rows(q, k_blocks.swapaxes(-1, -2))  # [G, nb, rows, 64]
    _mask(scores, visible)
    top = _row_maximum(np.maximum.reduce(scores, axis=1))  # [G, rows]
    # a row without keys has -inf everywhere; any finite stand-in makes its exponentials 0
    np.maximum(top, _LOWEST[top.dtype], out=top)
    scores -= top[:, None, :, None]
    p = np.exp(scores, out=scores)
    # each over 64 numbers (p.sum is four times slower), then block after block
    total = add_in_order(np.einsum("gbrk->gbr", p))  # [G, rows]
    acc = None
    step = max(1, _VALUES // max(1, top.size * v_blocks.shape[-1]))
    for first in range(0, k_blocks.shape[1], step):
        blocks = slice(first, first + step)
        values = matmul_rows(p[:, blocks], v_blocks[:, blocks])  # [G, step, rows, dv]
        if acc is not None:
            values[:, 0] += acc
        acc = add_in_order(values)  # [G, rows, dv]
    if not total.all():  # rows that see no key, or none with a finite score
        none = total == 0
        acc[none], total[none], top[none] = 0, 1, -np.inf
    acc /= total[..., None]
    return acc, np.log(total) + top


def _row_maximum(x):
    """max(axis=-1), NaN if there is one: a maximum of short rows is slow in NumPy, finding where it stands is not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[np.arange(len(rows)), rows.argmax(axis=1)].reshape(x.shape[:-1])


def _mask(scores, visible):
    """-inf for the keys that a token does not see, in the blocks that some token does not see in full.

    scores [G, nb, t heads, 64], visible [G or 1, t].
    """
    if visible.size == 1:  # most steps of a single request
        block, slot = divmod(int(visible[0, 0]), BLOCK)
        scores[:, block : block + 1, :, slot:] = scores[:, block + 1 :] = -np.inf
        return
    for b in range(int(visible.min()) // BLOCK, scores.shape[1]):
        hidden = visible[..., None, None] - b * BLOCK <= _SLOTS  # [G or 1, t, 1, 64]
        tokens = scores[:, b].reshape(len(scores), visible.shape[1], -1, BLOCK)  # a view
        np.copyto(tokens, scores.dtype.type(-np.inf), where=hidden)


def merge_states(out_a, lse_a, out_b, lse_b) -> Attended:
    """Join the attention of two disjoint key sets, unrounded float64: out [..., dv], lse [...] natural log.

    A side with lse -inf saw no key: whatever its out holds, NaN included, it does not enter, and the other side is
    returned as it is; two such sides give 0 and -inf.
    """
    out_a, out_b = np.asarray(out_a, np.float64), np.asarray(out_b, np.float64)
    lse_a, lse_b = np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)
    empty_a, empty_b = np.isneginf(lse_a), np.isneginf(lse_b)
    top = np.maximum(lse_a, lse_b)
    top = np.where(np.isneginf(top), 0.0, top)
    weight_a, weight_b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = weight_a + weight_b
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(empty_a, lse_b, np.where(empty_b, lse_a, np.log(total) + top))
        mixed = (_weighted(out_a, weight_a) + _weighted(out_b, weight_b)) / total[..., None]
    out = np.where(empty_a[..., None], out_b, np.where(empty_b[..., None], out_a, mixed))
    return Attended(np.where((empty_a & empty_b)[..., None], 0.0, out), lse)


def _weighted(out, weight):
    return np.where(weight[..., None] > 0, out * weight[..., None], 0.0)

"""Attention over a paged latent cache with FlashMLA's shapes and conventions, on plain arrays.

Letters: `b` requests, `s_q` query positions of each, `h_q` query heads, `h_kv` cache heads, `d` row width (576: latent
then RoPE), `dv` value width (the first `dv` numbers of a row are also its value). Arithmetic is float64 and the output
is rounded once, to the dtype of `q`. Rules: FlashMLA tests/ref.py, csrc get_decoding_sched_meta.cu, mla_combine.cu.
"""

from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp8.rounding import to_bfloat16
from refmodel.fp8_cache import ROW_BYTES, unpack_rows

PAGE_SIZE = 64  # rows of a page; also the width of a scheduler block
FIXED_OVERHEAD_BLOCKS = 5  # what a request costs a part beside its blocks (dense decode, blocks of 64)
ROWS_PER_SM = 64  # query rows that one multiprocessor takes at a time


class Attended(NamedTuple):
    """`out [b, s_q, h_q, dv]` in the dtype of q; `lse [b, h_q, s_q]`, natural logarithm, float32 (float64 for float64).

    A row that sees no key has out 0 and lse +inf.
    """

    out: np.ndarray
    lse: np.ndarray


class SplitPlan(NamedTuple):
    """Which part of the machine attends to which blocks.

    `parts` int32 [parts, 5]: begin request, begin block, end request (inclusive), end block (exclusive), index of the
    first request's split. `num_splits` int32 [b + 1] is a prefix sum: request i owns accumulator slots
    num_splits[i] .. num_splits[i + 1] - 1.
    """

    parts: np.ndarray
    num_splits: np.ndarray


def split_plan(cache_seqlens, num_q_rows: int, num_kv_heads: int = 1, num_sms: int = 132) -> SplitPlan:
    """Spread the blocks of all requests over the multiprocessors, as FlashMLA's metadata kernel does.

    `cache_seqlens` int [b]; `num_q_rows` = s_q * h_q / h_kv. Raises ValueError for negative lengths or empty shapes.
    """
    lengths = _lengths(cache_seqlens)
    if num_q_rows < 1 or num_kv_heads < 1 or num_sms < 1:
        raise ValueError(f"split_plan needs positive sizes, not {num_q_rows=}, {num_kv_heads=}, {num_sms=}")
    num_parts = max(num_sms // num_kv_heads // -(-num_q_rows // ROWS_PER_SM), 1)
    blocks = -(-np.maximum(lengths, 1) // PAGE_SIZE)  # an empty request still occupies one block
    overhead = FIXED_OVERHEAD_BLOCKS
    payload = -(-int((blocks + overhead).sum()) // num_parts) + overhead

    parts = np.zeros((num_parts, 5), np.int32)
    num_splits = np.zeros(len(blocks) + 1, np.int32)
    request = block = split = 0
    for part in range(num_parts):
        parts[part, [0, 1, 4]] = request, block, split
        room = payload
        while request < len(blocks):
            rest = int(blocks[request]) - block
            if room >= rest + overhead:  # the whole request fits
                room -= rest + overhead
                num_splits[request + 1] = num_splits[request] + split + 1
                request, block, split = request + 1, 0, 0
                continue
            if room > overhead:  # only a piece of it does
                block += room - overhead
                split += 1
            break
        end = (request, block) if block else (request - 1, blocks[request - 1] if request else 0)
        parts[part, 2:4] = end
    return SplitPlan(parts, num_splits)


def merge_splits(out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join partial results over disjoint key ranges: `out` [n, ..., dv] and `lse` [n, ...] over axis 0, float64.

    A split without keys has lse -inf. The join of nothing but such splits has out 0 and lse -inf.
    """
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    top = lse.max(axis=0)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        joined = top + np.log(np.exp(lse - top).sum(axis=0))
    weight = np.exp(lse - np.where(np.isneginf(joined), 0.0, joined))  # [n, ...]; 0 for a split without keys
    return (weight[..., None] * out).sum(axis=0), joined


def flash_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v=512, softmax_scale=None, causal=False, plan: SplitPlan = None
) -> Attended:
    """Dense decode: attention of `q` [b, s_q, h_q, d] over pages `k_cache` [num_blocks, 64, h_kv, d].

    `block_table` int [b, max_blocks] holds physical page ids; `cache_seqlens` int [b]. Nothing past a request's length
    is read, neither table entries nor rows. `causal`: query row i sees keys j <= i + length - s_q (bottom right).
    `softmax_scale` defaults to d ** -0.5. With `plan` each request is computed in its splits and merged.
    Raises ValueError for shapes that do not fit and for page ids outside the cache.
    """
    q, k_cache, block_table = np.asarray(q), np.asarray(k_cache), np.asarray(block_table)
    lengths = _lengths(cache_seqlens)
    _check_dense(q, k_cache, block_table, lengths, head_dim_v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((*q.shape[:3], head_dim_v))  # [b, s_q, h_q, dv]
    lse = np.full(q.shape[:3], -np.inf)  # [b, s_q, h_q]
    for i, length in enumerate(lengths):
        keys = gather_rows(k_cache, block_table[i], int(length))  # [s_k, h_kv, d]
        limit = _last_visible(q.shape[1], int(length), causal)
        edges = [0, int(length)] if plan is None else split_edges(plan, i, int(length))
        pieces = [
            _attend_rows(q[i], keys[start:stop], limit - start, scale, head_dim_v) for start, stop in pairwise(edges)
        ]
        out[i], lse[i] = merge_splits([piece[0] for piece in pieces], [piece[1] for piece in pieces])
    return _finish(out, lse, q.dtype)


def sparse_attend(
    q, cache, indices, topk_length=None, attn_sink=None, head_dim_v: int = 512, softmax_scale: float | None = None
) -> Attended:
    """Sparse decode: each query position attends to the rows that `indices` int [b, s_q, topk] names.

    An index is block * 64 + offset into `cache`, 656-byte rows (uint8 or E4M3, [num_blocks, 64, 1, 656]) or plain rows
    [num_blocks, 64, 1, d]; -1 selects nothing, and NaN in a selected row counts as 0. `topk_length` int [b]: only the
    first so many indices of a request count. `attn_sink` [h_q]: the output shrinks by 1 / (1 + exp(sink - lse)) and the
    lse does not change. Rows are dequantised to bfloat16 first. Raises ValueError for shapes or indices out of range.
    """
    q, cache, indices = np.asarray(q), np.asarray(cache), np.asarray(indices)
    _check_sparse(q, cache, indices)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows = cache.reshape(-1, cache.shape[-1])
    valid = indices >= 0
    if topk_length is not None:
        valid &= np.arange(indices.shape[2]) < np.asarray(topk_length).reshape(-1, 1, 1)
    out = np.zeros((*q.shape[:3], head_dim_v))
    lse = np.full(q.shape[:3], -np.inf)
    for i, j in np.ndindex(*indices.shape[:2]):
        chosen = rows[indices[i, j][valid[i, j]]]  # [n, bytes or d]
        keys = unpack_rows(chosen) if cache.shape[-1] == ROW_BYTES else chosen  # [n, d]
        keys = keys.astype(np.float64)
        keys[np.isnan(keys)] = 0.0
        limit = np.array([len(keys) - 1])
        out[i, j : j + 1], lse[i, j : j + 1] = _attend_rows(q[i, j : j + 1], keys[:, None], limit, scale, head_dim_v)
    if attn_sink is not None:
        alone = np.isneginf(lse)  # nothing to shrink, and an infinite sink minus an infinite lse has no value
        with np.errstate(over="ignore"):
            share = 1.0 / (1.0 + np.exp(np.asarray(attn_sink, np.float64) - np.where(alone, 0.0, lse)))
        out *= np.where(alone, 1.0, share)[..., None]
    return _finish(out, lse, q.dtype)


def gather_rows(k_cache: np.ndarray, pages: np.ndarray, length: int) -> np.ndarray:
    """The first `length` rows [length, h_kv, d] of a request whose pages are `pages`, in order; reads no more."""
    used = np.asarray(pages[: -(-length // PAGE_SIZE)], np.int64)
    if used.size and (used.min() < 0 or used.max() >= len(k_cache)):
        raise ValueError(f"block table names page {used.max()} or {used.min()}, but the cache has {len(k_cache)} pages")
    rows = [k_cache[page][: length - PAGE_SIZE * n] for n, page in enumerate(used)]
    return np.concatenate(rows) if rows else k_cache[:0].reshape(0, *k_cache.shape[2:])


def table_indices(indices, block_table) -> np.ndarray:
    """Positions within each request [b, s_q, topk] (-1 = none) as indices into the cache: page * 64 + offset."""
    indices, block_table = np.asarray(indices), np.asarray(block_table)
    page = np.take_along_axis(block_table[:, None], np.maximum(indices, 0) // PAGE_SIZE, axis=2)  # [b, s_q, topk]
    return np.where(indices < 0, -1, page * PAGE_SIZE + indices % PAGE_SIZE)


def split_edges(plan: SplitPlan, request: int, length: int) -> list[int]:
    """Key positions at which the plan cuts a request: [0, ..., length]."""
    starts = plan.parts[(plan.parts[:, 0] == request) & (plan.parts[:, 2] >= request), 1]
    inner = sorted({int(block) * PAGE_SIZE for block in starts if 0 < block * PAGE_SIZE < length})
    return [0, *inner, length]


def _attend_rows(q, keys, limit, scale, dv):
    """q [s_q, h_q, d], keys [n, h_kv, d], limit [s_q] = last visible key -> float64 (out, lse); lse -inf if none."""
    s_q, h_q, d = q.shape
    h_kv = keys.shape[1]
    grouped = q.astype(np.float64).reshape(s_q, h_kv, h_q // h_kv, d)
    keys = keys.astype(np.float64)
    score = np.einsum("sgrd,ngd->sgrn", grouped, keys, optimize=True) * scale  # [s_q, h_kv, h_q / h_kv, n]
    hidden = np.arange(keys.shape[0]) > limit[:, None]  # [s_q, n]
    score = np.where(hidden[:, None, None], -np.inf, score).reshape(s_q, h_q, -1)  # [s_q, h_q, n]
    top = score.max(axis=-1, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(score - top[..., None])
    total = weight.sum(axis=-1)  # [s_q, h_q]
    weight = weight.reshape(s_q, h_kv, h_q // h_kv, -1)
    summed = np.einsum("sgrn,ngv->sgrv", weight, keys[..., :dv], optimize=True).reshape(s_q, h_q, dv)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return summed / np.where(total == 0, 1.0, total)[..., None], lse


def _last_visible(s_q: int, length: int, causal: bool) -> np.ndarray:
    """Position of the last key that each query row may see; below 0 where it sees none."""
    last = np.full(s_q, length - 1)
    return np.arange(s_q) + length - s_q if causal else last


def _finish(out, lse, dtype) -> Attended:
    """Round once, put lse in FlashMLA's order, and mark rows without keys by +inf."""
    lse = np.where(np.isneginf(lse), np.inf, lse).transpose(0, 2, 1)  # [b, h_q, s_q]
    if dtype == np.float64:
        return Attended(out, lse)
    rounded = to_bfloat16(out) if dtype == ml_dtypes.bfloat16 else out.astype(dtype)
    return Attended(rounded, lse.astype(np.float32))


def _lengths(cache_seqlens) -> np.ndarray:
    lengths = np.asarray(cache_seqlens)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
        raise ValueError(f"cache_seqlens must be non-negative integers [b], not {lengths.dtype} {lengths.shape}")
    return lengths.astype(np.int64)


def _check_dense(q, k_cache, block_table, lengths, head_dim_v):
    if q.ndim != 4 or k_cache.ndim != 4 or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q {q.shape} must be [b, s_q, h_q, d] and the cache {k_cache.shape} [num_blocks, 64, h_kv, d]"
        )
    if k_cache.shape[1] != PAGE_SIZE:
        raise ValueError(f"pages hold {k_cache.shape[1]} rows: they must hold {PAGE_SIZE}")
    if q.shape[2] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads do not divide among {k_cache.shape[2]} cache heads")
    if not 0 < head_dim_v <= q.shape[-1]:
        raise ValueError(f"head_dim_v = {head_dim_v}: a value is the first part of a row of {q.shape[-1]}")
    if len(lengths) != len(q) or block_table.ndim != 2 or len(block_table) != len(q):
        raise ValueError(f"{len(q)} requests, but {len(lengths)} lengths and a block table {block_table.shape}")
    if lengths.size and lengths.max() > block_table.shape[1] * PAGE_SIZE:
        raise ValueError(f"length {lengths.max()} needs more than the {block_table.shape[1]} pages of the block table")


def _check_sparse(q, cache, indices):
    if q.ndim != 4 or cache.ndim != 4 or indices.ndim != 3 or q.shape[:2] != indices.shape[:2]:
        raise ValueError(f"q {q.shape}, cache {cache.shape}, indices {indices.shape} do not fit [b, s_q, ...]")
    if cache.shape[1] != PAGE_SIZE or cache.shape[2] != 1:
        raise ValueError(f"cache {cache.shape} must be [num_blocks, {PAGE_SIZE}, 1, row]: one head of pages of 64")
    if cache.shape[-1] not in (ROW_BYTES, q.shape[-1]):
        raise ValueError(f"cache rows of {cache.shape[-1]}: FP8 rows have {ROW_BYTES} bytes, plain ones {q.shape[-1]}")
    if indices.size and (indices.max() >= cache.shape[0] * PAGE_SIZE or indices.min() < -1):
        raise ValueError(
            f"indices span {indices.min()}..{indices.max()} of {cache.shape[0] * PAGE_SIZE} rows; -1 = none"
        )

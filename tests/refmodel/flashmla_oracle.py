"""Slow and obvious attention over pages, and FlashMLA's own measure of closeness."""

import math

import numpy as np

DENSE_OUT = (8e-4, 2.01 / 128, 5e-6)
DENSE_LSE = (1e-6, 8.01 / 65536, 1e-7)
SPARSE_OUT = (1e-3, 2.01 / 128, 5e-6)


def attend_one(query, keys, dv, scale):
    """One query vector over a list of key rows: (out [dv], lse), with loops and Python floats."""
    if not keys:
        return [0.0] * dv, math.inf
    score = [math.fsum(float(a) * float(b) for a, b in zip(query, key)) * scale for key in keys]
    top = max(score)
    weight = [math.exp(s - top) for s in score]
    total = math.fsum(weight)
    out = [math.fsum(w * float(key[v]) for w, key in zip(weight, keys)) / total for v in range(dv)]
    return out, top + math.log(total)


def dense(q, k_cache, block_table, lengths, dv, scale, causal):
    """The same result as flash_decode by looking up every key on its own: out [b, s_q, h_q, dv], lse [b, h_q, s_q]."""
    b, s_q, h_q, _ = q.shape
    share = h_q // k_cache.shape[2]
    out, lse = np.zeros((b, s_q, h_q, dv)), np.zeros((b, h_q, s_q))
    for i in range(b):
        for row in range(s_q):
            seen = lengths[i] if not causal else max(min(lengths[i], row + 1 + lengths[i] - s_q), 0)
            for head in range(h_q):
                keys = [k_cache[block_table[i][j // 64], j % 64, head // share] for j in range(seen)]
                out[i, row, head], lse[i, head, row] = attend_one(q[i, row, head], keys, dv, scale)
    return out, lse


def close(actual, expected, tolerance) -> bool:
    """Each element within the absolute or relative tolerance, infinities in the same places, one direction."""
    absolute, relative, cosine = tolerance
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if np.isnan(actual).any() or (np.isposinf(actual) != np.isposinf(expected)).any() or np.isneginf(actual).any():
        return False
    finite = np.isfinite(expected)
    a, e = actual[finite], expected[finite]
    error = np.abs(a - e)
    with np.errstate(divide="ignore", invalid="ignore"):
        good = (error < absolute) | (error / np.maximum(np.abs(e), 1e-300) < relative)
    norm = (a * a).sum() + (e * e).sum()
    return bool(good.all() and (norm == 0 or 1 - 2 * (a * e).sum() / norm < cosine))

"""Attention operators in both forms of MLA, dense, paged and sparse, and the merge of partial results, at their edges.

NaN stands wherever a kernel has no business: past a request's length, in pages of nobody, in rows that nobody selects,
in the output of a side that saw no key. Query and key rows are those of V3: 128 + 64 per head in the naive form,
512 + 64 in the absorbed one; only the number of heads is small at toy shapes.
"""

from functools import partial

import ml_dtypes
import numpy as np

from fp8.rounding import to_bfloat16
from refmodel.attention import attend, merge_states
from refmodel.flashmla import PAGE_SIZE, flash_decode, sparse_attend
from refmodel.fp8_cache import ROW_BYTES, pack_rows
from refmodel.golden.draws import normal, permutation
from refmodel.golden.optypes import OperatorSpec

BF16 = np.dtype(ml_dtypes.bfloat16)
SCALE = np.float32(0.13523378)  # V3's: 192^-1/2 times the square of YaRN's mscale, in float32
HEADS, V3_HEADS = 4, 128


def _scale():
    return {"softmax_scale": SCALE.reshape(())}


def _paged(key: str, lengths, heads: int, new: int = 1, reverse: bool = False):
    """Pages in use are scattered among pages of NaN, and so is what stands past each length."""
    lengths = np.int32(lengths)
    pages = -(-np.maximum(lengths, 1) // PAGE_SIZE)
    total = 2 * int(pages.sum()) + 1
    cache = np.full((total, PAGE_SIZE, 1, 576), np.nan, BF16)
    order = permutation(f"{key}/pages", total)[: pages.sum()]
    table, used = np.full((len(lengths), int(pages.max())), -1, np.int32), 0
    for i, length in enumerate(lengths):
        mine = np.sort(order[used : used + pages[i]])
        table[i, : pages[i]] = mine[::-1] if reverse else mine
        used += pages[i]
        rows = normal(f"{key}/rows/{i}", int(length), 1, 576)
        for p in range(-(-int(length) // PAGE_SIZE)):
            part = rows[p * PAGE_SIZE : (p + 1) * PAGE_SIZE]
            cache[table[i, p], : len(part)] = part
    q = normal(f"{key}/q", len(lengths), new, heads, 576)
    return {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths} | _scale()


def _decode_makers():
    made = {}
    for prefix, heads, reversed_pages in (("", HEADS, [128, 200, 129]), ("v3_", V3_HEADS, [1024, 200, 129])):
        made |= {
            f"{prefix}one_key": dict(lengths=[1]),
            f"{prefix}page_end": dict(lengths=[63, 64, 65]),
            f"{prefix}pages_reversed": dict(lengths=reversed_pages, reverse=True),
            f"{prefix}request_of_length_0": dict(lengths=[5, 0, 64]),
            f"{prefix}two_tokens": dict(lengths=[1, 64, 65, 130], new=2),
        }
        made |= {n: how | {"heads": heads} for n, how in made.items() if "heads" not in how}
    made["v3_long"] = dict(lengths=[4096, 4097], heads=V3_HEADS)
    return {name: partial(_paged, f"mla_decode/{name}", **how) for name, how in made.items()}


def _mla_decode(q, k_cache, block_table, cache_seqlens, softmax_scale):
    scale = float(softmax_scale)
    found = flash_decode(q, k_cache, block_table, cache_seqlens, softmax_scale=scale, causal=True)
    return {"out": found.out, "lse": np.swapaxes(found.lse, 1, 2)}  # lse [b, s_q, h_q]


def _sparse(key: str, heads: int, topk: int, pages: int, found, counts=None):
    """found: how many of the `topk` entries of each request name a row; the rest is -1. counts: `topk_length`, after
    which entries name rows that nobody may read."""
    requests = len(found)
    counts = np.int32([topk] * requests if counts is None else counts)
    cache = np.full((pages * PAGE_SIZE, ROW_BYTES), 0xFF, np.uint8)  # all ones is NaN in each of the three formats
    order = permutation(f"{key}/rows", len(cache))
    readable, forbidden = order[: len(cache) // 2], order[len(cache) // 2 :]
    cache[readable] = pack_rows(normal(f"{key}/cache", len(readable), 576))
    indices = np.full((requests, 1, topk), -1, np.int32)
    for i, number in enumerate(found):
        indices[i, 0, :number] = readable[permutation(f"{key}/choice/{i}", len(readable))[:number]]
        indices[i, 0, counts[i] :] = forbidden[: topk - counts[i]]
    q = normal(f"{key}/q", requests, 1, heads, 576)
    cache = cache.reshape(pages, PAGE_SIZE, 1, ROW_BYTES)
    return {"q": q, "k_cache": cache, "indices": indices, "topk_length": counts} | _scale()


def _sparse_makers():
    made = {}
    for prefix, heads, topk, pages in (("", HEADS, 64, 4), ("v3_", V3_HEADS, 2048, 96)):
        size = dict(heads=heads, topk=topk, pages=pages)
        made |= {
            f"{prefix}all_selected": size | dict(found=[topk, topk]),
            f"{prefix}few_keys": size | dict(found=[topk // 2 + 1, 1, topk]),
            f"{prefix}none_selected": size | dict(found=[0, 3]),
            f"{prefix}stops_early": size | dict(found=[topk, topk, topk], counts=[topk // 2, topk, topk - 1]),
        }
    return {name: partial(_sparse, f"sparse_decode/{name}", **how) for name, how in made.items()}


def _sparse_decode(q, k_cache, indices, topk_length, softmax_scale):
    found = sparse_attend(q, k_cache, indices, topk_length, softmax_scale=float(softmax_scale))
    return {"out": found.out, "lse": np.swapaxes(found.lse, 1, 2)}


def _naive(key: str, rows: int, heads: int):
    shapes = {"q": 192, "k": 192, "v": 128}
    return {name: normal(f"{key}/{name}", rows, heads, width) for name, width in shapes.items()} | _scale()


def _naive_makers():
    sizes = [("", 2, n) for n in (1, 63, 64, 65, 129)] + [("v3_", V3_HEADS, n) for n in (1, 64, 65, 129)]
    return {f"{p}rows_{n}": partial(_naive, f"mla_prefill/{p}rows_{n}", n, heads) for p, heads, n in sizes}


def _mla_prefill(q, k, v, softmax_scale):
    found = attend(q, k, v, float(softmax_scale), causal_offset=0)
    return {"out": to_bfloat16(found.out), "lse": found.lse.astype(np.float32)}


def _absorbed(key: str, keys: int, rows: int, heads: int):
    q, kv = normal(f"{key}/q", rows, heads, 576), normal(f"{key}/kv", keys, 576)
    return {"q": q, "kv": kv} | _scale()


def _absorbed_makers():
    made = {}
    for prefix, heads, keys in (("", HEADS, (1, 63, 64, 65, 129)), ("v3_", V3_HEADS, (1, 63, 64, 65, 129, 4096))):
        for n in keys:
            name = f"{prefix}keys_{n}"
            made[name] = partial(_absorbed, f"mla_absorbed/{name}", n, min(2, n), heads)
    return made


def _mla_absorbed(q, kv, softmax_scale):
    """The query rows are the last ones of the request; a key row's first 512 numbers are its value."""
    rows = kv[:, None]
    found = attend(q, rows, rows[..., :512], float(softmax_scale), causal_offset=len(kv) - len(q))
    return {"out": to_bfloat16(found.out), "lse": found.lse.astype(np.float32)}


def _two_sides(key: str, rows: int, heads: int, width: int, empty: bool = False):
    """Two partial results over disjoint keys. empty: sides without keys, whose output may hold anything."""
    made = {}
    for side in ("a", "b"):
        made[f"out_{side}"] = normal(f"{key}/out_{side}", rows, heads, width).astype(np.float32)
        made[f"lse_{side}"] = normal(f"{key}/lse_{side}", rows, heads, scale=4.0).astype(np.float32)
    if empty:
        for side, row in (("a", 0), ("b", 1), ("a", 2), ("b", 2)):
            made[f"lse_{side}"][row], made[f"out_{side}"][row] = -np.inf, np.nan
    return made


def _merge_makers():
    made = {}
    for prefix, heads, width in (("", 2, 16), ("v3_", V3_HEADS, 512)):
        for name, rows, empty in (("rows_1", 1, False), ("rows_9", 9, False), ("sides_without_keys", 4, True)):
            case = prefix + name
            made[case] = partial(_two_sides, f"merge_states/{case}", rows, heads, width, empty)
    return made


def _merge_states(out_a, lse_a, out_b, lse_b):
    found = merge_states(out_a, lse_a, out_b, lse_b)
    return {"out": found.out.astype(np.float32), "lse": found.lse.astype(np.float32)}


_OUT = ("out", "lse")
_REQUESTS = ("q", "block_table", "cache_seqlens")
_SIDES = ("out_a", "lse_a", "out_b", "lse_b")
ATTENTION_OPERATORS = (
    OperatorSpec("mla_decode", _OUT, _mla_decode, _decode_makers(), _REQUESTS),
    OperatorSpec("sparse_decode", _OUT, _sparse_decode, _sparse_makers(), ("q", "indices", "topk_length")),
    OperatorSpec("mla_prefill", _OUT, _mla_prefill, _naive_makers(), ()),
    OperatorSpec("mla_absorbed", _OUT, _mla_absorbed, _absorbed_makers(), ()),
    OperatorSpec("merge_states", _OUT, _merge_states, _merge_makers(), _SIDES, "float32"),
)

"""Operators around experts: the grouped FP8 product with rows that nothing defines, and the combine of each dialect.

More FP8 products at V3's shapes stand in `fp8.goldens`.
"""

from functools import partial

import numpy as np

from fp8 import BlockScaled, grouped_gemm_masked, quantize
from refmodel.golden import combine_trees
from refmodel.golden.draws import fractions, normal, permutation
from refmodel.golden.optypes import OperatorSpec


def _masked(key: str, counts, n: int = 128, k: int = 256, most: int = 64):
    counts = np.int32(counts)
    groups = len(counts)
    a = quantize(normal(f"{key}/a", groups * most, k), (1, 128))
    b = quantize(normal(f"{key}/b", groups * n, k), (128, 128))
    codes = a.codes.reshape(groups, most, k).copy()
    scale = a.scale.reshape(groups, most, k // 128).copy()
    undefined = ~_defined(codes, counts)
    codes.view(np.uint8)[undefined] = 0x7F  # NaN
    scale[undefined] = np.nan
    weight = {"b": b.codes.reshape(groups, n, k), "b_scale": b.scale.reshape(groups, n // 128, k // 128)}
    return {"a": codes, "a_scale": scale, **weight, "masked_m": counts}


def _masked_makers():
    cases = {"a_group_without_rows": [2, 0, 64], "all_full": [64, 64, 64], "nothing_at_all": [0, 0, 0]}
    made = {name: partial(_masked, f"grouped_gemm_masked/{name}", counts) for name, counts in cases.items()}
    return made | {"v3_down": partial(_masked, "grouped_gemm_masked/v3_down", [37, 0, 64], 7168, 2048)}


def _defined(a, masked_m):
    return np.arange(a.shape[1]) < masked_m[:, None]


def _masked_valid(a, masked_m, **others):
    return {"out": _defined(a, masked_m)}


def _grouped_gemm_masked(a, a_scale, b, b_scale, masked_m):
    left, right = BlockScaled(a, a_scale, (1, 128)), BlockScaled(b, b_scale, (128, 128))
    return {"out": np.asarray(grouped_gemm_masked(left, right, masked_m).out)}


def _choice(key: str, tokens: int, experts: int, top_k: int, groups: int, kept: int):
    """Distinct expert ids [T, K] of `kept` groups, in random order."""
    size, ids = experts // groups, np.empty((tokens, top_k), np.int64)
    for token in range(tokens):
        chosen = np.sort(permutation(f"{key}/groups/{token}", groups)[:kept])
        candidates = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        ids[token] = candidates[permutation(f"{key}/experts/{token}", len(candidates))[:top_k]]
    return ids


def _slots(key: str, tokens: int, v3: bool, layout: tuple[str, ...], holes: bool = False):
    """Rows at the slots of tokens; with `holes` a third of the slots, and all of one token, hold nothing (-1, NaN)."""
    experts, top_k, groups, kept, width = (256, 8, 8, 4, 7168) if v3 else (16, 4, 4, 2, 40)
    ids = _choice(key, tokens, experts, top_k, groups, kept)
    rows = normal(f"{key}/rows", tokens, top_k, width)
    weights = fractions(f"{key}/weights", tokens, top_k)
    if holes:
        empty = fractions(f"{key}/holes", tokens, top_k) < np.float32(1 / 3)
        empty[tokens // 2] = True
        ids[empty], rows[empty], weights[empty] = -1, np.nan, np.nan
    sizes = {"experts_per_rank": 8 if v3 else 2, "ranks_per_node": 8 if v3 else 2}  # 32 or 8 ranks on 4 nodes
    made = {name: np.int64(sizes[name]).reshape(()) for name in layout}
    return {"rows": rows, "topk_idx": ids, "topk_weights": weights, **made}


def _combine_makers(operator: str, layout: tuple[str, ...]):
    sizes = (("rows_1", 1, False), ("rows_17", 17, False), ("slots_without_expert", 9, True))
    v3 = (("v3_rows_1", 1, False), ("v3_rows_64", 64, False), ("v3_slots_without_expert", 9, True))
    makers = {}
    for real, cases in ((False, sizes), (True, v3)):
        makers |= {n: partial(_slots, f"{operator}/{n}", tokens, real, layout, holes) for n, tokens, holes in cases}
    return makers


def _combine(tree, rows, topk_idx, topk_weights, **layout):
    return {"out": tree(rows, topk_idx, topk_weights, **{name: int(size) for name, size in layout.items()})}


def _combine_spec(tree, *layout: str) -> OperatorSpec:
    name, batched = tree.__name__, ("rows", "topk_idx", "topk_weights")
    return OperatorSpec(name, ("out",), partial(_combine, tree), _combine_makers(name, layout), batched)


_RANK, _NODE = "experts_per_rank", "ranks_per_node"
EXPERT_OPERATORS = (
    OperatorSpec(
        "grouped_gemm_masked", ("out",), _grouped_gemm_masked, _masked_makers(), (), "bfloat16", _masked_valid
    ),
    _combine_spec(combine_trees.low_latency_combine),
    _combine_spec(combine_trees.normal_combine, _RANK, _NODE),
    _combine_spec(combine_trees.elastic_direct_combine, _RANK),
    _combine_spec(combine_trees.elastic_hybrid_combine, _RANK, _NODE),
)

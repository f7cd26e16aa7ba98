"""Operators as kernel authors meet them: inputs at the edges, what must come out, and what must not be read.

Inputs are small, drawn from integers of PCG64, and the same on every machine. NaN stands wherever a kernel has no
business: past a request's length, in pages of nobody, in rows that no token fills.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from fp8 import BlockScaled, grouped_gemm_masked, quantize
from fp8.rounding import to_bfloat16
from refmodel.attention import attend
from refmodel.experts import swiglu
from refmodel.flashmla import PAGE_SIZE, flash_decode
from refmodel.norm import rms_norm
from refmodel.rope import apply_rope
from refmodel.router import route

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = (1, 2, 63, 64, 65, 127, 128, 129)  # around the tile heights that kernels have


@dataclass(frozen=True)
class Case:
    """One call. valid: for outputs with rows that nothing defines, booleans over their leading axes."""

    name: str
    inputs: dict[str, np.ndarray]
    valid: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorSpec:
    """An operator: `run(**inputs) -> dict of outputs` is the reference. batched: the inputs whose first axis are rows
    (tokens, requests) that must not know each other; the first axis of every output goes with it."""

    name: str
    outputs: tuple[str, ...]
    run: Callable[..., dict[str, np.ndarray]]
    cases: Callable[[], Iterator[Case]]
    batched: tuple[str, ...]
    numerics: str = "bfloat16"


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """bfloat16 values of bell shape with standard deviation `scale`: sums of 12 integers of PCG64, exact."""
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 16, (12, *shape), dtype=np.int64)
    return to_bfloat16((bits.sum(axis=0) / (1 << 16) - 6.0) * scale)


def _norm_cases() -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"rows_{rows}", {"x": normal(rows, rows, 256), "weight": normal(1, 256)})
    tiny, one = normal(5, 3, 256, scale=2.0**-20), normal(6, 3, 256)
    one[1] = 0
    yield Case("tiny_values", {"x": tiny, "weight": normal(1, 256)})
    yield Case("row_of_zeros", {"x": one, "weight": normal(1, 256)})


def _rms_norm(x, weight):
    return {"out": to_bfloat16(rms_norm(x, weight, 1e-6))}


def _rope_cases() -> Iterator[Case]:
    inv_freq = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    for rows in (1, 64, 65):
        positions = np.arange(rows, dtype=np.int64) * 97
        yield Case(f"rows_{rows}", {"x": normal(rows, rows, 3, 64), "positions": positions, "inv_freq": inv_freq})
    far = np.int64([163839, 0, 4096])
    yield Case("far_positions", {"x": normal(9, 3, 3, 64), "positions": far, "inv_freq": inv_freq})


def _rope(x, positions, inv_freq):
    return {"out": to_bfloat16(apply_rope(x, positions, inv_freq))}


def _router_cases() -> Iterator[Case]:
    for rows in (1, 64, 129):
        logits = normal(rows, rows, 64, scale=2.0).astype(np.float32)
        bias = normal(7, 64, scale=0.5).astype(np.float32)
        yield Case(f"rows_{rows}", {"logits": logits, "correction_bias": bias})
    below = normal(8, 64, scale=0.5).astype(np.float32) - np.float32(3)  # a group masked with 0 would win
    yield Case("negative_bias", {"logits": normal(9, 33, 64).astype(np.float32), "correction_bias": below})


def _router(logits, correction_bias):
    settings = dict(top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    idx, weights, margin = route(logits, correction_bias, **settings)
    return {"topk_idx": idx, "topk_weights": weights, "margin": margin}


def _swiglu_cases() -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"rows_{rows}", {"gate": normal(rows, rows, 128, scale=3.0), "up": normal(rows + 1000, rows, 128)})
    steep = normal(3, 2, 128)
    steep[0, :2] = (-200.0, 200.0)  # exp(200) is no float32
    yield Case("steep", {"gate": steep, "up": normal(4, 2, 128)})


def _swiglu(gate, up):
    return {"out": to_bfloat16(swiglu(gate, up))}


def _decode_case(name: str, lengths, seed: int, reverse: bool = False) -> Case:
    """Pages in use are scattered among pages of NaN, and so is what stands past each length."""
    lengths = np.int32(lengths)
    pages = -(-np.maximum(lengths, 1) // PAGE_SIZE)
    total = 2 * int(pages.sum()) + 1
    cache = np.full((total, PAGE_SIZE, 1, 576), np.nan, BF16)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)[: pages.sum()]
    table, used = np.full((len(lengths), int(pages.max())), -1, np.int32), 0
    for i, length in enumerate(lengths):
        mine = np.sort(order[used : used + pages[i]])
        table[i, : pages[i]] = mine[::-1] if reverse else mine
        used += pages[i]
        rows = normal(seed + 1 + i, int(length), 1, 576)
        for p in range(-(-int(length) // PAGE_SIZE)):
            part = rows[p * PAGE_SIZE : (p + 1) * PAGE_SIZE]
            cache[table[i, p], : len(part)] = part
    q = normal(seed, len(lengths), 1, 4, 576)
    return Case(name, {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths})


def _decode_cases() -> Iterator[Case]:
    yield _decode_case("one_key", [1], 1)
    yield _decode_case("page_end", [63, 64, 65], 2)
    yield _decode_case("pages_reversed", [128, 200, 129], 3, reverse=True)
    yield _decode_case("request_of_length_0", [5, 0, 64], 4)


def _mla_decode(q, k_cache, block_table, cache_seqlens):
    found = flash_decode(q, k_cache, block_table, cache_seqlens)
    return {"out": found.out, "lse": np.swapaxes(found.lse, 1, 2)}  # lse [b, s_q, h_q]


def _prefill_cases() -> Iterator[Case]:
    for rows in (1, 63, 64, 65, 129):
        shapes = {"q": 192, "k": 192, "v": 128}
        yield Case(f"rows_{rows}", {n: normal(rows + i, rows, 2, d) for i, (n, d) in enumerate(shapes.items())})


def _mla_prefill(q, k, v):
    found = attend(q, k, v, 192**-0.5, causal_offset=0)
    return {"out": to_bfloat16(found.out), "lse": found.lse.astype(np.float32)}


def _quantize_cases() -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"rows_{rows}", {"x": normal(rows, rows, 384)})
    x = normal(2, 3, 384)
    x[0, :128], x[1, 128:256] = 0, normal(3, 128, scale=2.0**-30)
    yield Case("block_of_zeros", {"x": x})


def _quantize(x):
    made = quantize(x, (1, 128), "deepseek_v3", "float32")
    return {"codes": made.codes, "scale": made.scale}


def _masked_case(name: str, counts) -> Case:
    counts = np.int32(counts)
    groups, most = len(counts), 64
    a = quantize(normal(11, groups * most, 256), (1, 128))
    b = quantize(normal(12, groups * 128, 256), (128, 128))
    codes = a.codes.reshape(groups, most, 256).copy()
    scale = a.scale.reshape(groups, most, 2).copy()
    valid = np.arange(most) < counts[:, None]
    codes.view(np.uint8)[~valid] = 0x7F  # NaN
    scale[~valid] = np.nan
    inputs = {
        "a": codes,
        "a_scale": scale,
        "b": b.codes.reshape(groups, 128, 256),
        "b_scale": b.scale.reshape(groups, 1, 2),
    }
    return Case(name, inputs | {"masked_m": counts}, {"out": valid})


def _masked_cases() -> Iterator[Case]:
    yield _masked_case("a_group_without_rows", [2, 0, 64])
    yield _masked_case("all_full", [64, 64, 64])
    yield _masked_case("nothing_at_all", [0, 0, 0])


def _grouped_gemm_masked(a, a_scale, b, b_scale, masked_m):
    left, right = BlockScaled(a, a_scale, (1, 128)), BlockScaled(b, b_scale, (128, 128))
    return {"out": np.asarray(grouped_gemm_masked(left, right, masked_m).out)}


_ALL = (
    OperatorSpec("rms_norm", ("out",), _rms_norm, _norm_cases, ("x",)),
    OperatorSpec("rope", ("out",), _rope, _rope_cases, ("x", "positions")),
    OperatorSpec("router", ("topk_idx", "topk_weights"), _router, _router_cases, ("logits",), "float32"),
    OperatorSpec("swiglu", ("out",), _swiglu, _swiglu_cases, ("gate", "up")),
    OperatorSpec("mla_decode", ("out", "lse"), _mla_decode, _decode_cases, ("q", "block_table", "cache_seqlens")),
    OperatorSpec("mla_prefill", ("out", "lse"), _mla_prefill, _prefill_cases, ()),
    OperatorSpec("quantize", ("codes", "scale"), _quantize, _quantize_cases, ("x",)),
    OperatorSpec("grouped_gemm_masked", ("out",), _grouped_gemm_masked, _masked_cases, ()),
)
OPERATORS = {spec.name: spec for spec in _ALL}


def operator(name: str) -> OperatorSpec:
    """The operator of that name; ValueError lists the names if there is none."""
    if name not in OPERATORS:
        raise ValueError(f"no operator {name!r}; there are {', '.join(OPERATORS)}")
    return OPERATORS[name]


def case(name: str) -> tuple[OperatorSpec, Case]:
    """`mla_decode/page_end`, or `mla_decode` for its first case. Raises ValueError for an unknown one."""
    base, _, wanted = name.partition("/")
    spec = operator(base)
    names = []
    for found in spec.cases():
        names.append(found.name)
        if not wanted or found.name == wanted:
            return spec, found
    raise ValueError(f"operator {base} has no case {wanted!r}; there are {', '.join(names)}")

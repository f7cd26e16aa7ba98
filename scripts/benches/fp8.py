"""Speed of the FP8 formats and products, and how tight the bounds on a kernel's error are."""

import ml_dtypes
import numpy as np

from fp8 import E4M3, KERNELS, GemmRule, decode, encode, gemm, order_free_bound, ordered_bound, quantize
from scripts.benches.environment import blas_threads
from scripts.benches.timing import Row, Session

_BOUND_LIMITS = {"hopper": "<= 40", "float32_sequential": "<= 150"}


def measure(session: Session) -> list[Row]:
    """Encode and decode, the exact product, the tensor-core product, and the bounds."""
    return _codec(session) + _exact(session) + _hopper(session) + _bounds(session)


def _codec(session):
    """Elements per second of one thread; the table's side of 4 M float32 does not fit a cache."""
    count = 1 << (12 if session.quick else 22)
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    codes, narrow, out = encode(x, E4M3), x.astype(ml_dtypes.bfloat16), np.empty(count, np.float32)
    times = session.interleave(
        {
            "encode float32": lambda: encode(x, E4M3),
            "encode bfloat16": lambda: encode(narrow, E4M3),
            "ml_dtypes, float32 to E4M3": lambda: x.astype(ml_dtypes.float8_e4m3fn),
            "decode to float32": lambda: decode(codes, np.float32, out),
            "decode to float64": lambda: decode(codes, np.float64),
            "ml_dtypes, E4M3 to float32": lambda: codes.astype(np.float32),
            "quantize 1 x 128": lambda: quantize(x.reshape(-1, min(count, 4096))),
        }
    )
    limits = {"encode float32": ">= 400e6", "decode to float32": ">= 800e6"}
    rows = [
        Row(name, count / timing.seconds, "elements/s", None, "", session.limit(limits.get(name, "")), timing.spread)
        for name, timing in times.items()
    ]
    pairs = (("encode float32", "ml_dtypes, float32 to E4M3"), ("decode to float32", "ml_dtypes, E4M3 to float32"))
    return rows + [
        Row(mine, times[mine].seconds, "s", times[peer].seconds / times[mine].seconds, f"speed of {peer}")
        for mine, peer in pairs
    ]


def _operands(m, n, k):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (m, n))
    return quantize(a), quantize(b, (128, 128))


def _exact(session):
    m, n, k = (16, 32, 256) if session.quick else (512, 2048, 7168)
    a, b = _operands(m, n, k)
    left, right = (operand.dequantize(np.float64) for operand in (a, b))
    name = f"gemm exact {m} x {n} x {k}"
    times = session.interleave({name: lambda: gemm(a, b), "dgemm": lambda: left @ right.T})
    against = f"dgemm rate, {blas_threads()} thread(s)"
    ratio = times["dgemm"].seconds / times[name].seconds
    rate = 2 * m * n * k / times[name].seconds
    return [Row(name, rate, "FLOP/s", ratio, against, session.limit(">= 0.4"), times[name].spread)]


def _hopper(session):
    m, n, k = (8, 16, 128) if session.quick else (256, 512, 1024)
    a, b = _operands(m, n, k)
    rules = {f"gemm {name} {m} x {n} x {k}": KERNELS[name] for name in ("deepgemm_sm90", "deepseek_v3_triton")}
    rules[f"gemm float32_sequential {m} x {n} x {k}"] = GemmRule("float32_sequential")
    calls = {
        name: lambda rule=rule: gemm(a, b, *rule[:2], scale_order=rule.scale_order) for name, rule in rules.items()
    }
    times = session.interleave(calls)
    limits = {name: ">= 0.6e9" for name, rule in rules.items() if rule.accumulator == "hopper"}
    return [
        Row(name, m * n * k / timing.seconds, "multiply-adds/s", None, "", session.limit(limits.get(name, "")),
            timing.spread)
        for name, timing in times.items()
    ]  # fmt: skip


def _bounds(session):
    """The largest bound over the worst error seen; 1 would be perfect. Not a time: the same on every machine."""
    rows = []
    for k in (128,) if session.quick else (128, 2048, 7168):
        a, b = _operands(48, 48, k)
        for rule in (KERNELS["deepgemm_sm90"], GemmRule("float32_sequential")):
            for dtype in (np.float32, ml_dtypes.bfloat16):
                got = gemm(a, b, *rule[:2], dtype, rule.scale_order).astype(np.float64)
                name = f"bound, {rule.accumulator}, K {k}, {np.dtype(dtype).name}"
                limit = session.limit(_BOUND_LIMITS[rule.accumulator])
                rows.append(_tightness(name, ordered_bound(a, b, rule, dtype), got, limit))
                if dtype is np.float32:
                    rows.append(_tightness(f"{name}, any order", order_free_bound(a, b, rule, dtype), got, ""))
    return rows


def _tightness(name, product, got, limit) -> Row:
    largest = float(product.bound.max())
    return Row(name, largest, "", largest / float(np.abs(got - product.value).max()), "worst error", limit)

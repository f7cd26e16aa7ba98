"""Hold the accumulator models to a real GPU, bit by bit: `python tests/peers/gpu_fp8.py [--out FILE.npz]`.

Needs torch with a CUDA GPU of compute capability 8.9 or later (DeepGEMM is used where it is installed); says so and
exits 0 elsewhere. Runs for about a minute. Each probe compares one product of the GPU with every model that might
describe it, prints the share of equal elements, and names the model that should hold on this GPU. Exit 1 if that one
differs anywhere; the operands and both results of the differing elements are then written to --out.
`--device cpu` runs the same path on torch's CPU kernels, for which no model is expected.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from fp8 import E4M3, KERNELS, BlockScaled, GemmRule, encode, gemm, ordered_bound, quantize

HOPPER, BLACKWELL = (9, 0), (10, 0)
KEPT = 100  # differing elements written per probe


class Probe(NamedTuple):
    """One product on the GPU: actual float32 [M, N], models name -> float32 [M, N], the model expected, operands."""

    name: str
    actual: np.ndarray
    models: dict[str, np.ndarray]
    expected: str | None
    operands: tuple[BlockScaled, BlockScaled]


def operands(kind: str, k: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Codes [64, k] and [64, k] of E4M3, of values on which accumulators differ."""
    x, y = rng.standard_normal((64, k)) * 30, rng.standard_normal((64, k)) * 30
    if kind == "positive":
        x, y = np.abs(x), np.abs(y)
    elif kind == "negative_tails":  # truncation and sign-filling differ on small negative terms beside one large one
        x, y = -np.abs(x) * 0.01, np.abs(y) * 0.01
        x[:, ::32], y[:, ::32] = 256, 256
    elif kind == "all_exponents":
        x, y = (v * 2.0 ** rng.integers(-14, 4, v.shape) for v in (x, y))
    elif kind == "subnormals":
        x, y = (rng.integers(-16, 17, (64, k)) * 2.0**-9 for _ in range(2))
    return encode(x, E4M3), encode(y, E4M3)


KINDS = ("bell", "positive", "negative_tails", "all_exponents", "subnormals")


def to_torch(torch, array: np.ndarray, device: str):
    if array.dtype == E4M3.dtype:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn).to(device)
    return torch.from_numpy(np.array(array)).to(device)


def to_numpy(tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def whole_k(codes: np.ndarray, block_k: int) -> BlockScaled:
    """Codes with scales of one, promoted every `block_k`."""
    return BlockScaled(codes, np.ones((codes.shape[0], -(-codes.shape[1] // block_k)), np.float32), (1, block_k))


def tensorwise_models(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Models of a product with scales of one, with and without promotion."""
    k = a.shape[1]
    models = {}
    for block_k in sorted({k, min(k, 128), min(k, 64)}):
        pair = whole_k(a, block_k), whole_k(b, block_k)
        label = "no promotion" if block_k == k else f"promotion every {block_k}"
        for shift in ("truncate", "sign_fill"):
            models[f"hopper {shift}, {label}"] = gemm(*pair, "hopper", out_dtype=np.float32, shift=shift)
        models[f"float32_sequential, {label}"] = gemm(*pair, "float32_sequential", out_dtype=np.float32)
        models[f"exact, {label}"] = gemm(*pair, out_dtype=np.float32)
    models["blackwell"] = gemm(whole_k(a, k), whole_k(b, k), "blackwell", out_dtype=np.float32)
    return models


def expected_model(capability, fast: bool, k: int) -> str | None:
    if capability == BLACKWELL:
        return "blackwell"
    if capability == HOPPER:
        return "hopper truncate, " + ("no promotion" if fast or k <= 128 else "promotion every 128")
    return None


def tensorwise_probes(torch, device, capability):
    """torch._scaled_mm with scales of one, fast accumulation on and off."""
    rng = np.random.default_rng(0)
    one = torch.ones((), device=device)
    for kind in KINDS:
        for k in (32, 64, 128, 256, 1024, 4096):
            a, b = operands(kind, k, rng)
            models = tensorwise_models(a, b)
            left, right = to_torch(torch, a, device), to_torch(torch, b, device).t()
            for fast in (True, False):
                out = torch._scaled_mm(
                    left, right, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast
                )
                name = f"_scaled_mm {kind} K={k} fast={fast}"
                pair = whole_k(a, k), whole_k(b, k)
                yield Probe(name, to_numpy(out), models, expected_model(capability, fast, k), pair)


def block_operands(k: int, b_rows: int, scale_format: str) -> tuple[BlockScaled, BlockScaled]:
    rng = np.random.default_rng(k + b_rows)
    x, y = (rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16) for rows in (128, 256))
    return quantize(x, scale_format=scale_format), quantize(y, (b_rows, 128), scale_format=scale_format)


def block_models(a: BlockScaled, b: BlockScaled, out_dtype) -> dict[str, np.ndarray]:
    """Every promotion, scale order and accumulator that a block-scaled kernel may use."""
    rules = [
        GemmRule(accumulator, promotion, order)
        for accumulator in ("hopper", "exact")
        for promotion in ("fma", "mul_add")
        for order in ("a_then_b", "b_then_a", "scales_first")
    ]
    models = {"/".join(rule): gemm(a, b, *rule[:2], out_dtype, rule[2]).astype(np.float32) for rule in rules}
    if np.all(np.frexp(a.scale)[0] == 0.5) and np.all(np.frexp(b.scale)[0] == 0.5):
        models["blackwell"] = gemm(a, b, "blackwell", out_dtype=out_dtype).astype(np.float32)
    return models


def block_probes(torch, device, capability):
    """torch._scaled_mm with 1 x 128 and 128 x 128 scales (CUDA 12.9 and later)."""
    for b_rows, kernel in ((1, "cublas_1d1d"), (128, "cublas_1d2d")):
        for k in (512, 7168):
            a, b = block_operands(k, b_rows, "float32")
            a_scale = to_torch(torch, a.scale, device).t().contiguous().t()
            b_scale = to_torch(torch, b.scale, device)
            b_scale = b_scale.t().contiguous() if b_rows == 1 else b_scale.t()
            out = torch._scaled_mm(
                to_torch(torch, a.codes, device),
                to_torch(torch, b.codes, device).t(),
                scale_a=a_scale,
                scale_b=b_scale,
                out_dtype=torch.float32,
            )
            expected = "/".join(KERNELS[kernel]) if capability == HOPPER else None
            name = f"_scaled_mm blocks 1x128 x {b_rows}x128 K={k}"
            yield Probe(name, to_numpy(out), block_models(a, b, np.float32), expected, (a, b))


def deepgemm_probes(torch, device, capability):
    """DeepGEMM's dense kernel: float32 scales on Hopper, powers of two on Blackwell."""
    try:
        import deep_gemm
    except ImportError:
        print("skipped: deep_gemm is not installed")
        return
    for k in (512, 7168):
        a, b = block_operands(k, 128, "float32" if capability == HOPPER else "ue8m0")
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=device)
        pairs = [(to_torch(torch, x.codes, device), to_torch(torch, x.scale, device)) for x in (a, b)]
        deep_gemm.fp8_gemm_nt(*pairs, out)
        known = {HOPPER: "/".join(KERNELS["deepgemm_sm90"]), BLACKWELL: "blackwell"}
        models = block_models(a, b, ml_dtypes.bfloat16)
        yield Probe(f"deep_gemm K={k}", to_numpy(out), models, known.get(capability), (a, b))


def cast_holds(torch, device) -> bool:
    """Whether the cast from float32 gives our codes on every bfloat16 value; from torch 2.12 on it saturates."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    actual = torch.from_numpy(x).to(device).to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
    number = np.isfinite(x)
    shares = {rule: (encode(x, E4M3, rule).view(np.uint8) == actual)[number].mean() for rule in ("saturate", "nan")}
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = "saturate" if version >= (2, 12) else "nan"
    found = ", ".join(f"{rule} {share:.4%}" for rule, share in shares.items())
    print(f"cast float32 -> E4M3: {found}; {expected} expected")
    return shares[expected] == 1.0


def same(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Equal bits, save that all NaN are one and zero has no sign."""
    return (left == right) | (np.isnan(left) & np.isnan(right))


def report(probe: Probe, failures: dict[str, np.ndarray]) -> bool:
    """Print one probe; True if the expected model holds. What differs from it is added to `failures`."""
    shares = {name: same(probe.actual, model).mean() for name, model in probe.models.items()}
    best = max(shares, key=shares.get)
    known = probe.expected in shares
    holds = not known or shares[probe.expected] == 1.0
    word = ("equal" if holds else "DIFFERS") if known else "no model expected"
    line = f"{probe.name:50} {word}: "
    line += f"{probe.expected} {shares[probe.expected]:.4%}; " if known else ""
    print(line + f"closest: {best} {shares[best]:.4%}")
    if not holds:
        row, column = (index[:KEPT] for index in np.nonzero(~same(probe.actual, probe.models[probe.expected])))
        a, b = probe.operands
        tensors = {"row": row, "column": column, "gpu": probe.actual[row, column]}
        tensors |= {"model": probe.models[probe.expected][row, column], "a_scale": a.scale[row]}
        tensors |= {"a": a.codes[row].view(np.uint8), "b": b.codes[column].view(np.uint8)}
        tensors["b_scale"] = b.scale[column // b.block[0]]
        failures |= {f"{probe.name}/{name}": array for name, array in tensors.items()}
    return holds


def within_bound(probe: Probe) -> str:
    """Whether the GPU's result lies within the rigorous bound of a Hopper kernel: what a gate would check."""
    product = ordered_bound(*probe.operands, GemmRule("hopper", "fma", "a_then_b"), np.float32)
    beyond = np.count_nonzero(np.abs(probe.actual - product.value) > product.bound)
    return f"{probe.name:50} {beyond} of {probe.actual.size} elements beyond the bound"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default="gpu_fp8_differences.npz", help="where differing elements are written")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("skipped: torch is not installed")
        return 0
    capability = None
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            print("skipped: torch sees no CUDA GPU")
            return 0
        capability = torch.cuda.get_device_capability()
        print(f"{torch.cuda.get_device_name()}, capability {capability}, torch {torch.__version__}")
        if capability < (8, 9):
            print("skipped: FP8 tensor cores need compute capability 8.9")
            return 0
    start, failures = time.monotonic(), {}
    held = cast_holds(torch, arguments.device)
    for probes in (tensorwise_probes, block_probes, deepgemm_probes):
        try:
            for probe in probes(torch, arguments.device, capability):
                held &= report(probe, failures)
                if probes is block_probes:
                    print(within_bound(probe))
        except (RuntimeError, ValueError, NotImplementedError) as error:  # a variant that this build does not have
            print(f"skipped: {probes.__name__}: {str(error).splitlines()[0]}")
    if failures:
        np.savez_compressed(arguments.out, **failures)
        print(f"what differs is in {arguments.out}")
    verdict = "every expected model holds" if held else "an expected model does not hold"
    print(f"{verdict}; {time.monotonic() - start:.0f} s")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

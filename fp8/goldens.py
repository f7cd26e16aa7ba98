"""Operands and results of V3's FP8 products, from a seed, for kernels to be held to.

Everything is built from integers of PCG64 (whose stream NumPy guarantees), exact float32 arithmetic and the exact
product, so that the same bytes come out on every machine. Nothing is built before it is asked for.
Shapes: DeepSeek-V3, config.json (hidden 7168, q latent 1536, kv latent 512 + 64, 128 heads of 128 + 64, experts 2048);
gate and up, and q_a and kv_a, are one product each, as serving engines fuse them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fp8.blockscaled import BlockScaled, num_blocks, quantize
from fp8.gemm import REFERENCE, gemm
from fp8.grouped import ContiguousLayout, contiguous_layout, grouped_gemm_contiguous, grouped_gemm_masked
from fp8.recipes import RECIPES

V3_GEMMS = {
    "q_a_kv_a": (7168, 2112),
    "q_b": (1536, 24576),
    "kv_b": (512, 32768),
    "o": (16384, 7168),
    "gate_up": (7168, 4096),
    "down": (2048, 7168),
}
ROWS = (1, 64, 128, 4096)
GROUPS = (2, 9)
GROUPED_ROWS = 128  # rows per expert of a masked product, and the most real rows of a group of a contiguous one
KINDS = ("dense", "contiguous", "masked")
_BLOCK = 128
_RECIPE = "deepseek_v3"
_CHUNK = 1 << 16  # values made at a time


@dataclass(frozen=True)
class GoldenCase:
    """One product: kind dense (`num_rows` rows), contiguous or masked (`num_rows` per group at most, `groups` groups).

    scale_format: "float32" or "ue8m0". Raises ValueError for sizes below 1 or unknown kinds.
    """

    name: str
    kind: str
    num_rows: int
    n: int
    k: int
    groups: int = 1
    scale_format: str = "float32"
    seed: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"case {self.name}: kind {self.kind!r} is not one of {KINDS}")
        if min(self.num_rows, self.n, self.k, self.groups) < 1:
            raise ValueError(f"case {self.name}: sizes {self.num_rows, self.n, self.k, self.groups} must be positive")

    @property
    def layout(self) -> ContiguousLayout:
        """The rows of a contiguous case: group g has its `counts()[g]` real rows."""
        return contiguous_layout(self.counts())

    def counts(self) -> np.ndarray:
        """int32 [G]: real rows per group; one group has none where there are more than two."""
        counts = np.array([self.num_rows - 37 * group % self.num_rows for group in range(self.groups)], np.int32)
        if self.groups > 2:
            counts[1] = 0
        return counts

    def specification(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype, shape) of every tensor, without building any."""
        scale_rows, scale_columns = num_blocks(self.n, _BLOCK), num_blocks(self.k, _BLOCK)
        stack = () if self.kind == "dense" else (self.groups,)
        rows = (self.num_rows,)
        if self.kind == "contiguous":
            rows = (int(self.layout.grouped_layout.size),)
        elif self.kind == "masked":
            rows = (self.groups, self.num_rows)
        tensors = {
            "a.codes": ("float8_e4m3fn", (*rows, self.k)),
            "a.scale": ("float32", (*rows, scale_columns)),
            "b.codes": ("float8_e4m3fn", (*stack, self.n, self.k)),
            "b.scale": ("float32", (*stack, scale_rows, scale_columns)),
            "d": ("bfloat16", (*rows, self.n)),
        }
        if self.kind != "dense":
            tensors["defined"] = ("bool", rows)
        if self.kind == "contiguous":
            tensors["grouped_layout"] = ("int32", rows)
        if self.kind == "masked":
            tensors["masked_m"] = ("int32", (self.groups,))
        return {f"{self.name}.{name}": value for name, value in tensors.items()}

    def metadata(self) -> dict[str, str]:
        """What a reader of the tensors must know and cannot see in them, the floor under amax among it."""
        recipe = RECIPES[_RECIPE]
        facts = {
            "case": self.name,
            "kind": self.kind,
            "recipe": recipe.name,
            "amax_floor": recipe.amax_floor,
            "scale_format": self.scale_format,
            "seed": self.seed,
            **REFERENCE._asdict(),
        }
        return {name: str(value) for name, value in facts.items()}

    def valid(self) -> dict[str, str]:
        """Result -> the tensor that says which of its rows a kernel must write: it may leave anything in the others."""
        return {} if self.kind == "dense" else {f"{self.name}.d": f"{self.name}.defined"}

    def build(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) in the order of `specification`: operands, scales, result, defined rows, layout."""
        a, b = self.operand_a(), self.operand_b()
        for name, operand in (("a", a), ("b", b)):
            yield f"{self.name}.{name}.codes", operand.codes
            yield f"{self.name}.{name}.scale", operand.scale
        if self.kind == "dense":
            yield f"{self.name}.d", gemm(a, b)
            return
        if self.kind == "contiguous":
            name, where = "grouped_layout", self.layout.grouped_layout
            product = grouped_gemm_contiguous(a, b, where)
        else:
            name, where = "masked_m", self.counts()
            product = grouped_gemm_masked(a, b, where)
        yield f"{self.name}.d", product.out
        yield f"{self.name}.defined", product.defined
        yield f"{self.name}.{name}", where

    def digest(self) -> str:
        """SHA-256 of all tensors, names and bytes in order: equal on every machine."""
        hasher = hashlib.sha256()
        for name, array in self.build():
            hasher.update(name.encode())
            hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.hexdigest()

    def operand_a(self) -> BlockScaled:
        """Rows in 1 x 128 blocks; rows that no group owns are zero."""
        if self.kind == "masked":
            groups = [self._values((self.num_rows, self.k), f"a/{group}") for group in range(self.groups)]
            for values, count in zip(groups, self.counts()):
                values[count:] = 0
            return quantize(np.stack(groups), (1, _BLOCK), _RECIPE, self.scale_format)
        layout = self.layout.grouped_layout if self.kind == "contiguous" else np.zeros(self.num_rows, np.int32)
        values = self._values((layout.size, self.k), "a")
        values[layout < 0] = 0
        return quantize(values, (1, _BLOCK), _RECIPE, self.scale_format)

    def operand_b(self) -> BlockScaled:
        """Weights in 128 x 128 blocks, a stack of them for grouped products."""
        weights = []
        for group in range(self.groups):
            values = self._values((self.n, self.k), f"b/{group}")
            weights.append(quantize(values, (_BLOCK, _BLOCK), _RECIPE, self.scale_format))
        if self.kind == "dense":
            return weights[0]
        codes, scale = (np.stack([getattr(weight, name) for weight in weights]) for name in ("codes", "scale"))
        return BlockScaled(codes, scale, (_BLOCK, _BLOCK))

    def _values(self, shape: tuple[int, int], operand: str) -> np.ndarray:
        key = f"{self.name}/{self.scale_format}/{operand}/{self.seed}".encode()
        return random_values(shape, int.from_bytes(hashlib.sha256(key).digest()[:16], "little"))


def random_values(shape: tuple[int, int], seed: int) -> np.ndarray:
    """bfloat16 [M, K] of a bell shape with blocks of different size, from integers alone.

    The sum of four uniform 16-bit integers, less its mean, is close to normal with standard deviation 2^16 / sqrt(3);
    each run of 128 along a row is multiplied by a power of two from 2^-3 to 2^3. Rows are made a few at a time.
    """
    stream = np.random.PCG64(seed)
    exponent_stream = stream.jumped()
    num_rows, num_columns = shape
    blocks = num_blocks(num_columns, _BLOCK)
    out = np.empty(shape, ml_dtypes.bfloat16)
    rows_at_a_time = max(1, _CHUNK // max(num_columns, 1))
    for start in range(0, num_rows if num_columns else 0, rows_at_a_time):
        rows = out[start : start + rows_at_a_time]
        raw = stream.random_raw(rows.size).astype("<u8", copy=False).view("<u2").reshape(-1, 4)
        total = raw.astype(np.int32).sum(axis=1, dtype=np.int32) - 2 * 65535
        exponent = (exponent_stream.random_raw(len(rows) * blocks) % 7).astype(np.int32).reshape(-1, blocks) - 3
        scale = np.ldexp(np.float32(2.0**-16), np.repeat(exponent, _BLOCK, axis=1)[:, :num_columns])
        rows[...] = total.astype(np.float32).reshape(rows.shape) * scale
    return out


def v3_cases(rows=ROWS, groups=GROUPS, scale_format: str = "float32", seed: int = 0) -> tuple[GoldenCase, ...]:
    """All cases at V3's shapes: every product for each number of rows, and gate_up and down for each number of groups.

    Building the result of 4096 rows takes minutes in all; nothing is built here.
    """
    cases = [
        GoldenCase(f"{name}.m{m}", "dense", m, n, k, scale_format=scale_format, seed=seed)
        for name, (k, n) in V3_GEMMS.items()
        for m in rows
    ]
    for name in ("gate_up", "down"):
        k, n = V3_GEMMS[name]
        for count in groups:
            for kind in ("contiguous", "masked"):
                case = f"{name}.{kind}.g{count}"
                cases.append(GoldenCase(case, kind, GROUPED_ROWS, n, k, count, scale_format, seed))
    return tuple(cases)

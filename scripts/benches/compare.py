"""Speed and memory of `refmodel compare` on two dumps that are larger than what it may hold."""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from refmodel.tensor_file import save_tensors
from scripts.benches.children import in_child
from scripts.benches.timing import Row, Session

_COLUMNS = 4096


def measure(session: Session) -> list[Row]:
    """Bytes per second over both files, which lie in the page cache, and the peak of the process."""
    num_bytes = 4e6 if session.quick else 6e9
    with tempfile.TemporaryDirectory() as folder:
        session.note("generating")
        paths = _generate(Path(folder), num_bytes)
        session.note("comparing")
        runs = [in_child("scripts.benches.compare_once", *paths) for _ in range(min(2, session.repeats))]
        total = sum(path.stat().st_size for path in paths)
    cpu, wall = (min(run[clock] for run in runs) for clock in ("cpu", "wall"))
    name = f"compare {total / 1e9:.3g} GB"
    return [
        Row(f"{name}, cached, per CPU second", total / cpu, "B/s", None, "", session.limit(">= 0.5e9")),
        Row(f"{name}, cached, per second", total / wall, "B/s"),
        Row(f"{name}, peak memory", max(run["peak"] for run in runs), "B", None, "", session.limit(f"<= {2**30}")),
    ]


def _generate(folder: Path, num_bytes: float) -> list[Path]:
    """Two .safetensors files of bfloat16 tensors, half of `num_bytes` each; the second is 1 % off in places."""
    rows = max(4, int(num_bytes / 2 / 2 / _COLUMNS / 24))
    x = np.random.default_rng(0).standard_normal((rows, _COLUMNS), np.float32).astype(ml_dtypes.bfloat16)
    off = x.copy()
    off[::7] = (off[::7].astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16)
    paths = []
    for name, array in (("reference", x), ("actual", off)):
        tensors = {f"layers.{layer}.{where}.residual": array for layer in range(12) for where in ("attn_core", "merge")}
        paths.append(folder / f"{name}.safetensors")
        save_tensors(paths[-1], tensors)
    return paths

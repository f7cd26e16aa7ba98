"""A comparison reads dumps larger than the memory it may use."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from refmodel.golden import compare
from refmodel.golden.dump import open_dump, release
from refmodel.tensor_file import save_tensors

PEAK = """
import resource, sys
from refmodel.golden import compare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = compare(sys.argv[1], sys.argv[2])
print(report.exit_code, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("mebibytes", [96, pytest.param(768, marks=pytest.mark.long)])
def test_the_peak_does_not_grow_with_the_dump(tmp_path, mebibytes):
    rng = np.random.default_rng(0)
    part = rng.standard_normal((1 << 20,)).astype(np.float32)
    x = np.tile(part, mebibytes // 4).reshape(-1, 4096)
    save_tensors(tmp_path / "a.safetensors", {"layers.0.x": x})
    x *= np.float32(1 + 1e-6)
    save_tensors(tmp_path / "b.safetensors", {"layers.0.x": x})
    del x
    command = [sys.executable, "-c", PEAK, str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    code, before, peak = map(int, done.stdout.split())
    assert code == 0
    assert (peak - before) / 1024 < 120  # the dumps are twice `mebibytes`


def test_released_pages_are_read_again(tmp_path):
    x = np.arange(1 << 16, dtype=np.float32)
    save_tensors(tmp_path / "a.safetensors", {"x": x})
    array = open_dump(tmp_path / "a.safetensors")["x"]
    assert array[-1] == 65535
    release(array)
    np.testing.assert_array_equal(array, x)
    release(x)  # ordinary memory: nothing happens
    np.testing.assert_array_equal(x[:3], [0, 1, 2])


def test_progress_counts_every_byte_once():
    tensors = {"a": np.ones((3, 1 << 16), np.float32), "b": np.ones(10, ml_dtypes.bfloat16)}
    read = []
    compare(tensors, {n: x * x.dtype.type(2) for n, x in tensors.items()}, progress=read.append)
    assert sum(read) == 2 * sum(x.nbytes for x in tensors.values())

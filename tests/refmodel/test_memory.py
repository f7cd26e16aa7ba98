"""Arrays on cache lines, and memory that stays with the process."""

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from refmodel.memory import LINE, aligned_empty, side_by_side

ROOT = Path(__file__).resolve().parents[2]
FAULTS = """
import resource, sys
import numpy as np
from refmodel.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(16 << 20, np.float32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7,), (2, 3, 1000)])
def test_memory_begins_on_a_line(shape):
    for dtype in (np.float32, np.float64, np.uint8):
        array = aligned_empty(shape, dtype)
        assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, dtype, True)
        assert array.size == 0 or array.ctypes.data % LINE == 0
        array[...] = 1


def test_small_arrays_lie_side_by_side_and_never_in_each_other():
    rng = np.random.default_rng(0)
    sizes = [0, 1, 3, 64, 100_000, 3 << 20]  # of float32: the last one has memory of its own

    def copies(seed):
        mine = np.random.default_rng(seed)
        arrays = [mine.normal(size=(int(mine.choice(sizes)), 1)).astype(np.float32) for _ in range(20)]
        return arrays, [side_by_side(array) for array in arrays]

    with ThreadPoolExecutor(4) as pool:
        pairs = [pair for arrays, kept in pool.map(copies, rng.integers(0, 1 << 30, 12)) for pair in zip(arrays, kept)]
    for array, kept in pairs:
        np.testing.assert_array_equal(kept, array)
        assert (kept.dtype, kept.flags.writeable, kept.flags.c_contiguous) == (array.dtype, False, True)
        assert kept.size == 0 or kept.ctypes.data % LINE == 0
    spans = sorted((kept.ctypes.data, kept.nbytes) for _, kept in pairs if kept.size)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(spans))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_kept_memory_is_not_fetched_again():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") <= 10
    assert faults("leave") >= 100  # ten arrays of 64 MiB, in pages of 2 MiB at most

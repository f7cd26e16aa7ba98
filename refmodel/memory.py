"""Memory that products read fast, and that is not fetched from the system again and again."""

import ctypes
import math

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector load
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT = 1 << 30  # bytes that glibc keeps, and size from which on an array is the system's again as soon as it is freed


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose first element lies on a multiple of LINE bytes.

    Where rows are multiples of LINE bytes too, no vector load of a product crosses a line. (NumPy's own arrays begin
    where malloc says, 16 bytes off if they are large.)
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def keep_freed_memory():
    """Have glibc keep what is freed for the next array; no change under another C library.

    A pass makes and drops many arrays. Left alone, glibc gives them back to the system, which clears every page before
    it hands it out again: an eighth of the time of a pass on many ranks. For the whole process, as the variables
    MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ are: the commands do this, the library only where it has threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        mallopt(option, _KEPT)

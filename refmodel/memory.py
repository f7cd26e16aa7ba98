"""Memory that products read fast, and that is not fetched from the system again and again."""

import ctypes
import math
import threading

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector load
_BLOCK = 32 << 20  # bytes that many small arrays share
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


class _Block:
    """A piece of memory that is handed out from its start on, and lives as long as an array in it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._memory, self._used = np.empty(0, np.uint8), 0

    def take(self, size: int) -> np.ndarray:
        """`size` bytes on a multiple of LINE."""
        with self._lock:
            if self._used + size > self._memory.size:
                self._memory, self._used = aligned_empty((_BLOCK,), np.uint8), 0
            first = self._used
            self._used += -(-size // LINE) * LINE
            return self._memory[first : first + size]


_block = _Block()


def side_by_side(array: np.ndarray) -> np.ndarray:
    """A read-only copy that shares a large block of memory with other such copies, for what is read again and again.

    The system backs blocks of many megabytes with large pages, from which is read a tenth faster. An array of a
    quarter of a block or more gets one of its own.
    """
    if array.nbytes >= _BLOCK // 4:
        copy = aligned_empty(array.shape, array.dtype)
    else:
        copy = _block.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    copy.flags.writeable = False
    return copy


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

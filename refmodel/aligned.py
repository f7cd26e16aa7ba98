"""Memory that begins on a cache line: NumPy's own begins wherever malloc says, 16 bytes off for large arrays."""

import math

import numpy as np

LINE = 64  # bytes of a cache line, and of the widest vector load


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose first element lies on a multiple of LINE bytes.

    Where rows are multiples of LINE bytes too, no vector load of a product crosses a line.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + size].view(dtype).reshape(shape)

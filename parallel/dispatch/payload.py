"""Token rows as they travel: plain rows, or FP8 codes with their scales."""

import numpy as np

from fp8 import BlockScaled
from parallel.messages import Picked

BLOCK = (1, 128)


def payload_arrays(x) -> dict[str, tuple[np.ndarray, str]]:
    """`x` ([T, D] rows, BlockScaled rows or a pair (codes, scales)) as named arrays with their byte classes."""
    if isinstance(x, tuple):
        return {"codes": (np.asarray(x[0]), "payload"), "scale": (np.asarray(x[1]), "scales")}
    if isinstance(x, BlockScaled):
        if tuple(x.block) != BLOCK:
            raise ValueError(f"rows are scaled in blocks of {tuple(x.block)}: rows travel in blocks of {BLOCK}")
        return {"codes": (x.codes, "payload"), "scale": (x.scale, "scales")}
    return {"x": (np.asarray(x), "payload")}


def num_rows(x) -> int:
    """Rows of `x` in any of its forms."""
    return len(next(iter(payload_arrays(x).values()))[0])


def row_form(x) -> str:
    """What one row of `x` is made of."""
    return " + ".join(f"{array.dtype.name} {list(array.shape[1:])}" for array, _ in payload_arrays(x).values())


def take_rows(arrays: dict[str, tuple[np.ndarray, str]], index: np.ndarray) -> dict:
    """The rows that `index` names: copies, or `Picked` where that means fewer rows to keep."""
    if any(len(index) > len(array) for array, _ in arrays.values()):
        return {name: (Picked(array, index), cls) for name, (array, cls) in arrays.items()}
    return {name: (np.take(array, index, axis=0), cls) for name, (array, cls) in arrays.items()}


def join_payload(arrays: dict[str, np.ndarray]):
    """The rows of a received message in the form in which they were sent."""
    if "codes" in arrays:
        return BlockScaled(arrays["codes"], arrays["scale"], BLOCK)
    return arrays["x"]


def join_like(x, arrays: dict[str, np.ndarray]):
    """The rows of a received message: a pair (codes, scales) where `x` is one, else as `join_payload`."""
    return (arrays["codes"], arrays["scale"]) if isinstance(x, tuple) else join_payload(arrays)


def padding_array(num_rows: int, row_bytes: int, multiple: int) -> dict[str, tuple[np.ndarray, str]]:
    """The zero bytes that bring rows of `row_bytes` to a multiple; nothing where they are one already."""
    return filler(num_rows, -row_bytes % multiple)


def filler(num_rows: int, width: int) -> dict[str, tuple[np.ndarray, str]]:
    """`width` zero bytes for each row."""
    return {"padding": (np.zeros((num_rows, width), np.uint8), "padding")} if width else {}


def array_row_bytes(arrays: dict[str, tuple[np.ndarray, str]]) -> int:
    """Bytes of one row over all arrays."""
    return sum(array.itemsize * int(np.prod(array.shape[1:])) for array, _ in arrays.values())

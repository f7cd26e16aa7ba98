"""The header of a `.safetensors` file: read strictly, so that a damaged file is named and never half loaded.

Format (safetensors README, "Format"): 8 bytes little-endian header length, that many bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, then the data without holes.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 32  # NumPy 2 allows 64
MAX_BYTES = 2**62  # sizes beyond this cannot be addressed
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class TensorInfo(NamedTuple):
    """One header entry: dtype by its safetensors name, shape, and the byte range within the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """`tensors` in file order, `metadata` (empty if absent), `data_start` in bytes from the start of the file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_header(path) -> Header:
    """Read and check the header of the file at `path`; no tensor data is read.

    Raises ValueError that names the file, the tensor and the rule that is broken.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(8), file_size)
            raw = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) != length:
        raise ValueError(f"{path}: {len(raw)} of {length} header bytes could be read: the file is truncated")
    entries = _parse_json(path, raw)
    metadata = _check_metadata(path, entries.pop(METADATA_KEY, {}))
    tensors = {name: _check_entry(path, name, entry) for name, entry in entries.items()}
    _check_layout(path, tensors, file_size - 8 - length)
    return Header(tensors, metadata, 8 + length)


def _header_length(path: Path, start: bytes, file_size: int) -> int:
    if len(start) < 8:
        raise ValueError(f"{path}: {file_size} bytes: a .safetensors file starts with 8 bytes of header length")
    length = int.from_bytes(start, "little")
    if start == b"version ":
        raise ValueError(f"{path}: a Git LFS pointer, not tensor data: fetch the file itself (git lfs pull)")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: header length {length} is above the limit of {MAX_HEADER_BYTES} bytes")
    if 8 + length > file_size:
        raise ValueError(f"{path}: header of {length} bytes in a file of {file_size} bytes: the file is truncated")
    return length


def _parse_json(path: Path, raw: bytes) -> dict:
    def unique(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {shorten(twice)} occurs twice")
        return result

    def no_constant(text):
        raise ValueError(f"{text} is not JSON")

    if raw[:1] != b"{":
        raise ValueError(f"{path}: the header must start with '{{', not {raw[:1]!r}")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise ValueError(f"{path}: the header is nested too deeply to be a tensor list") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, oversized integers, and ours
        raise ValueError(f"{path}: the header is not valid JSON: {shorten(error)}") from None
    return header


def _check_metadata(path: Path, metadata) -> dict[str, str]:
    if metadata is None:  # MLX writes null where it has nothing to say
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: {METADATA_KEY} must map strings to strings, got {shorten(metadata)}")
    return metadata


def _check_entry(path: Path, name: str, entry) -> TensorInfo:
    fault = _fault(name, entry)
    if fault:
        raise ValueError(f"{path}: tensor {shorten(name)}: {fault}")
    return TensorInfo(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])


def _fault(name: str, entry) -> str:
    """The rule that an entry breaks by itself; empty if none."""
    if not name.isascii() and not _encodable(name):
        return "the name is not valid Unicode"
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        return f"an entry has exactly the keys dtype, shape and data_offsets, got {shorten(entry)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {shorten(dtype)}; known: {' '.join(DTYPES)}"
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not _are_counts(shape):
        return f"shape must be a list of at most {MAX_DIMENSIONS} sizes >= 0, got {shorten(shape)}"
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        return f"data_offsets must be two byte positions >= 0, got {shorten(offsets)}"
    itemsize = DTYPES[dtype].itemsize
    need = math.prod(shape) * itemsize
    if need >= MAX_BYTES or (need == 0 and math.prod(size for size in shape if size) * itemsize >= MAX_BYTES):
        return f"shape {shorten(shape)} of {dtype} cannot be addressed"
    begin, end = offsets
    if end - begin != need:
        return f"data_offsets [{begin}, {end}] hold {end - begin} bytes, shape {shape} of {dtype} needs {need}"
    return ""


def _are_counts(values: list) -> bool:
    return all(type(value) is int and 0 <= value < MAX_BYTES for value in values)


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    """The data section is covered exactly once: no hole, no overlap, nothing missing or left at the end."""
    position, last = 0, None
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            before = "the start of the data" if last is None else f"tensor {shorten(last)}"
            fault = "overlaps" if info.begin < position else "leaves a hole after"
            where = f"starts at byte {info.begin}, {fault} {before}, which ends at byte {position}"
            raise ValueError(f"{path}: tensor {shorten(name)}: {where}")
        position, last = info.end, name
        if position > data_bytes:
            raise ValueError(
                f"{path}: tensor {shorten(name)}: ends at byte {position} of a data section of {data_bytes}: "
                "the file is truncated"
            )
    if position != data_bytes:
        raise ValueError(f"{path}: {data_bytes - position} bytes after the last tensor belong to none")


def shorten(value, limit: int = 100) -> str:
    """A printable form of any value from a file, cut to `limit` characters."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else f"{text[:limit]}..."

"""Read and write `.safetensors` files of every dtype, bit for bit, bfloat16 and FP8 included."""

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from refmodel.tensor_header import DTYPES, METADATA_KEY, NAMES, read_header, shorten


class TensorFile:
    """One `.safetensors` file, memory mapped: `file[name]` touches only that tensor's bytes.

    `file[name]` is a read-only view of the file, which it keeps mapped; a copy where the file leaves it unaligned.
    Raises ValueError, naming file, tensor and rule, if the header is not valid.
    """

    def __init__(self, path):
        self.path = Path(path)
        self._header = read_header(self.path)
        self._map = None

    @property
    def metadata(self) -> dict[str, str]:
        """The free text entries of the header; empty if there are none."""
        return dict(self._header.metadata)

    def keys(self):
        """Tensor names, in the order of the header."""
        return self._header.tensors.keys()

    def __iter__(self):
        return iter(self._header.tensors)

    def __len__(self) -> int:
        return len(self._header.tensors)

    def __contains__(self, name) -> bool:
        return name in self._header.tensors

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype by its safetensors name such as "BF16", shape), from the header alone."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        dtype = DTYPES[entry.dtype]
        if entry.begin == entry.end:
            return np.zeros(entry.shape, dtype)
        start = self._header.data_start + entry.begin
        count = (entry.end - entry.begin) // dtype.itemsize
        array = np.frombuffer(self._data(), dtype, count, start).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()

    def _entry(self, name: str):
        try:
            return self._header.tensors[name]
        except KeyError:
            raise ValueError(f"{self.path}: no tensor {shorten(name)} among its {len(self)}") from None

    def _data(self) -> mmap.mmap:
        if self._map is None:
            need = self._header.data_start + max((t.end for t in self._header.tensors.values()), default=0)
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != need:
                    raise ValueError(f"{self.path}: was {need} bytes when opened, is {size} now")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map


def load_tensors(path) -> dict[str, np.ndarray]:
    """Read every tensor of a `.safetensors` file into ordinary writable arrays, in the order of the header.

    Raises ValueError, naming file, tensor and rule, if the file is not valid.
    """
    file = TensorFile(path)
    return {name: np.array(file[name]) for name in file}


def save_tensors(path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as a `.safetensors` file; equal input gives an equal file, byte for byte.

    Names are sorted in the header. The data is sorted by item size, widest first, then by name: so each tensor
    is aligned. Arrays of any memory order and byte order are written in C order, little-endian.
    The file appears under its name only when it is complete. Raises ValueError for a dtype that the format
    does not have, a name that is not a string, and metadata that does not map strings to strings.
    """
    path = Path(path)
    arrays = {name: _storable(name, array) for name, array in sorted(_checked_names(tensors).items())}
    layout = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = _header_bytes(arrays, layout, _checked_metadata(metadata))
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for name in layout:
                file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _checked_names(tensors: Mapping) -> Mapping:
    for name in tensors:
        if not isinstance(name, str) or name == METADATA_KEY:
            raise ValueError(f"tensor name {shorten(name)}: must be a string other than {METADATA_KEY!r}")
    return tensors


def _checked_metadata(metadata: Mapping | None) -> dict[str, str]:
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata {shorten(key)}: {shorten(value)}: keys and values must be strings")
    return metadata


def _storable(name: str, array) -> np.ndarray:
    """The array with a little-endian dtype of the format; ValueError if the format has none for it."""
    array = np.asarray(array)
    native = array.dtype.newbyteorder("=")
    if native not in NAMES:
        raise ValueError(
            f"tensor {shorten(name)}: dtype {array.dtype} cannot be stored; known: {' '.join(NAMES.values())}"
        )
    return array.astype(native) if native != array.dtype else array


def _header_bytes(arrays: dict[str, np.ndarray], layout: list[str], metadata: dict[str, str]) -> bytes:
    entries, position = {}, 0
    for name in layout:
        array = arrays[name]
        end = position + array.nbytes
        entries[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    header = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    header.update((name, entries[name]) for name in arrays)
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a tensor name or metadata entry is not valid Unicode: {shorten(error)}") from None
    return text + b" " * (-len(text) % 8)  # so that the data, too, starts at a multiple of 8


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Reads the tensors of a file written by `torch.save`, without torch and without running what is pickled in it.

The file is a zip archive: `data.pkl` describes the objects, `data/N` holds the bytes of storage N. Only plain
containers, numbers, strings and dense CPU tensors are rebuilt; any other object in the pickle is refused.
"""

import pickle
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

_STORAGES = {
    "ByteStorage": np.uint8,
    "CharStorage": np.int8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "BoolStorage": np.bool_,
    "BFloat16Storage": ml_dtypes.bfloat16,
}


def load_torch(path):
    """The object in the file, tensors as arrays of their own.

    Raises ValueError for files of another format, and for objects that are no plain data."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise ValueError(f"{path} holds no data.pkl: it was not written by torch.save")
            with archive.open(names[0]) as pickled:
                return _Reader(pickled, archive, names[0][: -len("data.pkl")], path).load()
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is no zip archive: only the format of torch.save since 1.6 is read") from None
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as a file of torch.save: {error}") from None


class _Reader(pickle.Unpickler):
    def __init__(self, pickled, archive, root, path):
        super().__init__(pickled, encoding="utf-8")
        self._archive, self._root, self._path = archive, root, path

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        raise ValueError(f"{self._path} holds a {module}.{name}: only plain data and dense CPU tensors are read")

    def persistent_load(self, reference):
        kind, dtype, key, _, count = reference
        data = self._archive.read(f"{self._root}data/{key}")
        if kind != "storage" or len(data) < count * dtype.itemsize:
            raise ValueError(f"{self._path}: storage {key} holds {len(data)} bytes, not {count} numbers of {dtype}")
        return np.frombuffer(data, dtype, count)

    def _rebuild(self, storage, offset, size, stride, *_):
        last = offset + sum((n - 1) * step for n, step in zip(size, stride)) if prod(size) else -1
        if len(size) != len(stride) or min((offset, *size, *stride)) < 0 or last >= len(storage):
            raise ValueError(f"{self._path}: a tensor of shape {list(size)} reaches beyond its storage")
        if not prod(size):
            return np.empty(size, storage.dtype)
        steps = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()

"""Open what somebody dumped, whatever the container, as one mapping from name to array."""

import json
import mmap
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from refmodel.tensor_file import TensorFile

READABLE = ".safetensors, .npz, .npy, .pt, a folder of such files, or a folder of SGLang's dumper"


class Dump(Mapping):
    """Named arrays, read when asked for.

    order: names in execution order where the source says so, else None. metadata: free text of the container.
    source: what to call the dump in messages.
    """

    def __init__(self, loaders: Mapping, source: str, order: list[str] | None = None, metadata: dict | None = None):
        self._loaders = dict(loaders)
        self.source = source
        self.order = order
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> np.ndarray:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def renamed(self, names: Mapping[str, str]) -> "Dump":
        """The same arrays under other names; names that the mapping lacks stay.

        Raises ValueError if two names become one.
        """
        loaders: dict = {}
        for old, load in self._loaders.items():
            new = names.get(old, old)
            if new in loaders:
                raise ValueError(f"{self.source}: two tensors would both be called {new!r}, one of them is {old!r}")
            loaders[new] = load
        order = None if self.order is None else [names.get(n, n) for n in self.order]
        return Dump(loaders, self.source, order, self.metadata)


def from_arrays(tensors: Mapping, source: str = "tensors", order=None, metadata=None) -> Dump:
    """A dump of arrays in memory; their order is taken as the execution order."""
    loaders = {name: (lambda array=array: np.asarray(array)) for name, array in tensors.items()}
    return Dump(loaders, source, list(tensors) if order is None else order, metadata)


def open_dump(source) -> Dump:
    """Open a mapping of arrays, a file or a folder.

    Raises ValueError if there is nothing to read, the kind is unknown, or the content is broken;
    FileNotFoundError if there is no such path.
    """
    if isinstance(source, Dump):
        dump = source
    elif isinstance(source, Mapping):
        dump = from_arrays(source)
    else:
        dump = _open_path(Path(os.fspath(source)))
    if not len(dump):
        raise ValueError(f"{dump.source}: holds no tensor; a dump with at least one tensor is required")
    return dump


def _open_path(path: Path) -> Dump:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    readers = {".safetensors": _open_safetensors, ".npz": _open_npz, ".npy": _open_npy, ".pt": _open_torch}
    readers[".pth"] = _open_torch
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind {path.suffix or 'without suffix'!r}; readable are {READABLE}")
    return readers[path.suffix](path)


def _open_safetensors(path: Path) -> Dump:
    file = TensorFile(path)
    order = None
    if "order" in file.metadata:
        try:
            order = [str(name) for name in json.loads(file.metadata["order"])]
        except (ValueError, TypeError):
            raise ValueError(f"{path}: metadata 'order' is not a JSON list of tensor names") from None
    return Dump({name: (lambda n=name: file[n]) for name in file}, str(path), order, file.metadata)


def _named(array: np.ndarray, where: str) -> np.ndarray:
    """NumPy files keep bfloat16 as two nameless bytes, and no FP8 name at all."""
    if array.dtype == np.dtype("V2"):
        return array.view(ml_dtypes.bfloat16)
    if array.dtype.kind == "V":
        raise ValueError(f"{where}: dtype {array.dtype} has lost its name; write FP8 tensors as .safetensors")
    return array


def _open_npz(path: Path) -> Dump:
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a readable .npz file ({error})") from None

    def load(name):
        try:
            return _named(archive[name], f"{path}: {name}")
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise ValueError(f"{path}: {name} is broken ({error})") from None

    return Dump({name: (lambda n=name: load(n)) for name in archive.files}, str(path), list(archive.files))


def _open_npy(path: Path) -> Dump:
    def load():
        try:
            return _named(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
        except (EOFError, OSError) as error:
            raise ValueError(f"{path}: not a readable .npy file ({error})") from None

    return Dump({path.stem: load}, str(path))


def _open_torch(path: Path) -> Dump:
    from refmodel.golden.torch_files import load_torch

    tensors = load_torch(path)
    return from_arrays(tensors, str(path))


def _open_folder(path: Path) -> Dump:
    from refmodel.golden.sglang_dumper import is_dumper_folder, open_dumper_folder

    if is_dumper_folder(path):
        return open_dumper_folder(path)
    loaders: dict = {}
    for file in sorted(path.iterdir()):
        if file.suffix not in (".safetensors", ".npz", ".npy", ".pt", ".pth"):
            continue
        part = _open_path(file)
        for name in part:
            if name in loaders:
                raise ValueError(f"{path}: tensor {name!r} stands in two files, one of them {file.name}")
            loaders[name] = lambda p=part, n=name: p[n]
    if not loaders:
        raise ValueError(f"{path}: folder holds no tensor file; readable are {READABLE}")
    return Dump(loaders, str(path))


def release(array: np.ndarray) -> None:
    """Give the pages of a memory-mapped array back, so that a long read does not count as memory in use.

    Does nothing for arrays in ordinary memory and where the platform cannot.
    """
    base = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    if base is not None and hasattr(base, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)

"""Read folders that SGLang's dumper wrote: one `.pt` file per tensor and rank, described by its file name.

A name is `key=value` pairs joined by three underscores, for example
`step=0___rank=1___dump_index=17___name=hidden_states___layer_id=3.pt`; the file holds {"value": ..., "meta": ...}
(sglang: python/sglang/srt/debug_utils/dumper.py).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from refmodel.golden.dump import Dump
from refmodel.golden.torch_files import load_object, to_numpy

SUFFIXES = (".pt", ".npy")
_PLAIN = ("name", "step", "rank", "dump_index", "layer_id", "recompute_status")


class DumpedFile(NamedTuple):
    """One file of the folder: its path and the pairs of its name."""

    path: Path
    tags: dict[str, str]

    def tag(self, key: str) -> int:
        """A numeric tag, 0 where it is absent."""
        text = self.tags.get(key, "0")
        if not text.lstrip("-").isdigit():
            raise ValueError(f"{self.path}: {key}={text!r} in the file name; an integer is required")
        return int(text)


def parse_name(path: Path) -> DumpedFile | None:
    """The pairs in the file's name, or None if the dumper did not name it."""
    if path.suffix not in SUFFIXES:
        return None
    pairs = [part.partition("=") for part in path.stem.split("___")]
    tags = {key: value for key, sign, value in pairs if sign}
    return DumpedFile(path, tags) if "name" in tags and len(tags) == len(pairs) else None


def is_dumper_folder(path: Path) -> bool:
    """Whether the folder holds at least one file that the dumper named."""
    return any(parse_name(file) is not None for file in path.iterdir())


def tensor_name(file: DumpedFile, steps: int, ranks: int) -> str:
    """`step.S.rank.R.layers.L.NAME`, without `step.0.` and without the rank where there is only one."""
    name = file.tags["name"].removeprefix("non_intrusive__")
    rest = sorted((k, v) for k, v in file.tags.items() if k not in _PLAIN and not k.endswith(("_rank", "_size")))
    name += "".join(f".{key}.{value}" for key, value in rest)
    if "layer_id" in file.tags and not name.startswith(("layers.", "model.layers.")):
        name = f"layers.{file.tag('layer_id')}.{name}"
    if ranks > 1:
        name = f"rank.{file.tag('rank')}.{name}"
    return f"step.{file.tag('step')}.{name}" if steps > 1 and file.tag("step") else name


def _load(file: DumpedFile) -> np.ndarray:
    if file.path.suffix == ".npy":
        return np.load(file.path, allow_pickle=False)
    content = load_object(file.path)
    value = content.get("value") if isinstance(content, dict) else content
    if not hasattr(value, "detach"):
        raise ValueError(f"{file.path}: holds a {type(value).__name__}; a tensor is required")
    return to_numpy(value)


def open_dumper_folder(path: Path) -> Dump:
    """All tensors of the folder, in the order in which they were dumped. A name that occurs twice within one step
    and rank gets `.call.N` from its second occurrence on.
    """
    files = [f for f in map(parse_name, sorted(path.iterdir())) if f is not None]
    files.sort(key=lambda f: (f.tag("step"), f.tag("dump_index"), f.tag("rank")))
    steps, ranks = len({f.tag("step") for f in files}), len({f.tag("rank") for f in files})
    loaders: dict = {}
    for file in files:
        name = base = tensor_name(file, steps, ranks)
        call = 1
        while name in loaders:
            name, call = f"{base}.call.{call}", call + 1
        loaders[name] = lambda f=file: _load(f)
    return Dump(loaders, str(path), list(loaders))

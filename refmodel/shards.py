"""The files of a checkpoint directory as one set of tensors under canonical names; headers only."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refmodel.names import canonical_name, layer_of
from refmodel.tensor_file import TensorFile
from refmodel.tensor_header import DTYPES, shorten

INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """Where a tensor is: its file, its name there, dtype (safetensors name) and shape, the layer that it belongs to
    (None outside the layers), and which part of what the file holds it is."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int | None
    part: tuple = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self) -> np.ndarray:
        """A read-only view of the mapped file."""
        return self.file[self.name][self.part] if self.part else self.file[self.name]


def read_shards(directory, notices: list[str]) -> dict[str, Stored]:
    """Every tensor of the directory by canonical name. `notices` gains what had to be assumed.

    Raises ValueError for a missing or damaged file, and for an index that does not describe its files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: not a directory; a checkpoint is a directory with config.json and .safetensors")
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    index = directory / INDEX
    weight_map = _read_index(index) if index.is_file() else None
    if weight_map is None:
        names = present
        if len(names) > 1:
            notices.append(f"no {INDEX}: all {len(names)} .safetensors files are read as shards")
    else:
        names = sorted(set(weight_map.values()))
        unlisted = sorted(set(present) - set(names))
        if unlisted:
            notices.append(f"{INDEX} does not list {', '.join(unlisted[:3])}: not read")
    if not names:
        raise ValueError(f"{directory}: no .safetensors file")
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(f"{index}: lists {len(missing)} files that do not exist, first {missing[0]!r}")
    files = {name: TensorFile(directory / name) for name in names}
    if weight_map is not None:
        _check_index(index, weight_map, files, notices)
    return _collect(files, weight_map)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        good = all(isinstance(name, str) for name in weight_map.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a JSON object with a weight_map: {shorten(error)}") from None
    if not good or any("/" in name or "\\" in name for name in weight_map.values()):
        raise ValueError(f"{path}: weight_map must map tensor names to file names in the same directory")
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], files: dict[str, TensorFile], notices: list[str]) -> None:
    absent = [name for name, shard in weight_map.items() if name not in files[shard]]
    if absent:
        name = absent[0]
        elsewhere = [shard for shard, file in files.items() if name in file]
        hint = f"; it is in {elsewhere[0]}" if elsewhere else ""
        raise ValueError(
            f"{path}: places {len(absent)} tensors in files that do not hold them, "
            f"first {shorten(name)} in {weight_map[name]}{hint}"
        )
    extra = [name for file in files.values() for name in file if name not in weight_map]
    if extra:
        notices.append(f"{INDEX} does not list {len(extra)} tensors of its shards, first {extra[0]}: read all the same")


def _collect(files: dict[str, TensorFile], weight_map: dict[str, str] | None) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for shard, file in files.items():
        for name in file:
            if weight_map is not None and weight_map.get(name, shard) != shard:
                continue  # a stale copy: the index names another shard
            full = canonical_name(name)
            for canonical, entry in _unfuse(full, Stored(file, name, *file.info(name), layer_of(full))):
                if canonical in tensors:
                    other = tensors[canonical]
                    raise ValueError(
                        f"{file.path}: tensor {shorten(name)} is {canonical}, which {other.file.path.name} "
                        f"holds as {shorten(other.name)}: one tensor, one place (is this one rank of a split model?)"
                    )
                tensors[canonical] = entry
    return tensors


def _unfuse(canonical: str, stored: Stored):
    """The experts of a layer in one tensor, as transformers holds them in memory, taken apart.

    `mlp.experts.gate_up_proj` [E, 2 * I, D], gate first, and `mlp.experts.down_proj` [E, D, I].
    """
    if len(stored.shape) != 3 or not canonical.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
        yield canonical, stored
        return
    stem, _, last = canonical.rpartition(".")
    experts, rows, columns = stored.shape
    for expert in range(experts):
        if last == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", stored._replace(shape=(rows, columns), part=(expert,))
            continue
        half = rows // 2
        for part, rows_of in (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half))):
            yield f"{stem}.{expert}.{part}.weight", stored._replace(shape=(half, columns), part=(expert, rows_of))

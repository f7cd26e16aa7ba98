"""Routing tables and expert loads that an engine recorded.

Read are: `.npy`, `.npz` and `.safetensors` (one array [tokens, layers, top-k] or [tokens, top-k], or one [tokens,
top-k] per layer, whose names hold the layer's number; vLLM's int16 `routed_experts` is of the first kind, the
tensors that `record()` names of the second), `.json` and `.jsonl` (SGLang answers with base64 int32
`meta_info.routed_experts`), and `.pt` (records of SGLang's expert-distribution recorder: `per_token` routing of one
rank per file, `stat` loads).
"""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from parallel.dispatch.torch_file import load_torch
from refmodel.tensor_file import load_tensors

UNWRITTEN = ("refuse", "skip")


class Recorded(NamedTuple):
    """ids int32 [L, T, K], -1 for none; rank int64 [T] of each token where the file says it, else None;
    phy2log int64 [L, S] where the file holds the placement, else None; notices: what was left out, and why."""

    ids: np.ndarray
    rank: np.ndarray | None
    phy2log: np.ndarray | None
    notices: tuple[str, ...]

    def tables(self, layer: int, num_ranks: int) -> list[np.ndarray]:
        """One layer's tokens by rank: as recorded, or cut into equal consecutive parts."""
        if self.rank is None:
            return np.array_split(self.ids[layer], num_ranks)
        if self.rank.max(initial=0) >= num_ranks:
            raise ValueError(f"tokens were recorded on rank {self.rank.max()}, but there are {num_ranks} ranks")
        return [self.ids[layer][self.rank == rank] for rank in range(num_ranks)]


def load_routing(
    paths,
    num_experts: int | None = None,
    layers: int | None = None,
    top_k: int | None = None,
    unwritten: str = "refuse",
) -> Recorded:
    """Routing of all files together, tokens in the order of the files.

    num_experts: ids of the file (logical or physical, as recorded) must be below; None takes any. layers, top_k:
    needed for base64 answers, which carry no shape. unwritten: rows that the engine never wrote (every slot the
    same, as left by buffers filled with 0, -1 or 255; single slots of -1, or 255 where there are fewer experts):
    `refuse`, or `skip` them
    (ids become -1, layers without any row are left out).
    Raises ValueError for unknown formats, shapes that do not fit, ids out of range and unwritten rows."""
    if unwritten not in UNWRITTEN:
        raise ValueError(f"unwritten = {unwritten!r}: must be one of {', '.join(UNWRITTEN)}")
    paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not paths:
        raise ValueError("no routing file was given")
    blocks, ranks, placements = [], [], []
    for path in paths:
        for block, rank, placement in _read(path, layers, top_k):
            _check_shape(path, block, blocks[0].shape if blocks else None)
            blocks.append(block)
            ranks.append(rank)
            placements.append(placement)
    if not blocks:
        raise ValueError(f"{paths[0]} holds no routing")
    ids = np.concatenate(blocks)  # [T, L, K]
    ids, notices = _settle_unwritten(paths[0], ids, num_experts, unwritten)
    if num_experts is not None and ids.max(initial=-1) >= num_experts:
        token, layer, slot = np.argwhere(ids >= num_experts)[0]
        raise ValueError(
            f"{paths[0]}: token {token}, layer {layer}, slot {slot}: id {ids[token, layer, slot]} is not below "
            f"{num_experts} experts: are these physical ids, or is the number of experts wrong?"
        )
    rank = None if None in ranks else np.repeat(ranks, [len(block) for block in blocks])
    return Recorded(ids.transpose(1, 0, 2), rank, placements[-1], notices)


def load_expert_loads(path) -> np.ndarray:
    """Loads of logical experts, int64 or float64 [L, E]: a table in `.npy`, `.npz`, `.safetensors` or `.csv`, or the
    `stat` record of SGLang's recorder (steps added up).

    Raises ValueError for files that hold no such table."""
    path = Path(path)
    if path.suffix == ".csv":
        table = np.atleast_2d(np.loadtxt(path, delimiter=",", comments="#"))
    elif path.suffix == ".pt":
        record = load_torch(path)
        if not isinstance(record, dict) or "logical_count" not in record:
            raise ValueError(f"{path} holds no logical_count: it is not a `stat` record of the recorder")
        table = record["logical_count"].astype(np.int64)
    else:
        arrays = load_arrays(path)
        if len(arrays) != 1:
            raise ValueError(f"{path} holds {len(arrays)} arrays ({', '.join(arrays)}): one table of loads is needed")
        table = next(iter(arrays.values()))
    if table.ndim == 3:  # [steps, layers, experts]
        table = table.sum(axis=0)
    if table.ndim == 1:
        table = table[None]
    if table.ndim != 2 or table.dtype.kind not in "iuf":
        raise ValueError(
            f"{path}: loads of shape {list(table.shape)}, {table.dtype}: must be numbers [layers, experts]"
        )
    return table


def _read(path: Path, layers, top_k):
    """(block [T, L, K], rank or None, phy2log or None) of one file."""
    if path.suffix in (".json", ".jsonl"):
        return [(block, None, None) for block in _base64_blocks(path, layers, top_k)]
    if path.suffix == ".pt":
        return _recorder_blocks(path)
    arrays = load_arrays(path)
    if len(arrays) == 1:
        (array,) = arrays.values()
        return [(array[:, None] if array.ndim == 2 else array, None, None)]
    named = {name: array for name, array in arrays.items() if name.endswith("topk_idx")} or arrays
    numbered = sorted((int(found[0]), name) for name in named if (found := re.findall(r"\d+", name)))
    if len(numbered) != len(named):
        raise ValueError(f"{path}: the names of several arrays must hold their layer's number: {', '.join(named)}")
    shapes = {named[name].shape for _, name in numbered}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"{path}: layers of shapes {sorted(shapes)}: must all be the same [tokens, top-k]")
    return [(np.stack([named[name] for _, name in numbered], axis=1), None, None)]


def load_arrays(path) -> dict[str, np.ndarray]:
    """Every array of a `.npy` (under the file's name), `.npz` or `.safetensors` file.

    Raises ValueError for other kinds of files and for damaged ones."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return {path.stem: np.load(path, allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except (EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".safetensors":
        return load_tensors(path)
    raise ValueError(f"{path}: unknown kind of file; .npy, .npz, .safetensors, .json, .jsonl and .pt are read")


def _base64_blocks(path: Path, layers, top_k):
    if not layers or not top_k:
        raise ValueError(
            f"{path}: base64 routed_experts carry no shape: say how many layers and which top-k were recorded"
        )
    text = path.read_text()
    answers = (
        [json.loads(line) for line in text.splitlines() if line.strip()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )
    blocks = []
    for number, answer in enumerate(answers if isinstance(answers, list) else [answers]):
        encoded = answer.get("meta_info", {}).get("routed_experts") if isinstance(answer, dict) else None
        if not isinstance(encoded, str):
            raise ValueError(f"{path}: answer {number} has no meta_info.routed_experts")
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        if flat.size % (layers * top_k):
            raise ValueError(
                f"{path}: answer {number} holds {flat.size} ids, no multiple of {layers} layers x top-{top_k}"
            )
        blocks.append(flat.reshape(-1, layers, top_k))
    return blocks


def _recorder_blocks(path: Path):
    record = load_torch(path)
    records = record.get("records", ()) if isinstance(record, dict) else ()
    blocks = [(r["topk_ids_of_layer"].transpose(1, 0, 2), r["rank"]) for r in records if "topk_ids_of_layer" in r]
    if not blocks:
        raise ValueError(f"{path} holds no topk_ids_of_layer: the recorder must run in its per_token mode")
    placement = record.get("last_physical_to_logical_map")
    return [(block, rank, placement) for block, rank in blocks]


def _check_shape(path: Path, block: np.ndarray, first) -> None:
    if block.ndim != 3 or block.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: routing of shape {list(block.shape)}, {block.dtype}: must be integers [tokens, layers, top-k]"
        )
    if first is not None and block.shape[1:] != first[1:]:
        raise ValueError(f"{path}: {list(block.shape[1:])} layers and top-k differ from {list(first[1:])} before")


def _settle_unwritten(path: Path, ids: np.ndarray, num_experts, unwritten: str):
    """(ids int32 with -1 where nothing was written and without layers that nobody wrote, notices)."""
    missing = ids < 0 if ids.dtype.kind == "i" else np.zeros(ids.shape, bool)
    if num_experts is not None and num_experts <= 255:
        missing = missing | (ids == 255)
    if ids.shape[2] > 1:
        missing = missing | (ids == ids[:, :, :1]).all(axis=2, keepdims=True)
    ids = ids.astype(np.int32)
    if not missing.any():
        return ids, ()
    token, layer, _ = np.argwhere(missing)[0]
    rows = missing.any(axis=2)
    what = (
        f"{rows.sum()} of {rows.size} (token, layer) rows hold slots that were never written, "
        f"first token {token}, layer {layer}: {ids[token, layer].tolist()}"
    )
    if unwritten == "refuse":
        raise ValueError(f"{path}: {what}; they can be skipped (unwritten 'skip')")
    ids[missing] = -1
    written = ~missing.all(axis=(0, 2))
    notices = [f"{what}: skipped"]
    if not written.all():
        notices.append(f"layers {', '.join(map(str, np.flatnonzero(~written)))} were never written: left out")
    return ids[:, written], tuple(notices)

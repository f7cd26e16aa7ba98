"""Recording of named tensors.

Every tensor that a stage names passes through `Scope.emit`. Outside of `record()` that costs a comparison; inside,
the array itself is kept (made read-only, never copied). Names read `layers.3.attn_core.router.topk_idx`; the first
prefill has no prefix, later steps start with `step.S.`, and `rank.R.` marks buffers that belong to a rank. Rows are in
global token order: where ranks or micro-batches hold parts of a tensor, the parts are joined by their row numbers.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

_active: ContextVar["Recording | None"] = ContextVar("recording", default=None)


class _Part(NamedTuple):
    rows: np.ndarray | None  # global row numbers of the first axis; None: the whole tensor
    array: np.ndarray


class Recording(Mapping):
    """name -> array, in execution order. Parts are joined when a tensor is first read."""

    def __init__(self, hook=None):
        self._parts: dict[str, list[_Part]] = {}
        self._joined: dict[str, np.ndarray] = {}
        self._hook = hook

    def add(self, name: str, array: np.ndarray, rows: np.ndarray | None):
        """Keep one part of a tensor, read-only from now on."""
        array.flags.writeable = False
        self._parts.setdefault(name, []).append(_Part(rows, array))
        if self._hook is not None:
            self._hook(name, array)

    def parts(self) -> dict[str, list]:
        """What was recorded, unjoined: name -> parts, each rows and array."""
        return {name: list(parts) for name, parts in self._parts.items()}

    def join(self, others: list[dict[str, list]]):
        """Add the parts that other processes recorded."""
        for other in others:
            for name, parts in other.items():
                self._parts.setdefault(name, []).extend(parts)
        self._joined.clear()

    def rows(self, name: str) -> np.ndarray | None:
        """Global row numbers of the first axis, ascending, as far as they were recorded; None: the whole tensor."""
        rows = [part.rows for part in self._parts[name]]
        return None if any(part is None for part in rows) else np.sort(np.concatenate(rows))

    def __getitem__(self, name):
        if name not in self._joined:
            self._joined[name] = _join(name, self._parts[name])
        return self._joined[name]

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)


def _join(name, parts):
    if len(parts) == 1:
        rows = parts[0].rows
        if rows is None or np.array_equal(rows, np.arange(len(rows))):
            return parts[0].array
    if any(part.rows is None for part in parts):
        raise ValueError(f"{name} was recorded {len(parts)} times in one step: a name stands for one tensor")
    rows = np.concatenate([part.rows for part in parts])
    array = np.concatenate([part.array for part in parts])
    if len(np.unique(rows)) != len(rows):
        raise ValueError(f"{name}: a row was recorded twice in one step")
    order = np.argsort(rows, kind="stable")
    joined = array[order]
    joined.flags.writeable = False
    return joined


@contextmanager
def record(hook=None):
    """Record every named tensor of what runs inside: `with record() as tensors: model.forward(ids)`.

    `hook(name, array)` is called as each tensor (or a rank's part of it) is made.
    """
    recording = Recording(hook)
    token = _active.set(recording)
    try:
        yield recording
    finally:
        _active.reset(token)


class Scope(NamedTuple):
    """Where a tensor is made: a name prefix, and the global numbers of the token rows at hand (None: all of them)."""

    prefix: str = ""
    rows: np.ndarray | None = None

    def emit(self, name: str, array: np.ndarray):
        """Name a tensor whose first axis is the token rows."""
        recording = _active.get()
        if recording is not None:
            recording.add(self.prefix + name, array, self.rows)

    def under(self, name: str) -> "Scope":
        """The scope one name further in."""
        return Scope(f"{self.prefix}{name}.", self.rows)


class _Unnamed(Scope):
    """A scope for a run that nobody records: making names would be in vain."""

    def emit(self, name, array):
        pass

    def under(self, name):
        return self


#: where tensors are made while no recording is on
UNNAMED = _Unnamed()


def recording() -> bool:
    """Whether a recording is on: buffers must not be reused then."""
    return _active.get() is not None

"""Chain replication over storage targets, emulated message by message: write all, read any.

The rules are those of CRAQ as 3FS uses it (deepseek-ai/3FS docs/design_notes.md): a write goes from the head of the
chain to its tail; each target holds the new version beside the committed one; the tail commits first, then each target
before it, and the client hears of it when the head has committed. A read at any target returns its committed version;
where a newer one is pending there, the tail decides. A target that returns joins behind the tail, copies what it lacks
and serves only then. As long as one target that served last survives, no acknowledged block is lost.
"""

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """SERVING holds every acknowledged block; SYNCING is copying them; OFFLINE is gone; LAST may hold the only copy."""

    SERVING = "serving"
    SYNCING = "syncing"
    OFFLINE = "offline"
    LAST = "last to serve"


class Unavailable(ValueError):
    """The chain has no serving target, or the one asked for does not serve."""


@dataclass
class Target:
    """One storage target: `committed` key -> (version, data), `pending` key -> {version: data}."""

    state: State = State.SERVING
    committed: dict = field(default_factory=dict)
    pending: dict = field(default_factory=dict)

    def version(self, key) -> int:
        """Version of the committed block, 0 where there is none."""
        return self.committed.get(key, (0, None))[0]

    def hold(self, key, version: int, data: bytes) -> None:
        """Keep a version beside the committed one, unless that is as new."""
        if version > self.version(key):
            self.pending.setdefault(key, {})[version] = data

    def commit(self, key, version: int) -> None:
        """Make a pending version the committed one, unless that is newer, and forget the older ones."""
        held = self.pending.get(key, {})
        if version in held and version > self.version(key):  # a copy from the tail may have overtaken it
            self.committed[key] = (version, held[version])
        newer = {v: data for v, data in held.items() if v > self.version(key)}
        self.pending.pop(key, None)
        if newer:
            self.pending[key] = newer


@dataclass
class Write:
    """A write on its way down the chain, then up; `acknowledged` once the head has committed."""

    key: object
    version: int
    data: bytes
    chain_version: int
    position: int = 0
    upwards: bool = False
    acknowledged: bool = False


class Chain:
    """`num_targets` targets in order, head first. Every method is one event; nothing happens between them."""

    def __init__(self, num_targets: int):
        if num_targets < 1:
            raise ValueError(f"num_targets = {num_targets}: a chain has at least one target")
        self.targets = [Target() for _ in range(num_targets)]
        self.order = list(range(num_targets))  # of the targets that serve or sync, head first
        self.chain_version = 1
        self._next_version = 1

    @property
    def serving(self) -> list[int]:
        """Targets that serve, head first."""
        return [t for t in self.order if self.targets[t].state is State.SERVING]

    def start_write(self, key, data: bytes) -> Write:
        """A write of `data` under `key`; it moves by `step`. Raises Unavailable without a serving target."""
        self._need_serving()
        self._next_version += 1
        return Write(key, self._next_version, bytes(data), self.chain_version)

    def step(self, write: Write) -> bool:
        """Deliver the next message of the write; True once it is acknowledged.

        A write that met another chain than it began with starts again at the head, with its version: what it left is
        overwritten by the same bytes. Raises Unavailable without a serving target (the client tries again later).
        """
        if write.acknowledged:
            return True
        self._need_serving()
        if write.chain_version != self.chain_version:
            write.chain_version, write.position, write.upwards = self.chain_version, 0, False
        target = self.targets[self.order[write.position]]
        if not write.upwards:
            target.hold(write.key, write.version, write.data)
            if write.position + 1 < len(self.order):
                write.position += 1
                return False
            write.upwards = True
        target.commit(write.key, write.version)
        write.acknowledged = write.position == 0
        write.position -= 1
        return write.acknowledged

    def write(self, key, data: bytes) -> None:
        """A write from first message to acknowledgement, undisturbed."""
        write = self.start_write(key, data)
        while not self.step(write):
            pass

    def read(self, key, target: int) -> bytes | None:
        """The block as `target` may show it, None if there is none. Raises Unavailable if the target does not serve."""
        if self.targets[target].state is not State.SERVING:
            raise Unavailable(f"target {target} is {self.targets[target].state.value}; read from one of {self.serving}")
        source = self.targets[target]
        if key in source.pending:  # a newer version is under way: only the tail knows whether it is committed
            source = self.targets[self.serving[-1]]
        return source.committed.get(key, (0, None))[1]

    def fail(self, target: int, wipe: bool = False) -> None:
        """The target stops answering; `wipe` loses its disk too. Every chain change has a new chain version."""
        lost = self.targets[target]
        if wipe:
            lost.committed.clear()
            lost.pending.clear()
        if lost.state in (State.OFFLINE, State.LAST):
            lost.state = State.OFFLINE if wipe else lost.state
            return
        was_only = self.serving == [target]
        self.order.remove(target)
        lost.state = State.LAST if was_only and not wipe else State.OFFLINE
        if was_only:
            for other in self.order:  # they were copying from it and are incomplete
                self.targets[other].state = State.OFFLINE
            self.order.clear()
        elif self.serving:
            self._commit_pending(self.targets[self.serving[-1]])
        self.chain_version += 1

    def restore(self, target: int) -> None:
        """The target answers again: it serves at once if it was the last to serve, else it syncs behind the tail.

        Raises Unavailable while no target serves and this was not the last: it may lack acknowledged blocks.
        """
        back = self.targets[target]
        if back.state in (State.SERVING, State.SYNCING):
            return
        if back.state is State.LAST:
            self._commit_pending(back)
            back.state = State.SERVING
        else:
            if not self.serving:
                last = [t for t, other in enumerate(self.targets) if other.state is State.LAST]
                raise Unavailable(f"target {target} may lack blocks: the last to serve, {last}, must return first")
            back.pending.clear()
            back.state = State.SYNCING
        self.order.append(target)
        self.chain_version += 1

    def sync_step(self, target: int) -> bool:
        """Copy one block that the tail has and the target lacks; with none left, serve. True once it serves."""
        back = self.targets[target]
        if back.state is not State.SYNCING:
            return back.state is State.SERVING
        tail = self.targets[self.serving[-1]]
        for key in [key for key in back.committed if key not in tail.committed]:
            del back.committed[key]  # never acknowledged here: the chain that knew it is gone
        for key, block in tail.committed.items():
            if back.committed.get(key) != block:
                back.committed[key] = block
                return False
        # Behind the tail, so all that is pending there must be pending or committed here: the tail's word is final.
        back.state = State.SERVING
        self.chain_version += 1
        return True

    def _commit_pending(self, target: Target) -> None:
        """A target that became the tail has seen what every target before it has: it may commit."""
        for key, held in list(target.pending.items()):
            target.commit(key, max(held))

    def _need_serving(self) -> None:
        if not self.serving:
            raise Unavailable("no target of the chain serves; the last one that did must return first")

"""A prefix cache in a directory: the role that 3FS has in the published system, on any mounted file system.

Blocks are named by a hash chain (keys.py) and hold whatever bytes the caller gives. A block is written beside, made
durable, then renamed under a lock: a reader never sees a part of one. Its parent is there when it appears, and eviction
takes leaves first, so a hit is always a run of blocks from the start of the prompt. Several processes may share one
directory. Trouble of any kind (a full disk, a flipped bit, a vanished file) is a miss, never an error.
"""

import fcntl
import os
import struct
import uuid
import warnings
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parallel.serving.block_file import CorruptBlock, decode_block, encode_block, read_all, sync_directory, write_all
from parallel.serving.keys import Namespace, block_keys, usable_blocks
from parallel.serving.store_index import block_path, choose_victims, scan

_USAGE = struct.Struct("<Q")


class StoreWarning(RuntimeWarning):
    """The store could not keep or return a block; the caller sees a miss."""


class Prefix(NamedTuple):
    """`num_tokens` of a prompt that were found, always whole blocks, and the payload of each block."""

    num_tokens: int
    payloads: list[bytes]


@dataclass
class StoreStats:
    """What one KVStore did: operations and bytes on the file system, and blocks by outcome."""

    read_ops: int = 0
    read_bytes: int = 0
    ahead_ops: int = 0  # blocks announced to the kernel before they were read
    write_ops: int = 0
    write_bytes: int = 0
    syncs: int = 0
    hit_blocks: int = 0
    published: int = 0
    already_there: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    refused: int = 0  # the parent was gone, or nothing could be evicted to make room


class KVStore:
    """Blocks of one namespace in the directory `path`, which other namespaces and processes may use as well.

    `max_bytes` bounds the directory's blocks of all namespaces together (None: unbounded); `read_ahead` blocks are
    announced to the kernel beyond the one being read. Raises ValueError for sizes out of range, OSError if the
    directory cannot be made or its file system has no advisory locks.
    """

    def __init__(self, path, namespace: Namespace, max_bytes: int | None = None, read_ahead: int = 4):
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes = {max_bytes}: a bounded store holds at least one byte (None = unbounded)")
        if read_ahead < 0:
            raise ValueError(f"read_ahead = {read_ahead}: it counts blocks")
        self.path, self.namespace = Path(path), namespace
        self.max_bytes, self.read_ahead = max_bytes, read_ahead
        self.stats = StoreStats()
        self._blocks, self._beside = self.path / "blocks", self.path / "beside"
        self._corrupt: set[bytes] = set()
        for directory in (self._blocks, self._beside):
            directory.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock:
            self._drop_abandoned()
            _set_usage(lock, sum(entry.size for entry in scan(self._blocks)))

    def lookup(self, tokens) -> int:
        """How many tokens of the prompt `tokens` [n] are stored, without reading them; at most n - 1."""
        found = 0
        for path, _, _, _ in self._chain(tokens)[: usable_blocks(self.namespace, len(tokens))]:
            if not path.exists():
                break
            found += 1
        return found * self.namespace.block_tokens

    def read(self, tokens) -> Prefix:
        """The longest stored run of blocks from the start of the prompt `tokens` [n], at most n - 1 tokens of it.

        Every block is checked against its checksum, its tokens and its parent; the run ends before one that fails.
        """
        chain = self._chain(tokens)[: usable_blocks(self.namespace, len(tokens))]
        payloads, opened, following = [], deque(), iter(chain)
        try:
            for path, key, parent, block in chain:
                self._announce(opened, following)
                fd = opened.popleft() if opened else None
                payload = None if fd is None else self._load(fd, path, key, parent, block)
                if payload is None:
                    break
                payloads.append(payload)
        finally:
            for fd in opened:
                if fd is not None:
                    os.close(fd)
        for path, _, _, _ in reversed(chain[: len(payloads)]):  # a parent is never older than its child
            with suppress(OSError):
                os.utime(path)
        self.stats.hit_blocks += len(payloads)
        return Prefix(len(payloads) * self.namespace.block_tokens, payloads)

    def write(self, tokens, payloads, first_block: int = 0) -> int:
        """Store the blocks `first_block`, `first_block` + 1, ... of `tokens` [n]; returns how many are now new.

        Only full blocks, whose lookahead is known, can be stored. Blocks that are there already are skipped. What
        cannot be written ends the run with a warning. Raises ValueError for more payloads than full blocks.
        """
        chain = self._chain(tokens)
        if first_block < 0 or first_block + len(payloads) > len(chain):
            raise ValueError(
                f"blocks {first_block} .. {first_block + len(payloads) - 1} of {len(tokens)} tokens: there are "
                f"{len(chain)} full blocks of {self.namespace.block_tokens} (lookahead {self.namespace.lookahead})"
            )
        new = 0
        for i, payload in enumerate(payloads, first_block):
            path, key, parent, block = chain[i]
            if key not in self._corrupt and path.exists():
                self.stats.already_there += 1
                continue
            try:
                before = chain[i - 1] if i else None
                if not self._publish(path, before, encode_block(key, parent, block, payload)):
                    break
            except OSError as error:
                self.stats.failed_writes += 1
                warnings.warn(f"KV block not stored: {error}; later requests will miss it", StoreWarning, stacklevel=2)
                break
            self._corrupt.discard(key)
            new += 1
        return new

    def used_bytes(self) -> int:
        """Bytes of the blocks of all namespaces in the directory, counted now."""
        return sum(entry.size for entry in scan(self._blocks))

    def _chain(self, tokens) -> list[tuple]:
        """(path, key, parent, tokens with lookahead) of each full block."""
        size, ahead = self.namespace.block_tokens, self.namespace.lookahead
        chain, parent = [], self.namespace.root()
        for i, key in enumerate(block_keys(self.namespace, tokens)):
            block = tokens[i * size : (i + 1) * size + ahead]
            chain.append((block_path(self._blocks, key, parent), key, parent, block))
            parent = key
        return chain

    def _announce(self, opened: deque, following) -> None:
        """Keep `read_ahead` blocks open beyond the next; an open file survives eviction until it is closed."""
        while len(opened) <= self.read_ahead and (not opened or opened[-1] is not None):
            step = next(following, None)
            if step is None:
                return
            try:
                fd = os.open(step[0], os.O_RDONLY)
            except FileNotFoundError:
                fd = None
            except OSError as error:
                fd = None
                self._failed_read(error)
            opened.append(fd)
            if fd is not None and len(opened) > 1 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
                self.stats.ahead_ops += 1

    def _load(self, fd: int, path: Path, key: bytes, parent: bytes, block) -> bytes | None:
        """Read and check one open block; None where it cannot be trusted."""
        try:
            data = read_all(fd)
            self.stats.read_ops += 1
            self.stats.read_bytes += len(data)
            return decode_block(data, key, parent, block)
        except CorruptBlock as error:
            self.stats.corrupt += 1
            self._corrupt.add(key)  # so that the next write replaces it
            warnings.warn(f"{path.name}: {error}; treated as a miss", StoreWarning, stacklevel=3)
        except OSError as error:
            self._failed_read(error)
        finally:
            os.close(fd)
        return None

    def _failed_read(self, error: OSError) -> None:
        self.stats.failed_reads += 1
        warnings.warn(f"KV block not read: {error}; treated as a miss", StoreWarning, stacklevel=4)

    def _publish(self, path: Path, before: tuple | None, data: bytes) -> bool:
        """Write beside, make durable, then rename; False where the block `before` is gone or there is no room."""
        beside = self._beside / uuid.uuid4().hex
        with self._locked():  # so that no other process takes the file for an abandoned one before it is locked
            fd = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            write_all(fd, data)
            self.stats.write_ops += 1
            self.stats.write_bytes += len(data)
            self.stats.syncs += 1
            with self._locked() as lock:
                alone = before is not None and not before[0].exists()
                if alone or not self._make_room(lock, len(data), keep=before[1].hex() if before else ""):
                    self.stats.refused += 1
                    beside.unlink()
                    return False
                self._move_into_place(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.stats.published += 1
        return True

    def _move_into_place(self, beside: Path, path: Path) -> None:
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            sync_directory(self._blocks)
            self.stats.syncs += 1
        os.rename(beside, path)
        sync_directory(path.parent)
        self.stats.syncs += 1

    def _make_room(self, lock: int, size: int, keep: str) -> bool:
        """Count `size` more bytes, evicting where the bound asks for it; call under the lock.

        The count is raised before the rename: a crash between the two leaves it too high, which the next scan mends.
        """
        used = _USAGE.unpack(os.pread(lock, _USAGE.size, 0))[0]
        if self.max_bytes is not None and used + size > self.max_bytes:
            self._drop_abandoned()
            entries = scan(self._blocks)
            used = sum(entry.size for entry in entries)
            excess = used + size - self.max_bytes
            if excess > 0:
                spare = self.max_bytes // 16  # a little more, so that not every write has to scan
                for victim in choose_victims(entries, excess + spare, keep):
                    victim.path.unlink(missing_ok=True)
                    used -= victim.size
                    self.stats.evicted += 1
                    self.stats.evicted_bytes += victim.size
            if used + size > self.max_bytes:
                _set_usage(lock, used)
                return False
        _set_usage(lock, used + size)
        return True

    def _drop_abandoned(self) -> None:
        """Remove what killed writers left beside; a live writer holds a lock on its file."""
        for path in self._beside.iterdir():
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(fd)

    @contextmanager
    def _locked(self):
        """The directory's lock, which a killed process gives back by itself; yields the open lock file."""
        fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_size != _USAGE.size:
                _set_usage(fd, 0)
            yield fd
        finally:
            os.close(fd)


def _set_usage(lock: int, used: int) -> None:
    os.pwrite(lock, _USAGE.pack(used), 0)

"""What lies in a store's directory: who is whose parent, how much there is, and which blocks go first."""

import heapq
import os
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".blk"


class Entry(NamedTuple):
    """One block on disk. `parent` is the hexadecimal name of the block before it, or of its namespace's root."""

    key: str
    parent: str
    size: int
    used_ns: int
    path: Path


def block_path(blocks: Path, key: bytes, parent: bytes) -> Path:
    """Both names are in the file name, so that eviction sees the tree without opening a file."""
    return blocks / key.hex()[:2] / f"{key.hex()}.{parent.hex()}{SUFFIX}"


def scan(blocks: Path) -> list[Entry]:
    """Every block below the directory; files that vanish meanwhile are left out."""
    entries = []
    for shelf in _listing(blocks):
        for item in _listing(shelf.path):
            if not item.name.endswith(SUFFIX):
                continue
            key, parent = item.name.removesuffix(SUFFIX).split(".")
            try:
                stat = item.stat()
            except FileNotFoundError:
                continue
            entries.append(Entry(key, parent, stat.st_size, stat.st_mtime_ns, Path(item.path)))
    return entries


def choose_victims(entries: list[Entry], bytes_to_free: int, keep: str) -> list[Entry]:
    """Blocks to remove, leaves first and among them the least recently used, until enough bytes are free.

    A block goes only after all blocks that continue it, so what remains is always reachable from a root. `keep` (a
    key) and so everything before it stays.
    """
    by_key = {entry.key: entry for entry in entries}
    children = {entry.key: 0 for entry in entries}
    for entry in entries:
        if entry.parent in children:
            children[entry.parent] += 1
    leaves = [(e.used_ns, e.key) for e in entries if not children[e.key] and e.key != keep]
    heapq.heapify(leaves)
    victims = []
    while bytes_to_free > 0 and leaves:
        victim = by_key[heapq.heappop(leaves)[1]]
        victims.append(victim)
        bytes_to_free -= victim.size
        parent = by_key.get(victim.parent)
        if parent is not None:
            children[parent.key] -= 1
            if not children[parent.key] and parent.key != keep:
                heapq.heappush(leaves, (parent.used_ns, parent.key))
    return victims


def _listing(path) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []

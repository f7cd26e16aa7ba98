"""What the store's tests write and check: payloads that follow from the tokens alone, and processes to kill."""

import hashlib
import os
import random
import signal
import tempfile
from pathlib import Path

import numpy as np

from parallel.serving.block_file import decode_block
from parallel.serving.keys import Namespace, block_keys
from parallel.serving.kv_store import KVStore
from parallel.serving.store_index import scan

SPACE = Namespace("example", "bfloat16", "latent", block_tokens=4)


def quick_directory() -> tempfile.TemporaryDirectory:
    """A directory in memory where there is one: a kill loses nothing that was written, synced or not."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def payload(tokens, size: int = 3000) -> bytes:
    """Bytes that depend on every token up to the block's end."""
    return hashlib.shake_128(np.asarray(tokens, "<u4").tobytes()).digest(size)


def payloads(tokens, space=SPACE) -> list[bytes]:
    full = (len(tokens) - space.lookahead) // space.block_tokens
    return [payload(tokens[: (i + 1) * space.block_tokens]) for i in range(full)]


def prompts(seed: int, count: int = 40) -> list[list[int]]:
    """Conversations that branch: many share their first blocks."""
    rng = random.Random(seed)
    return [
        [rng.randrange(2) for _ in range(2)] + [b for b in rng.choices((7, 9), k=3) for _ in range(5)]
        for _ in range(count)
    ]


def check_everything(path, known_prompts, space=SPACE) -> int:
    """Read every block file there is: each must be whole, right, and have its parent. Returns how many there are."""
    truth = {}
    for tokens in known_prompts:
        parent = space.root()
        for i, key in enumerate(block_keys(space, tokens)):
            truth[key.hex()] = (key, parent, tokens[: (i + 1) * space.block_tokens])
            parent = key
    entries = scan(path / "blocks")
    names = {entry.key for entry in entries} | {space.root().hex()}
    for entry in entries:
        key, parent, tokens = truth[entry.key]
        assert decode_block(entry.path.read_bytes(), key, parent, tokens[-space.block_tokens :]) == payload(tokens)
        assert entry.parent in names
    return len(entries)


def write_forever(path, seed: int, max_bytes) -> None:
    """Body of a process that is meant to be killed."""
    store = KVStore(path, SPACE, max_bytes=max_bytes)
    while True:
        for tokens in prompts(seed):
            store.write(tokens, payloads(tokens))
            store.read(tokens)


def die_at_operation(number: int) -> None:
    """The process will kill itself at its `number`-th call that changes the file system, before or half in it."""
    left = [number]

    def deadly(call, half=None):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if half:
                    half(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    write = os.write
    os.write = deadly(write, half=lambda fd, data: write(fd, data[: len(data) // 2]))
    for name in ("fsync", "rename", "mkdir", "pwrite", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))


def in_child(body) -> int:
    """Run `body` in a forked process; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        body()
    finally:
        os._exit(0)

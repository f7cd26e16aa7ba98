"""One stored block as a file: header, tokens, payload, checksum. Written beside, made durable, then renamed.

`magic 8 | key 32 | parent 32 | tokens u32 | payload length u64 | tokens u32 each | payload | BLAKE2b of all of it 32`
"""

import hashlib
import os
import struct

from parallel.serving.keys import KEY_BYTES, token_bytes

MAGIC = b"RMKVBLK1"
_HEADER = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}sIQ")


class CorruptBlock(ValueError):
    """The file does not hold what its name promises."""


def encode_block(key: bytes, parent: bytes, tokens, payload) -> bytes:
    """The bytes of the file; `tokens` are the block's and those looked ahead at; `payload` is any bytes-like object."""
    payload = memoryview(payload).cast("B")
    words = token_bytes(tokens)
    body = b"".join((_HEADER.pack(MAGIC, key, parent, len(words) // 4, len(payload)), words, payload))
    return body + _checksum(body)


def decode_block(data: bytes, key: bytes, parent: bytes, tokens) -> bytes:
    """The payload. Raises CorruptBlock if a length, the checksum, the key, the parent or a token is not as expected."""
    words = token_bytes(tokens)
    expected = _HEADER.size + len(words)
    if len(data) < expected + KEY_BYTES:
        raise CorruptBlock(f"file of {len(data)} bytes is shorter than its header and tokens, {expected + KEY_BYTES}")
    body, checksum = memoryview(data)[:-KEY_BYTES], bytes(data[-KEY_BYTES:])
    if _checksum(body) != checksum:
        raise CorruptBlock("checksum does not match the content")
    magic, own_key, own_parent, num_tokens, length = _HEADER.unpack_from(body)
    if (magic, own_key, own_parent) != (MAGIC, key, parent):
        raise CorruptBlock("header names another block")
    if num_tokens * 4 != len(words) or bytes(body[_HEADER.size : expected]) != words:
        raise CorruptBlock("stored tokens are not those asked for")
    if length != len(body) - expected:
        raise CorruptBlock(f"header promises {length} bytes of payload, {len(body) - expected} are there")
    return bytes(body[expected:])


def write_all(fd: int, data: bytes) -> None:
    """Write every byte (a single call may write fewer) and make them durable. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


def read_all(fd: int) -> bytes:
    """The whole file from its start. Raises OSError."""
    pieces, position = [], 0
    while piece := os.pread(fd, 1 << 24, position):
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)


def sync_directory(path) -> None:
    """Make a rename or a new file in the directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(body) -> bytes:
    return hashlib.blake2b(body, digest_size=KEY_BYTES, person=b"refmodel kv sum").digest()

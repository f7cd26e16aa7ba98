"""What a stored block is called: a hash chain over its tokens and over every setting that changes its bytes.

Each hash has a domain of its own, each field its name and its length, each token four bytes: two different inputs never
feed the same bytes to the hash (vllm-project/vllm#44701, where an adapter's name passed for another tenant's salt).
"""

import hashlib
import struct
from dataclasses import dataclass, fields

import numpy as np

KEY_BYTES = 32


@dataclass(frozen=True)
class Namespace:
    """Every setting that changes the bytes of a block; two namespaces never share one.

    model: identity of the weights (name and revision, or a digest). numerics: the preset. layout: dtype, width and
    layers of a row, in order. block_tokens: tokens of a block. tenant, adapter: who may share, and what was applied.
    lookahead: tokens after the block that its bytes depend on; 1 where the rows of an MTP layer are stored, because
    the last of them was computed with the next token. extra: further (name, value) pairs.
    Raises ValueError for sizes out of range and values that are not text.
    """

    model: str
    numerics: str
    layout: str
    block_tokens: int = 64
    tenant: str = ""
    adapter: str = ""
    lookahead: int = 0
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens}: a block holds at least one token")
        if self.lookahead < 0:
            raise ValueError(f"lookahead = {self.lookahead}: it counts tokens after the block")
        for name, value in self.settings():
            if not isinstance(value, str | int):
                raise ValueError(f"namespace setting {name} = {value!r} is neither text nor an integer")

    def settings(self) -> list[tuple[str, str | int]]:
        """(name, value) of every setting, those of `extra` under the prefix `extra.`."""
        plain = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "extra"]
        return plain + [(f"extra.{name}", value) for name, value in self.extra]

    def root(self) -> bytes:
        """The 32 bytes from which the chain starts."""
        digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"refmodel kv root")
        for name, value in self.settings():
            for kind, text in (("name", name), (type(value).__name__, str(value))):
                for part in (kind.encode(), text.encode()):
                    digest.update(struct.pack("<I", len(part)) + part)
        return digest.digest()


def token_bytes(tokens) -> bytes:
    """Token ids as four bytes each, little endian. Raises ValueError for ids outside 0 .. 2^32 - 1."""
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        return b""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 1 << 32:
        raise ValueError(f"token ids must be integers 0 .. 2^32 - 1 in one row, not {tokens.dtype} {tokens.shape}")
    return tokens.astype("<u4").tobytes()


def block_keys(namespace: Namespace, tokens) -> list[bytes]:
    """Keys of the full blocks of `tokens` [n]; key i hashes key i - 1, the block's tokens, and those looked ahead at.

    A block whose lookahead is not known yet has no key, so there are (n - lookahead) // block_tokens of them.
    """
    tokens = np.asarray(tokens)
    size, ahead = namespace.block_tokens, namespace.lookahead
    keys, parent = [], namespace.root()
    for start in range(0, len(tokens) - ahead - size + 1, size):
        digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"refmodel kv blk")
        digest.update(parent + struct.pack("<II", size, ahead) + token_bytes(tokens[start : start + size + ahead]))
        parent = digest.digest()
        keys.append(parent)
    return keys


def usable_blocks(namespace: Namespace, num_tokens: int) -> int:
    """How many blocks of a prompt of `num_tokens` may be taken from the store: at least one token must be computed.

    Without it there would be no logits for the next token (vllm-project/vllm#17999).
    """
    return max(num_tokens - max(1, namespace.lookahead), 0) // namespace.block_tokens

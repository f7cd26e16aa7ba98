"""The latent cache: what MLA keeps of each token, in pages of 64 with a block table per request.

A row is [kv_latent (C) after its norm | k_pe (P) after RoPE], in the activation dtype: 1,152 bytes per token and layer
for V3 in bfloat16. The MTP layer is one more layer of the same pages: its slot i belongs to the pair (h_i, t_i+1).
"""

import numpy as np

from refmodel.attention import BLOCK
from refmodel.numerics import widen

#: tokens per page, which is also attention's key block
PAGE_SIZE = BLOCK


class PagePool:
    """Pages for all requests of one rank: per layer an array [pages, 64, C + P], grown by doubling unless bounded."""

    def __init__(self, num_layers: int, width: int, dtype, max_pages: int | None = None):
        self.num_layers, self.width, self.dtype = num_layers, width, np.dtype(dtype)
        self.max_pages = max_pages
        self._layers = [np.zeros((0, PAGE_SIZE, width), self.dtype) for _ in range(num_layers)]
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages that exist, used or free."""
        return len(self._layers[0])

    @property
    def num_free(self) -> int:
        """Pages that no request holds (of those that exist)."""
        return len(self._free)

    def layer(self, layer: int) -> np.ndarray:
        """Pages of one layer: [pages, 64, C + P]."""
        return self._layers[layer]

    def allocate(self) -> int:
        """Take a page. Raises ValueError when a bounded pool is exhausted."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def release(self, page: int):
        """Give a page back."""
        self._free.append(page)

    def _grow(self):
        old = self.num_pages
        new = max(1, 2 * old) if self.max_pages is None else min(max(1, 2 * old), self.max_pages)
        if new <= old:
            raise ValueError(f"the cache pool is full: all of its max_pages = {self.max_pages} pages are in use")
        for layer, pages in enumerate(self._layers):
            grown = np.zeros((new, PAGE_SIZE, self.width), self.dtype)
            grown[:old] = pages
            self._layers[layer] = grown
        self._free.extend(range(new - 1, old - 1, -1))  # pop() hands them out in ascending order


class LatentCache:
    """The cache of one request: its pages in order, and how many tokens of it are valid."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.block_table: list[int] = []
        #: tokens whose rows the main layers hold; the next token has this position
        self.length = 0
        #: per layer, how many leading rows have been written: a key is read only after it was written
        self.written = [0] * pool.num_layers
        self._ahead: dict[int, dict[int, int]] = {}  # layer -> first row -> end of what was written behind a gap

    def reserve(self, tokens: int):
        """Hold pages for `tokens` tokens."""
        while len(self.block_table) * PAGE_SIZE < tokens:
            self.block_table.append(self.pool.allocate())

    def write(self, layer: int, start: int, rows: np.ndarray):
        """Store rows [t, C + P] of tokens start .. start + t - 1."""
        self.reserve(start + len(rows))
        pages = self.pool.layer(layer)
        done = 0
        while done < len(rows):
            page, slot = divmod(start + done, PAGE_SIZE)
            count = min(PAGE_SIZE - slot, len(rows) - done)
            pages[self.block_table[page], slot : slot + count] = rows[done : done + count]
            done += count
        self._count(layer, start, start + len(rows))

    def _count(self, layer, start, stop):
        """Rows behind a gap count once the gap is filled."""
        if start > self.written[layer]:
            self._ahead.setdefault(layer, {})[start] = stop
            return
        self.written[layer] = stop
        ahead = self._ahead.get(layer, {})
        for row in sorted(ahead):
            if row <= self.written[layer]:
                self.written[layer] = max(self.written[layer], ahead.pop(row))

    def rows(self, layer: int, tokens: int | None = None) -> np.ndarray:
        """A copy of the first `tokens` (default: all valid) rows of a layer: [tokens, C + P]."""
        tokens = self.length if tokens is None else tokens
        blocks = -(-tokens // PAGE_SIZE)
        pages = self.pool.layer(layer)[self.block_table[:blocks]]  # [nb, 64, C + P]
        return pages.reshape(blocks * PAGE_SIZE, self.pool.width)[:tokens]

    def read_blocks(self, layer: int, tokens: int, out: np.ndarray):
        """Fill `out` [nb, 64, C + P], in a compute dtype, with the first `tokens` rows as zero-filled key blocks.

        What a page holds past `tokens` (rejected drafts, another request's old rows, NaN) is replaced by zero.
        """
        table, pages = self.block_table[: len(out)], self.pool.layer(layer)
        if pages.dtype == out.dtype:
            pages.take(table, axis=0, out=out, mode="clip")  # clip: without a check, straight into `out`
        else:
            out[...] = widen(pages[table], out.dtype)
        if tokens % PAGE_SIZE:
            out[-1, tokens % PAGE_SIZE :] = 0

    def truncate(self, tokens: int):
        """Forget everything after the first `tokens`: rejected drafts. Pages no longer needed are given back."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"truncate to {tokens} tokens: the cache holds {self.length}")
        self.length = tokens
        self.written = [min(written, tokens) for written in self.written]
        self._ahead.clear()
        for page in reversed(self.block_table[-(-tokens // PAGE_SIZE) :]):
            self.pool.release(page)
        del self.block_table[-(-tokens // PAGE_SIZE) :]

    def release(self):
        """Give all pages back."""
        self.truncate(0)

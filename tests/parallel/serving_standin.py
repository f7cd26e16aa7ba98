"""A model whose tokens are known: each follows from all tokens before it, read back from the pages of its rank."""

import zlib

import numpy as np

from parallel.serving.handoff import CachePages
from parallel.serving.kv_store import Prefix

VOCABULARY = 50
POISON = -1  # a row that nobody has written
REJECTED = -2  # the row of a draft that was not accepted


def next_token(context) -> int:
    """What follows these tokens."""
    return zlib.crc32(np.asarray(context, "<i8").tobytes()) % VOCABULARY


def plain_generation(prompt, max_new_tokens: int, stop=()) -> list[int]:
    """The tokens that must come out, however the request is scheduled."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def num_accepted(context, drafts: int) -> int:
    """How many of the drafts after these tokens happen to be right: known, but irregular."""
    return min(zlib.crc32(np.asarray(context, "<i4").tobytes()) % (drafts + 2), drafts)


class StandIn:
    """An engine of `num_ranks` ranks with `num_pages` pages of `page_size` rows; a row holds its token id."""

    def __init__(self, num_ranks: int, num_pages: int, page_size: int, drafts: int = 0):
        self.num_ranks, self.num_pages, self.page_size, self.drafts = num_ranks, num_pages, page_size, drafts
        self.pages = np.full((num_ranks, num_pages, page_size), POISON, np.int64)
        self.known: set[int] = set()
        self.drafting: set[int] = set()
        self.hidden: dict[int, int] = {}
        self.proposed = self.accepted = self.rows = 0
        self.widest = self.lookahead = 0
        self.arrived: dict[int, int] = {}

    def step(self, batch):
        assert len(batch) == self.num_ranks
        seen = [
            page for rank, chunks in enumerate(batch) for chunk in chunks for page in ((rank, p) for p in chunk.pages)
        ]
        assert len(seen) == len(set(seen)), "two requests share a page"
        self.widest = max([self.widest, *map(len, batch)])
        return [[self._compute(rank, chunk) for chunk in chunks] for rank, chunks in enumerate(batch)]

    def _compute(self, rank, chunk):
        assert chunk.tokens, "an empty chunk"
        self.known.add(chunk.request)
        self.rows += len(chunk.tokens)
        view = self.pages[rank].reshape(-1)  # [pages * page_size]
        places = (np.array(chunk.pages)[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        end = chunk.start + len(chunk.tokens)
        view[places[chunk.start : end]] = chunk.tokens
        context = view[places[:end]].tolist()
        if chunk.request in self.arrived:  # the first draft must start from this request's own last state
            assert self.arrived.pop(chunk.request) == sum(context[: chunk.start])
        assert min(context) >= 0, f"request {chunk.request} reads a row that was never written"
        if not chunk.final:
            return []
        self.hidden[chunk.request] = sum(context)
        if chunk.request not in self.drafting:  # its first token: there is nothing to verify yet
            self.drafting.add(chunk.request)
            return [next_token(context)]
        right = num_accepted(context, self.drafts)
        for i in range(self.drafts):  # verification writes the rows of all drafts, right or not
            view[places[end + i]] = next_token(context) if i < right else REJECTED
            if i < right:
                context.append(next_token(context))
        self.proposed, self.accepted = self.proposed + self.drafts, self.accepted + right
        return [*context[end:], next_token(context)]

    def export_page(self, rank, page):
        assert (self.pages[rank, page] >= 0).all(), "a block with unwritten or rejected rows goes into the store"
        return self.pages[rank, page].tobytes()

    def import_page(self, rank, page, payload):
        self.pages[rank, page] = np.frombuffer(payload, np.int64)

    def forget(self, request):
        self.known.discard(request)
        self.drafting.discard(request)
        self.hidden.pop(request, None)

    def cache(self, rank):
        return CachePages([self.pages[rank][:, :, None]])

    def hand_out(self, request):
        return np.array([self.hidden[request]]), b"sampling"

    def hand_in(self, request, rank, pages, metadata):
        assert metadata.sampling == b"sampling"
        self.drafting.add(request)
        self.arrived[request] = int(metadata.hidden[0])


class MemoryStore:
    """The interface of KVStore without a disk, as a dictionary of whole prefixes."""

    def __init__(self, namespace):
        self.namespace, self.blocks = namespace, {}

    def read(self, tokens):
        size, payloads = self.namespace.block_tokens, []
        while (len(payloads) + 1) * size < len(tokens):
            payload = self.blocks.get(tuple(tokens[: (len(payloads) + 1) * size]))
            if payload is None:
                break
            payloads.append(payload)
        return Prefix(len(payloads) * size, payloads)

    def write(self, tokens, payloads, first_block=0):
        size = self.namespace.block_tokens
        for i, payload in enumerate(payloads, first_block):
            assert (i + 1) * size <= len(tokens)
            assert np.frombuffer(payload, np.int64).tolist() == list(tokens[i * size : (i + 1) * size])
            self.blocks[tuple(tokens[: (i + 1) * size])] = payload
        return len(payloads)

"""A model, or a deployment of it, as the scheduler's engine: chunks in, tokens out, caches in the scheduler's pages.

Prefill runs the naive form of MLA and decode the absorbed one. With `drafts` > 0 the MTP layer follows the main model:
its row i belongs to the pair (hidden state i, token i + 1), so in a prompt that is still being read it lags by one row.
"""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parallel.serving.handoff import CachePages, Metadata
from parallel.serving.keys import Namespace
from parallel.serving.requests import Attempt, Chunk
from parallel.serving.spec_stats import SpecStats
from refmodel.cache import PAGE_SIZE, LatentCache
from refmodel.generate import Item, accept, distribution, draw


class PagedRows(LatentCache):
    """A request's cache in pages that the scheduler owns: it never takes or gives back a page itself."""

    def reserve(self, tokens: int) -> None:
        """Raises ValueError where the scheduler gave too few pages."""
        if len(self.block_table) * PAGE_SIZE < tokens:
            raise ValueError(f"{tokens} rows do not fit the {len(self.block_table)} pages that the scheduler gave")

    def truncate(self, tokens: int) -> None:
        """Forget rejected drafts."""
        self.length = tokens
        self.written = [min(written, tokens) for written in self.written]


class Pairs(NamedTuple):
    """What the MTP layer reads next: (hidden state, following token) of consecutive positions from `slot` on."""

    tokens: np.ndarray  # int64 [t]
    hidden: np.ndarray  # [t, D]
    slot: int
    phase: str


@dataclass
class _State:
    """What is kept of a request beside its pages."""

    request: object
    cache: PagedRows
    rng: np.random.Generator
    decoding: bool = False
    last_hidden: np.ndarray | None = None  # [1, D] of the last row, whose pair still lacks its token
    pairs: Pairs | None = None
    draft: tuple | None = None  # (probabilities [vocab], hidden [1, D]) after the last pair
    draft_tokens: list[int] = field(default_factory=list)
    draft_probs: list[np.ndarray] = field(default_factory=list)


class ModelEngine:
    """`model` is a `Model` (one rank) or a `Deployment`; `num_pages` pages of 64 rows on each rank.

    mtp: whether MTP rows are kept (default: if drafts > 0); a prefill side needs them for a decode side that drafts.
    Tokens are drawn as `refmodel.generate` does, each request with its own generator seeded by (seed, request).
    Raises ValueError for drafts wanted from a model without an MTP layer.
    """

    page_size = PAGE_SIZE

    def __init__(self, model, num_pages: int, drafts: int = 0, mtp=None, temperature=0.0, top_p=1.0, seed: int = 0):
        self.model, self.num_pages, self.drafts = model, num_pages, drafts
        self.mtp = drafts > 0 if mtp is None else mtp
        if self.mtp and model.config.num_nextn_predict_layers < 1:
            raise ValueError(f"drafts = {drafts}, mtp = {mtp}: this model has no MTP layer")
        self.num_ranks = model.topology.num_ranks if hasattr(model, "topology") else 1
        self._residents = getattr(model, "residents", None)  # a deployment's; a model alone has nobody to place
        self.lookahead = int(self.mtp)
        self.seed = seed
        self.stats = SpecStats(max(drafts, 1))
        self._distribution = lambda logits: distribution(logits, temperature, top_p)
        self._pools = [self._whole_pool() for _ in range(self.num_ranks)]
        self._states: dict = {}
        self._returns: dict = {}  # request -> how often it lost its pages

    def step(self, batch: list[list[Chunk]]) -> list[list[list[int]]]:
        """New tokens of each chunk: none before its prompt ends, then one, then one more than accepted drafts."""
        work = [(rank, chunk, self._state(rank, chunk)) for rank, chunks in enumerate(batch) for chunk in chunks]
        prompts = [entry for entry in work if not entry[2].decoding]
        decoding = [entry for entry in work if entry[2].decoding]
        new = {**self._prefill(prompts), **self._decode(decoding)}
        self._feed([(rank, state) for rank, _, state in work])
        return [[new[chunk.request] for chunk in chunks] for chunks in batch]

    def namespace(self, model: str, tenant: str = "", adapter: str = "") -> Namespace:
        """For a KVStore of this engine's pages; `model` says which weights (name and revision, or a digest)."""
        layers = self.cache(0).layers
        layout = f"{len(layers)} layers of {layers[0].shape[2]} {layers[0].dtype.name}"
        numerics = repr(getattr(self.model, "model", self.model).numerics)
        return Namespace(model, numerics, layout, self.page_size, tenant, adapter, self.lookahead)

    def export_page(self, rank: int, page: int) -> bytes:
        """All layers of a page, layer by layer."""
        return np.stack([layer[page] for layer in self.cache(rank).layers]).tobytes()

    def import_page(self, rank: int, page: int, payload: bytes) -> None:
        """The inverse of export_page."""
        layers = self.cache(rank).layers
        rows = np.frombuffer(payload, layers[0].dtype).reshape(len(layers), *layers[0].shape[1:])
        for layer, row in zip(layers, rows):
            layer[page] = row

    def cache(self, rank: int) -> CachePages:
        """The pages of the layers in use."""
        config = self.model.config
        count = config.num_hidden_layers + (1 if self.mtp else 0)
        return CachePages([self._pools[rank].layer(layer) for layer in range(count)])

    def forget(self, request) -> None:
        """The request has ended or lost its pages."""
        self._states.pop(request, None)
        if self._residents is not None:
            self._residents.forget(request)
        self._returns[request] = self._returns.get(request, 0) + 1

    def hand_out(self, request) -> tuple[np.ndarray | None, bytes]:
        """The hidden state of the last prompt token, and the random generator."""
        state = self._states[request]
        sampling = json.dumps(state.rng.bit_generator.state).encode()
        return (state.last_hidden if self.mtp else None), sampling

    def hand_in(self, request, rank: int, pages: list[int], metadata: Metadata) -> None:
        """Go on where the prefill side stopped: its pages are filled, its first token is not in them yet."""
        state = self._new_state(request, rank, pages, metadata.position)
        state.rng.bit_generator.state = json.loads(metadata.sampling)
        state.decoding = True
        if self.drafts:  # the prompt's last pair, as the prefill side reads it, so that the draft is the same
            state.pairs = Pairs(np.array([metadata.first_token]), metadata.hidden, metadata.position - 1, "prefill")
        self._states[request] = state

    def _prefill(self, work) -> dict:
        """Rows of prompts; the first new token of those that end."""
        items = [self._item(rank, state, chunk.tokens, chunk.start) for rank, chunk, state in work]
        new = {}
        for (_, chunk, state), step in zip(work, self.model.step(items, "prefill") if items else []):
            token = [draw(self._distribution(step.logits[-1]), state.rng)] if chunk.final else []
            state.decoding = chunk.final
            self._set_pairs(
                state, chunk.tokens[0 if state.last_hidden is not None else 1 :] + token, step.hidden, chunk.start
            )
            new[chunk.request] = token
        return new

    def _set_pairs(self, state: _State, following: list[int], hidden: np.ndarray, start: int) -> None:
        """Pairs whose token has become known; the last row's waits where no token follows yet."""
        if not self.mtp:
            return
        if state.last_hidden is not None:
            hidden, start = np.concatenate([state.last_hidden, hidden]), start - 1
        state.last_hidden = hidden[-1:]
        if following:
            state.pairs = Pairs(np.array(following), hidden[: len(following)], start, "prefill")

    def _decode(self, work) -> dict:
        """Draft, verify all drafts of all requests in one pass, keep what is accepted and one token more."""
        self._feed([(rank, state) for rank, _, state in work])  # those that were handed in
        self._draft([(rank, state) for rank, _, state in work])
        items = [
            self._item(rank, state, [*chunk.tokens, *state.draft_tokens], chunk.start) for rank, chunk, state in work
        ]
        new = {}
        for (_, chunk, state), step in zip(work, self.model.step(items, "decode") if items else []):
            verdict = accept(state.draft_tokens, state.draft_probs, self._distribution(step.logits), state.rng)
            if state.draft_tokens:
                self.stats.add(verdict.num_accepted, len(state.draft_tokens))
            taken = len(verdict.tokens)
            state.cache.truncate(chunk.start + taken)
            if self.mtp:
                state.pairs = Pairs(np.array(verdict.tokens), step.hidden[:taken], chunk.start, "decode")
            new[chunk.request] = verdict.tokens
        return new

    def _draft(self, work) -> None:
        """`drafts` tokens for each request; from the second on the MTP layer reads its own output."""
        for _, state in work:
            state.draft_tokens, state.draft_probs = [], []
        for number in range(self.drafts):
            for _, state in work:
                state.draft_probs.append(state.draft[0])
                state.draft_tokens.append(draw(state.draft[0], state.rng))
            if number + 1 < self.drafts:
                for _, state in work:
                    pairs = Pairs(
                        np.array(state.draft_tokens[-1:]), state.draft[1], state.cache.length + number, "decode"
                    )
                    state.pairs = pairs
                self._feed(work)

    def _feed(self, work) -> None:
        """Let the MTP layer read the pairs that wait, prefill and decode each in one pass."""
        for phase in ("prefill", "decode"):
            ready = [(rank, state) for rank, state in work if state.pairs is not None and state.pairs.phase == phase]
            items = [
                self._item(rank, state, state.pairs.tokens, state.pairs.slot, state.pairs.hidden)
                for rank, state in ready
            ]
            for (_, state), step in zip(ready, self.model.mtp_step(items, phase) if items else []):
                state.draft = (self._distribution(step.logits[-1]), step.hidden[-1:])
                state.pairs = None

    def _item(self, rank: int, state: _State, tokens, slot: int, hidden=None) -> Item:
        request = rank if self._residents is None else state.request
        return Item(request, np.asarray(tokens, np.int64), state.cache, slot, hidden)

    def _state(self, rank: int, chunk: Chunk) -> _State:
        if chunk.request not in self._states:
            self._states[chunk.request] = self._new_state(chunk.request, rank, chunk.pages, chunk.start)
        state = self._states[chunk.request]
        state.cache.block_table = list(chunk.pages)
        return state

    def _new_state(self, request, rank: int, pages: list[int], rows: int) -> _State:
        """A request whose first `rows` rows are in its pages on `rank`."""
        if self._residents is not None:
            self._residents.place(request, rank)
        cache = PagedRows(self._pools[rank])
        cache.block_table = list(pages)
        cache.length, cache.written = rows, [rows] * len(cache.written)
        name, attempt = request if isinstance(request, Attempt) else (request, 0)
        returns = attempt + self._returns.get(request, 0)
        seed = [self.seed, name, returns] if returns else [self.seed, name]
        return _State(request, cache, np.random.default_rng(seed))

    def _whole_pool(self):
        """All pages at once, so that their arrays stay where they are; their owner is the scheduler."""
        pool = getattr(self.model, "model", self.model).new_pool(self.num_pages)
        for _ in range(self.num_pages):
            pool.allocate()
        return pool

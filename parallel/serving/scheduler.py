"""Continuous batching over data-parallel ranks: who computes what in the next step.

Every step each rank takes one token (and its drafts) of each decoding request, then pieces of prompts while its token
budget lasts. A request enters when some rank has pages for all its tokens; the oldest waiting one is never overtaken.
When pages run out, the youngest requests of the rank go back to waiting and keep their tokens. The oldest request of a
rank can always take a step, so every request finishes.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from parallel.serving.balance import balance, decode_cost, prefill_cost
from parallel.serving.pages import PagePool
from parallel.serving.requests import Chunk, Engine, Request, Status


@dataclass(frozen=True)
class SchedulerConfig:
    """max_requests, max_tokens: of one rank in one step. draft_tokens: rows that speculation may add to a step.

    policy: how new requests are placed (balance.py); window: how many are placed together. Raises ValueError.
    """

    max_requests: int = 64
    max_tokens: int = 512
    draft_tokens: int = 0
    policy: str = "balanced"
    window: int = 8

    def __post_init__(self):
        if self.max_requests < 1 or self.window < 1 or self.draft_tokens < 0:
            raise ValueError(f"{self.max_requests=}, {self.window=}, {self.draft_tokens=}: at least 1, 1 and 0")
        if self.max_tokens < 1 + self.draft_tokens:
            raise ValueError(f"{self.max_tokens=}: a step must hold one token and its {self.draft_tokens} drafts")


@dataclass
class SchedulerStats:
    """Tokens by what happened to them. input and hit count each request once, at its first admission."""

    steps: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0  # rows asked of the engine, drafts not included
    refetched_tokens: int = 0  # found in the store when a preempted request came back
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Requests over the ranks of `engine`; `store` is a KVStore whose blocks are the engine's pages, or None."""

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None, store=None):
        self.engine, self.config, self.store = engine, config or SchedulerConfig(), store
        if store is not None and store.namespace.block_tokens != engine.page_size:
            raise ValueError(
                f"the store's blocks hold {store.namespace.block_tokens} tokens and the engine's pages "
                f"{engine.page_size}: one block must be one page"
            )
        if store is not None and store.namespace.lookahead < engine.lookahead:
            raise ValueError(
                f"the store's namespace looks {store.namespace.lookahead} tokens ahead and the engine's rows depend on "
                f"{engine.lookahead}: blocks would be taken for others that continue differently"
            )
        self.pools = [PagePool(engine.num_pages, engine.page_size) for _ in range(engine.num_ranks)]
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []  # by arrival
        self.running: list[list[Request]] = [[] for _ in self.pools]  # of each rank, by arrival
        self.stats = SchedulerStats()
        self._in_flight: list[list[Chunk]] | None = None
        self._aborted: set[int] = set()

    def submit(self, request_id: int, prompt, max_new_tokens: int, stop=()) -> Request:
        """A new request. Raises ValueError if it is empty, known already, or could never fit the pages of a rank."""
        prompt = [int(token) for token in prompt]
        if request_id in self.requests:
            raise ValueError(f"request {request_id} was submitted before")
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"request {request_id}: {len(prompt)} prompt tokens, {max_new_tokens=}; at least one each")
        rows = len(prompt) + max_new_tokens - 1 + self.config.draft_tokens
        if self.pools[0].pages_for(rows) > self.engine.num_pages:
            raise ValueError(
                f"request {request_id} needs up to {rows} rows and a rank has {self.engine.num_pages} pages of "
                f"{self.engine.page_size}: shorten it or enlarge the cache"
            )
        request = Request(request_id, prompt, max_new_tokens, frozenset(stop), arrival=len(self.requests))
        self.requests[request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request_id: int) -> None:
        """End a request now; pages that a step in flight may still touch are given back when it ends."""
        request = self.requests[request_id]
        if request.status in (Status.FINISHED, Status.ABORTED):
            return
        if self._in_flight is not None and request.status is Status.RUNNING:
            self._aborted.add(request_id)
        else:
            self._end(request, Status.ABORTED)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or any(self.running)

    def step(self) -> None:
        """Plan, compute, take in the results."""
        self.finish(self.engine.step(self.begin()))

    def begin(self) -> list[list[Chunk]]:
        """The chunks of the next step, a list per rank. Raises ValueError if the last step has not been finished."""
        if self._in_flight is not None:
            raise ValueError("begin was called twice: finish the step in flight first")
        self._admit()
        self._in_flight = [self._plan(rank) for rank in range(len(self.pools))]
        self.stats.steps += 1
        return self._in_flight

    def finish(self, results: list[list[list[int]]]) -> None:
        """Take in the new tokens of every chunk of the step in flight. Raises ValueError if they do not fit it."""
        batch, self._in_flight = self._in_flight, None
        if batch is None or [len(row) for row in batch] != [len(row) for row in results]:
            raise ValueError("finish needs one list of new tokens per chunk of the step in flight")
        for chunks, answers in zip(batch, results):
            for chunk, new in zip(chunks, answers):
                request = self.requests[chunk.request]
                if chunk.final != bool(new):
                    raise ValueError(
                        f"request {chunk.request}: {len(new)} new tokens for a chunk with final={chunk.final}"
                    )
                if chunk.request not in self._aborted:
                    self._take_in(request, chunk, list(new))
        for request_id in self._aborted:
            if self.requests[request_id].status is Status.RUNNING:
                self._end(self.requests[request_id], Status.ABORTED)
        self._aborted.clear()

    def _take_in(self, request: Request, chunk: Chunk, new: list[int]) -> None:
        request.cached += len(chunk.tokens)
        self.stats.computed_tokens += len(chunk.tokens)
        if not chunk.final:
            return
        taken = request.accept(new)
        self.stats.generated_tokens += len(taken)
        request.cached += len(taken) - 1  # accepted drafts have rows, the last token has none yet
        if request.done:
            self._store_blocks(request)
            self._end(request, Status.FINISHED)
        elif len(request.generated) == len(taken):  # the prompt is complete
            self._store_blocks(request)

    def _plan(self, rank: int) -> list[Chunk]:
        """Decoding requests first, then prompts, each in order of arrival, within the token budget."""
        chunks, budget = [], self.config.max_tokens
        decoding = [request for request in self.running[rank] if request.remaining == 1]
        prompts = [request for request in self.running[rank] if request.remaining > 1]
        for request in decoding + prompts:
            if request.status is not Status.RUNNING:  # preempted for an older one in this very loop
                continue
            count = min(request.remaining, budget)
            final = count == request.remaining
            extra = self.config.draft_tokens if final else 0
            if final and count + extra > budget:  # the drafts do not fit: leave the last token for the next step
                count, final, extra = count - 1 if request.remaining > 1 else 0, False, 0
            if count < 1 or not self._grow(request, request.cached + count + extra):
                continue
            budget -= count + extra
            tokens = request.tokens[request.cached : request.cached + count]
            chunks.append(Chunk(request.id, tokens, request.cached, list(request.pages), final))
        return chunks

    def _grow(self, request: Request, rows: int) -> bool:
        """Pages for `rows` rows, at the expense of younger requests; False if only older ones could give some."""
        pool = self.pools[request.rank]
        missing = pool.pages_for(rows) - len(request.pages)
        while pool.free < missing:
            youngest = self.running[request.rank][-1]
            if youngest.arrival <= request.arrival:
                return False
            self._preempt(youngest)
        request.pages += pool.take(max(missing, 0))
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status, request.cached = Status.WAITING, 0
        request.preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, request, key=lambda other: other.arrival)

    def _admit(self) -> None:
        """Place waiting requests, several at once where all fit, else one by one; stop at the first that does not."""
        while self.waiting:
            group = self.waiting[: self.config.window]
            ranks = self._place(group)
            if min(ranks) < 0:
                group = group[:1]
                ranks = self._place(group)
            if min(ranks) < 0:
                return
            for request, rank in zip(group, ranks):
                self._enter(request, rank)
            del self.waiting[: len(group)]

    def _place(self, group: list[Request]) -> list[int]:
        """A rank for each request, -1 where none has room, by rows, requests, attention and tokens still to compute."""
        size = self.engine.page_size
        start = np.array([self._load(rank) for rank in range(len(self.pools))])  # [R, 4]
        start[:, 0] = [(pool.num_pages - pool.free) * size for pool in self.pools]
        capacity = [self.engine.num_pages * size, self.config.max_requests, np.inf, np.inf]
        return balance(self._costs(group), len(self.pools), self.config.policy, start, capacity).bins.tolist()

    def _load(self, rank: int) -> np.ndarray:
        return self._costs(self._occupants(rank)).sum(axis=0)

    def _costs(self, requests) -> np.ndarray:
        """[n, 4]: rows of the cache that a request holds, one request, query-key pairs and tokens still to compute."""
        requests = list(requests)
        rows = [
            self.pools[0].pages_for(request.length + self.config.draft_tokens) * self.engine.page_size
            for request in requests
        ]
        todo = prefill_cost([request.remaining for request in requests], [request.cached for request in requests])
        return np.concatenate([decode_cost(rows), todo], axis=1)

    def _enter(self, request: Request, rank: int) -> None:
        pool = self.pools[rank]
        request.status, request.rank = Status.RUNNING, rank
        request.pages = pool.take(pool.pages_for(request.length + self.config.draft_tokens))
        insort(self.running[rank], request, key=lambda other: other.arrival)
        self._prepare(request)
        if self.store is not None:
            prefix = self.store.read(request.tokens)
            for page, payload in zip(request.pages, prefix.payloads):
                self.engine.import_page(rank, page, payload)
            request.cached = prefix.num_tokens
            request.stored_blocks = max(request.stored_blocks, len(prefix.payloads))
        if request.hit_tokens is None:
            request.hit_tokens = request.cached
            self.stats.input_tokens += len(request.prompt)
            self.stats.hit_tokens += request.cached
        else:
            self.stats.refetched_tokens += request.cached

    def _store_blocks(self, request: Request) -> None:
        """Write the full blocks that are in the cache, whose lookahead is known, and that were not written yet."""
        if self.store is None:
            return
        ahead = self.store.namespace.lookahead
        valid = min(request.cached, request.length - ahead)
        blocks = range(request.stored_blocks, valid // self.engine.page_size)
        if blocks:
            payloads = [self.engine.export_page(request.rank, request.pages[i]) for i in blocks]
            self.store.write(request.tokens[: valid + ahead], payloads, first_block=blocks.start)
            request.stored_blocks = blocks.stop

    def _end(self, request: Request, status: Status) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.status = status

    def _leave(self, request: Request) -> None:
        self.running[request.rank].remove(request)
        self._give_back(request)
        request.pages, request.rank = [], None
        self.engine.forget(request.id)

    # What a side of a hand-over does differently

    def _occupants(self, rank: int) -> list[Request]:
        """Requests that hold pages of the rank."""
        return self.running[rank]

    def _prepare(self, request: Request) -> None:
        """Called when a request has its pages and nothing is in them yet."""

    def _give_back(self, request: Request) -> None:
        """Called when a request leaves its rank."""
        self.pools[request.rank].give_back(request.pages)

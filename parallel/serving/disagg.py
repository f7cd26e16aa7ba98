"""Prefill and decode apart: two schedulers, the hand-over between them, and one queue in front.

A request first reserves pages on a decode rank, then a prefill rank computes its prompt and sends the rows over as they
come, then it decodes. The decode side never reads the prefix store, it only adds the generated tail; the prefill side
reads and writes it. A request that loses its decode pages goes back to the queue with its tokens and is prefilled
again; its hits are counted the first time only (DeepSeek open-infra-index, day_6; vllm-project/vllm#46898).
"""

from bisect import insort
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Protocol

import numpy as np

from parallel.ledger import Ledger, Tag
from parallel.serving.handoff import CachePages, HandOver, Metadata
from parallel.serving.requests import Attempt, Engine, Request, Status
from parallel.serving.scheduler import Scheduler, SchedulerConfig
from parallel.topology import Topology


class HandOverEngine(Engine, Protocol):
    """An engine whose requests can leave it or arrive from another."""

    def cache(self, rank: int) -> CachePages:
        """The pages of a rank, as arrays that hand-over reads and writes."""

    def hand_out(self, request: int) -> tuple[np.ndarray | None, bytes]:
        """(hidden state that the next draft starts from, sampling state) of a request that has its first token."""

    def hand_in(self, request: int, rank: int, pages: list[int], metadata: Metadata) -> None:
        """Begin to decode a request whose rows have arrived in these pages."""


class PrefillSide(Scheduler):
    """Requests end with one token; their pages stay until the hand-over does not read them any more."""

    def __init__(self, engine: HandOverEngine, config: SchedulerConfig, store=None):
        super().__init__(engine, config, store)
        self.handovers: dict[Attempt, HandOver] = {}
        self._targets: dict[Attempt, tuple[CachePages, Request, Callable]] = {}
        self._leaving: dict[Attempt, tuple[int, list[int]]] = {}

    @property
    def busy(self) -> bool:
        """Whether a request is left, or pages that a write still reads."""
        return super().busy or bool(self._leaving)

    def pair(self, attempt: Attempt, target: CachePages, reserved: Request, record: Callable) -> Request:
        """Prefill a request for the decode rank that has `reserved` pages for it in `target`.

        `record(source, destination, request, class, layer, rows, bytes of a row)` hears of every delivery.
        """
        self._targets[attempt] = (target, reserved, record)
        return self.submit(attempt, reserved.tokens, 1)

    def reap(self) -> None:
        """Free the pages that no write under way reads."""
        for attempt, (rank, pages) in list(self._leaving.items()):
            if self.handovers[attempt].source_free:
                self.pools[rank].give_back(pages)
                del self._leaving[attempt]

    def _prepare(self, request: Request) -> None:
        cache = self.engine.cache(request.rank)
        cache.poison(request.pages)
        target, reserved, record = self._targets.pop(request.id)
        record = partial(record, request.rank, reserved.rank, reserved.id)
        self.handovers[request.id] = HandOver(
            cache, request.pages, target, reserved.pages, len(request.prompt), record=record
        )

    def _take_in(self, request: Request, chunk, new: list[int]) -> None:
        super()._take_in(request, chunk, new)
        handover = self.handovers[request.id]
        if request.status is Status.RUNNING:
            handover.send(max(handover.sent, request.cached - self.engine.lookahead))

    def _end(self, request: Request, status: Status) -> None:
        handover = self.handovers.get(request.id)
        self._targets.pop(request.id, None)
        if status is Status.FINISHED:
            handover.send(request.cached)
            handover.finish(Metadata(request.generated[0], request.cached, *self.engine.hand_out(request.id)))
        elif handover is not None:
            handover.abort_source()
        super()._end(request, status)

    def _give_back(self, request: Request) -> None:
        self._leaving[request.id] = (request.rank, request.pages)


class DecodeSide(Scheduler):
    """`waiting` is the queue of the whole system; requests enter by `reserve` and `start`."""

    def __init__(self, engine: HandOverEngine, config: SchedulerConfig, store=None):
        super().__init__(engine, config, store)
        self.reserved: list[list[Request]] = [[] for _ in self.pools]

    @property
    def busy(self) -> bool:
        """Whether any request waits, is prefilled, or decodes."""
        return super().busy or any(self.reserved)

    def reserve(self) -> Request | None:
        """Pages for the oldest waiting request; None if no rank has room for it."""
        rank = self._place(self.waiting[:1])[0] if self.waiting else -1
        if rank < 0:
            return None
        request = self.waiting.pop(0)
        request.status, request.rank = Status.PREFILLING, rank
        request.pages = self.pools[rank].take(self.pools[rank].pages_for(request.length + self.config.draft_tokens))
        self.engine.cache(rank).poison(request.pages)
        self.reserved[rank].append(request)
        return request

    def start(self, request: Request, metadata: Metadata) -> None:
        """All rows of a reserved request have arrived: decode from its next token on."""
        self.reserved[request.rank].remove(request)
        insort(self.running[request.rank], request, key=lambda other: other.arrival)
        request.status, request.cached = Status.RUNNING, metadata.position
        self.stats.generated_tokens += len(request.accept([metadata.first_token]))
        if request.done:
            self._end(request, Status.FINISHED)
        else:
            self.engine.hand_in(request.id, request.rank, request.pages, metadata)

    def drop(self, request: Request) -> None:
        """A reserved request will not come: free its pages. No write may be under way to them."""
        self.reserved[request.rank].remove(request)
        self._give_back(request)
        request.pages, request.rank = [], None

    def _admit(self) -> None:
        """Requests enter by `reserve`."""

    def _occupants(self, rank: int) -> list[Request]:
        return self.running[rank] + self.reserved[rank]


class PrefillDecode:
    """Requests through a prefill and a decode deployment.

    `decode` is a scheduler config with the drafts of speculation; the prefill side has none. `store`: the prefix store
    of the prefill side, or None; `decode_store`: that of the decode side, which only writes (default: the same one).
    """

    def __init__(
        self,
        prefill_engine: HandOverEngine,
        decode_engine: HandOverEngine,
        prefill: SchedulerConfig | None = None,
        decode: SchedulerConfig | None = None,
        store=None,
        decode_store=None,
    ):
        self.prefill = PrefillSide(prefill_engine, prefill or SchedulerConfig(), store)
        self.decode = DecodeSide(decode_engine, decode or SchedulerConfig(), decode_store or store)
        if self.prefill.config.draft_tokens:
            raise ValueError(
                f"the prefill side drafts {self.prefill.config.draft_tokens} tokens: only decoding speculates"
            )
        ranks = [side.engine.num_ranks for side in (self.prefill, self.decode)]
        #: what went from prefill to decode; decode ranks are numbered behind the prefill ranks, on nodes of their own
        self.ledger = Ledger(Topology(sum(ranks), gcd(*ranks)))
        self.attempts: dict[Attempt, Request] = {}
        self.bytes_sent: dict[int, dict[str, int]] = {}  # request -> bytes over all its hand-overs

    def submit(self, request_id: int, prompt, max_new_tokens: int, stop=()) -> Request:
        """A new request. Raises ValueError if it could not fit a rank of either side."""
        longest = len(prompt) + max_new_tokens - 1  # what is prefilled again if its decode pages are lost at the end
        pool = self.prefill.pools[0]
        if pool.pages_for(longest) > pool.num_pages:
            raise ValueError(
                f"request {request_id}: {longest} rows exceed the {pool.num_pages} pages of a prefill rank"
            )
        self.bytes_sent[request_id] = {"tokens": 0, "pages": 0, "metadata": 0}
        return self.decode.submit(request_id, prompt, max_new_tokens, stop)

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; pages are freed when no write reads or touches them."""
        request = self.decode.requests[request_id]
        if request.status is not Status.PREFILLING:
            self.decode.abort(request_id)
            return
        request.status = Status.ABORTED
        attempt = Attempt(request.id, request.preemptions)
        self.prefill.abort(attempt)
        if attempt in self.prefill.handovers:
            self.prefill.handovers[attempt].abort_destination()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do, writes under way included."""
        return self.decode.busy or self.prefill.busy or bool(self.attempts)

    def tick(self, deliver: Callable | None = None, between: Callable[[], None] = lambda: None) -> None:
        """One step of both sides. `deliver(handovers)` carries out writes (default: all); `between` runs amid steps."""
        self._pair()
        between()
        self._run(self.prefill, between)
        (deliver or _deliver_all)([self.prefill.handovers[a] for a in self.attempts if a in self.prefill.handovers])
        between()
        self._arrive()
        self._run(self.decode, between)
        self.prefill.reap()

    def _run(self, side: Scheduler, between) -> None:
        batch = side.begin()
        between()
        side.finish(side.engine.step(batch))

    def _pair(self) -> None:
        while (request := self.decode.reserve()) is not None:
            attempt = Attempt(request.id, request.preemptions)
            self.attempts[attempt] = request
            self.prefill.pair(attempt, self.decode.engine.cache(request.rank), request, self._record)

    def _record(self, src: int, dst: int, request: int, cls: str, layer: int, rows: int, row_bytes: int) -> None:
        """A line of the ledger: `rows` rows of one request in one layer."""
        to = np.zeros(self.ledger.topology.num_ranks, np.int32)
        to[self.prefill.engine.num_ranks + dst] = rows
        self.ledger.append(src, to, {cls: row_bytes}, Tag("hand_over", layer, request=request))

    def _arrive(self) -> None:
        """Start what is complete, and free the reserved pages of what was aborted once nothing can reach them."""
        for attempt, request in list(self.attempts.items()):
            source, handover = self.prefill.requests[attempt], self.prefill.handovers.get(attempt)
            if request.hit_tokens is None and source.hit_tokens is not None:
                request.hit_tokens = source.hit_tokens
                self.decode.stats.input_tokens += len(request.prompt)
                self.decode.stats.hit_tokens += source.hit_tokens
            if request.status is Status.ABORTED:
                if source.status in (Status.ABORTED, Status.FINISHED) and (
                    handover is None or handover.destination_free
                ):
                    self.decode.drop(request)
                    self._close(attempt, request)
            elif handover is not None and handover.complete:
                metadata = handover.take()
                self._close(attempt, request)
                request.stored_blocks = source.stored_blocks
                self.decode.start(request, metadata)

    def _close(self, attempt: Attempt, request: Request) -> None:
        self.prefill.reap()
        handover = self.prefill.handovers.pop(attempt, None)
        if handover is not None:
            sent = self.bytes_sent[request.id]
            sent["tokens"] += handover.payload_bytes
            sent["pages"] += handover.page_bytes
            sent["metadata"] += handover.metadata_bytes
        del self.attempts[attempt]


def _deliver_all(handovers: list[HandOver]) -> None:
    for handover in handovers:
        while handover.under_way:
            handover.deliver()

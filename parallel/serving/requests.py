"""What the scheduler knows of a request, and what it asks an engine to compute."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class Attempt(NamedTuple):
    """The name of one prefill of a request, where prefill is apart: it is done again if its decode pages are lost."""

    request: int
    number: int


class Status(Enum):
    """WAITING for a rank, RUNNING on one, FINISHED with all tokens, or ABORTED.

    Where prefill is apart, PREFILLING: pages are reserved for it while another rank fills them.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass
class Request:
    """A prompt and what has become of it. `cached` counts the rows in the cache that belong to `tokens`.

    hit_tokens: prompt tokens found in the prefix store when the request was first admitted, never counted again.
    """

    id: int | Attempt
    prompt: list[int]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    arrival: int = 0
    generated: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    rank: int | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    hit_tokens: int | None = None
    stored_blocks: int = 0
    preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def remaining(self) -> int:
        """Tokens whose rows are not in the cache; 1 while decoding."""
        return self.length - self.cached

    @property
    def done(self) -> bool:
        """All tokens are there, or the last one is a stop token."""
        full = len(self.generated) >= self.max_new_tokens
        return full or bool(self.generated and self.generated[-1] in self.stop)

    def accept(self, tokens: list[int]) -> list[int]:
        """Append new tokens up to the limit and to the first stop token; returns those that were taken."""
        taken = []
        for token in tokens:
            if self.done:
                break
            self.generated.append(token)
            taken.append(token)
        return taken


class Chunk(NamedTuple):
    """Compute `tokens`, which stand at positions `start`, `start` + 1, ...; rows before `start` are in the cache.

    `pages` hold the request's rows in order, with room for the drafts. `final`: these are the last known tokens, so
    the engine must return what follows them: one token, or more where drafts were accepted. The rows of accepted
    drafts stay in the cache behind those of `tokens`; rejected ones lie behind and are overwritten.
    """

    request: int | Attempt
    tokens: list[int]
    start: int
    pages: list[int]
    final: bool


class Engine(Protocol):
    """What computes: a model on data-parallel ranks, each with its own pages."""

    num_ranks: int
    num_pages: int
    page_size: int
    lookahead: int  # by how many rows some layer lags behind the others in a prompt that is still being read

    def step(self, batch: list[list[Chunk]]) -> list[list[list[int]]]:
        """New tokens of each chunk of each rank, none for a chunk that is not final. Ranks may have no chunks."""

    def export_page(self, rank: int, page: int) -> bytes:
        """The bytes of a page, for the prefix store."""

    def import_page(self, rank: int, page: int, payload: bytes) -> None:
        """Fill a page from the prefix store."""

    def forget(self, request: int) -> None:
        """The request has ended or lost its cache: drop what is kept for it beside the pages (drafts, hidden state)."""

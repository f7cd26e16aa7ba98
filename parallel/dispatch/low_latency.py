"""DeepEP's low-latency dispatch and combine: one message for each token and expert, straight to the expert's rank.

Rows are never merged; weights are applied at the token's own rank, in top-k order, so that there is one reduction.
Source: DeepEP csrc/kernels/legacy/internode_ll.cu.
"""

from typing import NamedTuple

import numpy as np

from parallel.dispatch import logfmt
from parallel.dispatch.elastic_rows import check_capacity
from parallel.dispatch.exchange import Exchange, Pairs
from parallel.dispatch.layout import order_by
from parallel.dispatch.payload import join_payload, payload_arrays, take_rows
from parallel.dispatch.rounding_tree import ordered_sum
from parallel.network import Received

HEADER_WORDS = 4  # int32: the token's index on its rank, then three reserved words


class Messages(NamedTuple):
    """One rank's messages in the order of sending: by expert, then by token."""

    slot: np.ndarray  # int64 [n] flat (token, slot)
    token: np.ndarray  # int64 [n]
    counts: np.ndarray  # int32 [R, e] messages for each expert

    @classmethod
    def of(cls, topk_idx: np.ndarray, num_experts: int, num_ranks: int) -> "Messages":
        ids = topk_idx.reshape(-1)
        by_expert = order_by(ids + 1, num_experts + 1)
        slot = by_expert[np.count_nonzero(ids < 0) :]
        counts = np.bincount(ids[slot], minlength=num_experts).reshape(num_ranks, -1)
        return cls(slot, slot // max(1, topk_idx.shape[1]), counts.astype(np.int32))

    def send(self, exchange_arrays: dict) -> dict:
        """The header and the rows of each message."""
        header = np.zeros((len(self.token), HEADER_WORDS), np.int32)
        header[:, 0] = self.token
        return {"header": (header, "header"), **take_rows(exchange_arrays, self.token)}

    def reduce(self, rows: np.ndarray, topk_weights: np.ndarray, out_dtype=None) -> np.ndarray:
        """[T, D] from the experts' rows [n, D] in the order of sending: weighted, slots in top-k order."""
        in_token_order = order_by(self.slot, topk_weights.size)
        slots = self.slot[in_token_order]
        counts = np.bincount(self.token, minlength=len(topk_weights))
        return ordered_sum(rows, in_token_order, counts, topk_weights.reshape(-1)[slots], out_dtype=out_dtype)


def received_experts(received: Received) -> np.ndarray:
    """int64 [M]: the local expert of each received row, which stand by (source, expert, token)."""
    local = np.arange(received.control.shape[1])
    return np.repeat(np.tile(local, len(received.counts)), received.control.reshape(-1))


def arrival_order(expert: np.ndarray, counts: np.ndarray, num_local_experts: int, seed=None) -> np.ndarray:
    """Rows [M] sorted by expert; within an expert each source's rows stay together.

    Without a seed by (source, token); a seed (integers) permutes the sources' blocks and the rows within each.
    """
    if seed is None:
        return order_by(expert, num_local_experts)
    rng = np.random.default_rng(seed)
    source = np.repeat(np.arange(len(counts)), counts)
    block = rng.random((num_local_experts, len(counts)))[expert, source]
    return np.lexsort((rng.random(len(expert)), block, expert))


class LowLatencyExchange(Exchange):
    """One rank's low-latency exchange.

    `arrival_seed` permutes, within each expert, the order of the source ranks' blocks and the rows within a block: the
    real kernels take slots by atomic counters, so any such order is a legal one. None keeps (source, token).
    `logfmt` sends the experts' rows back as LogFMT-10. `num_max_tokens_per_rank` is the capacity, equal on all ranks.
    """

    def __init__(
        self,
        *args,
        arrival_seed: int | None = None,
        logfmt: bool = False,
        num_max_tokens_per_rank: int | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.arrival_seed, self.logfmt, self.capacity = arrival_seed, logfmt, num_max_tokens_per_rank

    def dispatch_send(self, x, topk_idx, topk_weights):
        topk_idx, self._weights = self._checked(x, topk_idx, topk_weights)
        if self.capacity is not None:
            check_capacity(self._where("dispatch_send"), len(topk_idx), self.capacity)
        self._messages = Messages.of(topk_idx, self.num_experts, self.topology.num_ranks)
        self.network.send_rows(
            self.rank,
            self._messages.send(payload_arrays(x)),
            self._messages.counts.sum(axis=1),
            self._tag("dispatch_send"),
            control=self._messages.counts,
            terms={**self._terms(x, topk_idx), "num_max_tokens_per_rank": self.capacity},
        )

    def dispatch_recv(self):
        received = self._receive("dispatch_recv")
        self._from, expert = received.counts, received_experts(received)
        seed = None if self.arrival_seed is None else self._seed(self.arrival_seed)
        self._row = arrival_order(expert, received.counts, self.num_local_experts, seed)
        self.recv_src_idx = received.arrays["header"][:, 0]
        return Pairs(join_payload(received.arrays), self._row, expert[self._row])

    def combine_send(self, rows):
        rows = self._check_pairs(rows, len(self._row))
        back = np.empty_like(rows)
        back[self._row] = rows
        flags = np.ones((self.topology.num_ranks, self.num_local_experts), np.int32)
        self._width, self._dtype, lengths = rows.shape[1], rows.dtype, None
        if self.logfmt:
            back, length = logfmt.encode(back)
            lengths = {"x": length}
        arrays = {"x": (back, "payload")}
        self.network.send_rows(self.rank, arrays, self._from, self._tag("combine_send"), control=flags, lengths=lengths)

    def combine_recv(self):
        received = self._receive("combine_recv", gathered=self.logfmt)  # the sum takes each row once
        rows = received.arrays["x"]  # [n, D] in the order of sending
        if self.logfmt:
            rows = logfmt.decode(logfmt.Encoded(rows, received.lengths["x"]), self._width)
        return self._messages.reduce(rows, self._weights, self._dtype)

    def _awaits(self, stage):
        super()._awaits(stage)
        sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
        return ((self._tag(sends[stage]), None),) if stage in sends else ()

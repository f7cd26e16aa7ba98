"""The protocol that every dialect of dispatch and combine follows, seen from one rank."""

from typing import Any, NamedTuple

import numpy as np

from parallel.dispatch.layout import check_topk_idx, experts_per_rank
from parallel.dispatch.payload import num_rows, row_form
from parallel.messages import describe
from parallel.network import Network, Received, Tag

STAGES = ("dispatch_send", "dispatch_forward", "dispatch_recv", "combine_send", "combine_forward", "combine_recv")


class Pairs(NamedTuple):
    """What a rank's experts have to compute: pair p is row `row[p]` of `x` for local expert `expert[p]`.

    Sorted by expert, then by the dialect's receive order. `x` [M, D] is as it arrived (an array, or BlockScaled rows).
    """

    x: Any
    row: np.ndarray  # int64 [P]
    expert: np.ndarray  # int64 [P]


class Exchange:
    """One dispatch and combine of one rank, for one layer and micro-batch. No method ever waits.

    The stages are called in the order of STAGES; a receiving one (`dispatch_forward`, `dispatch_recv`,
    `combine_forward`, `combine_recv`) raises NotDelivered unless `ready(stage)`.
    """

    def __init__(
        self, network: Network, rank: int, num_experts: int, layer: int = 0, micro_batch: int = 0, step: int = 0
    ):
        self.network, self.topology = network, network.topology
        if not 0 <= rank < self.topology.num_ranks:
            raise ValueError(f"rank = {rank}: ranks are 0 to {self.topology.num_ranks - 1}")
        self.rank, self.num_experts = rank, num_experts
        self.num_local_experts = experts_per_rank(num_experts, self.topology)
        self.layer, self.micro_batch, self.step = layer, micro_batch, step

    # The stages.

    def dispatch_send(self, x, topk_idx: np.ndarray, topk_weights: np.ndarray) -> None:
        """Send the rows of `x` ([T, D] array or BlockScaled) to the ranks of their experts.

        `topk_idx` [T, K] physical ids, -1 for none; `topk_weights` [T, K] float32 (float64 for float64 rows).
        """
        raise NotImplementedError

    def dispatch_forward(self) -> None:
        """Pass rows on, where the dialect has a middle hop."""

    def dispatch_recv(self) -> Pairs:
        """Take what arrived for this rank's experts."""
        raise NotImplementedError

    def combine_send(self, rows: np.ndarray) -> None:
        """Send the experts' outputs `rows` [P, D], in the order of the pairs, on their way back."""
        raise NotImplementedError

    def combine_forward(self) -> None:
        """Reduce and pass on, where the dialect has a middle hop."""

    def combine_recv(self) -> np.ndarray:
        """The combined rows [T, D] in the dtype that was sent."""
        raise NotImplementedError

    # What a receiving stage waits for.

    def ready(self, stage: str) -> bool:
        """Could this stage run now?"""
        return all(self.network.ready(self.rank, tag, sources) for tag, sources in self._awaits(stage))

    def waits_for(self, stage: str) -> list[int]:
        """Ranks whose packet this stage still needs."""
        return [rank for tag, sources in self._awaits(stage) for rank in self.network.missing(self.rank, tag, sources)]

    def _awaits(self, stage: str) -> tuple[tuple[Tag, tuple[int, ...] | None], ...]:
        """(tag, sources or None for all ranks) of all that a stage receives."""
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is none of {', '.join(STAGES)}")
        return ()

    # For the dialects.

    def _tag(self, stage: str) -> Tag:
        return Tag(stage, self.layer, self.micro_batch, self.step)

    def _seed(self, seed: int) -> list[int]:
        """A seed of this exchange's own."""
        return [seed, self.rank, self.layer, self.micro_batch, self.step]

    def _where(self, stage: str) -> str:
        """The place that an error names."""
        return f"rank {self.rank}, {describe(self._tag(stage))}"

    def _receive(self, stage: str, gathered: bool = True) -> Received:
        """The one exchange that this stage waits for."""
        ((tag, sources),) = self._awaits(stage)
        return self.network.receive(self.rank, tag, sources, gathered=gathered)

    def _checked(self, x, topk_idx, topk_weights) -> tuple[np.ndarray, np.ndarray]:
        topk_idx = check_topk_idx(topk_idx, self.num_experts, self.topology)
        topk_weights = np.asarray(topk_weights)
        tokens = num_rows(x)
        if topk_weights.shape != topk_idx.shape or len(topk_idx) != tokens:
            raise ValueError(
                f"rank {self.rank}, layer {self.layer}: {tokens} rows, topk_idx {topk_idx.shape}, topk_weights "
                f"{topk_weights.shape}: one row of K ids and of K weights for each token is needed"
            )
        return topk_idx, topk_weights

    def _terms(self, x, topk_idx: np.ndarray) -> dict:
        """What all ranks of a dispatch must agree on."""
        return {"num_experts": self.num_experts, "top_k": topk_idx.shape[1], "row": row_form(x)}

    def _check_pairs(self, rows: np.ndarray, pairs: int) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.ndim != 2 or len(rows) != pairs:
            raise ValueError(
                f"rank {self.rank}, layer {self.layer}: combine got rows of shape {rows.shape}; "
                f"one row for each of the {pairs} pairs of dispatch_recv is needed"
            )
        return rows

"""Where a run is to stop, and why it did."""

import re
from typing import NamedTuple

from refmodel.generate import Work
from refmodel.layer import DENSE_LAYER, EMBED, FINAL, MOE_LAYER
from refmodel.mtp import MTP_EMBED
from refmodel.program import Operation

STAGE_NAMES = tuple(dict.fromkeys(stage.name for stage in (EMBED, MTP_EMBED, *DENSE_LAYER, *MOE_LAYER, FINAL)))


class Stop(NamedTuple):
    """Why `until` came to a stop.

    reason: `tensor` (that the operation now inside of has named), `operation` (that comes next), `end` (of the run) or
    `interrupted`. detail: what the check said.
    """

    reason: str
    tensor: str | None = None
    detail: object = None


class Target(NamedTuple):
    """Which operations are meant; None means any."""

    stage: str | None = None
    layer: int | None = None
    rank: int | None = None
    micro_batch: int | None = None
    step: int | None = None

    def holds(self, operation: Operation | None, step: int) -> bool:
        """Whether an operation of generation step `step` is meant."""
        if operation is None:
            return False
        its = Target(operation.stage.name, operation.layer, operation.rank, operation.micro_batch, step)
        return all(wanted is None or wanted == value for wanted, value in zip(self, its))

    def check(self, config, num_ranks: int):
        """Raise ValueError for a stage, layer or rank that a run does not have."""
        if self.stage is not None and self.stage not in STAGE_NAMES:
            raise ValueError(f"stage {self.stage!r}: must be one of {', '.join(STAGE_NAMES)}")
        if self.layer is not None and not 0 <= self.layer < config.num_layers:
            raise ValueError(f"layer {self.layer}: this model has layers 0 to {config.num_layers - 1}")
        if self.rank is not None and not 0 <= self.rank < num_ranks:
            raise ValueError(f"rank {self.rank}: this run has ranks 0 to {num_ranks - 1}")


def step_of(work: Work) -> int:
    """The generation step that a pass belongs to."""
    match = re.match(r"step\.(\d+)\.", work.prefix)
    return int(match.group(1)) if match else 0

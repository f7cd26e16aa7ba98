"""A pass through a model as a walk over operations: who walks it, decides when to stop.

`Model` and `Deployment` run a pass to its end; the stepper stops between operations. Both run the same walk.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from refmodel.generate import Step, Work
from refmodel.layer import Stage, stage_scope
from refmodel.state import State
from refmodel.trace import UNNAMED, Scope, recording


class Operation(NamedTuple):
    """One stage of one layer (None for embed and the main model's final), for the rows of one micro-batch.

    `rank` and `micro_batch` are labels that an engine with several programs sets.
    """

    stage: Stage
    layer: int | None
    state: State
    rank: int = 0
    micro_batch: int = 0

    @property
    def scope(self) -> Scope:
        """Where its tensors are named."""
        return stage_scope(self.state, self.stage, self.layer)

    def run(self):
        """Do it."""
        self.stage.run(self.state, self.layer, self.scope if recording() else UNNAMED)


class Pass(NamedTuple):
    """One pass over the tokens of some requests.

    Run each operation before asking for the next one, which may depend on it; then `finish`.
    """

    work: Work
    operations: Iterator[Operation]
    finish: Callable[[], list[Step]]

    def run(self) -> list[Step]:
        """Walk to the end: what the engine returns for each item."""
        for operation in self.operations:
            operation.run()
        return self.finish()

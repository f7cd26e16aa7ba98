"""A small real forward and backward that a training pipeline runs: linear stages with tanh between them.

It exists to show that a pipeline schedule moves no gradient by one bit. Each stage computes y = tanh(x W); the loss
of a micro-batch is the sum of squares of the last y, halved.
"""

from collections.abc import Sequence

import numpy as np

from parallel.schedule.ops import Op
from parallel.schedule.pipeline import chunks, run


class Stages:
    """State of one training step. weights: [S, D, D], inputs: [M, T, D], both float64.

    split: first micro-batch that travels downwards in DualPipe (M where there is one direction). Gradients add up in
    ascending micro-batch order within a direction; then the two directions are added. Without that rule the order of
    a schedule would show in the last bits.
    """

    def __init__(self, weights: np.ndarray, inputs: np.ndarray, split: int | None = None):
        self.weights, self.inputs = weights, inputs
        self.split = len(inputs) if split is None else split
        self.outputs, self.gradients, self.pending = {}, {}, {}
        self.partial = np.zeros((2, *weights.shape), dtype=np.float64)

    def forward(self, micro_batch: int, stage: int) -> None:
        x = self.inputs[micro_batch] if stage == 0 else self.outputs[micro_batch, stage - 1]
        self.outputs[micro_batch, stage] = np.tanh(np.einsum("td,de->te", x, self.weights[stage]))

    def backward_input(self, micro_batch: int, stage: int) -> None:
        """Gradient of the stage's input; keeps what the weight gradient will need."""
        y = self.outputs[micro_batch, stage]
        above = y if stage + 1 == len(self.weights) else self.gradients.pop((micro_batch, stage + 1))
        inner = above * (1.0 - y * y)
        self.pending[micro_batch, stage] = inner
        self.gradients[micro_batch, stage] = np.einsum("te,de->td", inner, self.weights[stage])

    def backward_weight(self, micro_batch: int, stage: int) -> None:
        """Adds this micro-batch's weight gradient to the sum of its direction."""
        x = self.inputs[micro_batch] if stage == 0 else self.outputs[micro_batch, stage - 1]
        direction = int(micro_batch >= self.split)
        self.partial[direction, stage] += np.einsum("td,te->de", x, self.pending.pop((micro_batch, stage)))

    def weight_gradients(self) -> np.ndarray:
        """[S, D, D]: both directions together (an all-reduce between the two ranks that hold a stage)."""
        return self.partial[0] + self.partial[1]

    def input_gradients(self) -> np.ndarray:
        """[M, T, D], after every backward has run."""
        return np.stack([self.gradients[micro_batch, 0] for micro_batch in range(len(self.inputs))])

    def step(self, op: Op) -> None:
        """Do one operation of a training schedule."""
        act = {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}
        for kind, micro_batch, stage in chunks(op):
            act[kind](micro_batch, stage)


def train_serial(weights: np.ndarray, inputs: np.ndarray, split: int | None = None) -> Stages:
    """One micro-batch after the other through all stages and back: the result that every schedule must give."""
    stages = Stages(weights, inputs, split)
    for micro_batch in range(len(inputs)):
        for stage in range(len(weights)):
            stages.forward(micro_batch, stage)
        for stage in reversed(range(len(weights))):
            stages.backward_input(micro_batch, stage)
            stages.backward_weight(micro_batch, stage)
    return stages


def train(
    schedules: Sequence[Sequence[Op]], weights: np.ndarray, inputs: np.ndarray, split: int | None = None, order="rank"
) -> Stages:
    """The same step by a pipeline schedule; `order` as in `execute`."""
    stages = Stages(weights, inputs, split)
    run(schedules, len(weights), stages.step, order)
    return stages

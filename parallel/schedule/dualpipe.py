"""DualPipe and DualPipeV: training pipelines that run a forward beside a backward on the same device.

Source of the eight steps: deepseek-ai/DualPipe dualpipe/dualpipe.py and dualpipev.py.
DualPipe feeds the pipeline from both ends: rank r holds stage r for micro-batches of the first half, which travel
upwards, and stage P-1-r for those of the second half, which travel downwards. DualPipeV folds one pipeline of 2P
stages onto P ranks: rank r holds stages r and 2P-1-r.

Operations: `F` chunk; `B` full (gradients of input and weights) or `input` (the weights' part is queued); `W` weight
takes the oldest queued part; `F&B` pair. In an `Op`, `layer` is the pipeline stage.
"""

from parallel.schedule.ops import Op


class _Writer:
    """Writes the program of one rank: counts micro-batches per local phase and keeps the weight-gradient queue.

    stages, first_micro_batch: pipeline stage and first micro-batch of local phase 0 and of local phase 1.
    """

    def __init__(self, rank, stages, first_micro_batch):
        self.rank, self.stages = rank, stages
        self.next_forward, self.next_backward = list(first_micro_batch), list(first_micro_batch)
        self.queue, self.ops = [], []

    def _take(self, counters, phase):
        counters[phase] += 1
        return counters[phase] - 1, self.stages[phase]

    def forward(self, phase):
        self.ops.append(Op("F", self.rank, *self._take(self.next_forward, phase), "chunk"))

    def backward(self, phase, zero_bubble=False):
        chunk = self._take(self.next_backward, phase)
        if zero_bubble:
            self.queue.append(chunk)
        self.ops.append(Op("B", self.rank, *chunk, "input" if zero_bubble else "full"))

    def weight(self):
        self.ops.append(Op("W", self.rank, *self.queue.pop(0), "weight"))

    def pair(self, forward_phase, backward_phase):
        ahead, ahead_stage = self._take(self.next_forward, forward_phase)
        behind, behind_stage = self._take(self.next_backward, backward_phase)
        self.ops.append(Op("F&B", self.rank, (ahead, behind), (ahead_stage, behind_stage), "pair"))


def _write_eight_steps(writer, half, depth, main):
    """The eight steps. half: ranks between the ends and the middle; depth: distance from the end; main: n of step 4."""
    before_middle = half - depth - 1
    for _ in range(2 * before_middle):  # 1
        writer.forward(0)
    for _ in range(depth + 1):  # 2
        writer.forward(0)
        writer.forward(1)
    for _ in range(before_middle):  # 3
        writer.backward(1, zero_bubble=True)
        writer.weight()
        writer.forward(1)
    for step in range(main):  # 4
        if step == 0 and before_middle == 0:  # the middle begins earlier by not pairing these two
            writer.forward(0)
            writer.backward(1)
        else:
            writer.pair(0, 1)
        writer.pair(1, 0)
    for _ in range(before_middle):  # 5
        writer.backward(1)
        writer.pair(1, 0)
    zero_bubble = False
    for step in range(depth + 1):  # 6
        if step == (depth + 1) // 2 and depth % 2 == 1:
            zero_bubble = True
        writer.backward(1, zero_bubble)
        if step == (depth + 1) // 2 and depth % 2 == 0:
            zero_bubble = True
        writer.backward(0, zero_bubble)
    for _ in range(before_middle):  # 7
        writer.weight()
        writer.backward(0, zero_bubble=True)
    for _ in range(depth + 1):  # 8
        writer.weight()


def build(num_ranks: int, micro_batches: int) -> list[list[Op]]:
    """DualPipe's programs, one per rank.

    Micro-batches below `micro_batches / 2` travel from rank 0 upwards, the others from the last rank downwards.
    Raises ValueError for an odd number of ranks or of micro-batches, or fewer than two micro-batches per rank.
    """
    _check_counts(num_ranks, micro_batches)
    if num_ranks % 2:
        raise ValueError(f"num_ranks = {num_ranks}: DualPipe pairs rank r with rank P-1-r, so P must be even")
    if micro_batches % 2:
        raise ValueError(f"micro_batches = {micro_batches}: each direction takes half, so their number must be even")
    programs = []
    for rank in range(num_ranks):
        half, depth = num_ranks // 2, min(rank, num_ranks - 1 - rank)
        stages, first = [rank, num_ranks - 1 - rank], [0, micro_batches // 2]
        if rank >= half:  # local phase 0 is the direction that enters the pipeline on this side
            stages, first = stages[::-1], first[::-1]
        writer = _Writer(rank, stages, first)
        _write_eight_steps(writer, half, depth, micro_batches // 2 - num_ranks + depth + 1)
        programs.append(writer.ops)
    return programs


def build_v(num_ranks: int, micro_batches: int) -> list[list[Op]]:
    """DualPipeV's programs, one per rank, for a pipeline of `2 * num_ranks` stages; the loss is on rank 0.

    Raises ValueError for fewer than two micro-batches per rank.
    """
    _check_counts(num_ranks, micro_batches)
    programs = []
    for rank in range(num_ranks):
        writer = _Writer(rank, [rank, 2 * num_ranks - 1 - rank], [0, 0])
        _write_eight_steps(writer, num_ranks, rank, micro_batches - 2 * num_ranks + rank + 1)
        programs.append(writer.ops)
    return programs


def _check_counts(num_ranks, micro_batches):
    if num_ranks < 1:
        raise ValueError(f"num_ranks = {num_ranks}: a pipeline has at least one rank")
    if micro_batches < 2 * num_ranks:
        raise ValueError(
            f"micro_batches = {micro_batches} on {num_ranks} ranks: the eight steps need at least two per rank, "
            f"{2 * num_ranks}"
        )

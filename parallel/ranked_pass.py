"""One pass over the ranks of a deployment: who computes which rows, what may run when, and the rows back in order."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from parallel.micro_batches import micro_batches
from parallel.pieces import join_pieces, pieces_of
from parallel.schedule import LayerPlan, Op, program_order, walk
from refmodel.generate import Step, Work
from refmodel.model import advance_caches, main_program, make_batch, mtp_program
from refmodel.program import Operation
from refmodel.state import State
from refmodel.trace import Scope

_RECEIVING = ("dispatch_forward", "dispatch_recv", "combine_forward", "combine_recv")


class Part(NamedTuple):
    """One micro-batch of one rank."""

    rows: np.ndarray  # global row of each of its token rows
    state: State
    done: set  # (layer, stage) pairs that have run


class RankedPass:
    """`work` on the ranks of `deployment`, under its schedule; `step` numbers the pass in the ledger."""

    def __init__(self, deployment, work: Work, step: int):
        self.deployment, self.model, self.work, self.step = deployment, deployment.model, work, step
        depth, dense = self.model.config.num_hidden_layers, self.model.config.first_k_dense_replace
        self.plan = LayerPlan.mtp(depth) if work.mtp else LayerPlan.of(depth, dense)
        self._reads = {(layer, stage): self.plan.reads(layer, stage) for layer, stage in self.plan.program()}
        self.parts = self._distribute()

    def operations(self) -> Iterator[Operation]:
        """Every operation of this process's ranks, each given out when all that it reads is there."""
        deployment, config = self.deployment, self.model.config
        program = mtp_program(config) if self.work.mtp else main_program(config)
        stages = {(layer, stage.name): stage for stage, layer in program}
        schedules = [deployment.build(self.plan, rank) for rank in range(deployment.topology.num_ranks)]
        order = deployment.order
        if deployment.transport == "mpi":  # one program order for all: each exchange is one collective call
            schedules = [[op for op in program_order(schedules) if op.rank in deployment.local_ranks]]
            order = "rank"
        for op in walk(schedules, self._ready, lambda op: "; ".join(self._missing(op)), order):
            part = self.parts[op.rank, op.micro_batch]
            layer = op.layer if (op.layer, op.stage) in stages else None  # embed and final of the main model
            yield Operation(stages[layer, op.stage], layer, part.state, op.rank, op.micro_batch)
            part.done.add((op.layer, op.stage))

    def collect(self) -> list[Step]:
        """The rows of each item, of all micro-batches and processes."""
        pieces = [piece for part in self.parts.values() for piece in pieces_of(part.rows, part.state)]
        if self.deployment.transport == "mpi":
            pieces = [piece for of_process in self.deployment.network.comm.allgather(pieces) for piece in of_process]
        advance_caches(self.work)
        return join_pieces(pieces, self.work.items, self.model)

    def _ready(self, op: Op) -> bool:
        """Whether an operation waits for nothing: asked far more often than what it waits for."""
        part = self.parts[op.rank, op.micro_batch]
        if not part.done.issuperset(self._reads[op.layer, op.stage]):
            return False
        if op.stage in _RECEIVING:
            return part.state.values["exchange"].ready(op.stage)
        return op.stage != "attn_core" or not self._missing(op)

    def _missing(self, op: Op) -> list[str]:
        """What an operation still waits for, in words; empty when it may run."""
        part = self.parts[op.rank, op.micro_batch]
        missing = [
            f"its own {stage} of layer {layer}"
            for layer, stage in self._reads[op.layer, op.stage]
            if (layer, stage) not in part.done
        ]
        if missing:
            return missing
        if op.stage in _RECEIVING:
            exchange = part.state.values["exchange"]
            if not exchange.ready(op.stage):
                ranks = exchange.waits_for(op.stage)
                missing.append(f"packets of {op.stage}, layer {op.layer}, from ranks {', '.join(map(str, ranks))}")
        if op.stage == "attn_core":  # one request may span both micro-batches
            for segment in part.state.batch.segments:
                written = segment.cache.written[op.layer]
                if written < segment.keys:
                    missing.append(f"keys {written} to {segment.keys - 1} of layer {op.layer}, not yet in the cache")
        return missing

    def _distribute(self) -> dict[tuple[int, int], Part]:
        """The micro-batches of every rank, empty ones included."""
        work, deployment = self.work, self.deployment
        items, phase = work.items, work.phase
        shift = self.model.numerics.switches.mtp_position_shift if work.mtp else 0
        starts = np.cumsum([0, *(len(item.token_ids) for item in items)])
        per_rank: list[list] = [[] for _ in range(deployment.topology.num_ranks)]
        for item, start in zip(items, starts):
            per_rank[deployment.rank_of(item.request)].append((item, int(start)))
        routed: dict = {}  # (layer, micro-batch) -> rank -> what it sent
        made = {}
        for rank in deployment.local_ranks:
            mine = per_rank[rank]
            alone = deployment.schedule == "sequential"
            for micro_batch, parts in enumerate([mine] if alone else micro_batches(mine, phase, deployment.split)):
                batch = make_batch([item for item, _ in parts], phase, shift)
                values = {"mtp_input": self._hidden(parts)} if work.mtp else {}
                rows = [np.arange(start, start + len(item.token_ids)) for item, start in parts]
                rows = np.concatenate([*rows, np.zeros(0)]).astype(np.int64)
                if work.last_only:
                    values["head_rows"] = np.flatnonzero(np.isin(rows, starts[1:] - 1))
                exchange = partial(deployment.exchange, rank, micro_batch, self.step, rows, routed)
                state = State(self.model.weights, batch, exchange, Scope(work.prefix, rows), values)
                made[rank, micro_batch] = Part(rows, state, set())
        return made

    def _hidden(self, parts):
        """What feeds the MTP layer: [T, D], also of a rank without tokens."""
        none = np.zeros((0, self.model.config.hidden_size), self.model.numerics.activation)
        return np.concatenate([none, *(item.hidden for item, _ in parts)])

"""A model on emulated ranks: data-parallel attention, experts spread over all ranks, every byte through one network."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from parallel.dispatch import DIALECTS, make_exchange
from parallel.hand_over import hand_over, joint_topology
from parallel.ledger import Ledger
from parallel.network import Network
from parallel.pieces import join_pieces, pieces_of
from parallel.placed_exchange import PlacedExchange
from parallel.placement import Placement
from parallel.reference import ReferenceModel, choose_by_row, rounding_tree
from parallel.residents import Residents
from parallel.schedule import BUILDERS, LayerPlan, Op, program_order, walk
from parallel.schedule.split import split_decode, split_prefill
from parallel.topology import Topology
from refmodel.cache import LatentCache
from refmodel.generate import Generated, Item, Step, Work, generate
from refmodel.layer import State
from refmodel.model import Model, advance_caches, main_program, make_batch, mtp_program
from refmodel.program import Operation, Pass
from refmodel.trace import Scope

_RECEIVING = ("dispatch_forward", "dispatch_recv", "combine_forward", "combine_recv")


class _Part(NamedTuple):
    """One micro-batch of one rank."""

    rows: np.ndarray  # global row of each of its token rows
    state: State
    done: set  # (layer, stage) pairs that have run


class Deployment:
    """`model` on `topology.num_ranks` ranks. Results do not depend on anything chosen here, except by definition.

    redundant_experts: physical slots beyond the routed experts; ranks must divide the sum.
    dispatch: a dialect of `parallel.dispatch`. schedule: `sequential`, `prefill_overlap`, `decode_overlap`, `vllm_dbo`.
    transport: `memory` (one process) or `mpi` (ranks spread over the processes of mpiexec).
    placement: which slot holds which expert, for all layers or by layer (default: slot i holds expert i mod E).
    replica_rule: one of `parallel.replicas.RULES`; `static`, or `hashed` for `allgather`.
    order: how the executor picks among ranks that can move. split: how a rank's (item, first row) list becomes two
    micro-batches; by default halves of attention work in prefill, of requests in decode.
    Raises ValueError for unknown names, for ranks that do not divide the experts, and for placements that do not fit.
    """

    def __init__(
        self,
        model: Model,
        topology: Topology,
        redundant_experts: int = 0,
        dispatch: str = "low_latency",
        schedule: str = "sequential",
        transport: str = "memory",
        *,
        placement: Placement | dict[int, Placement] | None = None,
        replica_rule: str | None = None,
        order="rank",
        split: Callable | None = None,
        **dispatch_options,
    ):
        if dispatch not in DIALECTS:
            raise ValueError(f"dispatch = {dispatch!r}: must be one of {', '.join(DIALECTS)}")
        if schedule not in BUILDERS:
            raise ValueError(f"schedule = {schedule!r}: must be one of {', '.join(BUILDERS)}")
        if transport not in ("memory", "mpi"):
            raise ValueError(f"transport = {transport!r}: must be 'memory' or 'mpi'")
        self.model, self.config, self.topology = model, model.config, topology
        self.dispatch, self.schedule, self.transport = dispatch, schedule, transport
        #: without an all-to-all every rank must choose the same replica
        self.replica_rule = replica_rule or ("hashed" if dispatch == "allgather" else "static")
        self._placements = placement
        if placement is None:
            self._placements = default_placement(self.config.n_routed_experts, redundant_experts, topology)
        check_placements(self._placements, self.config, topology)
        self._order, self._split, self._dispatch_options = order, split, dispatch_options
        self._reset()
        #: ranks that this process computes: all of them, unless they are spread by MPI
        self.local_ranks = tuple(getattr(self._network, "local_ranks", range(topology.num_ranks)))

    def _reset(self):
        self._network = _make_network(self.topology, self.transport)
        self._pools = [self.model.new_pool() for _ in range(self.topology.num_ranks)]
        self.residents = Residents(self.topology.num_ranks)
        self._handed_over: WeakKeyDictionary[Deployment, Ledger] = WeakKeyDictionary()
        self._step = 0

    def fresh(self) -> "Deployment":
        """The same deployment as if nothing had run on it: other caches, an empty ledger."""
        other = copy.copy(self)
        other._reset()
        return other

    def placement(self, layer: int) -> Placement:
        """Which slot holds which expert in one layer."""
        return self._placements[layer] if isinstance(self._placements, dict) else self._placements

    @property
    def ledger(self):
        """Everything that was moved so far; over MPI, what this process's ranks sent."""
        return self._network.ledger

    @property
    def network(self):
        """The only way from one rank to others."""
        return self._network

    def rank_of(self, request: int) -> int:
        """The rank that holds a request: where `run` or `place` was told, else request mod ranks."""
        return self.residents.rank_of(request)

    def place(self, request: int, rank: int) -> None:
        """Let a request live on `rank`; the next `run` or `generate` places its own requests anew.

        Raises ValueError for a rank that does not exist, and for a request that has tokens on another one.
        """
        self.residents.place(request, rank)

    def hand_over(self, request: int, other: "Deployment", rank: int | None = None) -> LatentCache:
        """Move a request's cache, MTP rows included, to another deployment of the same model; returns the cache there.

        rank: of `other`; by default where `other` would place the request. Going on there gives the bits of staying.
        What crosses is in `hand_over_ledger(other)`. Errors as in `parallel.hand_over.hand_over`.
        """
        return hand_over(self, request, other, rank, self.hand_over_ledger(other))

    def hand_over_ledger(self, other: "Deployment") -> Ledger:
        """What went from here to `other` so far; its ranks are numbered behind the ones here."""
        return self._handed_over.setdefault(other, Ledger(joint_topology(self.topology, other.topology)))

    def new_cache(self, request: int) -> LatentCache:
        """An empty cache in the pages of the request's rank."""
        return LatentCache(self._pools[self.rank_of(request)])

    def run(self, batch: Sequence[Sequence], caches=None, phase: str = "prefill") -> list[list[np.ndarray]]:
        """Logits of a batch: per rank a list of id arrays in, the same nesting of [T, vocab] out.

        caches: the same nesting of caches that the tokens follow; none start empty.
        """
        flat = self._place_batch(batch)
        items = []
        for request, (rank, index) in enumerate(flat):
            cache = self.new_cache(request) if caches is None else caches[rank][index]
            items.append(Item(request, self.model.check_ids(batch[rank][index]), cache, cache.length))
        logits = iter([step.logits for step in self.step(items, phase)])
        return [[next(logits) for _ in requests] for requests in batch]

    def generate(self, batch: Sequence[Sequence], max_new_tokens: int, speculative: bool = False, **settings):
        """New tokens, in the nesting of `batch`; `settings` as in `refmodel.generate.generate`."""
        prompts = [batch[rank][index] for rank, index in self._place_batch(batch)]
        done = self.generate_batch(prompts, max_new_tokens, speculative=speculative, **settings)
        tokens = iter(done.tokens)
        return [[next(tokens) for _ in requests] for requests in batch]

    def _place_batch(self, batch) -> list[tuple[int, int]]:
        """(rank, index in its list) of each request; requests are numbered in that order from here on."""
        if len(batch) != self.topology.num_ranks:
            raise ValueError(
                f"{len(batch)} rank lists for {self.topology.num_ranks} ranks: a batch holds one list of id arrays for "
                "each rank, empty where a rank has no request"
            )
        flat = [(rank, index) for rank, requests in enumerate(batch) for index in range(len(requests))]
        self.residents.start_anew(rank for rank, _ in flat)
        return flat

    def generate_batch(self, prompts, max_new_tokens: int, **settings) -> Generated:
        """New tokens after several prompts; request i is on rank i mod ranks unless `run` placed it."""
        return generate(self, [self.model.check_ids(prompt) for prompt in prompts], max_new_tokens, **settings)

    def step(self, items: list[Item], phase: str, prefix: str = "", last_only: bool = False) -> list[Step]:
        """One pass of the main model over the tokens of several requests, on their ranks.

        last_only: logits [1, vocab] of each request's last token alone.
        """
        return self.begin(Work(items, phase, prefix, last_only=last_only)).run()

    def mtp_step(self, items: list[Item], phase: str, prefix: str = "") -> list[Step]:
        """One pass of the MTP layer over (hidden, token) pairs of several requests, on their ranks."""
        return self.begin(Work(items, phase, prefix, mtp=True)).run()

    def begin(self, work: Work) -> Pass:
        """A pass of which nothing has run yet."""
        self._step += 1
        for item in work.items:
            self.residents.keep(item.request, item.cache)
        depth, dense = self.config.num_hidden_layers, self.config.first_k_dense_replace
        plan = LayerPlan.mtp(depth) if work.mtp else LayerPlan.of(depth, dense)
        parts = self._distribute(work)
        return Pass(work, self._operations(work, plan, parts), lambda: self._collect(work, parts))

    def _operations(self, work, plan, parts) -> Iterator[Operation]:
        program = mtp_program(self.config) if work.mtp else main_program(self.config)
        stages = {(layer, stage.name): stage for stage, layer in program}
        build = BUILDERS[self.schedule]
        schedules = [build(plan, rank) for rank in range(self.topology.num_ranks)]
        order = self._order
        if self.transport == "mpi":  # one program order for all processes, so that each exchange is one collective
            schedules = [[op for op in program_order(schedules) if op.rank in self.local_ranks]]
            order = "rank"
        part_of = lambda op: parts[op.rank, op.micro_batch]  # noqa: E731
        ready = lambda op: self._ready(part_of(op), plan, op)  # noqa: E731
        for op in walk(schedules, ready, lambda op: "; ".join(self._missing(part_of(op), plan, op)), order):
            part = parts[op.rank, op.micro_batch]
            layer = op.layer if (op.layer, op.stage) in stages else None  # embed and final of the main model
            yield Operation(stages[layer, op.stage], layer, part.state, op.rank, op.micro_batch)
            part.done.add((op.layer, op.stage))

    def _collect(self, work, parts) -> list[Step]:
        """The rows of each item, of all micro-batches and processes."""
        pieces = [piece for part in parts.values() for piece in pieces_of(part.rows, part.state)]
        if self.transport == "mpi":
            pieces = [piece for of_process in self._network.comm.allgather(pieces) for piece in of_process]
        advance_caches(work)
        return join_pieces(pieces, work.items, self.model)

    def _ready(self, part: _Part, plan: LayerPlan, op: Op) -> bool:
        """Whether an operation waits for nothing: asked far more often than what it waits for."""
        if not part.done.issuperset(plan.reads(op.layer, op.stage)):
            return False
        if op.stage in _RECEIVING:
            return part.state.values["exchange"].ready(op.stage)
        return op.stage != "attn_core" or not self._missing(part, plan, op)

    def _missing(self, part: _Part, plan: LayerPlan, op: Op) -> list[str]:
        """What an operation still waits for, in words; empty when it may run."""
        missing = [f"its own {stage} of layer {layer}" for layer, stage in plan.reads(op.layer, op.stage)
                   if (layer, stage) not in part.done]  # fmt: skip
        if missing:
            return missing
        if op.stage in _RECEIVING:
            exchange = part.state.values["exchange"]
            if not exchange.ready(op.stage):
                ranks = exchange.waits_for(op.stage)
                missing.append(f"packets of {op.stage}, layer {op.layer}, from ranks {', '.join(map(str, ranks))}")
        if op.stage == "attn_core":  # one request may span both micro-batches
            for segment in part.state.batch.segments:
                keys, written = segment.cache_offset + segment.stop - segment.start, segment.cache.written[op.layer]
                if written < keys:
                    missing.append(f"keys {written} to {keys - 1} of layer {op.layer}, not yet in the cache")
        return missing

    def _distribute(self, work: Work) -> dict[tuple[int, int], _Part]:
        """The micro-batches of every rank, empty ones included."""
        items, phase = work.items, work.phase
        shift = self.model.numerics.switches.mtp_position_shift if work.mtp else 0
        starts = np.cumsum([0, *(len(item.token_ids) for item in items)])
        per_rank: list[list] = [[] for _ in range(self.topology.num_ranks)]
        for item, start in zip(items, starts):
            per_rank[self.rank_of(item.request)].append((item, int(start)))
        routed: dict = {}  # (layer, micro-batch) -> rank -> what it sent
        made = {}
        for rank in self.local_ranks:
            mine = per_rank[rank]
            for micro_batch, parts in enumerate(self._micro_batches(mine, phase)):
                batch = make_batch([item for item, _ in parts], phase, shift)
                values = {"mtp_input": self._hidden(parts)} if work.mtp else {}
                rows = [np.arange(start, start + len(item.token_ids)) for item, start in parts]
                rows = np.concatenate([*rows, np.zeros(0)]).astype(np.int64)
                if work.last_only:
                    values["head_rows"] = np.flatnonzero(np.isin(rows, starts[1:] - 1))
                exchange = partial(self._exchange, rank, micro_batch, self._step, rows, routed)
                state = State(self.model.weights, batch, exchange, Scope(work.prefix, rows), values)
                made[rank, micro_batch] = _Part(rows, state, set())
        return made

    def _micro_batches(self, mine, phase):
        if self.schedule == "sequential":
            return [mine]
        if self._split is not None:
            return self._split(mine)
        if phase == "decode":
            return [[mine[index] for index in half] for half in split_decode(len(mine))]
        new, cached = [len(item.token_ids) for item, _ in mine], [item.slot for item, _ in mine]
        return [
            [cut_item(*mine[part.request], part.start, part.stop) for part in half]
            for half in split_prefill(new, cached)
        ]

    def _hidden(self, parts):
        """What feeds the MTP layer: [T, D], also of a rank without tokens."""
        none = np.zeros((0, self.config.hidden_size), self.model.numerics.activation)
        return np.concatenate([none, *(item.hidden for item, _ in parts)])

    def _exchange(self, rank, micro_batch, step, rows, routed, layer):
        placement = self.placement(layer)
        inner = make_exchange(
            self.dispatch,
            self._network,
            rank,
            placement.num_physical,
            layer,
            micro_batch,
            step,
            **self._dispatch_options,
        )
        choose = partial(self.choose, rows=rows, placement=placement, rank=rank)
        # over MPI a process does not see what the others' ranks sent
        sent = None if self.transport == "mpi" else routed.setdefault((layer, micro_batch), {})
        return PlacedExchange(inner, placement, choose, rows, sent)

    def choose(self, topk_idx, rows, placement: Placement, rank: int) -> np.ndarray:
        """Physical ids of the tokens at global rows `rows` [T] of a step, routed on `rank`."""
        all_to_all = self.dispatch != "allgather"
        return choose_by_row(topk_idx, rows, placement, self.replica_rule, rank, self.topology, all_to_all)

    def reference(self) -> Model:
        """The one-rank model whose bits this deployment must give."""
        tree = self._tree()
        return self.model if tree is None else ReferenceModel(self, tree)

    @property
    def reference_name(self) -> str:
        """What `reference` is, in words."""
        if self._tree() is None:
            return "the single-rank run"
        return f"the single-rank run with the rounding tree of {self.dispatch}"

    def _tree(self):
        return rounding_tree(self.dispatch, self.topology, self._dispatch_options.get("mode", "hybrid"))


def cut_item(item: Item, start: int, first: int, stop: int) -> tuple[Item, int]:
    """Tokens first .. stop - 1 of an item whose first token is global row `start`."""
    hidden = None if item.hidden is None else item.hidden[first:stop]
    part = Item(item.request, item.token_ids[first:stop], item.cache, item.slot + first, hidden)
    return part, start + first


def check_placements(placement: Placement | dict[int, Placement], config, topology: Topology) -> None:
    """Raises ValueError unless each MoE layer, those of MTP included, has a placement of its experts on these ranks."""
    needed = [layer for layer in range(config.num_layers) if config.is_moe_layer(layer)]
    by_layer = placement if isinstance(placement, dict) else dict.fromkeys(needed, placement)
    missing = [layer for layer in needed if layer not in by_layer]
    if missing:
        raise ValueError(f"placement names no layer {missing[0]}: each of the MoE layers {needed} needs one")
    for layer in needed:
        experts, _, ranks = by_layer[layer].shape
        if (experts, ranks) != (config.n_routed_experts, topology.num_ranks):
            raise ValueError(
                f"placement of layer {layer}: {experts} experts on {ranks} ranks, but the model has "
                f"{config.n_routed_experts} and the topology {topology.num_ranks}"
            )


def default_placement(num_experts: int, redundant_experts: int, topology: Topology) -> Placement:
    """Slot i holds expert i mod num_experts; slots are spread over the ranks in contiguous runs."""
    return Placement.contiguous(num_experts, topology.num_ranks, redundant_experts)


def _make_network(topology, transport):
    if transport == "mpi":
        from parallel.mpi import MpiNetwork

        return MpiNetwork(topology)
    return Network(topology)

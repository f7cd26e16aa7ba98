"""A model on emulated ranks: data-parallel attention, experts spread over all ranks, every byte through one network."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from parallel.dispatch import DIALECTS, make_exchange
from parallel.hand_over import hand_over, joint_topology
from parallel.ledger import Ledger
from parallel.network import Network
from parallel.placed_exchange import PlacedExchange
from parallel.placement import Placement
from parallel.ranked_pass import RankedPass
from parallel.reference import ReferenceModel, choose_by_row, rounding_tree
from parallel.residents import Residents
from parallel.schedule import BUILDERS
from parallel.topology import Topology
from refmodel.cache import LatentCache
from refmodel.generate import Generated, Item, Step, Work, generate
from refmodel.model import Model
from refmodel.program import Pass


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
        #: (layer plan, rank) -> the operations of that rank, in order
        self.build = BUILDERS[schedule]
        #: without an all-to-all every rank must choose the same replica
        self.replica_rule = replica_rule or ("hashed" if dispatch == "allgather" else "static")
        self._placements = placement
        if placement is None:
            self._placements = default_placement(self.config.n_routed_experts, redundant_experts, topology)
        check_placements(self._placements, self.config, topology)
        self.order, self.split, self._dispatch_options = order, split, dispatch_options
        self._reset()
        #: ranks that this process computes: all of them, unless they are spread by MPI
        self.local_ranks = tuple(getattr(self._network, "local_ranks", range(topology.num_ranks)))

    def _reset(self):
        self._network = _make_network(self.topology, self.transport)
        self._pools = [self.model.new_pool() for _ in range(self.topology.num_ranks)]
        self.residents = Residents(self.topology.num_ranks)
        self._handed_over: WeakKeyDictionary[Deployment, Ledger] = WeakKeyDictionary()
        self._temporary: list[LatentCache] = []  # of requests whose caches nobody asked for
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

        caches: the same nesting of caches that the tokens follow; without them requests start empty, and their pages
        are given back when the next batch comes.
        """
        flat = self._place_batch(batch)
        items = []
        for request, (rank, index) in enumerate(flat):
            cache = self._temporary_cache(request) if caches is None else caches[rank][index]
            items.append(Item(request, self.model.check_ids(batch[rank][index]), cache, cache.length))
        logits = iter([step.logits for step in self.step(items, phase)])
        return [[next(logits) for _ in requests] for requests in batch]

    def generate(self, batch: Sequence[Sequence], max_new_tokens: int, speculative: bool = False, **settings):
        """New tokens, in the nesting of `batch`; `settings` as in `refmodel.generate.generate`."""
        prompts = [batch[rank][index] for rank, index in self._place_batch(batch)]
        done = self.generate_batch(prompts, max_new_tokens, speculative=speculative, **settings)
        self._temporary.extend(done.caches)
        tokens = iter(done.tokens)
        return [[next(tokens) for _ in requests] for requests in batch]

    def _temporary_cache(self, request):
        self._temporary.append(self.new_cache(request))
        return self._temporary[-1]

    def _place_batch(self, batch) -> list[tuple[int, int]]:
        """(rank, index in its list) of each request; requests are numbered in that order from here on."""
        if len(batch) != self.topology.num_ranks:
            raise ValueError(
                f"{len(batch)} rank lists for {self.topology.num_ranks} ranks: a batch holds one list of id arrays for "
                "each rank, empty where a rank has no request"
            )
        for cache in self._temporary:
            cache.release()
        self._temporary.clear()
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
        walked = RankedPass(self, work, self._step)
        return Pass(work, walked.operations(), walked.collect)

    def exchange(self, rank, micro_batch, step, rows, routed, layer) -> PlacedExchange:
        """One rank's exchange of one layer and micro-batch; `rows` are the global rows of its tokens."""
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

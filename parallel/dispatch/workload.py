"""What is dispatched: a deployment, its tokens and how they are routed; the published deployments as presets."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel.dispatch.draw import draw_routing
from parallel.dispatch.expectations import Reach, expected_reach
from parallel.eplb import rebalance_experts
from parallel.placement import Placement
from parallel.replicas import choose_replicas, is_rank_invariant
from parallel.topology import Topology


@dataclass(frozen=True)
class Workload:
    """One step of a deployment: `tokens` per rank, routed to `top_k` of `experts` logical experts in each of `layers`.

    redundant: physical experts beyond the logical ones, placed by the balanced plan for equal loads. `over_physical`
    draws physical ids directly, as if replicas were logical experts: perfectly even loads. shared_replicas: of the
    redundant experts, those that hold the shared expert; every token adds one of them as a last target (so that targets
    are top_k + 1). `replica_rule` maps logical to physical ids."""

    description: str = ""
    ranks: int = 32
    ranks_per_node: int = 8
    tokens: int = 4096
    experts: int = 256
    redundant: int = 0
    shared_replicas: int = 0
    top_k: int = 8
    hidden: int = 7168
    layers: int = 58
    dispatch: str = "normal"
    payload: str = "fp8"
    mode: str = "hybrid"
    routing: str = "uniform"
    num_groups: int = 8
    topk_group: int = 4
    over_physical: bool = False
    replica_rule: str = "random"

    def __post_init__(self):
        for name in ("tokens", "redundant", "shared_replicas"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        for name in ("experts", "top_k", "hidden", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.shared_replicas > self.redundant:
            raise ValueError(
                f"shared_replicas = {self.shared_replicas}: must not exceed the {self.redundant} redundant experts"
            )
        is_rank_invariant(self.replica_rule)

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, self.ranks_per_node)

    @property
    def num_physical(self) -> int:
        return self.experts + self.redundant

    @property
    def targets(self) -> int:
        """Experts that a token is sent to: top-k, and the shared one where it is dispatched."""
        return self.top_k + (self.shared_replicas > 0)

    @cached_property
    def placement(self) -> Placement:
        """Where the routed experts stand (before the shared expert's replicas): logical ids, or physical ones."""
        routed = self.num_physical - self.shared_replicas
        if self.over_physical or self.shared_replicas:
            return Placement.contiguous(routed, 1)
        if not self.redundant:
            return Placement.contiguous(self.experts, self.ranks)
        groups = self.num_groups if self.experts % self.num_groups == 0 else 1
        load = np.ones((1, self.experts))
        arguments = (routed, groups, self.topology.num_nodes, self.ranks)
        return Placement(rebalance_experts(load, *arguments, policy="balanced").phy2log[0], self.ranks)

    def tables(self, layer: int, seed: int = 0) -> list[np.ndarray]:
        """Physical ids of one layer's tokens, one int array [tokens, targets] per rank."""
        rng = np.random.default_rng((seed, layer))
        drawn = self.placement.num_experts
        arguments = (self.ranks * self.tokens, drawn, self.top_k, self.num_groups, self.topk_group)
        ids = draw_routing(self.routing, rng, *arguments)
        tables = self.to_physical(list(ids.reshape(self.ranks, self.tokens, self.top_k)), layer, seed)
        if self.shared_replicas:
            first = self.num_physical - self.shared_replicas
            shared = [np.full((self.tokens, 1), first + r % self.shared_replicas) for r in range(self.ranks)]
            tables = [np.concatenate(pair, axis=1) for pair in zip(tables, shared)]
        return tables

    def to_physical(self, tables: list[np.ndarray], layer: int = 0, seed: int = 0) -> list[np.ndarray]:
        """Logical ids of each rank's tokens as physical ones, by the replica rule."""
        if self.placement.num_physical == self.placement.num_experts:
            return tables  # one replica each, in order
        result, offset = [], 0
        for rank, table in enumerate(tables):
            options = {"rank": rank, "token_offset": offset, "seed": seed + layer, "topology": self.topology}
            result.append(choose_replicas(table, self.placement, self.replica_rule, **options))
            offset += len(table)
        return result

    def expected_reach(self) -> Reach | None:
        """Mean ranks and nodes per token in closed form; None where the routing or the replicas are not random."""
        drawn = self.placement.num_experts
        if self.routing == "balanced" or self.shared_replicas or self.replica_rule not in ("random", "hashed"):
            return None
        placement = Placement.contiguous(drawn, self.ranks) if self.over_physical else self.placement
        groups = (self.num_groups, self.topk_group) if self.routing == "group_limited" else (1, 1)
        return expected_reach(placement, self.topology, self.top_k, *groups)


PRESETS = {
    "prefill-ep32": Workload(
        "prefill on 4 nodes: 32 redundant experts, 9 routed per GPU, group-limited routing",
        ranks=32, tokens=4096, redundant=32, dispatch="normal", routing="group_limited",
    ),
    "decode-ep144": Workload(
        "decode on 18 nodes: 32 redundant experts, 2 routed per GPU, even over the physical experts",
        ranks=144, tokens=176, redundant=32, dispatch="low_latency", over_physical=True,
    ),
    "paper-ep320": Workload(
        "the V3 report's decode on 40 nodes: 1 expert per GPU, the shared expert dispatched as a 9th target; of its 64 "
        "GPUs for redundant and shared experts 32 are taken to hold the shared one (the report does not say)",
        ranks=320, tokens=32, redundant=64, shared_replicas=32, dispatch="low_latency",
    ),
    "profile-ep128": Workload(
        "the published decode profile on 16 nodes: 128 requests per GPU, forced-balanced routing, no redundancy",
        ranks=128, tokens=128, dispatch="low_latency", routing="balanced",
    ),
}  # fmt: skip

"""From a deployment and its load to the seconds of every operation of a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parallel.schedule import BUILDERS, LayerPlan, Op, sequential
from parallel.schedule.ops import exchange_of
from parallel.schedule.split import attention_pairs, split_prefill
from parallel.timing.costs import V3, Batch, Efficiency, decode_batch, roofline, stage_work
from parallel.timing.hardware import HARDWARE, Hardware
from parallel.timing.imbalance import Loads
from parallel.timing.timeline import Timeline, timeline
from parallel.timing.traffic import Traffic, low_latency, node_limited
from parallel.topology import Topology


@dataclass(frozen=True)
class Scenario:
    """A deployment under load.

    batches, traffic: one per micro-batch; a batch is what each rank computes, traffic is `{"dispatch", "combine"}`.
    experts_per_rank: physical experts whose weights a rank reads. loads: rows of each rank by MoE layer, `None` where
    experts are loaded evenly; a layer that is not named has the even load. issue: seconds of the kernels that start
    and end an exchange on the compute stream. efficiency: as in costs.py.
    """

    name: str
    gpu: Hardware
    topology: Topology
    layers: LayerPlan
    batches: tuple[Batch, ...]
    traffic: tuple[Mapping[str, Traffic], ...]
    experts_per_rank: float
    loads: Mapping[int, Loads] | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    issue: float = 0.0
    shape: object = V3
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self):
        if len(self.batches) != len(self.traffic) or not self.batches:
            raise ValueError(f"{len(self.batches)} batches but {len(self.traffic)} traffic tables: one per micro-batch")
        for layer, loads in (self.loads or {}).items():
            if len(loads.rows) != self.topology.num_ranks:
                raise ValueError(f"loads of layer {layer} name {len(loads.rows)} ranks of {self.topology.num_ranks}")

    def programs(self, schedule: str) -> list[list[Op]]:
        """One program per rank. Raises ValueError for an unknown schedule."""
        if schedule not in BUILDERS:
            raise ValueError(f"schedule {schedule!r}: known are {', '.join(BUILDERS)}")
        ranks = range(self.topology.num_ranks)
        if schedule == "sequential":
            return [sequential.build(self.layers, rank, micro_batches=len(self.batches)) for rank in ranks]
        return [BUILDERS[schedule](self.layers, rank) for rank in ranks]


class Prices:
    """Seconds of every operation of a scenario; each stage is priced once for all ranks."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self._compute, self._transfer = {}, {}

    def compute(self, op: Op) -> float:
        """Seconds on the compute stream."""
        scenario = self.scenario
        if op.stage.endswith(("_send", "_recv")):
            return scenario.issue
        loads = (scenario.loads or {}).get(op.layer) if op.stage == "experts" else None
        key = (op.stage, op.micro_batch, op.layer if loads else None)
        if key not in self._compute:
            self._compute[key] = self._stage_seconds(op.stage, scenario.batches[op.micro_batch], loads)
        return self._compute[key][op.rank]

    def _stage_seconds(self, stage, batch, loads):
        scenario = self.scenario
        ranks = scenario.topology.num_ranks
        price = self._roofline(stage)
        if stage != "experts":
            return [price(stage_work(stage, batch, scenario.shape))] * ranks
        rows = batch.tokens * scenario.shape.num_experts_per_tok
        if loads is None:
            return [price(stage_work(stage, batch, scenario.shape, rows, scenario.experts_per_rank))] * ranks
        share = (loads.rows / loads.rows.mean()).tolist()
        return [
            price(stage_work(stage, batch, scenario.shape, rows * part, experts))
            for part, experts in zip(share, loads.experts.tolist())
        ]

    def _roofline(self, stage):
        return lambda work: roofline(work, self.scenario.gpu, self.scenario.efficiency, stage == "attn_core")

    def transfer(self, op: Op) -> float:
        """Seconds on the communication stream; the middle hop runs within the first one's time."""
        scenario = self.scenario
        if op.stage.endswith("_forward"):
            return 0.0
        loads = (scenario.loads or {}).get(op.layer)
        key = (op.stage, op.micro_batch, op.layer if loads else None)
        if key not in self._transfer:
            traffic = scenario.traffic[op.micro_batch][exchange_of(op.stage)]
            traffic = traffic.received_by(loads) if loads else traffic
            seconds = traffic.seconds(scenario.gpu, scenario.efficiency.link, scenario.efficiency.sync)
            self._transfer[key] = seconds.tolist()
        return self._transfer[key][op.rank]


def time_of(scenario: Scenario, schedule: str, waits: bool = True) -> Timeline:
    """The timeline of a scenario under a schedule; `waits=False` gives the bound of perfect overlap."""
    prices = Prices(scenario)
    return timeline(scenario.programs(schedule), prices.compute, prices.transfer, waits)


class Preset(NamedTuple):
    """A published deployment: how to build it, and the schedule that it runs."""

    build: Callable[..., Scenario]
    schedule: str


def main_layers(num_layers: int, mtp: bool, shape=V3) -> LayerPlan:
    """Dense layers, MoE layers, and the MTP layer as one MoE layer more."""
    dense = min(shape.first_k_dense_replace, num_layers)
    return LayerPlan(tuple(range(dense)), tuple(range(dense, num_layers + bool(mtp))))


def decode_scenario(
    gpu: Hardware = HARDWARE["h800"],
    ranks: int = 144,
    requests: float = 1850 / 21,
    context: float = 4989,
    draft_tokens: int = 1,
    num_layers: int = 61,
    redundant: int = 32,
    loads: Mapping[int, Loads] | None = None,
    efficiency: Efficiency | None = None,
    shape=V3,
) -> Scenario:
    """Decode as published: DP attention, one expert-parallel group over all ranks, low-latency exchanges.

    requests, context: per rank, averages. The MTP layer counts as one more MoE layer when draft tokens are verified.
    """
    half = decode_batch(requests / 2, context, draft_tokens)
    topology = Topology(ranks, gpu.nvlink_domain)
    return Scenario(
        f"decode EP{ranks} on {gpu.name}",
        gpu,
        topology,
        main_layers(num_layers, draft_tokens > 0, shape),
        (half, half),
        (low_latency(half.tokens, topology, shape),) * 2,
        (shape.n_routed_experts + redundant) / ranks,
        loads,
        efficiency or Efficiency(),
        0.0,
        shape,
        ("sampling and host time are left out", "experts are loaded evenly unless loads are given"),
    )


def prefill_scenario(
    gpu: Hardware = HARDWARE["h800"],
    ranks: int = 32,
    prompts: Sequence[int] = (4096, 4096, 4096, 4096),
    cached: Sequence[int] | None = None,
    num_layers: int = 61,
    redundant: int = 32,
    loads: Mapping[int, Loads] | None = None,
    efficiency: Efficiency | None = None,
    compute_sms: int = 108,
    shape=V3,
) -> Scenario:
    """Prefill as published: each rank holds `prompts` new tokens behind `cached` keys, cut where attention halves.

    compute_sms: of the 132 on an H800, the ones that communication leaves; scaled for other GPUs.
    """
    cached = [0] * len(prompts) if cached is None else list(cached)
    topology = Topology(ranks, gpu.nvlink_domain)
    batches = tuple(_part_batch(parts, prompts, cached) for parts in split_prefill(prompts, cached))
    given = efficiency or Efficiency()
    shared = Efficiency(
        given.attention, given.matmul, given.memory, given.link, given.sms * compute_sms / 132, given.sync
    )
    return Scenario(
        f"prefill EP{ranks} on {gpu.name}",
        gpu,
        topology,
        main_layers(num_layers, False, shape),
        batches,
        tuple(_normal_traffic(batch.tokens, topology, shape) for batch in batches),
        (shape.n_routed_experts + redundant) / ranks,
        loads,
        shared,
        0.0,
        shape,
        (
            "memory time is not slowed by the SMs that communication takes",
            "routing is even within the group limit; notify kernels and the KV transfer are left out",
        ),
    )


def _part_batch(parts, prompts, cached):
    tokens = sum(part.stop - part.start for part in parts)
    pairs = sum(attention_pairs(cached[part.request], part.start, part.stop) for part in parts)
    keys = sum(cached[part.request] + part.stop for part in parts)
    ends = sum(part.stop == prompts[part.request] for part in parts)
    return Batch(float(tokens), float(pairs), float(keys), float(ends), "prefill")


def _normal_traffic(tokens, topology, shape):
    """Node-limited where groups divide over the nodes; else one message per (token, expert)."""
    if shape.n_group % topology.num_nodes:
        return low_latency(tokens, topology, shape)
    return node_limited(tokens, topology, shape)


PRESETS = {
    "decode": Preset(decode_scenario, "decode_overlap"),
    "prefill": Preset(prefill_scenario, "prefill_overlap"),
}


def stage_table(scenario: Scenario) -> dict[str, np.ndarray]:
    """Seconds of each stage of one MoE layer and of `dispatch` and `combine`, float64 [R]: micro-batches added up."""
    prices = Prices(scenario)
    layer = scenario.layers.moe[-1] if scenario.layers.moe else scenario.layers.dense[-1]
    table = {}
    for micro_batch in range(len(scenario.batches)):
        for stage in scenario.layers.stages(layer):
            for rank in range(scenario.topology.num_ranks):
                op = Op("F", rank, micro_batch, layer, stage)
                name, price = stage, prices.compute
                if stage.endswith("_send"):
                    name, price = exchange_of(stage), prices.transfer
                elif stage.endswith(("_forward", "_recv")):
                    continue
                table.setdefault(name, np.zeros(scenario.topology.num_ranks))[rank] += price(op)
    return table

"""The same model beside other published figures: DeepSeek's profile data and SGLang's large-scale deployment.

Sources: deepseek-ai/profile-data README; lmsys.org blog 2025-05-05, "Deploying DeepSeek with PD disaggregation and
large-scale expert parallelism on 96 H100 GPUs", which also quotes the profile's throughput; day 6 of
deepseek-ai/open-infra-index.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from parallel.timing.costs import V3, Efficiency, core_flop_per_pair, expert_parameters
from parallel.timing.hardware import HARDWARE
from parallel.timing.prices import Scenario, decode_scenario, prefill_scenario, time_of
from parallel.timing.traffic import node_limited
from parallel.topology import Topology

MEASURED_RATES = Efficiency(attention=660 / 989, link=39 / 50)
GPUS = 8


class Published(NamedTuple):
    """A published throughput and the deployment that it belongs to. tokens: counted tokens per rank and run."""

    name: str
    tokens_per_second_and_node: float
    tokens: float
    schedule: str
    build: Callable[[Efficiency | None], Scenario]
    note: str


class Beside(NamedTuple):
    """published, bound, modelled: tokens per second and node; the bound has perfect overlap and peak rates."""

    name: str
    published: float
    bound: float
    modelled: float
    note: str

    @property
    def ratio(self) -> float:
        """Modelled over published."""
        return self.modelled / self.published


def _decode(gpu, ranks, requests, context, redundant):
    return lambda efficiency: decode_scenario(
        HARDWARE[gpu], ranks, requests, context, 0, redundant=redundant, efficiency=efficiency
    )


def _prefill(gpu, length):
    return lambda efficiency: prefill_scenario(HARDWARE[gpu], 32, (length,) * (16384 // length), efficiency=efficiency)


PUBLISHED = (
    Published("profile decode EP128, 4K", 18598, 128, "decode_overlap", _decode("h800", 128, 128, 4096, 0),
              "forced-balanced routing; read as 128 requests of one token, which the source leaves open"),
    Published("profile prefill EP32, 4K", 62713, 16384, "prefill_overlap", _prefill("h800", 4096),
              "16K tokens per GPU, routing balanced"),
    Published("SGLang decode EP72, 2K", 22282, 256, "decode_overlap", _decode("h100", 72, 256, 2000, 32),
              "256 requests per GPU, real routing with EPLB"),
    Published("SGLang decode EP72, 4K, simulated MTP", 17373, 128, "decode_overlap", _decode("h100", 72, 128, 4000, 32),
              "as 128 requests; the simulated acceptance of 60 % is not modelled"),
    Published("SGLang prefill EP32, 1K", 57674, 16384, "prefill_overlap", _prefill("h100", 1024), "real routing"),
    Published("SGLang prefill EP32, 2K", 54543, 16384, "prefill_overlap", _prefill("h100", 2048), "real routing"),
    Published("SGLang prefill EP32, 4K", 50302, 16384, "prefill_overlap", _prefill("h100", 4096), "real routing"),
    Published("SGLang prefill EP32, 4K, balanced", 59337, 16384, "prefill_overlap", _prefill("h100", 4096),
              "expert choice made even"),
)  # fmt: skip


def one_rank(scenario: Scenario) -> Scenario:
    """The scenario as its rank 0 alone: enough, and quick, where all ranks carry the same load."""
    traffic = tuple(
        {name: type(each)(*(part[:1] for part in each)) for name, each in table.items()} for table in scenario.traffic
    )
    return replace(scenario, topology=Topology(1, scenario.topology.ranks_per_node), traffic=traffic)


def beside_published() -> list[Beside]:
    """Every published throughput with the model's bound and its value at measured link and attention rates."""
    rows = []
    for entry in PUBLISHED:
        bound = time_of(one_rank(entry.build(None)), entry.schedule, waits=False).makespan
        modelled = time_of(one_rank(entry.build(MEASURED_RATES)), entry.schedule).makespan
        rows.append(
            Beside(
                entry.name,
                entry.tokens_per_second_and_node,
                entry.tokens * GPUS / bound,
                entry.tokens * GPUS / modelled,
                entry.note,
            )
        )
    return rows


def training_model(tokens: int = 4096, ranks: int = 64, gpu: str = "h800", shape=V3) -> dict[str, float]:
    """Seconds that the model gives to kernel families of a training layer, each at peak rates.

    tokens: per rank, one sequence. Exchanges are node-limited; attention is causal over the sequence, its backward
    2.5 times the forward; grouped products are one forward of the routed experts' gate, up and down together.
    """
    device = HARDWARE[gpu]
    traffic = node_limited(tokens, Topology(ranks, device.nvlink_domain), shape)
    pairs = tokens * (tokens + 1) / 2
    forward = pairs * core_flop_per_pair("prefill", shape) / device.bf16_flops
    seconds = {name: float(each.seconds(device)[0]) for name, each in traffic.items()}
    return {
        **seconds,
        "dispatch_cached": seconds["dispatch"],
        "attention_forward": forward,
        "attention_backward": 2.5 * forward,
        "experts_forward": 2 * tokens * shape.num_experts_per_tok * expert_parameters(shape) / device.fp8_flops,
    }

"""The vocabulary of schedules: operations, stages, and which layers a program runs through.

A schedule is a list of `Op` per rank, in program order. It can be printed, checked, drawn and timed without running.
"""

from dataclasses import dataclass
from typing import NamedTuple

from refmodel.layer import DENSE_LAYER, MOE_LAYER

DENSE_STAGES = tuple(stage.name for stage in DENSE_LAYER)
MOE_STAGES = tuple(stage.name for stage in MOE_LAYER)
EXCHANGES = ("dispatch", "combine")
HOPS = ("send", "forward", "recv")
EXCHANGE_STAGES = tuple(f"{exchange}_{hop}" for exchange in EXCHANGES for hop in HOPS)

# What a stage reads of its own micro-batch and layer; the first stage of a layer reads the layer before it.
READS = {
    "attn_core": ("attn_proj",),
    "dispatch_send": ("attn_core",),
    "dispatch_forward": ("dispatch_send",),
    "dispatch_recv": ("dispatch_forward",),
    "experts": ("dispatch_recv",),
    "combine_send": ("experts",),
    "combine_forward": ("combine_send",),
    "combine_recv": ("combine_forward",),
    "shared": ("attn_core",),
    "merge": ("combine_recv", "shared"),
    "mlp": ("attn_core",),
}


class Op(NamedTuple):
    """One operation of one rank.

    kind: `F` forward, `B` backward, `W` weight gradient, `F&B` a forward and a backward that share the device.
    micro_batch, layer: ints; a pair (forward's, backward's) for `F&B`.
    stage: a stage name for inference; for training `chunk`, `full`, `input`, `weight` or `pair` (see dualpipe.py),
        where `layer` is the pipeline stage.
    `embed` and `mtp_embed` carry the layer that they feed, `final` the layer that it reads.
    """

    kind: str
    rank: int
    micro_batch: int | tuple[int, int]
    layer: int | tuple[int, int]
    stage: str

    def __str__(self):
        if self.kind == "F&B":
            (forward, backward), (ahead, behind) = self.micro_batch, self.layer
            return f"r{self.rank} F(m{forward},s{ahead})&B(m{backward},s{behind})"
        return f"r{self.rank} {self.kind} {self.stage}(m{self.micro_batch},l{self.layer})"


@dataclass(frozen=True)
class LayerPlan:
    """The layers that a program runs through: dense ones first, then mixture-of-experts ones, numbered without a gap.

    embed: the stage that feeds the first layer, `embed` or `mtp_embed`.
    Raises ValueError where the numbers have a gap, a dense layer follows an MoE layer, or there is no layer.
    """

    dense: tuple[int, ...]
    moe: tuple[int, ...]
    embed: str = "embed"

    def __post_init__(self):
        object.__setattr__(self, "dense", tuple(self.dense))
        object.__setattr__(self, "moe", tuple(self.moe))
        layers = self.layers
        if not layers:
            raise ValueError("a layer plan without layers: there is nothing to schedule")
        if layers[0] < 0 or layers != tuple(range(layers[0], layers[0] + len(layers))):
            raise ValueError(
                f"dense = {self.dense}, moe = {self.moe}: the overlap tables need dense layers first, "
                "then MoE layers, numbered without a gap"
            )
        if self.embed not in ("embed", "mtp_embed"):
            raise ValueError(f"embed = {self.embed!r}: a program starts with 'embed' or 'mtp_embed'")

    @property
    def layers(self) -> tuple[int, ...]:
        return self.dense + self.moe

    @classmethod
    def of(cls, num_hidden_layers: int, first_k_dense_replace: int) -> "LayerPlan":
        """The main model: `first_k_dense_replace` dense layers, MoE layers after them."""
        dense = min(first_k_dense_replace, num_hidden_layers)
        return cls(tuple(range(dense)), tuple(range(dense, num_hidden_layers)))

    @classmethod
    def mtp(cls, num_hidden_layers: int) -> "LayerPlan":
        """The multi-token-prediction layer alone: an MoE layer with index `num_hidden_layers`."""
        return cls((), (num_hidden_layers,), "mtp_embed")

    def stages(self, layer: int) -> tuple[str, ...]:
        """Stages of a layer, in the order of the sequential program."""
        return DENSE_STAGES if layer in self.dense else MOE_STAGES

    def program(self) -> list[tuple[int, str]]:
        """Every (layer, stage) of one micro-batch, in the order of the sequential program."""
        inner = [(layer, stage) for layer in self.layers for stage in self.stages(layer)]
        return [(self.layers[0], self.embed), *inner, (self.layers[-1], "final")]

    def reads(self, layer: int, stage: str) -> tuple[tuple[int, str], ...]:
        """The (layer, stage) pairs of the same micro-batch that must be done before this one."""
        if stage == self.embed:
            return ()
        if stage == "final":
            return ((layer, self.stages(layer)[-1]),)
        if stage == "attn_proj":
            if layer == self.layers[0]:
                return ((layer, self.embed),)
            return ((layer - 1, self.stages(layer - 1)[-1]),)
        return tuple((layer, read) for read in READS[stage])


def exchange_of(stage: str) -> str:
    """`dispatch` or `combine` for the six exchange stages."""
    return stage.split("_")[0]

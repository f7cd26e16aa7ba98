"""How a published overlap table becomes a program: the common part of the three two-micro-batch schedules.

A table holds one period: what runs in each slot while two micro-batches, `A` and `B`, pass one MoE layer.
The program is the table repeated over the layers. What falls before the first MoE layer or after the last one is left
out, and that alone gives the prologue and the epilogue.
"""

from typing import NamedTuple

from parallel.schedule.ops import HOPS, LayerPlan, Op


class Item(NamedTuple):
    """A box of the drawing: a block of stages of micro-batch `half` at layer (current + `ahead`)."""

    block: str  # attn, attn0, attn1, mlp, shared; dispatch, combine
    half: str  # A or B
    ahead: int = 0


class Slot(NamedTuple):
    """What the compute stream does, in order, while the communication stream runs one exchange (or none)."""

    exchange: Item | None
    compute: tuple[Item, ...]


BLOCKS = {
    "attn": ("attn_proj", "attn_core"),
    "attn0": ("attn_proj",),
    "attn1": ("attn_core",),
    "mlp": ("experts",),
    "shared": ("shared",),
}


def block_stages(item: Item, layer: int, moe: tuple[int, ...]) -> list[tuple[int, str]]:
    """(layer, stage) pairs of a compute box. A box that begins attention first merges the layer below it."""
    stages = []
    if item.block in ("attn", "attn0") and layer - 1 in moe:
        stages.append((layer - 1, "merge"))
    if layer in moe:
        stages += [(layer, stage) for stage in BLOCKS[item.block]]
    return stages


def expand(table: tuple[Slot, ...], layers: LayerPlan, rank: int, micro_batch: dict[str, int]) -> list[Op]:
    """The program of one rank: embed and dense layers one micro-batch after the other, the table, then final.

    micro_batch: index of the micro-batch that stands for `A` and for `B`. The smaller index goes first outside the
    table, because a request that spans both has its earlier tokens there.
    """
    order = sorted(micro_batch.values())
    ops = []
    for index in order:
        ops.append(Op("F", rank, index, layers.layers[0], layers.embed))
        ops += [Op("F", rank, index, layer, stage) for layer in layers.dense for stage in layers.stages(layer)]
    if layers.moe:
        for current in range(layers.moe[0] - 1, layers.moe[-1] + 2):
            for slot in table:
                ops += slot_ops(slot, current, layers.moe, rank, micro_batch)
    return ops + [Op("F", rank, index, layers.layers[-1], "final") for index in order]


def slot_ops(slot: Slot, current: int, moe: tuple[int, ...], rank: int, micro_batch: dict[str, int]) -> list[Op]:
    """Send, the computation that covers the exchange, then the middle hop and the receive."""
    compute = [
        Op("F", rank, micro_batch[item.half], layer, stage)
        for item in slot.compute
        for layer, stage in block_stages(item, current + item.ahead, moe)
    ]
    if slot.exchange is None or current + slot.exchange.ahead not in moe:
        return compute
    send, forward, receive = (
        Op("F", rank, micro_batch[slot.exchange.half], current + slot.exchange.ahead, f"{slot.exchange.block}_{hop}")
        for hop in HOPS
    )
    return [send, *compute, forward, receive]


def halves(lead: int, leader: str) -> dict[str, int]:
    """Which micro-batch is `A` and which is `B`, when `leader` is the one that runs ahead."""
    if lead not in (0, 1):
        raise ValueError(f"lead = {lead}: with two micro-batches the one ahead is 0 or 1")
    return {leader: lead, "BA"[leader == "B"]: 1 - lead}

"""Prefill with two micro-batches: attention of one covers dispatch of the other.

Source of the table: the prefill drawing of deepseek-ai/profile-data and of deepseek-ai/open-infra-index (day 6).
The drawing runs 108 SMs of computation beside 24 SMs of communication, which is busy in all four slots.
"""

from parallel.schedule.ops import LayerPlan, Op
from parallel.schedule.overlap import Item, Slot, expand, halves

TABLE = (
    Slot(Item("combine", "B", -1), (Item("attn", "A"), Item("shared", "B", -1))),
    Slot(Item("dispatch", "A"), (Item("attn", "B"),)),
    Slot(Item("dispatch", "B"), (Item("mlp", "A"),)),
    Slot(Item("combine", "A"), (Item("mlp", "B"), Item("shared", "A"))),
)


def build(layers: LayerPlan, rank: int, lead: int = 0) -> list[Op]:
    """The program of one rank; micro-batch `lead` is the drawing's `A`, one attention block ahead of the other.

    Where one prompt spans both micro-batches, its earlier tokens belong in `lead`. (The drawing calls the leader
    micro-batch 1; only the name differs.) Raises ValueError when `lead` is not 0 or 1.
    """
    return expand(TABLE, layers, rank, halves(lead, "A"))

"""Decode with two micro-batches half a layer apart: attention is split in two, and no SM serves communication.

Source of `TABLE`: the decode drawing of deepseek-ai/profile-data and of deepseek-ai/open-infra-index (day 6).
The chain of one micro-batch has five stages: attention up to the cache write, core attention to the gate, dispatch
(beside the shared expert), experts, combine. Nothing is in flight while experts run.
Source of the `VLLM_*` tables: vllm-project/vllm docs/design/dbo.md, whose micro-batch 1 is `A` here.
"""

from parallel.schedule.ops import LayerPlan, Op
from parallel.schedule.overlap import Item, Slot, expand, halves

TABLE = (
    Slot(Item("dispatch", "B"), (Item("shared", "B"), Item("attn0", "A"))),
    Slot(None, (Item("mlp", "B"),)),
    Slot(Item("combine", "B"), (Item("attn1", "A"),)),
    Slot(Item("dispatch", "A"), (Item("shared", "A"), Item("attn0", "B", 1))),
    Slot(None, (Item("mlp", "A"),)),
    Slot(Item("combine", "A"), (Item("attn1", "B", 1),)),
)

VLLM_MLP_SHARED_OVERLAP = (
    Slot(Item("dispatch", "A"), (Item("attn", "B"),)),
    Slot(Item("dispatch", "B"), (Item("mlp", "A"),)),
    Slot(Item("combine", "A"), (Item("shared", "A"), Item("mlp", "B"))),
    Slot(Item("combine", "B"), (Item("shared", "B"), Item("attn", "A", 1))),
)

VLLM_MLP_OVERLAP = (
    Slot(Item("dispatch", "A"), (Item("attn", "B"), Item("shared", "B"))),
    Slot(Item("dispatch", "B"), (Item("mlp", "A"),)),
    Slot(Item("combine", "A"), (Item("mlp", "B"),)),
    Slot(Item("combine", "B"), (Item("attn", "A", 1), Item("shared", "A", 1))),
)

VLLM_TABLES = {"mlp_shared_overlap": VLLM_MLP_SHARED_OVERLAP, "mlp_overlap": VLLM_MLP_OVERLAP}


def build(layers: LayerPlan, rank: int, lead: int = 0) -> list[Op]:
    """The program of one rank; micro-batch `lead` is the drawing's `B`, half a layer ahead of the other.

    Raises ValueError when `lead` is not 0 or 1.
    """
    return expand(TABLE, layers, rank, halves(lead, "B"))


def build_vllm(layers: LayerPlan, rank: int, lead: int = 0, order: str = "mlp_shared_overlap") -> list[Op]:
    """vLLM's dual-batch order; micro-batch `lead` is the one whose attention runs first.

    order: `mlp_shared_overlap` (the shared expert covers combine) or `mlp_overlap` (it follows attention).
    Raises ValueError for another order, or when `lead` is not 0 or 1.
    """
    if order not in VLLM_TABLES:
        raise ValueError(f"order = {order!r}: vLLM has {', '.join(VLLM_TABLES)}")
    return expand(VLLM_TABLES[order], layers, rank, halves(lead, "A"))

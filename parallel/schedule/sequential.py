"""The sequential program: one micro-batch after the other, every stage in order."""

from parallel.schedule.ops import LayerPlan, Op


def build(layers: LayerPlan, rank: int, micro_batches: int = 1) -> list[Op]:
    """The program of one rank: each micro-batch from embedding to final before the next one begins.

    Raises ValueError for fewer than one micro-batch.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches}: a program runs at least one micro-batch")
    return [
        Op("F", rank, micro_batch, layer, stage)
        for micro_batch in range(micro_batches)
        for layer, stage in layers.program()
    ]

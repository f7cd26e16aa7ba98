"""A rank's items cut into micro-batches."""

from parallel.schedule.split import split_decode, split_prefill
from refmodel.generate import Item

Placed = tuple[Item, int]  # an item, and the global row of its first token


def cut_item(item: Item, start: int, first: int, stop: int) -> Placed:
    """Tokens first .. stop - 1 of an item whose first token is global row `start`."""
    hidden = None if item.hidden is None else item.hidden[first:stop]
    part = Item(item.request, item.token_ids[first:stop], item.cache, item.slot + first, hidden)
    return part, start + first


def micro_batches(mine: list[Placed], phase: str, split=None) -> list[list[Placed]]:
    """Two halves, either of which may be empty: of attention work in prefill, where one prompt may lie in both, of
    requests in decode; or what `split` makes of the list.
    """
    if split is not None:
        return split(mine)
    if phase == "decode":
        return [[mine[index] for index in half] for half in split_decode(len(mine))]
    new, cached = [len(item.token_ids) for item, _ in mine], [item.slot for item, _ in mine]
    return [
        [cut_item(*mine[part.request], part.start, part.stop) for part in half] for half in split_prefill(new, cached)
    ]

"""Where a row comes from and where it goes: request and token, slot, expert, rank."""

import re
from typing import NamedTuple

import numpy as np

from refmodel.generate import Work


class Route(NamedTuple):
    """What one rank received in one exchange: pair p is received row `row[p]` for `expert[p]`."""

    work: Work
    layer: int
    rank: int
    micro_batch: int
    num_rows: int  # received rows
    token_row: np.ndarray  # int64 [P] global row of the token
    slot: np.ndarray  # int64 [P] place among the token's K selected experts
    row: np.ndarray  # int64 [P]
    expert: np.ndarray  # int64 [P] the model's expert
    local: np.ndarray  # int64 [P] the rank's own number of it

    @classmethod
    def of(cls, operation, work: Work, top_k: int) -> "Route":
        """After `dispatch_recv`."""
        values = operation.state.values
        exchange, pairs = values["exchange"], values["pairs"]
        token_row, slot = np.divmod(exchange.pair_slots(), top_k)
        logical = [exchange.logical_expert(int(e)) for e in pairs.expert]
        return cls(
            work,
            operation.layer,
            operation.rank,
            operation.micro_batch,
            int(pairs.x.shape[0]),
            token_row,
            slot,
            np.asarray(pairs.row),
            np.array(logical, np.int64),
            np.asarray(pairs.expert),
        )


class Origin(NamedTuple):
    """One selected expert of one token. `rank` and after are None as long as the row has not arrived.

    token: position in its request. slot: place among the selected experts. source: the rank of the request.
    row: row of what `rank` received. pair: row of what its experts compute. tensor_row: row of the recorded tensors of
    `experts`, which is token row * K + slot. weight: None where the routing was not recorded.
    """

    request: int
    token: int
    token_id: int
    slot: int
    expert: int
    weight: float | None
    layer: int
    source: int
    tensor_row: int
    rank: int | None = None
    micro_batch: int | None = None
    row: int | None = None
    pair: int | None = None
    local_expert: int | None = None


def token_at(work: Work, row: int):
    """(item, index in it) of a global row of a pass. Raises ValueError for a row that the pass does not have."""
    start = 0
    for item in work.items:
        if start <= row < start + len(item.token_ids):
            return item, row - start
        start += len(item.token_ids)
    raise ValueError(f"token row {row}: this pass has rows 0 to {start - 1}")


def row_of(work: Work, request: int, token: int) -> int:
    """Global row of a request's token (its position). Raises ValueError where this pass does not compute it."""
    start = 0
    for item in work.items:
        if item.request == request:
            if item.slot <= token < item.slot + len(item.token_ids):
                return start + token - item.slot
            last = item.slot + len(item.token_ids) - 1
            raise ValueError(f"token {token}: this pass computes tokens {item.slot} to {last} of request {request}")
        start += len(item.token_ids)
    known = ", ".join(str(item.request) for item in work.items)
    raise ValueError(f"request {request}: this pass has requests {known}")


def origins_of_row(stepper, rank: int, row: int, layer: int | None = None, micro_batch: int | None = None):
    """What received row `row` of `rank` is, in its last exchange (of one layer or micro-batch, where given).

    A list of `Origin`, one for each expert of that rank that the row is for; empty for a row that all experts pass by.
    Raises ValueError where that rank has received nothing, or fewer rows.
    """
    for route in reversed(stepper.routes):
        if route.rank == rank and layer in (None, route.layer) and micro_batch in (None, route.micro_batch):
            break
    else:
        where = "" if layer is None else f" in layer {layer}"
        raise ValueError(f"rank {rank} has received no rows{where} so far")
    if not 0 <= row < route.num_rows:
        raise ValueError(
            f"row {row}: rank {rank} received {route.num_rows} rows in layer {route.layer}, "
            f"micro-batch {route.micro_batch}"
        )
    return [_origin(stepper, route, int(pair)) for pair in np.flatnonzero(route.row == row)]


def whereabouts(stepper, request: int, token: int, layer: int | None = None, work: Work | None = None) -> list[Origin]:
    """Where a token went in a layer (the last one that routed it): one `Origin` for each of its selected experts.

    token: its position in the request. work: a pass (default: the one at hand).
    Raises ValueError for a token that was not routed there yet.
    """
    work = stepper.work if work is None else work
    row = row_of(work, request, token)
    layers = range(stepper.config.num_layers) if layer is None else [layer]
    for candidate in reversed(layers):
        ids = _row(stepper.tensors, f"{work.prefix}layers.{candidate}.attn_core.router.topk_idx", row)
        if ids is not None:
            return [_slot_origin(stepper, work, candidate, row, slot, int(e)) for slot, e in enumerate(ids)]
    where = "in any layer" if layer is None else f"in layer {layer}"
    raise ValueError(f"token {token} of request {request} was not routed {where} so far")


def origins_of_tensor_row(stepper, name: str, row: int):
    """(request, token, token id, list of `Origin`) of row `row` of a recorded tensor: one row for each token, or, of
    `experts`, one for each of its slots. Raises ValueError where no tensor of that name has such a row.
    """
    if name not in stepper.tensors:
        raise ValueError(f"no tensor {name!r} so far")
    if _row(stepper.tensors, name, row) is None:
        raise ValueError(f"{name} has no row {row} so far")
    work, layer, stage = _place(stepper, name)
    top_k = stepper.config.num_experts_per_tok
    by_slot = stage == "experts"
    item, index = token_at(work, row // top_k if by_slot else row)
    origins = []
    if by_slot:
        origins = [whereabouts(stepper, item.request, item.slot + index, layer, work)[row % top_k]]
    return item.request, item.slot + index, int(item.token_ids[index]), origins


def _place(stepper, name: str):
    """(pass, layer or None, stage) of a recorded name."""
    prefix, layer, stage = re.match(r"((?:step\.\d+\.)?(?:draft\.\d+\.)?)(?:layers\.(\d+)\.)?(\w+)", name).groups()
    layer = None if layer is None else int(layer)
    mtp = layer == stepper.config.num_hidden_layers
    work = next(work for work in stepper.works if (work.prefix, work.mtp) == (prefix, mtp))
    return work, layer, stage


def _slot_origin(stepper, work, layer, row, slot, expert) -> Origin:
    for route in reversed(stepper.routes):
        if route.work is work and route.layer == layer:
            pair = np.flatnonzero((route.token_row == row) & (route.slot == slot))
            if pair.size:
                return _origin(stepper, route, int(pair[0]))
    return _made(stepper, work, layer, row, slot, expert)


def _origin(stepper, route: Route, pair: int) -> Origin:
    row, slot = int(route.token_row[pair]), int(route.slot[pair])
    made = _made(stepper, route.work, route.layer, row, slot, int(route.expert[pair]))
    return made._replace(
        rank=route.rank,
        micro_batch=route.micro_batch,
        row=int(route.row[pair]),
        pair=pair,
        local_expert=int(route.local[pair]),
    )


def _made(stepper, work, layer, row, slot, expert) -> Origin:
    item, index = token_at(work, row)
    weights = _row(stepper.tensors, f"{work.prefix}layers.{layer}.attn_core.router.topk_weights", row)
    return Origin(
        request=item.request,
        token=item.slot + index,
        token_id=int(item.token_ids[index]),
        slot=slot,
        expert=expert,
        weight=None if weights is None else float(weights[slot]),
        layer=layer,
        source=stepper.rank_of(item.request),
        tensor_row=row * stepper.config.num_experts_per_tok + slot,
    )


def _row(tensors, name: str, row: int):
    """One global row of a recorded tensor, None as long as it is not there."""
    if name not in tensors:
        return None
    rows, array = tensors.rows(name), tensors[name]
    if rows is None:
        return array[row] if 0 <= row < len(array) else None
    place = int(np.searchsorted(rows, row))
    return array[place] if place < len(rows) and rows[place] == row else None

"""What micro-batches of ranks computed, put back together request by request."""

from typing import NamedTuple

import numpy as np

from refmodel.generate import Item, Step


class Piece(NamedTuple):
    """Consecutive rows of one request that one micro-batch of one rank computed."""

    first: int  # global row of the first token
    logits: np.ndarray  # [t, vocab]; fewer rows where the head read last rows only
    hidden: np.ndarray  # [t, D]


def pieces_of(rows: np.ndarray, state) -> list[Piece]:
    """One piece for each request of a micro-batch that has tokens; `rows` int [T] are its global rows."""
    values, pieces = state.values, []
    head_rows = values.get("head_rows", np.arange(len(rows)))
    for segment in state.batch.segments:
        if segment.stop > segment.start:
            first, end = np.searchsorted(head_rows, (segment.start, segment.stop))
            hidden = values["mtp_hidden"][segment.start : segment.stop]
            pieces.append(Piece(int(rows[segment.start]), values["logits"][first:end], hidden))
    return pieces


def join_pieces(pieces: list[Piece], items: list[Item], model) -> list[Step]:
    """The rows of each item; they are copied only where an item has several pieces."""
    starts = np.cumsum([0, *(len(item.token_ids) for item in items)])
    found: list[list[Piece]] = [[] for _ in items]
    for piece in sorted(pieces, key=lambda piece: piece.first):
        found[int(np.searchsorted(starts, piece.first, side="right")) - 1].append(piece)
    numerics, config = model.numerics, model.config
    no_logits = numerics.store(np.zeros((0, config.vocab_size)), "logits")
    no_hidden = numerics.store(np.zeros((0, config.hidden_size)), "norm")
    return [
        Step(_joined([piece.logits for piece in of_item], no_logits), _joined([p.hidden for p in of_item], no_hidden))
        for of_item in found
    ]


def _joined(arrays, none):
    if not arrays:
        return none
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

"""The commands of `refmodel step` about rows and ranks: where rows are from, what is under way, what was sent."""

import re

import numpy as np

from refmodel.stepper import origins_of_row, origins_of_tensor_row, parse_selection, whereabouts
from refmodel.stepper.look import spans
from scripts.step_registry import Reply, at_most, command, integer
from scripts.step_text import lookup


@command("who", "", "r3[17] | TENSOR[ROW] | request 0 token 5   [layer N] [micro-batch N]")
def who(session, words) -> Reply:
    """Say where a row is from, or where a token went.

    who r3[17]                   row 17 of what rank 3 received in its last dispatch: its request, token, slots, experts
    who layers.1.experts.out[9]  a row of a recorded tensor: its request and token, and of `experts` its slot and rank
    who request 0 token 5        where that token went: for each selected expert its rank and the row there
    layer and micro-batch choose another exchange than the last one.
    """
    words = list(words)
    chosen = {"layer": None, "micro_batch": None}
    for key, spelled in (("layer", ("layer",)), ("micro_batch", ("micro-batch", "mb"))):
        for word in spelled:
            if word in words:
                at = words.index(word)
                chosen[key] = integer(" ".join(words[at + 1 : at + 2]), word)
                del words[at : at + 2]
    text = " ".join(words)
    if match := re.fullmatch(r"(?:r|rank )(\d+) ?\[ ?(\d+) ?\]", text):
        return _of_row(session, *map(int, match.groups()), chosen)
    if match := re.fullmatch(r"request (\d+) token (\d+)", text):
        return _of_token(session, *map(int, match.groups()), chosen["layer"])
    if re.fullmatch(r"[\w.*?-]+ ?\[ ?\d+ ?\]", text):
        return _of_tensor_row(session, text)
    raise ValueError(f"who {text}: must be like r3[17], layers.1.experts.out[9], or request 0 token 5")


def _of_row(session, rank, row, chosen) -> Reply:
    stepper = session.stepper
    if rank >= stepper.num_ranks:
        raise ValueError(f"rank {rank}: this run has ranks 0 to {stepper.num_ranks - 1}")
    origins = origins_of_row(stepper, rank, row, **chosen)
    if not origins:
        return Reply([f"row {row} of rank {rank} selects no expert there"], {"origins": []})
    first = origins[0]
    where = f"row {row} of rank {rank} (layer {first.layer}, micro-batch {first.micro_batch})"
    lines = [f"{where} is {_token(first)}, of rank {first.source}", *(_slot(stepper, origin) for origin in origins)]
    return Reply(lines, {"origins": [_data(stepper, origin) for origin in origins]})


def _of_token(session, request, token, layer) -> Reply:
    stepper = session.stepper
    origins = whereabouts(stepper, request, token, layer)
    first = origins[0]
    lines = [f"{_token(first)}, of rank {first.source}, in layer {first.layer}:"]
    lines += [_slot(stepper, origin) for origin in origins]
    return Reply(lines, {"origins": [_data(stepper, origin) for origin in origins]})


def _of_tensor_row(session, text) -> Reply:
    stepper = session.stepper
    called, index = parse_selection(text)
    _, _, name = lookup(stepper, called)
    request, token, token_id, origins = origins_of_tensor_row(stepper, name, index[0])
    rank = stepper.rank_of(request)
    lines = [f"{name}[{index[0]}] is token {token} of request {request} (id {token_id}), of rank {rank}"]
    lines += [_slot(stepper, origin) for origin in origins]
    data = {"request": request, "token": token, "token_id": token_id, "rank": rank}
    return Reply(lines, data | {"origins": [_data(stepper, origin) for origin in origins]})


def _token(origin) -> str:
    return f"token {origin.token} of request {origin.request} (id {origin.token_id})"


def _slot(stepper, origin) -> str:
    weight = "" if origin.weight is None else f", weight {origin.weight:.5g}"
    text = f"  slot {origin.slot}: expert {origin.expert}{weight}"
    if origin.rank is None:
        return f"{text}: not received yet"
    at = "" if stepper.num_ranks == 1 else f" of rank {origin.rank}, its expert {origin.local_expert}"
    text += f": row {origin.row}{at}, pair {origin.pair}, row {origin.tensor_row} of layers.{origin.layer}.experts.*"
    hops = _hops(stepper, origin)
    return text + ("".join([f"; {hops[0].src}", *(f" -{hop.link}-> {hop.dst}" for hop in hops)]) if hops else "")


def _hops(stepper, origin):
    return stepper.path(origin) if hasattr(stepper, "path") else []


def _data(stepper, origin) -> dict:
    return origin._asdict() | {"hops": [hop._asdict() for hop in _hops(stepper, origin)]}


def _between(session, what):
    if not hasattr(session.stepper, "ledger"):
        raise ValueError(f"{what}: one model alone sends nothing; start with --ranks N")
    return session.stepper


@command("mailbox", "m")
def mailbox(session, words) -> Reply:
    """Say what is under way: sent and not yet taken, by exchange."""
    at_most(words, 0, "mailbox")
    letters = _between(session, "mailbox").mailbox()
    lines = [
        f"{letter.message}: {letter.rows} rows in {letter.parcels} packets from ranks {_ranks(letter.senders)}, "
        f"not yet taken by ranks {_ranks(letter.readers)}"
        for letter in letters
    ]
    return Reply(lines or ["nothing is under way"], {"exchanges": [letter._asdict() for letter in letters]})


def _ranks(ranks) -> str:
    return spans(np.array(ranks))


@command("ledger", "", "[matrix | layer N]")
def ledger(session, words) -> Reply:
    """Say what was sent so far: bytes by direction, link and class; `matrix`: bytes from rank to rank.

    layer N counts that layer alone, as a matrix.
    """
    stepper = _between(session, "ledger")
    if words:
        if words[0] not in ("matrix", "layer") or len(words) > 1 + (words[0] == "layer"):
            raise ValueError(f"ledger {' '.join(words)}: must be ledger, ledger matrix, or ledger layer 3")
        layer = integer(" ".join(words[1:]), "layer") if words[0] == "layer" else None
        matrix = stepper.ledger.matrix(layer=layer)
        lines = ["from \\ to" + "".join(f"{dst:>10}" for dst in range(len(matrix)))]
        lines += [f"{src:>9}" + "".join(f"{cell:>10,}" for cell in row) for src, row in enumerate(matrix)]
        return Reply(lines, {"matrix_bytes": matrix.tolist()})
    volumes, lines = stepper.volumes(), []
    for direction, links in volumes.items():
        for link, classes in links.items():
            parts = [f"{name} {count:,}" for name, count in classes.items() if count]
            if parts:
                lines.append(f"{direction:<9}{link:<7}{sum(classes.values()):>14,} bytes: {', '.join(parts)}")
    return Reply(lines or ["nothing was sent so far"], {"bytes": volumes})

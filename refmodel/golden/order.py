"""The order in which tensors come to be, from metadata where given, else from their names."""

import re

from refmodel.golden.dump import Dump

STAGES = (
    "embed",
    "mtp_embed",
    "attn_proj",
    "attn_core",
    "mlp",
    "dispatch_send",
    "dispatch_forward",
    "dispatch_recv",
    "experts",
    "combine_send",
    "combine_forward",
    "combine_recv",
    "shared",
    "merge",
    "final",
    "sample",
)
_STEP = re.compile(r"^step\.(\d+)\.")
_RANK = re.compile(r"^rank\.(\d+)\.")
_LAYER = re.compile(r"^layers\.(\d+)\.")
_BEFORE, _AFTER = -1, 1 << 30


def execution_key(name: str) -> tuple:
    """A sort key by step, layer, stage and rank, for dumps that do not say their order.

    Within one stage names are sorted as text with numbers as numbers.
    """
    rest, step, rank, layer = name, 0, -1, None
    if match := _STEP.match(rest):
        step, rest = int(match.group(1)), rest[match.end() :]
    if match := _RANK.match(rest):
        rank, rest = int(match.group(1)), rest[match.end() :]
    if match := _LAYER.match(rest):
        layer, rest = int(match.group(1)), rest[match.end() :]
    head = rest.split(".", 1)[0]
    stage = STAGES.index(head) if head in STAGES else len(STAGES)
    if layer is None:
        layer = _BEFORE if head in ("embed", "token_ids", "input_ids", "positions") else _AFTER
    natural = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", rest) if part)
    return (step, layer, stage, rank, natural)


def execution_order(reference: Dump, actual: Dump) -> list[str]:
    """All names of both dumps: in the reference's order where it states one, else by name; then names that
    only the actual dump has."""
    names = list(reference)
    if reference.order is not None:
        stated = {name: i for i, name in enumerate(reference.order)}
        names.sort(key=lambda name: stated.get(name, len(stated)))
    else:
        names.sort(key=execution_key)
    return names + sorted((name for name in actual if name not in reference), key=execution_key)

"""The commands of `refmodel step` that look."""

from fnmatch import fnmatchcase

import numpy as np

from refmodel.stepper import histogram, parse_selection, select, statistics
from refmodel.stepper.look import spans, wide
from scripts.step_registry import COMMANDS, Reply, at_most, command, find, integer
from scripts.step_text import bars, brief, elements, label, lookup, numbers_of, place, where

MOST_IN_JSON = 4096
GROUPS = {
    "step_moves": "move",
    "step_looks": "look",
    "step_golden": "hold to a golden",
    "step_origins": "rows and ranks",
    "step_session": "files",
}


@command("where", "w")
def where_(session, words) -> Reply:
    """Say where one is: the operation that comes next, or the tensor one stands at."""
    at_most(words, 0, "where")
    stepper = session.stepper
    lines, data = where(stepper)
    work = stepper.work
    tokens = sum(len(item.token_ids) for item in work.items)
    kind = "MTP layer" if work.mtp else "main model"
    name = work.prefix.rstrip(".") or "prefill"
    lines.append(f"pass: {name}, {kind}, {len(work.items)} requests, {tokens} token rows, {work.phase} attention")
    return Reply(lines, data | {"pass": name, "mtp": work.mtp, "phase": work.phase, "token_rows": tokens})


@command("list", "l", "[COUNT]")
def list_(session, words) -> Reply:
    """List the operations that ran last, and the next one."""
    at_most(words, 1, "list")
    count = integer(words[0], "list") if words else 8
    stepper = session.stepper
    past = stepper.operations[len(stepper.operations) - min(count, len(stepper.operations)) :]
    lines = [f"   {label(stepper, operation)}" for operation in past]
    lines.append("-> the end" if stepper.here is None else f"-> {label(stepper, stepper.here)}")
    data = {"past": [place(stepper, operation) for operation in past], "next": place(stepper, stepper.here)}
    return Reply(lines, data)


@command("names", "", "[PATTERN]")
def names(session, words) -> Reply:
    """List the tensors that were made, with dtype and shape: names layers.3.*"""
    at_most(words, 1, "names")
    pattern = words[0] if words else "*"
    tensors = session.stepper.tensors
    found = [name for name in tensors if fnmatchcase(name, pattern)]
    lines = [f"{name}  {tensors[name].dtype} {list(tensors[name].shape)}" for name in found]
    lines = lines or [f"none so far{f' that fits {pattern!r}' if words else ''}"]
    data = {name: {"dtype": tensors[name].dtype.name, "shape": list(tensors[name].shape)} for name in found}
    return Reply(lines, {"tensors": data})


@command("values", "v")
def values(session, words) -> Reply:
    """List what the stages of the micro-batch at hand share now; `show values.NAME` shows one."""
    at_most(words, 0, "values")
    found = {}
    for name, value in session.stepper.values.items():
        is_array = isinstance(value, np.ndarray)
        found[name] = f"{value.dtype} {list(value.shape)}" if is_array else type(value).__name__
    lines = [f"values.{name}  {what}" for name, what in found.items()]
    return Reply(lines or ["none yet"], {"values": found})


@command("show", "p", "TENSOR[INDEX]")
def show(session, words) -> Reply:
    """Show a tensor: dtype, shape, statistics, elements, histogram; with an index, those elements.

    show layers.1.attn_core.norm          show layers.1.attn_core.norm[3, :8]
    TENSOR is a name, a pattern that one name fits, or the end of a name of the last operation (show norm);
    values.NAME is what stages share now, cache.REQUEST.LAYER the rows in a request's cache.
    The first index counts global rows; where ranks have made only some, those are there.
    """
    if not words:
        raise ValueError("show: which tensor? (names lists them)")
    called, index = parse_selection(" ".join(words))
    array, rows, name = lookup(session.stepper, called)
    data = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    if rows is not None:
        data["rows"] = spans(rows, most=1 << 30)
    if index is not None:
        part = select(array, index, rows)
        header = f"{called}[{', '.join(map(_written, index))}]  {part.dtype} {list(part.shape)}"
        most = part.size <= MOST_IN_JSON
        data |= {"index": [_written(i) for i in index], "values": wide(part).tolist() if most else None}
        return Reply([header, *elements(part, 1000)], data)
    lines = [name + (f"  rows {spans(rows)}" if rows is not None else ""), *numbers_of(array)]
    lines += elements(array, 60)
    data["statistics"] = statistics(array)._asdict()
    if array.size and np.isfinite(wide(array)).any():
        drawn = histogram(array)
        lines += bars(drawn)
        data["histogram"] = {"edges": drawn.edges.tolist(), "counts": drawn.counts.tolist()}
    return Reply(lines, data)


def _written(index) -> str:
    """An index as it is typed."""
    if isinstance(index, slice):
        ends = ["" if end is None else str(end) for end in (index.start, index.stop, index.step)]
        return ":".join(ends[:2] if index.step is None else ends)
    return "..." if index is ... else str(index)


@command("hist", "", "TENSOR[INDEX] [INTERVALS]")
def hist(session, words) -> Reply:
    """Draw the histogram of a tensor, or of a part of it."""
    if not words:
        raise ValueError("hist: which tensor? (names lists them)")
    words = list(words)
    bins = integer(words.pop(), "hist") if len(words) > 1 and words[-1].isdigit() else 12
    called, index = parse_selection(" ".join(words))
    array, rows, name = lookup(session.stepper, called)
    drawn = histogram(array if index is None else select(array, index, rows), bins)
    data = {"name": name, "edges": drawn.edges.tolist(), "counts": drawn.counts.tolist()}
    return Reply([name, *bars(drawn)], data)


@command("made", "", "")
def made(session, words) -> Reply:
    """List the tensors of the last operation, each in one line."""
    at_most(words, 0, "made")
    stepper = session.stepper
    lines = [brief(stepper, name) for name in stepper.made]
    return Reply(lines or ["the last operation made no tensors"], {"tensors": stepper.made})


@command("help", "h", "[COMMAND]")
def help_(session, words) -> Reply:
    """List the commands, or explain one."""
    at_most(words, 1, "help")
    if words:
        found = find(words[0])
        return Reply(found.help.splitlines(), {"help": found.help})
    lines = []
    for module, title in GROUPS.items():
        lines += ["", f"{title}:"] if lines else [f"{title}:"]
        for each in COMMANDS.values():
            if each.run.__module__ == f"scripts.{module}":
                lines.append(f"  {each.name + (f' ({each.short})' if each.short else ''):<14} {each.summary}")
    lines += ["", "help COMMAND says more. An empty line repeats next and step. # begins a comment."]
    return Reply(lines, {"commands": {name: each.summary for name, each in COMMANDS.items()}})

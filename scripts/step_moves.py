"""The commands of `refmodel step` that move."""

import pdb

from refmodel.stepper import has_nan
from scripts.step_registry import Quit, Reply, at_most, command, integer
from scripts.step_text import brief, label, place, where

KEYWORDS = ("layer", "rank", "micro-batch", "stage", "step", "nan", "diff", "end")


def _count(words, each) -> int:
    at_most(words, 1, each)
    count = integer(words[0], each) if words else 1
    if count < 1:
        raise ValueError(f"{each} {count}: must be at least 1")
    return count


def _ended(stepper) -> Reply:
    lines, data = where(stepper)
    return Reply(lines, data)


@command("next", "n", "[COUNT]")
def next_(session, words) -> Reply:
    """Run the next operation; inside one, finish it.

    An operation is one stage of one layer, for one micro-batch of one rank. An empty line repeats next and step.
    """
    stepper, ran, lines = session.stepper, [], []
    count = _count(words, "next")
    with session.watching() as interrupted:
        for _ in range(count):
            operation = stepper.next()
            if operation is None:
                break
            ran.append(place(stepper, operation) | {"tensors": stepper.made})
            names = [name.removeprefix(operation.scope.prefix) for name in stepper.made]
            lines = [f"ran {label(stepper, operation)}: {', '.join(names) or 'no tensors'}"]
            if interrupted():
                break
    text, data = where(stepper)
    return Reply(lines + text, {"ran": ran, **data})


@command("step", "s", "[COUNT]")
def step(session, words) -> Reply:
    """Go into the next operation, then from tensor to tensor.

    The operation runs; its tensors are shown one by one, in the order in which it makes them. `next` finishes it.
    """
    stepper, lines, names = session.stepper, [], []
    count = _count(words, "step")
    with session.watching() as interrupted:
        for _ in range(count):
            if stepper.here is None and stepper.num_hidden == 0:
                stepper.into()
                break
            name = stepper.into()
            if name is None:
                lines.append(f"ran {label(stepper, stepper.last)}: no tensors")
            else:
                names.append(name)
                made = len(stepper.made)
                lines.append(f"[{made} of {made + stepper.num_hidden}] {brief(stepper, name)}")
            if interrupted():
                break
    text, data = where(stepper)
    return Reply(lines + (text if stepper.inside is None else []), {"tensors": names, **data})


@command("continue", "c", "[TENSOR | diff | nan] [stage NAME] [layer N] [rank N] [micro-batch N] [step N]")
def continue_(session, words) -> Reply:
    """Go on to a tensor, a difference, a NaN, or a stage; without any, to the end.

    TENSOR is a name or a pattern: continue layers.3.*.topk_idx
    diff stops at the first tensor that differs from the golden, `diff exact` at the first other bit.
    nan stops at the first tensor with a NaN or an infinity.
    layer, rank and micro-batch stop where one is entered, stage before every stage of that name; step N is step N of
    generation, 0 the prefill. Words together must all hold: continue layer 4 rank 2 stage experts
    Ctrl-C stops after the operation that runs, a second Ctrl-C breaks it off.
    """
    tensor, kind, target = _target(words)
    stepper = session.stepper
    check, before = None, len(stepper.operations)
    if kind == "nan":
        check = has_nan
    elif kind is not None:
        check = session.golden_check(exact=kind == "exact")
    with session.watching() as interrupted:
        stop = stepper.until(tensor, check=check, interrupted=interrupted, **target)
    lines, data = where(stepper)
    data |= {"reason": stop.reason, "tensor": stop.tensor}
    if stop.reason == "interrupted":
        return Reply(["interrupted", *lines], data)
    if kind in ("diff", "exact"):
        return _found(session, check, stop, lines, data)
    if stop.tensor is not None:
        said = [f"{stop.tensor}: {stop.detail}"] if stop.detail else []
        return Reply([*said, *lines, brief(stepper, stop.tensor)], data | {"detail": stop.detail})
    if stop.reason == "end" and words and words != ["end"]:
        ran = len(stepper.operations) - before
        hint = f" (back {ran} returns to where this began)" if ran else ""
        return Reply([f"{' '.join(words)}: did not come{hint}", *lines], data)
    return Reply(lines, data)


def _found(session, check, stop, lines, data) -> Reply:
    """What `continue diff` came to."""
    from scripts.step_golden import result_lines

    data |= {"compared": check.compared}
    if stop.tensor is None:
        if not check.compared:
            raise ValueError(f"{check.source} has none of the tensors that were made: nothing was compared")
        return Reply([f"no difference: {check.compared} tensors (or ranks' parts of them) compared", *lines], data)
    rows = session.stepper.made_rows(stop.tensor)
    text = [f"first difference: {stop.tensor}", *result_lines(stop.detail, rows)]
    return Reply(text + lines, data | {"result": stop.detail.to_dict()}, differs=True)


def _target(words) -> tuple[str | None, str | None, dict]:
    """(tensor pattern, `nan`, `diff` or `exact`, conditions on operations)."""
    tensor = kind = None
    target: dict = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("layer", "rank", "micro-batch", "mb", "stage", "step"):
            if not words:
                raise ValueError(f"continue {word}: which one?")
            key = {"micro-batch": "micro_batch", "mb": "micro_batch"}.get(word, word)
            target[key] = words.pop(0) if word == "stage" else integer(words.pop(0), word)
        elif word in ("nan", "diff", "exact"):
            kind = word if kind in (None, "diff") else kind
        elif word == "end" and not words and tensor is None and kind is None and not target:
            return None, None, {}
        elif tensor is None:
            tensor = word
        else:
            raise ValueError(f"continue {tensor} {word}: one tensor at a time (a pattern may hold *)")
    return tensor, kind, target


@command("back", "b", "[COUNT]")
def back(session, words) -> Reply:
    """Go back to before the operation that was last.

    Everything before it runs again from the start of the run, which gives the same bits.
    """
    session.stepper.back(_count(words, "back"))
    return _ended(session.stepper)


@command("restart")
def restart(session, words) -> Reply:
    """Go back to before the first operation."""
    at_most(words, 0, "restart")
    session.stepper.restart()
    return _ended(session.stepper)


@command("pdb")
def pdb_(session, words) -> Reply:
    """Run the next operation under Python's debugger, from its first line.

    Inside an operation, that operation runs again, up to the line after the one that makes the tensor at hand.
    In pdb, `c` finishes the operation and comes back here; `q` breaks it off: one is then before it.
    """
    at_most(words, 0, "pdb")
    if session.stepper.here is None and session.stepper.inside is None:
        raise ValueError("pdb: at the end, nothing runs any more (back goes back)")
    session.stepper.debug(session.debugger(pdb.Pdb))
    return _ended(session.stepper)


@command("quit", "q")
def quit_(session, words) -> Reply:
    """Leave. The end of the input (Ctrl-D) does, too."""
    raise Quit

"""Name the mistake: recompute a wrong output with each known mistake in it, and see which gives the engine's tensor."""

from dataclasses import dataclass

import numpy as np

from refmodel.golden.mistakes import mistakes_of
from refmodel.golden.operators import Operator
from refmodel.golden.replay import Replay, as_stored
from refmodel.golden.report import TensorResult
from refmodel.golden.topk import compare_routes, ids_of
from refmodel.golden.ulp import widen

EXPLAINED = 0.25  # a mistake is the cause if it leaves at most this part of the error
BAD_ROW = 0.05  # of the worst row's error: rows below it are not asked what went wrong


@dataclass(frozen=True)
class Finding:
    """A known mistake that reproduces the engine's tensor: its name, the tensor whose operator has it, in words, and
    the relative errors without and with it."""

    mistake: str
    tensor: str
    text: str
    error_before: float
    error_after: float


def _row_errors(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """For each row (leading axis) the norm of the error, or for ids whether the sets differ."""
    if expected.dtype.kind in "iu":
        return (np.sort(expected, axis=-1) != np.sort(actual, axis=-1)).any(axis=-1).astype(np.float64)
    r, a = (widen(np.ascontiguousarray(x)).reshape(len(x), -1) for x in (expected, actual))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((r == a) | (np.isnan(r) & np.isnan(a)), 0.0, np.abs(a - r))
    odd = ~np.isfinite(error)  # NaN or infinity on one side: larger than any value
    error[odd] = 10 * np.abs(r[np.isfinite(r)]).max(initial=1.0)
    return np.sqrt(np.square(error).sum(axis=1))


def diagnose_output(replay: Replay, op: Operator, result: TensorResult) -> tuple[Finding, ...]:
    """Known mistakes, in this operator or in one before it that was not captured, that reproduce the output.

    Only the rows that are wrong are asked: a fault may be one rank's.
    """
    name = result.name.removeprefix(replay.prefix)
    place = op.outputs.index(name)
    actual = as_stored(name, np.asarray(replay.captured[name]), replay.context.numerics)
    outputs = replay.run(op)
    expected = outputs[place]
    ids = ids_of(name, op.outputs)
    if ids is not None and ids in replay.captured and actual.shape == expected.shape:  # weights follow their experts
        ours, theirs = outputs[op.outputs.index(ids)], np.asarray(replay.captured[ids])
        actual = np.take_along_axis(actual, compare_routes(ours, theirs, None, 0.0).order, axis=-1)
    if expected.shape != actual.shape:
        return ()
    errors = _row_errors(expected, actual)
    asked = errors > BAD_ROW * errors.max()
    size = max(float(np.linalg.norm(widen(np.ascontiguousarray(expected[asked])))), 1e-300)
    before = float(np.linalg.norm(errors[asked]))
    found = []
    for suspect in replay.segment(op):
        where = name if suspect is op else suspect.outputs[0]
        for mistake in mistakes_of(suspect.kind):
            wrong = replay.with_mistake(suspect, mistake.how)
            try:
                made = wrong.run(op)[place]
                after = float(np.linalg.norm(_row_errors(made, actual)[asked]))
            except (ValueError, IndexError, TypeError):
                continue  # this mistake is not possible with these shapes
            if after <= EXPLAINED * before:
                found.append(Finding(mistake.name, replay.prefix + where, mistake.text, before / size, after / size))
    return tuple(sorted(found, key=lambda f: f.error_after))

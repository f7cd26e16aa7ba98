"""Run single operators on the tensors that an engine had as their inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from refmodel.golden.operators import Context, Operator, operators
from refmodel.golden.ulp import has_ulp, widen
from refmodel.numerics import round_to


@dataclass(frozen=True)
class Step:
    """One pass after the first: the rows of each request in it, one after the other.

    requests: which requests of the first pass these are (default: all, in order). slots: cache slot of each one's first
    row (default: behind what its cache holds; less than that where drafts were rejected). phase: the form of attention.
    mtp_token_ids: the tokens that entered the MTP layer beside these rows, one each; None if it did not run.
    """

    lengths: tuple[int, ...]
    token_ids: np.ndarray | None = None
    phase: str = "decode"
    requests: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    mtp_token_ids: np.ndarray | None = None


INTEGERS = ("topk_idx",)
WIDE = ("logits", "topk_weights", "lse", "scale")


class Replay:
    """What each operator of `model` should have made of the tensors in `captured`.

    A tensor that the engine did not capture is computed from those that it did, as far back as needed. Captured values
    are taken as they are, in the dtype that this model stores there. Rows are the tokens of the requests of `context`.
    wrong: keywords of mistakes for the operators that make the tensors of these names. before: the replay that makes
    what these operators need and do not make (the MTP layer needs the main model's state). prefix: what the engine's
    names have in front of those in `captured` (`step.3.`).
    """

    def __init__(
        self,
        context: Context,
        captured: Mapping[str, np.ndarray],
        ops: list[Operator] | None = None,
        wrong: Mapping[str, dict] | None = None,
        before: "Replay | None" = None,
        prefix: str = "",
    ):
        self.prefix = prefix
        self.context, self.captured, self.wrong, self.before = context, captured, dict(wrong or {}), before
        self.operators = operators(context.model) if ops is None else ops
        self.maker = {name: op for op in self.operators for name in op.outputs}
        self._values: dict[str, np.ndarray] = {}

    def value(self, name: str) -> np.ndarray:
        """The engine's tensor in our dtype, or what follows from the engine's tensors before it."""
        if name not in self._values:
            if name in self.captured:
                self._values[name] = as_stored(name, np.asarray(self.captured[name]), self.context.numerics)
            elif name not in self.maker and self.before is not None:
                self._values[name] = self.before.value(name)
            else:
                op = self.maker[name]
                self._values |= {n: x for n, x in zip(op.outputs, self.run(op)) if n not in self.captured}
        return self._values[name]

    def run(self, op: Operator) -> tuple[np.ndarray, ...]:
        """The outputs of one operator on the engine's own inputs. Raises ValueError where an input cannot be had."""
        if op.kind in ("embed", "enorm") and self.context.token_ids is None:
            raise ValueError(f"{op.outputs[0]}: token ids are needed and were not given")
        mistake = self.wrong.get(op.outputs[0], {})
        return tuple(op.run(self.context, *(self.value(name) for name in op.inputs), **mistake))

    def with_mistake(self, op: Operator, how: dict) -> "Replay":
        """The same replay with a mistake (keywords of the operator) in one operator."""
        return Replay(self.context, self.captured, self.operators, {op.outputs[0]: how}, self.before, self.prefix)

    def segment(self, op: Operator) -> list[Operator]:
        """The operator and those before it whose outputs the engine did not capture, back to what it did."""
        found, waiting = [], [op]
        while waiting:
            current = waiting.pop()
            if current in found:
                continue
            found.append(current)
            waiting += [self.maker[n] for n in current.inputs if n not in self.captured and n in self.maker]
        return [o for o in self.operators if o in found]


def as_stored(name: str, array: np.ndarray, numerics) -> np.ndarray:
    """A captured tensor in the dtype that the model stores under that name."""
    last = name.rsplit(".", 1)[-1]
    if last in INTEGERS:
        return array.astype(np.int64)
    if last == "margin":
        return array.astype(np.float64)
    if last == "codes":
        if array.dtype.itemsize != 1:
            raise ValueError(f"{name}: dtype {array.dtype}; E4M3 codes are required")
        return np.ascontiguousarray(array).view(ml_dtypes.float8_e4m3fn)
    target = numerics.wide if last in WIDE else numerics.activation
    if array.dtype == target:
        return array
    if not has_ulp(array.dtype):
        raise ValueError(f"{name}: dtype {array.dtype}; a floating-point dtype is required")
    return round_to(widen(np.ascontiguousarray(array)), target)


def step_replays(
    first: Replay, captured: Mapping[str, np.ndarray], steps: Sequence[Step], mtp: Replay | None = None
) -> list[Replay]:
    """A replay of each later pass, whose attention reads the cache rows of the passes before it.

    mtp: that of the MTP layer in the first pass; needed where steps state what entered the layer.
    Raises ValueError for a request that the first pass does not have, a slot behind the end of its cache, or MTP tokens
    that do not fit the rows or the passes before.
    """
    lengths = dict(enumerate(first.context.lengths))
    history = [(first, tuple(lengths), (0,) * len(lengths))]
    mtp_history = [] if mtp is None else [(mtp, tuple(lengths), (0,) * len(lengths))]
    made = []
    for number, step in enumerate(steps, 1):
        requests, slots = _place(number, step, lengths)
        prefix = f"step.{number}."
        context = replace(
            first.context,
            token_ids=None if step.token_ids is None else np.asarray(step.token_ids),
            lengths=tuple(step.lengths),
            phase=step.phase,
            offsets=slots,
            past=_Past(tuple(history), requests, slots),
        )
        mine = {n.removeprefix(prefix): captured[n] for n in captured if n.startswith(prefix)}
        made.append(Replay(context, mine, first.operators, prefix=prefix))
        history.append((made[-1], requests, slots))
        if step.mtp_token_ids is not None:
            _check_mtp(number, step, len(mtp_history))
            past = _Past(tuple(mtp_history), requests, slots)
            made.append(_mtp_step(mtp, made[-1], np.asarray(step.mtp_token_ids), past))
            mtp_history.append((made[-1], requests, slots))
        lengths |= {r: slot + n for r, slot, n in zip(requests, slots, step.lengths)}
    return made


def _place(number: int, step: Step, lengths: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(requests, slots) of a step, where the caches hold `lengths` rows before it."""
    requests = tuple(lengths) if step.requests is None else step.requests
    if len(requests) != len(step.lengths) or not set(requests) <= set(lengths):
        raise ValueError(f"step {number}: requests {requests} with lengths {step.lengths}; there are {list(lengths)}")
    slots = tuple(lengths[r] for r in requests) if step.slots is None else step.slots
    if any(slot > lengths[r] for r, slot in zip(requests, slots)):
        raise ValueError(f"step {number}: slots {slots} are behind the ends {[lengths[r] for r in requests]}")
    return requests, slots


def _check_mtp(number: int, step: Step, passes: int) -> None:
    rows = sum(step.lengths)
    if np.shape(step.mtp_token_ids) != (rows,):
        raise ValueError(
            f"step {number}: mtp_token_ids {np.shape(step.mtp_token_ids)} must be one for each of {rows} rows"
        )
    if passes != number:
        raise ValueError(f"step {number}: mtp_token_ids are stated for {passes} of the {number} passes before it")


def _mtp_step(mtp: Replay, main: Replay, token_ids: np.ndarray, past: "_Past") -> Replay:
    shift = mtp.context.position_shift
    context = replace(main.context, token_ids=token_ids, position_shift=shift, past=past)
    return Replay(context, main.captured, mtp.operators, before=main, prefix=main.prefix)


@dataclass(frozen=True)
class _Past:
    """Cache rows before a pass: called with a layer, gives [slot, C + P] for each of its requests."""

    history: tuple
    requests: tuple[int, ...]
    slots: tuple[int, ...]

    def __call__(self, layer: int) -> list[np.ndarray]:
        rows: dict[int, np.ndarray] = {}
        for replay, requests, slots in self.history:
            p = f"layers.{layer}.attn_proj."
            new = np.concatenate([replay.value(p + "kv_latent"), replay.value(p + "k_pe")], axis=1)
            start = 0
            for request, slot, length in zip(requests, slots, replay.context.lengths):
                old = rows.get(request, new[:0])
                rows[request] = np.concatenate([old[:slot], new[start : start + length]])
                start += length
        return [rows[request][:slot] for request, slot in zip(self.requests, self.slots)]

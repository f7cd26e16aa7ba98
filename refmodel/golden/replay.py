"""Run single operators on the tensors that an engine had as their inputs."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from refmodel.golden.operators import Context, Operator, operators
from refmodel.golden.ulp import has_ulp, widen
from refmodel.numerics import round_to

INTEGERS = ("topk_idx",)
WIDE = ("logits", "topk_weights", "lse", "scale")


class Replay:
    """What each operator of `model` should have made of the tensors in `captured`.

    A tensor that the engine did not capture is computed from those that it did, as far back as needed. Captured values
    are taken as they are, in the dtype that this model stores there. Rows are the tokens of the requests of `context`.
    wrong: keywords of mistakes for the operators that make the tensors of these names. before: the replay that makes
    what these operators need and do not make (the MTP layer needs the main model's state).
    """

    def __init__(
        self,
        context: Context,
        captured: Mapping[str, np.ndarray],
        ops: list[Operator] | None = None,
        wrong: Mapping[str, dict] | None = None,
        before: "Replay | None" = None,
    ):
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

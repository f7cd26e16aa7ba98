"""Hold a kernel to the reference over all edge cases of its operator, and to what every kernel owes.

It must not change its inputs, must give the same bits when called again, and a row's bits must not depend on the rows
beside it.
"""

from collections.abc import Callable, Mapping

import numpy as np

from refmodel.golden.compare import compare
from refmodel.golden.opcases import case, operator
from refmodel.golden.optypes import Case, OperatorSpec
from refmodel.golden.report import Report
from refmodel.golden.tolerance import Tolerance, one_operator


class OperatorMismatch(AssertionError):
    """A kernel broke its contract; the text holds the report."""


def named_outputs(spec: OperatorSpec, returned) -> dict[str, np.ndarray]:
    """What the function returned, by output name, as NumPy arrays: a mapping, a tuple in order, or one array.

    Raises OperatorMismatch where outputs are missing or too many.
    """
    if isinstance(returned, Mapping):
        found = dict(returned)
    else:
        values = returned if isinstance(returned, (tuple, list)) else (returned,)
        if len(values) != len(spec.outputs):
            raise OperatorMismatch(
                f"{spec.name} gives {', '.join(spec.outputs)}; the function returned {len(values)} values"
            )
        found = dict(zip(spec.outputs, values))
    absent = [name for name in spec.outputs if found.get(name) is None]
    unknown = [name for name in found if name not in spec.outputs]
    if absent or unknown:
        raise OperatorMismatch(f"{spec.name} gives {', '.join(spec.outputs)}; missing {absent}, not known {unknown}")
    return {name: _array(found[name]) for name in spec.outputs}


def _array(value) -> np.ndarray:
    if type(value).__module__.split(".")[0] == "torch":
        from refmodel.golden.torch_files import to_numpy

        return to_numpy(value)
    return np.asarray(value)


def judge(spec: OperatorSpec, given: Case, outputs: Mapping[str, np.ndarray], tolerances=None) -> Report:
    """Compare a kernel's outputs for one case with the reference's."""
    expected = spec.run(**given.inputs)
    rules = {f"^{n}$": one_operator(x.dtype, spec.numerics, x.size) for n, x in expected.items() if x.dtype.kind != "i"}
    if "scale" in expected:
        rules["^scale$"] = Tolerance(ulps=1, reason="a scale: one division in float32")
    rules = {**(tolerances or {}), **rules}
    missing = {name: x for name, x in expected.items() if name not in spec.outputs}  # the margin, for ties
    return compare(expected, {**missing, **outputs}, rules, valid={f"^{k}$": v for k, v in given.valid.items()})


def check(name: str, outputs: Mapping, tolerances=None) -> Report:
    """Judge the outputs of one case, `mla_decode/page_end` or `mla_decode` for the first.

    Raises OperatorMismatch with the report unless everything holds.
    """
    spec, given = case(name)
    report = judge(spec, given, named_outputs(spec, outputs), tolerances)
    if not report.ok:
        raise OperatorMismatch(f"{name}: {report.to_text()}")
    return report


def _call(fn: Callable, spec: OperatorSpec, inputs: Mapping[str, np.ndarray], torch: bool) -> dict[str, np.ndarray]:
    copies = {name: x.copy() for name, x in inputs.items()}
    passed = copies
    if torch:
        from refmodel.golden.torch_files import to_torch

        passed = {name: to_torch(x) for name, x in copies.items()}
    outputs = {name: x.copy() for name, x in named_outputs(spec, fn(**passed)).items()}
    for name, before in inputs.items():
        after = _array(passed[name])
        if after.shape != before.shape or after.tobytes() != before.tobytes():
            raise OperatorMismatch(f"{spec.name}: the function changed its input {name}")
    return outputs


def opcheck(
    fn: Callable,
    name: str,
    *,
    shapes: str = "toy",
    torch: bool = False,
    tolerances=None,
    rows_independent: bool = True,
) -> int:
    """Run `fn(**inputs)` over all cases of an operator; the number of cases that hold.

    shapes: "toy", "v3" (for kernels that are made for V3's widths and head counts) or "all".
    torch: inputs are torch tensors (bfloat16 and FP8 bit for bit). tolerances: regular expression -> Tolerance for
    outputs. rows_independent=False leaves out the last of the three duties, for kernels that do not claim it.
    Raises OperatorMismatch for the first case that does not hold, with the report.
    """
    spec, count = operator(name), 0
    for given in spec.cases(shapes):
        outputs = _call(fn, spec, given.inputs, torch)
        report = judge(spec, given, outputs, tolerances)
        if not report.ok:
            raise OperatorMismatch(f"{name}/{given.name}: {report.to_text()}")
        again = _call(fn, spec, given.inputs, torch)
        _same_bits(f"{name}/{given.name}: called again", outputs, again, given)
        if rows_independent and spec.batched:
            _check_rows(fn, spec, given, outputs, torch)
        count += 1
    return count


def _same_bits(what: str, outputs, again, given: Case) -> None:
    for name, before in outputs.items():
        after = again[name]
        valid = given.valid.get(name)
        if valid is not None:
            before, after = before[valid], after[valid]
        if before.tobytes() != after.tobytes():
            rows = np.flatnonzero([x.tobytes() != y.tobytes() for x, y in zip(before, after)])
            raise OperatorMismatch(f"{what}, {name} has other bits, first in row {rows[0] if len(rows) else 0}")


def _check_rows(fn: Callable, spec: OperatorSpec, given: Case, outputs, torch: bool) -> None:
    rows = len(given.inputs[spec.batched[0]])
    for row in sorted({0, rows // 2, rows - 1}) if rows > 1 else ():
        inputs = {n: x[row : row + 1] if n in spec.batched else x for n, x in given.inputs.items()}
        alone = _call(fn, spec, inputs, torch)
        part = {name: x[row : row + 1] for name, x in outputs.items()}
        _same_bits(f"{spec.name}/{given.name}: row {row} computed alone", part, alone, Case("", {}))

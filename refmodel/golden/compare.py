"""Compare two dumps by name, in execution order, and say which tensor diverges first."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from refmodel.golden.bundle import check_schema, is_golden, read_bundle
from refmodel.golden.dump import Dump, open_dump, release
from refmodel.golden.looks import looks_like
from refmodel.golden.metrics import Difference, measure
from refmodel.golden.order import execution_order
from refmodel.golden.report import Report, TensorResult, place
from refmodel.golden.rules import Rules, compile_pattern
from refmodel.golden.tolerance import Tolerance
from refmodel.golden.topk import compare_routes, ids_of, is_topk_idx, sibling

RELEASE_BYTES = 64 << 20  # memory-mapped pages are given back after so many bytes


@dataclass(frozen=True)
class Options:
    """How to compare; see `compare`."""

    rules: Rules
    tie_margin: float
    dtypes: str
    valid: Mapping[str, np.ndarray | str]
    threads: int
    progress: Callable[[int], None] | None


def compare(
    reference,
    actual,
    tolerances=None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    tie_margin: float | None = None,
    missing: str = "error",
    extra: str = "error",
    dtypes: str = "error",
    only: str | None = None,
    valid: Mapping[str, np.ndarray | str] | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Compare the tensors of two dumps (mappings of arrays, or paths) name by name.

    tolerances: None takes the golden's own rules, or what dtype and depth suggest; "suggested", "reproduce"
    (the same computation on another machine) and "exact" say which; a `Tolerance` holds for all floating-point
    tensors; a mapping of regular expressions to `Tolerance` (or to its fields) is tried first, in order, and
    leaves the other names to their default. rtol, atol: one rule for all floating-point tensors, in short.
    Integer tensors are exact unless a regular expression says otherwise. Ids of selected experts (`topk_idx`) are
    compared as sets; where the `margin` beside them is at most `tie_margin` a flip is a tie and no fault, and
    weights are compared expert by expert.
    missing, extra, dtypes: "error" or "ignore". only: regular expression of the names to compare.
    valid: regular expression -> booleans over leading axes, or the name of a tensor that holds them or holds
    counts per group: rows that are not valid are read on neither side.

    Raises ValueError for an empty dump, no name in common, a golden of another schema, or a bad rule.
    """
    for option, value in (("missing", missing), ("extra", extra), ("dtypes", dtypes)):
        if value not in ("error", "ignore"):
            raise ValueError(f"{option}={value!r}: 'error' or 'ignore' is required")
    left, right = open_dump(reference), open_dump(actual)
    rules, golden_valid, numerics = _golden(left, tolerances, rtol, atol)
    check_golden_schema(right)
    options = Options(
        rules=rules,
        tie_margin=_tie_margin(tie_margin, numerics),
        dtypes=dtypes,
        valid={**{f"^{re.escape(k)}$": v for k, v in golden_valid.items()}, **(valid or {})},
        threads=threads or min(4, os.cpu_count() or 1),
        progress=progress,
    )
    names = execution_order(left, right)
    if only is not None:
        pattern = compile_pattern(only, "only")
        names = [name for name in names if pattern.search(name)]
    if not any(name in left and name in right for name in names):
        raise ValueError(
            f"{left.source} and {right.source} have no tensor name in common"
            f"{'' if only is None else f' that matches {only!r}'}; nothing was compared "
            f"(the first names are {next(iter(left))!r} and {next(iter(right))!r})"
        )
    results, notes = [], []
    for name in names:
        if name not in left or name not in right:
            kind = "extra" if name not in left else "missing"
            if (extra if kind == "extra" else missing) == "error":
                results.append(_one_sided(name, kind, left if kind == "missing" else right))
            continue
        results.append(_compare_one(name, left, right, options))
    for kind, policy in (("missing", missing), ("extra", extra)):
        here, there = (left, right) if kind == "missing" else (right, left)
        count = sum(1 for name in names if name in here and name not in there)
        if policy == "ignore" and count:
            notes.append(f"{count} {kind} tensors were not compared")
    return Report(tuple(results), _headline(results), left.source, right.source, tuple(notes))


def check_golden_schema(dump: Dump) -> None:
    """Raise ValueError if the dump is a golden of a schema that this version does not read."""
    if is_golden(dump.metadata):
        check_schema(dump.metadata, dump.source)


def _golden(left: Dump, tolerances, rtol, atol) -> tuple[Rules, dict, str | None]:
    golden_rules, golden_valid, numerics = {}, {}, None
    if is_golden(left.metadata):
        bundle = read_bundle(left.source)
        golden_rules, golden_valid, numerics = bundle.tolerances, bundle.valid, bundle.numerics
    if rtol is not None or atol is not None:
        if tolerances is not None:
            raise ValueError("tolerances and rtol/atol are both given; one of them is required")
        tolerances = Tolerance(rtol=rtol or 0.0, atol=atol or 0.0, reason="given")
    return Rules.make(tolerances, golden_rules, numerics, left), golden_valid, numerics


_TIES = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-7, "fp8": 2.0**-5, None: 1e-5}


def _tie_margin(given: float | None, numerics: str | None) -> float:
    """Largest margin at which another choice is noise: scores are sigmoids, whose error is that of the numerics."""
    if given is None:
        return _TIES[numerics]
    if not given >= 0:
        raise ValueError(f"tie_margin={given!r}: a number of 0 or more is required")
    return given


def _one_sided(name: str, kind: str, dump: Dump) -> TensorResult:
    array = dump[name]
    if kind == "missing":
        return TensorResult(name, kind, reference_dtype=array.dtype.name, reference_shape=array.shape)
    return TensorResult(name, kind, actual_dtype=array.dtype.name, actual_shape=array.shape)


def valid_rows(name: str, array: np.ndarray, valid: Mapping, dump: Dump) -> np.ndarray | None:
    """The booleans over leading axes that say which rows of tensor `name` hold something, or None for all.

    A tensor of counts [groups] means: the first `count` rows of each group of `array` [groups, rows, ...].
    """
    mask = next((m for pattern, m in valid.items() if re.search(pattern, name)), None)
    if mask is None:
        return None
    if isinstance(mask, str):
        if mask not in dump:
            raise ValueError(f"valid rows of {name!r}: no tensor {mask!r} in {dump.source}")
        mask = dump[mask]
    mask = np.asarray(mask)
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind not in "iu" or mask.ndim + 1 > array.ndim or mask.shape != array.shape[: mask.ndim]:
        raise ValueError(
            f"valid rows of {name!r} with shape {array.shape}: got {mask.dtype} of shape {mask.shape}; "
            "booleans over leading axes, or one count per group, are required"
        )
    return np.arange(array.shape[mask.ndim]) < mask[..., None]


def _compare_one(name: str, left: Dump, right: Dump, options: Options) -> TensorResult:
    r, a = left[name], right[name]
    base = TensorResult(
        name,
        "differs",
        reference_dtype=r.dtype.name,
        actual_dtype=a.dtype.name,
        reference_shape=r.shape,
        actual_shape=a.shape,
        tolerance=options.rules.of(name, r, a),
    )
    if r.shape != a.shape:
        return replace(base, status="shape")
    valid = valid_rows(name, r, options.valid, left)
    if is_topk_idx(name) and r.ndim and r.dtype.kind in "iu" and a.dtype.kind in "iu":
        result = _compare_ids(base, r, a, left, options, valid)
    elif (ids := ids_of(name, left)) and ids in right and right[ids].shape == r.shape == left[ids].shape:
        result = _compare_weights(base, r, a, ids, left, right, options, valid)
    else:
        result = _judge(base, r, a, options, valid)
    if result.ok and r.dtype != a.dtype and options.dtypes == "error":
        result = replace(result, status="dtype", note="the values hold, the dtype does not")
    return result


def _judge(base: TensorResult, r, a, options: Options, valid, note: str = "") -> TensorResult:
    read = 0

    def after_block(count: int) -> None:
        nonlocal read
        read += count
        if read >= RELEASE_BYTES:
            read = 0
            release(r), release(a)
        if options.progress is not None:
            options.progress(count)

    threads = options.threads if r.size > 1 << 20 else 1
    difference = measure(r, a, base.tolerance, valid, threads, after_block)
    status = _status(difference, base.tolerance)
    if status == "differs" and not note:
        note = looks_like(r, a, difference) or "" if valid is None else ""
        note = f"looks: {note}" if note else ""
    release(r), release(a)
    if valid is not None:
        note = (note + "; " if note else "") + f"{int(valid.size - valid.sum())} rows not valid and not read"
    return replace(base, status=status, difference=difference, note=note)


def _status(d: Difference, tolerance: Tolerance) -> str:
    if d.identical:
        return "identical"
    too_many = d.differing > tolerance.differing * d.total
    scaled = d.scale is not None and abs(d.scale - 1) > tolerance.scale
    return "differs" if d.violations or too_many or scaled else "close"


def _compare_ids(base, r, a, left: Dump, options: Options, valid) -> TensorResult:
    margin_name = sibling(base.name, left, "margin")
    routes = compare_routes(r, a, left[margin_name] if margin_name else None, options.tie_margin)
    ordered = np.take_along_axis(a, routes.order, -1)
    ordered[routes.ties] = r[routes.ties]
    flips = int(routes.ties.sum() if valid is None else (routes.ties & _spread(valid, routes.ties.shape)).sum())
    result = _judge(base, r, ordered, options, valid, note="compared as sets" + _margins(routes, left, margin_name))
    if result.ok and flips:
        first = tuple(int(i) for i in np.argwhere(routes.ties)[0])
        note = (
            f"{flips} of {routes.ties.size} rows flip at a tie (margin <= {options.tie_margin:g}), first {place(first)}"
        )
        return replace(result, status="tie", note=note)
    return replace(result, note="" if result.status == "identical" and not flips else result.note)


def _margins(routes, left: Dump, margin_name: str | None) -> str:
    rows = np.argwhere(routes.flipped & ~routes.ties)
    if not len(rows):
        return ""
    text = f"; {len(rows)} of {routes.flipped.size} rows choose other experts, first {place(tuple(rows[0]))}"
    if margin_name:
        text += f" at a margin of {float(left[margin_name][tuple(rows[0])]):.4g}"
    return text


def _spread(valid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(valid.reshape(valid.shape + (1,) * (len(shape) - valid.ndim)), shape)


def _compare_weights(base, r, a, ids: str, left: Dump, right: Dump, options: Options, valid) -> TensorResult:
    """Weights follow their experts: put the actual ones into the order of the reference's ids."""
    routes = compare_routes(left[ids], right[ids], None, 0.0)
    same = ~routes.flipped
    if valid is not None:
        same = same & _spread(valid, same.shape)
    skipped = int(routes.flipped.sum())
    result = _judge(base, r, np.take_along_axis(a, routes.order, -1), options, None if same.all() else same)
    if skipped:
        result = replace(result, note=f"{skipped} rows with other experts not compared")
    return result


def _headline(results: list[TensorResult]) -> str:
    report = Report(tuple(results), "")
    first = report.first
    if first is None:
        same = report.counts().get("identical", 0)
        text = f"equal: {len(results)} tensors, {same} bit for bit, {len(results) - same} within tolerance"
        ties = [r for r in results if r.status == "tie"]
        return text + (f"; routing flips at ties in {len(ties)}, first {ties[0].name}" if ties else "")
    if first.status in ("missing", "extra"):
        count = sum(r.status == first.status for r in results)
        side = "the actual dump" if first.status == "missing" else "the reference"
        return f"{first.name} is missing from {side}" + (f", and {count - 1} more names are" if count > 1 else "")
    text = f"{first.name} diverges first: "
    if first.status == "shape":
        text += f"shape {list(first.actual_shape)}, {list(first.reference_shape)} is expected"
    elif first.status == "dtype":
        text += f"dtype {first.actual_dtype}, {first.reference_dtype} is expected (the values hold)"
    else:
        text += _reason(first)
    before = results[: results.index(first)]
    flips = [r for r in before if r.status == "tie"]
    if flips:
        text += f"; before it routing flips at a tie in {flips[0].name}, which moves all that follows"
    absent = sum(r.status in ("missing", "extra") for r in results)
    return text + (f"; {absent} names are on one side only" if absent else "")


def _reason(result: TensorResult) -> str:
    d, rule = result.difference, result.tolerance
    if d.violations:
        text = f"{d.violations} of {d.total} elements outside tolerance ({rule})"
        if d.worst_abs is not None:
            worst = d.worst_abs
            text += f", worst {worst.reference:.6g} against {worst.actual:.6g} at {place(worst.index)}"
    elif d.differing > rule.differing * d.total:
        text = f"{d.differing} of {d.total} elements differ, {rule.differing:g} of them may"
    else:
        text = f"all elements hold, but together they are scaled by {d.scale:.6g} (within {rule.scale:.3g} is allowed)"
    return text + (f"; {result.note}" if result.note else "")

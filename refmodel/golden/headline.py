"""One sentence about a comparison: which tensor diverges first, how, and what it looks like."""

from refmodel.golden.report import Report, TensorResult, place


def headline(results: list[TensorResult]) -> str:
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
        text += reason(first)
    before = results[: results.index(first)]
    flips = [r for r in before if r.status == "tie"]
    if flips:
        text += f"; before it routing flips at a tie in {flips[0].name}, which moves all that follows"
    absent = sum(r.status in ("missing", "extra") for r in results)
    return text + (f"; {absent} names are on one side only" if absent else "")


def reason(result: TensorResult) -> str:
    """How a tensor that differs does so, as a part of a sentence."""
    d, rule = result.difference, result.tolerance
    if d.violations:
        text = f"{d.violations} of {d.total} elements outside tolerance ({rule})"
        if d.worst_abs is not None:
            worst = d.worst_abs
            text += f", worst {worst.reference:.6g} against {worst.actual:.6g} at {place(worst.index)}"
    elif d.differing > rule.differing * d.total:
        text = f"{d.differing} of {d.total} elements differ, {rule.differing:g} of them may"
    elif d.worst_row is not None and d.worst_row.error > rule.row:
        off = f"{d.worst_row.error:.3g} of its norm ({rule.row:.3g} is allowed)"
        text = f"all elements hold, but row {place(d.worst_row.index)} is off by {off}"
    elif abs(d.scale - 1) <= rule.scale:
        off = f"{d.relative_error:.3g} of the norm ({rule.norm:.3g} is allowed)"
        text = f"all elements hold, but together they are off by {off}"
    else:
        text = f"all elements hold, but together they are scaled by {d.scale:.6g} (within {rule.scale:.3g} is allowed)"
    return text + (f"; {result.note}" if result.note else "")

"""The commands of `refmodel step` that hold tensors to a golden."""

from refmodel.stepper import Golden
from scripts.step_registry import Reply, at_most, command
from scripts.step_text import lookup


@command("golden", "", "FILE")
def golden(session, words) -> Reply:
    """Hold the run to another golden (or any dump with our names: .safetensors, .npz, ...)."""
    at_most(words, 1, "golden")
    if not words:
        raise ValueError("golden: which file?")
    session.load_golden(words[0])
    count = len(session.golden.dump)
    return Reply([f"{words[0]}: {count} tensors"], {"golden": words[0], "tensors": count})


@command("diff", "d", "[TENSOR...]")
def diff(session, words) -> Reply:
    """Hold tensors to the golden: those named, or all that the last operation made.

    Of a tensor whose rows are on several ranks, the rows made so far are compared.
    """
    check: Golden = session.golden_check()
    stepper = session.stepper
    names = [lookup(stepper, word)[2] for word in words] or stepper.made
    if not names:
        raise ValueError("diff: the last operation made no tensors; name one")
    lines, results, differs = [], {}, False
    for name in names:
        if name not in check.dump and not words:
            lines.append(f"{name}: not in the golden")
            continue
        result = check.judge(stepper.tensors, name)
        lines += [f"{name}: {result.status}", *result_lines(result, stepper.tensors.rows(name))]
        results[name] = result.to_dict()
        differs |= not result.ok
    return Reply(lines, {"results": results}, differs)


def result_lines(result, rows) -> list[str]:
    """What a comparison found, rows by their global numbers."""
    d = result.difference
    if result.status in ("shape", "dtype"):
        here = f"{result.actual_dtype} {list(result.actual_shape)}"
        return [f"  golden {result.reference_dtype} {list(result.reference_shape)}, here {here}"]
    if d is None or d.identical:
        return []
    lines = [f"  {d.violations} of {d.total} elements outside ({result.tolerance}), {d.differing} differ"]
    if d.worst_abs is not None:
        index = list(d.worst_abs.index)
        if rows is not None and index:
            index[0] = int(rows[index[0]])
        pair = f"golden {d.worst_abs.reference:.6g}, here {d.worst_abs.actual:.6g}"
        lines.append(f"  worst absolute {d.worst_abs.error:.6g} at {index}: {pair}")
    if d.relative_error is not None:
        lines.append(f"  error norm / golden norm {d.relative_error:.3g}, cosine {d.cosine:.9g}")
    return lines + ([f"  {result.note}"] if result.note else [])

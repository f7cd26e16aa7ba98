"""How `refmodel step` writes operations and tensors."""

from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from refmodel.stepper.look import spans, statistics, wide


def label(stepper, operation) -> str:
    """`layers.3.experts, rank 2, micro-batch 1`: what is not the only one of its kind."""
    words = [operation.scope.prefix.rstrip(".")]
    if stepper.num_ranks > 1:
        words.append(f"rank {operation.rank}")
    if getattr(stepper.engine, "schedule", "sequential") != "sequential":
        words.append(f"micro-batch {operation.micro_batch}")
    return ", ".join(words)


def place(stepper, operation) -> dict | None:
    """An operation for a machine."""
    if operation is None:
        return None
    return {
        "name": operation.scope.prefix.rstrip("."),
        "stage": operation.stage.name,
        "layer": operation.layer,
        "rank": operation.rank,
        "micro_batch": operation.micro_batch,
    }


def where(stepper) -> tuple[list[str], dict]:
    """Where one is."""
    done = len(stepper.operations)
    data = {"done": done, "next": place(stepper, stepper.here), "inside": stepper.inside}
    if stepper.inside is not None:
        made = stepper.made
        total = len(made) + stepper.num_hidden
        text = f"inside {label(stepper, stepper.last)}: tensor {len(made)} of {total}, {stepper.inside}"
        return [text], data | {"operation": place(stepper, stepper.last)}
    if stepper.stuck is not None:
        return [f"stuck after {done} operations: {stepper.stuck}"], data | {"stuck": str(stepper.stuck)}
    if stepper.here is None:
        return [f"at the end: {done} operations ran"], data
    return [f"next: {label(stepper, stepper.here)} ({done} done)"], data


def brief(stepper, name: str) -> str:
    """A tensor in one line."""
    array, rows = stepper.tensors[name], stepper.tensors.rows(name)
    s = statistics(array)
    held = "" if rows is None or stepper.num_ranks == 1 else f" rows {spans(rows)}"
    numbers = "" if s.min is None else f"  min {s.min:.5g}  max {s.max:.5g}  rms {s.rms:.5g}"
    bad = f"  {s.nan} NaN, {s.inf} infinite" if s.nan or s.inf else ""
    return f"{name}  {s.dtype} {list(s.shape)}{held}{numbers}{bad}"


def numbers_of(array) -> list[str]:
    """Two lines of statistics."""
    s = statistics(array)
    if s.min is None:
        return [f"{s.dtype} {list(s.shape)}", f"zeros {s.zeros}  NaN {s.nan}  infinite {s.inf}"]
    return [
        f"{s.dtype} {list(s.shape)}  min {s.min:.6g}  max {s.max:.6g}  mean {s.mean:.6g}  rms {s.rms:.6g}",
        f"zeros {s.zeros}  NaN {s.nan}  infinite {s.inf}",
    ]


def elements(array, most: int) -> list[str]:
    """The elements, or the corners of them where there are more than `most`."""
    shown = np.asarray(array) if array.dtype.kind in "biu" else wide(array)
    text = np.array2string(shown, threshold=most, precision=6, max_line_width=110, suppress_small=False)
    return text.splitlines()


def bars(histogram, width: int = 40) -> list[str]:
    """A histogram, one interval a line."""
    most = max(1, int(histogram.counts.max(initial=0)))
    lines = []
    for left, right, count in zip(histogram.edges, histogram.edges[1:], histogram.counts):
        bar = "#" * int(np.ceil(width * count / most))
        lines.append(f"{left:>12.5g} .. {right:<12.5g} {bar:<{width}} {count}")
    return lines


def lookup(stepper, name: str) -> tuple[np.ndarray, np.ndarray | None, str]:
    """(array, its global rows or None, full name) of what a person calls `name`: a tensor by its name, its end within
    the operation at hand, or a pattern that one name fits; `values.NAME`; `cache.REQUEST.LAYER`. Raises ValueError.
    """
    if name in stepper.tensors:
        return stepper.tensors[name], stepper.tensors.rows(name), name
    head, _, rest = name.partition(".")
    if head == "values" and rest:
        return _value(stepper.values, rest), None, name
    if head == "cache" and rest:
        return _cache(stepper, rest), None, name
    fits = [n for n in stepper.made if n.endswith(f".{name}")] or [n for n in stepper.tensors if fnmatchcase(n, name)]
    if len(fits) == 1:
        return stepper.tensors[fits[0]], stepper.tensors.rows(fits[0]), fits[0]
    if fits:
        raise ValueError(f"{name!r} fits {len(fits)} tensors: {', '.join(fits[:4])}{', ...' if len(fits) > 4 else ''}")
    close = get_close_matches(name, list(stepper.tensors), 1)
    hint = f"; did you mean {close[0]}?" if close else "; names lists those that were made"
    raise ValueError(f"no tensor {name!r} so far{hint}")


def _value(values: dict, path: str):
    name, *rest = path.split(".")
    if name not in values:
        raise ValueError(f"no value {name!r} here; there are {', '.join(values) or 'none'}")
    value = values[name]
    for part in rest:
        if part.startswith("_") or not hasattr(value, part):
            raise ValueError(f"values.{path}: a {type(value).__name__} has no {part!r}")
        value = getattr(value, part)
    if not isinstance(value, np.ndarray):
        fields = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())
        hint = f"; it has {', '.join(fields)}" if fields else "; pdb looks into it"
        raise ValueError(f"values.{path} is a {type(value).__name__}, not an array{hint}")
    return value


def _cache(stepper, path: str):
    parts = path.split(".")
    items = {item.request: item for item in stepper.work.items}
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"cache.{path}: must be cache.REQUEST.LAYER, like cache.0.3")
    request, layer = map(int, parts)
    if request not in items or layer >= stepper.config.num_layers:
        raise ValueError(
            f"cache.{path}: this pass has requests {', '.join(map(str, items))}, "
            f"and layers 0 to {stepper.config.num_layers - 1}"
        )
    cache = items[request].cache
    return cache.rows(layer, cache.written[layer])

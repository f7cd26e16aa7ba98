"""Judge one tensor of a comparison: as numbers, as a set of experts, or row by row by source."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from refmodel.golden.dump import Dump, release
from refmodel.golden.looks import looks_like
from refmodel.golden.metrics import Difference, measure
from refmodel.golden.picture import error_picture
from refmodel.golden.report import TensorResult, place
from refmodel.golden.rows import Keys, describe, gather, match_rows, source_keys
from refmodel.golden.rules import Rules
from refmodel.golden.tolerance import Tolerance
from refmodel.golden.topk import compare_routes, ids_of, is_topk_idx, sibling

RELEASE_BYTES = 64 << 20  # memory-mapped pages are given back after so many bytes


@dataclass(frozen=True)
class Options:
    """How tensors are judged; see `compare`."""

    rules: Rules
    tie_margin: float
    dtypes: str = "error"
    valid: Mapping[str, np.ndarray | str] = field(default_factory=dict)
    threads: int = 1
    progress: Callable[[int], None] | None = None
    by_source: bool = False
    pictures: bool = False


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


def judge_tensor(name: str, left: Dump, right: Dump, options: Options) -> TensorResult:
    """The result for one tensor that both dumps have."""
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
    if options.by_source and (keys := source_keys(name, left)) is not None:
        return _judge_by_source(base, r, a, keys, right, options)
    if r.shape != a.shape:
        return replace(base, status="shape")
    valid = valid_rows(name, r, options.valid, left)
    if is_topk_idx(name) and r.ndim and r.dtype.kind in "iu" and a.dtype.kind in "iu":
        result = _compare_ids(base, r, a, left, options, valid)
    elif (ids := ids_of(name, left)) and ids in right and right[ids].shape == r.shape == left[ids].shape:
        result = _compare_weights(base, r, a, ids, left, right, options, valid)
    elif (slots := _slot_order(name, r, left, right)) is not None:
        result = _compare_slots(base, r, a, slots, options)
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
    status = status_of(difference, base.tolerance)
    if status == "differs" and not note:
        note = looks_like(r, a, difference) or "" if valid is None else ""
        note = f"looks: {note}" if note else ""
    picture = None
    if options.pictures and status == "differs" and valid is None:
        picture = error_picture(r, a, difference.rms_reference)
    release(r), release(a)
    if valid is not None:
        note = (note + "; " if note else "") + f"{int(valid.size - valid.sum())} rows not valid and not read"
    return replace(base, status=status, difference=difference, note=note, picture=picture)


def status_of(d: Difference, tolerance: Tolerance) -> str:
    """identical, close or differs."""
    if d.identical:
        return "identical"
    too_many = d.differing > tolerance.differing * d.total
    scaled = d.scale is not None and abs(d.scale - 1) > tolerance.scale
    far = d.relative_error is not None and d.relative_error > tolerance.norm
    far = far or (d.worst_row is not None and d.worst_row.error > tolerance.row)
    return "differs" if d.violations or too_many or scaled or far else "close"


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


def _slot_order(name: str, r: np.ndarray, left: Dump, right: Dump) -> np.ndarray | None:
    """For tensors of experts with a row per slot (token * K + k): the actual row of each of the reference's rows, -1
    where the token chose another expert or none. None for other tensors, and where both chose in one order."""
    layer, experts, _ = name.rpartition(".experts.")
    ids = f"{layer}.attn_core.router.topk_idx"
    if not experts or ids not in left or ids not in right:
        return None
    ours, theirs = left[ids], right[ids]
    if ours.shape != theirs.shape or ours.size != len(r) or np.array_equal(ours, theirs):
        return None
    routes = compare_routes(ours, theirs, None, 0.0)
    first_slot = np.arange(len(ours))[:, None] * ours.shape[1]
    return np.where(routes.flipped[:, None] | (ours < 0), -1, first_slot + routes.order).reshape(-1)


def _compare_slots(base: TensorResult, r, a, slots: np.ndarray, options: Options) -> TensorResult:
    """Rows follow their experts, as weights do."""
    here = slots >= 0
    result = _judge(base, r[here], a[slots[here]], options, None)
    note = f"slots by expert, {int((~here).sum())} of {here.size} rows not compared"
    return replace(result, note=f"{result.note}; {note}" if result.note else note)


def _judge_by_source(base: TensorResult, r, a, keys: Keys, right: Dump, options: Options) -> TensorResult:
    """Rows that came from one (rank, token, expert) are compared with each other, wherever they stand."""
    other = source_keys(base.name, right)
    if other is None:
        return replace(base, status="differs", note=f"{right.source} does not say where its rows came from")
    match = match_rows(keys.keys, other.keys)
    found = match.order >= 0
    left_rows, right_rows = gather(r, keys)[found], gather(a, other)[match.order[found]]
    if left_rows.shape != right_rows.shape:
        return replace(base, status="shape")
    result = _judge(base, left_rows, right_rows, options, None)
    if (fault := describe(match)) is not None:
        return replace(result, status="differs", note=fault + (f"; {result.note}" if result.note else ""))
    moved = int((match.order != np.arange(len(match.order))).sum())
    return replace(result, note=f"matched by source, {moved} of {len(match.order)} rows stand elsewhere")

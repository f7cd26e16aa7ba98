"""Compare two dumps by name, in execution order, and say which tensor diverges first."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from refmodel.golden.bundle import check_schema, is_golden, read_bundle
from refmodel.golden.dump import Dump, open_dump
from refmodel.golden.headline import headline
from refmodel.golden.judge import Options, judge_tensor
from refmodel.golden.names import interleave_rope, translate
from refmodel.golden.order import execution_order
from refmodel.golden.report import Report, TensorResult
from refmodel.golden.rules import Rules, compile_pattern
from refmodel.golden.tolerance import TIE_MARGINS, Tolerance
from refmodel.golden.unshard import join_ranks


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
    names: str | None = None,
    half_split_rope: bool = False,
    ranks: Mapping[str, str] | None = None,
    by_source: bool = False,
    pictures: int = 0,
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
    The actual dump is first brought into our form: `ranks` joins what ranks hold (regular expression -> layout, see
    `unshard`), `names` is the table of an engine ("huggingface", "vllm", "sglang"; names without a counterpart are
    left out with a note), `half_split_rope` takes rotated vectors from half-split to interleaved order.
    pictures: how many of the first failing tensors get a heat map for `Report.to_html`.
    by_source: match rows of dispatched tensors by the source tensors beside them (see `rows`).

    Raises ValueError for an empty dump, no name in common, a golden of another schema, or a bad rule.
    """
    for option, value in (("missing", missing), ("extra", extra), ("dtypes", dtypes)):
        if value not in ("error", "ignore"):
            raise ValueError(f"{option}={value!r}: 'error' or 'ignore' is required")
    left, right = open_dump(reference), open_dump(actual)
    rules, golden_valid, numerics = _golden(left, right, tolerances, rtol, atol)
    check_golden_schema(right)
    right, notes = our_form(left, right, ranks, names, half_split_rope)
    options = Options(
        rules=rules,
        tie_margin=_tie_margin(tie_margin, numerics),
        dtypes=dtypes,
        valid={**{f"^{re.escape(k)}$": v for k, v in golden_valid.items()}, **(valid or {})},
        threads=threads or min(4, os.cpu_count() or 1),
        progress=progress,
        by_source=by_source,
    )
    chosen = _chosen(left, right, only)
    results = []
    for name in chosen:
        if name in left and name in right:
            wanted = sum(r.picture is not None for r in results) < pictures
            results.append(judge_tensor(name, left, right, replace(options, pictures=wanted)))
        elif (missing if name in left else extra) == "error":
            results.append(_one_sided(name, left, right))
    for kind, policy, here, there in (("missing", missing, left, right), ("extra", extra, right, left)):
        count = sum(name in here and name not in there for name in chosen)
        if policy == "ignore" and count:
            notes.append(f"{count} {kind} tensors were not compared")
    return Report(tuple(results), headline(results), left.source, right.source, tuple(notes))


def our_form(left: Dump, right: Dump, ranks, names, half_split_rope) -> tuple[Dump, list[str]]:
    """The actual dump `right` with ranks joined, names translated and rotated vectors reordered, and notes about it."""
    notes: list[str] = []
    if ranks:
        right, more = join_ranks(right, ranks)
        notes += more
    if names is not None:
        right, more = translate(right, left, names)
        notes += more
    if half_split_rope:
        right, more = interleave_rope(right, left)
        notes += more
    return right, notes


def _chosen(left: Dump, right: Dump, only: str | None) -> list[str]:
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
    return names


def check_golden_schema(dump: Dump) -> None:
    """Raise ValueError if the dump is a golden of a schema that this version does not read."""
    if is_golden(dump.metadata):
        check_schema(dump.metadata, dump.source)


def _golden(left: Dump, right: Dump, tolerances, rtol, atol) -> tuple[Rules, dict, str | None]:
    golden_rules, golden_valid, numerics = {}, {}, None
    if is_golden(left.metadata):
        bundle = read_bundle(left.source)
        golden_rules, golden_valid, numerics = bundle.tolerances, bundle.valid, bundle.numerics
    if rtol is not None or atol is not None:
        if tolerances is not None:
            raise ValueError("tolerances and rtol/atol are both given; one of them is required")
        tolerances = Tolerance(rtol=rtol or 0.0, atol=atol or 0.0, reason="given")
    rules = Rules.make(tolerances, golden_rules, numerics, (left, right))
    return rules, golden_valid, rules.numerics


def _tie_margin(given: float | None, numerics: str | None) -> float:
    """Largest margin at which another choice is noise: scores are sigmoids, whose error is that of the numerics."""
    if given is None:
        return TIE_MARGINS[numerics]
    if not given >= 0:
        raise ValueError(f"tie_margin={given!r}: a number of 0 or more is required")
    return given


def _one_sided(name: str, left: Dump, right: Dump) -> TensorResult:
    if name in left:
        array = left[name]
        return TensorResult(name, "missing", reference_dtype=array.dtype.name, reference_shape=array.shape)
    array = right[name]
    return TensorResult(name, "extra", actual_dtype=array.dtype.name, actual_shape=array.shape)

"""Find the first operator of an engine that is wrong, apart from everything that only follows from it.

In bfloat16 everything differs a little after layer 0, and everything differs a lot after a fault. So each operator is
replayed on the engine's own captured inputs, and only its output is judged: drift and faults before it do not count.
The engine's own routing is used as it is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from refmodel.golden.bundle import Bundle
from refmodel.golden.diagnose import Finding, diagnose_output
from refmodel.golden.dump import Dump, open_dump
from refmodel.golden.headline import reason
from refmodel.golden.judge import status_of
from refmodel.golden.looks import looks_like
from refmodel.golden.metrics import measure
from refmodel.golden.mistakes import variants_of
from refmodel.golden.operators import Context, Operator, mtp_operators, operators
from refmodel.golden.passes import stated_passes
from refmodel.golden.replay import Replay, Step, step_replays
from refmodel.golden.report import Report, TensorResult
from refmodel.golden.tolerance import EXACT, TIE_MARGINS, UNIT_ROUNDOFF, Tolerance, one_operator
from refmodel.golden.topk import compare_routes
from refmodel.golden.ulp import widen

WIDE_KINDS = ("router_logits", "router", "logits")  # stored as wide as they are computed, in every numerics


@dataclass(frozen=True)
class Location:
    """The result of `locate`: `report` has one result per captured tensor, judged from the engine's own inputs.

    findings: the known mistakes that reproduce the first one that does not hold. expected: what it should have been.
    """

    report: Report
    findings: tuple[Finding, ...] = ()
    expected: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        return self.report.ok

    @property
    def exit_code(self) -> int:
        return self.report.exit_code

    @property
    def first(self) -> TensorResult | None:
        return self.report.first

    @property
    def headline(self) -> str:
        return self.report.headline

    def to_json(self) -> dict:
        """Plain values."""
        return self.report.to_json() | {"findings": [finding.__dict__ for finding in self.findings]}

    def to_text(self, verbose: bool = False) -> str:
        """The headline, then the report."""
        return self.report.to_text(verbose)


def locate(
    model,
    actual,
    *,
    token_ids=None,
    lengths: tuple[int, ...] | None = None,
    phase: str = "prefill",
    mtp_token_ids=None,
    steps: Sequence[Step] = (),
    tolerances: Mapping[str, Tolerance] | None = None,
    tie_margin: float | None = None,
    diagnose: bool = True,
) -> Location:
    """Replay every operator whose output the engine captured, and name the first that does not hold.

    model: the reference with the engine's weights and numerics. actual: a dump under our names (see `compare` for
    other forms: `open_dump`, `translate`, `join_ranks`). token_ids [T]: without them the embedding is not judged.
    lengths: rows of each request (default: one request). phase: "decode" if the engine's attention is absorbed.
    mtp_token_ids: the tokens that entered the MTP layer of the first pass, to judge that as well. steps: what stands
    in the passes after the first one, whose tensors are called `step.1.…`, `step.2.…`; others are left out.

    Raises ValueError if nothing was captured that the model makes, or shapes do not fit the model.
    """
    dump = open_dump(actual)
    numerics = model.numerics.name
    tie = (1e-12 if numerics == "float64" else 1e-5) if tie_margin is None else tie_margin
    context = _context(model, dump, token_ids, lengths, phase)
    replays = [Replay(context, dump, operators(model))]
    if mtp_token_ids is not None:
        shift = model.numerics.switches.mtp_position_shift
        shifted = replace(context, token_ids=np.asarray(mtp_token_ids), position_shift=shift)
        replays.append(Replay(shifted, dump, mtp_operators(model), before=replays[0]))
    replays += step_replays(replays[0], dump, steps, replays[1] if mtp_token_ids is not None else None)
    results, failed, misshapen = [], None, set()
    for replay in replays:
        for op in replay.operators:
            if misshapen.intersection(op.inputs):
                continue  # nothing follows from an input of a wrong shape, which was reported
            judged = _judge_operator(replay, op, numerics, tie, tolerances or {})
            misshapen |= {r.name for r in judged if r.status == "shape"}
            judged = [replace(r, name=replay.prefix + r.name) for r in judged]
            failed = failed or next(((replay, op, r) for r in judged if not r.ok), None)
            results += judged
    if not results:
        raise ValueError(f"{dump.source}: none of its {len(dump)} tensors is made by an operator of the model")
    findings = diagnose_output(*failed) if failed and diagnose else ()
    notes = _notes(dump, replays)
    report = Report(tuple(results), _headline(results, findings), "replay from its own inputs", dump.source, notes)
    return Location(report, findings, _expected(*failed) if failed else None)


def _expected(replay: Replay, op: Operator, result: TensorResult) -> np.ndarray:
    return replay.run(op)[op.outputs.index(result.name.removeprefix(replay.prefix))]


def locate_from_golden(model, golden: Bundle, actual, **options) -> Location:
    """`locate` with tokens, requests, form of attention and later steps as the golden of `refmodel dump` states them.

    model: the checkpoint that the golden was made of. Raises ValueError if the golden does not state its prompts.
    """
    return locate(model, actual, **stated_passes(golden), **options)


def _context(model, dump: Dump, token_ids, lengths, phase) -> Context:
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase={phase!r}: 'prefill' or 'decode' is required")
    ids = None if token_ids is None else model.check_ids(token_ids)
    rows = len(ids) if ids is not None else _rows(dump)
    lengths = tuple(lengths or (rows,))
    if sum(lengths) != rows:
        raise ValueError(f"lengths {list(lengths)} add up to {sum(lengths)} rows; there are {rows}")
    return Context(model, ids, lengths, phase)


def _rows(dump: Dump) -> int:
    name = next((n for n in dump if (n.startswith("layers.") and ".attn_proj." in n) or n == "embed.hidden"), None)
    if name is None:
        raise ValueError(f"{dump.source}: how many tokens it holds is not to be seen; give token_ids or lengths")
    return len(dump[name])


def _judge_operator(replay: Replay, op: Operator, numerics: str, tie: float, rules: Mapping) -> list[TensorResult]:
    names = [name for name in op.outputs if name in replay.captured and not name.endswith(".margin")]
    if not names or (op.kind in ("embed", "enorm") and replay.context.token_ids is None):
        return []
    try:
        expected = dict(zip(op.outputs, replay.run(op)))
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"{names[0]}: the captured inputs {', '.join(op.inputs)} do not fit the model: {error}"
        ) from None
    segment = replay.segment(op)
    magnified = _magnification(replay, segment)
    limit = tie if len(segment) == 1 else max(tie, TIE_MARGINS[numerics])
    results = []
    for name in names:
        rule = next((t for pattern, t in rules.items() if re.search(pattern, name)), None)
        dtypes = (expected[name].dtype, replay.captured[name].dtype)
        coarse = max(dtypes, key=lambda d: UNIT_ROUNDOFF.get(d, 0.0))
        rule = operator_rule(segment, coarse, expected[name].size, numerics, magnified) if rule is None else rule
        results.append(_judge_output(replay, name, expected, rule, limit))
    if all(r.ok for r in results) or numerics not in ("bfloat16", "fp8"):
        return results
    return _as_variant(replay, op, results, limit) or results


def _as_variant(replay: Replay, op: Operator, results: list[TensorResult], tie: float) -> list[TensorResult] | None:
    """The results under the first variant of sound engines with which all outputs hold."""
    for suspect in replay.segment(op):
        for variant in variants_of(suspect.kind):
            other = replay.with_mistake(suspect, variant.how)
            expected = dict(zip(op.outputs, other.run(op)))
            again = [_judge_output(other, r.name, expected, r.tolerance, tie) for r in results]
            if all(r.ok for r in again):
                return [replace(r, note=variant.text) for r in again]
    return None


def _magnification(replay: Replay, segment: list[Operator]) -> float:
    """How much rounding grows on its way through attention: an exponential magnifies the rounding of a score by the
    size of the score, of which the lse is a measure."""
    largest = 0.0
    for op in segment:
        if op.kind == "attention":
            lse = widen(np.ascontiguousarray(replay.value(op.outputs[1])))
            largest = max(largest, float(np.abs(lse[np.isfinite(lse)]).max(initial=0.0)))
    return 10.0 + largest / 2 if largest else 1.0


def operator_rule(segment: list[Operator], dtype, size: int, numerics: str, magnified: float = 1.0) -> Tolerance:
    """The tolerance for the output of the last of these operators, whose first inputs agree to the bit."""
    wide = len(segment) == 1 and segment[0].kind in WIDE_KINDS and numerics != "float64"
    return one_operator(dtype, "float32" if wide else numerics, size, len(segment), magnified)


def _judge_output(replay, name, expected, rule: Tolerance, tie: float) -> TensorResult:
    r, a = expected[name], np.asarray(replay.captured[name])
    last = name.rsplit(".", 1)[-1]
    base = TensorResult(name, "differs", r.dtype.name, a.dtype.name, r.shape, a.shape, rule)
    if r.shape != a.shape:
        return replace(base, status="shape")
    if last == "topk_idx":
        return _judge_ids(base, r, a, expected, tie)
    valid = None
    if last == "topk_weights":
        valid, a = _weights_by_expert(replay, name, expected, a)
    elif ".experts." in name:
        idx = replay.value(f"{name.split('.experts.')[0]}.attn_core.router.topk_idx").reshape(-1)
        valid = idx >= 0 if (idx < 0).any() else None
    difference = measure(r, a, rule, valid)
    status = status_of(difference, rule)
    note = looks_like(r, a, difference) if status == "differs" and valid is None else None
    return replace(base, status=status, difference=difference, note=f"looks: {note}" if note else "")


def _judge_ids(base: TensorResult, r, a, expected, tie: float) -> TensorResult:
    margin = next(x for n, x in expected.items() if n.endswith("margin"))
    routes = compare_routes(r, a, margin, tie)
    wrong = routes.flipped & ~routes.ties
    ordered = np.take_along_axis(a, routes.order, -1)
    ordered[~wrong] = r[~wrong]
    difference = measure(r, ordered, EXACT)
    note = f"{int(wrong.sum())} of {wrong.size} rows choose other experts" if wrong.any() else ""
    status = "differs" if wrong.any() else "tie" if routes.ties.any() else "identical"
    return replace(base, status=status, difference=difference, note=note, tolerance=EXACT)


def _weights_by_expert(replay, name: str, expected, a) -> tuple[np.ndarray | None, np.ndarray]:
    """The engine's weights in the order of our ids, and the rows where both chose the same experts."""
    ids = name.replace("topk_weights", "topk_idx")
    if ids not in replay.captured:
        return None, a
    routes = compare_routes(expected[ids], np.asarray(replay.captured[ids]), None, 0.0)
    return (~routes.flipped if routes.flipped.any() else None), np.take_along_axis(a, routes.order, -1)


def _headline(results: list[TensorResult], findings: tuple[Finding, ...]) -> str:
    first = Report(tuple(results), "").first
    if first is None:
        same = sum(r.status == "identical" for r in results)
        ties = [r for r in results if r.status == "tie"]
        text = f"every operator holds on its own inputs: {len(results)} tensors, {same} bit for bit"
        varied = [r for r in results if r.note and r.status in ("identical", "close")]
        text += f"; {len(varied)} of them {varied[0].note}, first {varied[0].name}" if varied else ""
        return text + (f"; routing flips at ties in {len(ties)}, first {ties[0].name}" if ties else "")
    if first.status == "shape":
        return (
            f"{first.name} has shape {list(first.actual_shape)}, {list(first.reference_shape)} follows from its inputs"
        )
    text = f"{first.name} does not follow from its inputs: {reason(first)}"
    if findings:
        best = findings[0]
        where = "" if best.tensor == first.name else f", at {best.tensor}"
        text += f"; it equals ours {best.text}{where} (which leaves {best.error_after:.2g} of {best.error_before:.2g})"
    return text


def _notes(dump: Dump, replays: list[Replay]) -> tuple[str, ...]:
    made = {replay.prefix + name for replay in replays for name in replay.maker}
    later = sum(name.startswith("step.") and name not in made for name in dump)
    unknown = [n for n in dump if n not in made and not n.startswith(("step.", "request."))]
    absent = [n for n in replays[0].maker if n not in dump]
    notes = [f"{later} tensors of later steps are not replayed"] if later else []
    if unknown:
        notes.append(f"{len(unknown)} names are made by no operator of the model, the first is {unknown[0]}")
    if absent:
        notes.append(
            f"{len(absent)} tensors were not captured and are recomputed where needed, the first is {absent[0]}"
        )
    return tuple(notes)

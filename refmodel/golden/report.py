"""What a comparison found: one headline, one result per tensor, as text and as JSON."""

from dataclasses import dataclass, field

import numpy as np

from refmodel.golden.metrics import Difference, Worst
from refmodel.golden.tolerance import Tolerance

FAILING = ("differs", "shape", "dtype", "missing", "extra")
PASSING = ("identical", "close", "tie")


@dataclass(frozen=True)
class TensorResult:
    """One tensor of a comparison.

    status: identical (bit for bit, but for the sign of zero and NaN payloads), close (within tolerance),
    tie (routing that differs only where candidates tie), differs, shape, dtype, missing (only in the reference),
    extra (only in the actual dump). note: what the difference looks like, or what was done to compare.
    picture: worst errors on a coarse grid, where `compare` was asked for pictures.
    """

    name: str
    status: str
    reference_dtype: str | None = None
    actual_dtype: str | None = None
    reference_shape: tuple[int, ...] | None = None
    actual_shape: tuple[int, ...] | None = None
    tolerance: Tolerance | None = None
    difference: Difference | None = None
    note: str = ""
    picture: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        return self.status in PASSING

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "status": self.status,
            "ok": self.ok,
            "reference": {"dtype": self.reference_dtype, "shape": self.reference_shape},
            "actual": {"dtype": self.actual_dtype, "shape": self.actual_shape},
            "tolerance": None if self.tolerance is None else self.tolerance.to_dict() | {"rule": str(self.tolerance)},
            "metrics": None if self.difference is None else self.difference.to_dict(),
            "note": self.note,
        }


def number(value) -> str:
    """A value as a person reads it."""
    if value is None:
        return "undefined"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def place(index: tuple[int, ...] | None) -> str:
    """An index as NumPy writes it: [3, 17]."""
    return "[" + ", ".join(str(i) for i in index or ()) + "]"


def worst_text(worst: Worst | None) -> str:
    """'0.25 at [3, 17] (reference 1, actual 1.25)'."""
    if worst is None:
        return "0"
    values = "" if worst.reference is None else f" ({number(worst.reference)} against {number(worst.actual)})"
    return f"{number(worst.error)} at {place(worst.index)}{values}"


def _detail(result: TensorResult) -> list[str]:
    d = result.difference
    if d is None:
        return []
    lines = [
        f"outside tolerance {d.violations} of {d.total}, first at {place(d.first_violation)}; "
        f"differing {d.differing}, first at {place(d.first_differing)}",
        f"rows: {d.bad_rows} outside, {d.differing_rows} differing of {d.rows}; worst row {worst_text(d.worst_row)}",
        f"worst absolute {worst_text(d.worst_abs)}",
        f"worst relative {worst_text(d.worst_rel)}",
        f"worst ulp      {worst_text(d.worst_ulp)}",
        f"difference {number(d.difference)}, cosine {number(d.cosine)}, norm ratio {number(d.norm_ratio)}, "
        f"fitted scale {number(d.scale)} (leaves {number(d.scale_residual)}), reference rms {number(d.rms_reference)}",
    ]
    if d.nan_reference or d.nan_actual or d.inf_reference or d.inf_actual:
        lines.append(
            f"NaN {d.nan_reference} in reference, {d.nan_actual} in actual, {d.nan_both} in both; "
            f"infinite {d.inf_reference} and {d.inf_actual}; on one side only {d.unequal_nonfinite}"
        )
    if result.tolerance is not None:
        lines.append(f"tolerance {result.tolerance} ({result.tolerance.reason})")
    return lines


@dataclass(frozen=True)
class Report:
    """The result of `compare`: `results` in execution order, `headline` in one sentence.

    notes: what was assumed or left out (names mapped, rows ignored, tensors not compared).
    """

    results: tuple[TensorResult, ...]
    headline: str
    reference: str = "reference"
    actual: str = "actual"
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every tensor holds."""
        return all(result.ok for result in self.results)

    @property
    def exit_code(self) -> int:
        """0 if every tensor holds, 1 if one does not. What cannot be compared at all raises and never gets here."""
        return 0 if self.ok else 1

    @property
    def first(self) -> TensorResult | None:
        """The first diverging tensor in execution order; a missing or extra name only if no tensor diverges."""
        failing = [r for r in self.results if not r.ok]
        return next((r for r in failing if r.status not in ("missing", "extra")), failing[0] if failing else None)

    def counts(self) -> dict[str, int]:
        """How many tensors have each status."""
        found = [r.status for r in self.results]
        return {status: found.count(status) for status in PASSING + FAILING if status in found}

    def __getitem__(self, name: str) -> TensorResult:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)

    def to_json(self) -> dict:
        """Plain values; floats may be NaN or infinite where a tensor holds such values."""
        return {
            "ok": self.ok,
            "exit_code": self.exit_code,
            "headline": self.headline,
            "reference": self.reference,
            "actual": self.actual,
            "counts": self.counts(),
            "first": None if self.first is None else self.first.name,
            "notes": list(self.notes),
            "tensors": [result.to_dict() for result in self.results],
        }

    def to_html(self) -> str:
        """One HTML page that needs no network."""
        from refmodel.golden.html import render

        return render(self)

    def to_text(self, verbose: bool = False, limit: int = 10) -> str:
        """The headline, the first failing tensors in full, then one line for each other failing tensor.

        verbose: one line for passing tensors as well, and no limit.
        """
        lines = [self.headline, f"reference {self.reference}, actual {self.actual}"]
        lines.append(", ".join(f"{count} {status}" for status, count in self.counts().items()))
        lines += [f"note: {note}" for note in self.notes]
        failing = [r for r in self.results if not r.ok]
        shown = self.results if verbose else failing[:limit]
        for result in shown:
            lines += ["", summary_line(result)]
            if not result.ok or verbose:
                lines += ["  " + line for line in _detail(result)]
        if len(failing) > len(shown):
            lines += ["", f"and {len(failing) - len(shown)} more:"]
            lines += ["  " + summary_line(r) for r in failing[len(shown) :]][:100]
        return "\n".join(lines)


def summary_line(result: TensorResult) -> str:
    """One line about one tensor."""
    text = f"{result.status:9} {result.name}"
    if result.status == "shape":
        text += f": {list(result.reference_shape)} against {list(result.actual_shape)}"
    elif result.status in ("missing", "extra"):
        text += f": only in the {'reference' if result.status == 'missing' else 'actual dump'}"
    else:
        shape = "x".join(str(n) for n in result.reference_shape) or "scalar"
        text += f" {shape} {result.reference_dtype}"
        if result.actual_dtype != result.reference_dtype:
            text += f" against {result.actual_dtype}"
        if result.difference is not None and not result.difference.total:
            text += ": 0 elements"
        elif result.difference is not None and not result.ok:
            text += f": {result.difference.violations} of {result.difference.total} outside tolerance"
    return text + (f"; {result.note}" if result.note else "")

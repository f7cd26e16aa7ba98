"""Hold what an engine computed to our model, tensor by tensor, and look for the cause of the first difference."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from refmodel.golden.compare import compare
from refmodel.golden.locate import Location
from refmodel.golden.report import TensorResult
from refmodel.golden.tolerance import Tolerance
from refmodel.model import Model
from refmodel.numerics import ENGINES as SWITCHES
from refmodel.numerics import Switches
from refmodel.trace import record
from scripts.engine_cause import describe, locate_capture
from scripts.engine_join import rank_of
from scripts.engines import Capture

NOISE = 4.0  # an engine may be so many times as noisy as our own float32 arithmetic
CAP = 10.0  # and no more than so many times the tolerance


@dataclass
class Check:
    """What a check found. `worst` maps a part (`embed`, `layers.3`, `final`) to its worst tensor and distance."""

    engine: str
    ranks: int
    ok: bool
    headline: str
    details: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: dict[str, tuple[str, float]] = field(default_factory=dict)
    logits: float | None = None  # largest difference of the logits, relative to their root mean square
    first: str | None = None
    cause: str | None = None  # completes "it equals ours ..."
    mistake: str | None = None  # its name in refmodel.golden.mistakes
    speculation: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        """Plain values."""
        worst = {part: {"name": name, "of_rms": value} for part, (name, value) in self.worst.items()}
        return {**vars(self), "worst": worst}


def check_capture(
    captured: Capture,
    folder: Path,
    *,
    prompts: Callable,
    engine: str,
    like: str,
    dtype: str = "float32",
    tolerance: float = 1e-4,
    new_tokens: int = 0,
    mtp: bool = False,
) -> Check:
    """Compare a capture with our model of the checkpoint in `folder`; `prompts(config)` are the tokens of both.

    In float32 whole runs are compared: the logits must be within `tolerance` of the root mean square of ours, other
    tensors within the rules of `rules`; ids of experts are compared as sets, and a flip at a router margin below the
    noise is a tie. In bfloat16 whole runs drift apart by rounding alone, so each operator is held to its own captured
    inputs. `like` names the engine whose side our switches take.
    """
    model = Model.from_pretrained(folder, numerics=dtype, like=like if like in SWITCHES else None)
    tokens = prompts(model.config)
    ours = recorded(model, tokens[0], mtp)
    theirs = {name: array for name, array in captured.tensors.items() if not name.startswith("engine.")}
    if dtype == "float32":
        report = compare(
            {name: ours[name] for name in ours if name in theirs or name.endswith("router.margin")},
            theirs,
            rules(model, folder, tokens[0], ours, mtp, tolerance),
            missing="ignore",
            dtypes="ignore",
        )
        fits = report.first is not None and report.first.status == "differs"
        location = locate_capture(model, tokens[0], theirs) if fits else None
    else:
        report = location = locate_capture(model, tokens[0], theirs)
    check = Check(captured.result.engine, len(captured.ranks), report.ok, report.headline, notes=list(captured.notes))
    check.worst = worst_by_part(ours, theirs)
    if "final.logits" in theirs:
        check.logits = of_rms(theirs["final.logits"], ours["final.logits"])
    if report.first is not None and report.first.name in ours:
        expected = ours if report is not location else {report.first.name: location.expected}
        _explain(check, report.first, model, tokens[0], expected, captured, tolerance)
        if location is not None:
            _name_cause(check, location)
    _check_logprobs(check, captured, ours, tokens[0])
    if new_tokens:
        _check_generated(check, captured, model, tokens, new_tokens, mtp)
    return check


def recorded(model: Model, tokens: list[int], mtp: bool) -> Mapping[str, np.ndarray]:
    """Our tensors of one prefill, and with `mtp` those of the MTP layer's slots 0 .. T - 2."""
    with record() as tensors:
        model.forward(tokens)
        if mtp:
            hidden = "final.norm"
            if model.numerics.switches.mtp_hidden == "pre_norm":
                hidden = next(name for name in reversed(list(tensors)) if name.endswith(".residual"))
            model.mtp_logits(tokens[1:], tensors[hidden][:-1])
    return tensors


def rules(model: Model, folder: Path, tokens, ours: Mapping, mtp: bool, tolerance: float) -> dict[str, Tolerance]:
    """name -> Tolerance: `tolerance` of the root mean square, or NOISE times what rounding alone does to that tensor.

    Rounding is measured: our model with float32 arithmetic inside its operators, as engines have it, against float64.
    Where attention is sharp or activations are large a tensor is noisier than the logits are; the rule never exceeds
    CAP times the tolerance, and the logits are always held to the tolerance itself.
    """
    like = next((name for name in SWITCHES if Switches.like(name) == model.numerics.switches), None)
    exact = recorded(Model.from_pretrained(folder, numerics="float64", like=like), tokens, mtp)
    narrow = recorded(Model.from_pretrained(folder, model.numerics.name, "float32", like), tokens, mtp)
    found = {}
    for name in ours:
        measured = ours[name].dtype.kind != "i" and not name.endswith("logits")
        noise = NOISE * of_rms(narrow[name], exact[name]) if measured else 0.0
        rms = min(max(tolerance, noise), CAP * tolerance)
        found[f"^{re.escape(name)}$"] = Tolerance(rms=rms, reason=f"rounding alone makes {noise / NOISE:.1e}")
    return found


def of_rms(actual: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference relative to the root mean square of the reference."""
    actual, reference = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    if actual.shape != reference.shape:
        return float("inf")
    size = float(np.sqrt(np.square(reference).mean()))
    worst = float(np.abs(actual - reference).max())
    return worst / size if size else (0.0 if worst == 0 else float("inf"))


def worst_by_part(ours: Mapping, theirs: Mapping) -> dict[str, tuple[str, float]]:
    """Per part of the model the tensor with the largest difference; routing ids and weights apart."""
    worst: dict[str, tuple[str, float]] = {}
    for name in ours:
        if name not in theirs or ".topk_" in name:
            continue
        part = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
        value = of_rms(theirs[name], ours[name])
        if part not in worst or value > worst[part][1]:
            worst[part] = (name, value)
    return worst


def _explain(check, first: TensorResult, model, tokens, ours: Mapping, captured, tolerance) -> None:
    """Add the operator, the rank and both values of the first diverging tensor. `ours` holds what it should be."""
    name, expected, theirs = first.name, ours[first.name], captured.tensors[first.name]
    check.first = name
    if first.status == "shape":
        return
    error = np.abs(theirs[: len(expected)].astype(np.float64) - expected.astype(np.float64))
    if ".topk_idx" in name:
        error = (np.sort(theirs, axis=-1) != np.sort(expected, axis=-1)).astype(np.float64)
    row = (first.difference.first_violation or first.difference.worst_abs.index)[0]
    index = (row, *(int(i) for i in np.unravel_index(int(error[row].argmax()), error[row].shape)))
    check.details.append(f"operator: {describe(name, expected, theirs[: len(expected)], model.config, tolerance)}")
    check.details.append(f"first wrong token {row} (id {tokens[row]})")
    if ".topk_idx" in name:
        check.details.append(f"experts expected {_ids(expected[row])}, actual {_ids(theirs[row])}")
        if _margin(name) in ours:
            check.details.append(f"router margin there {float(ours[_margin(name)][row]):.4g}")
    else:
        check.details.append(f"at {list(index)} expected {float(expected[index])!r}, actual {float(theirs[index])!r}")
    check.details += _which_rank(name, index, expected, captured, tolerance)


def _name_cause(check: Check, location: Location) -> None:
    """Add the known mistake, and the operator that is wrong on its own inputs where it is not the one that diverged."""
    if location.ok:
        check.details.append("cause: no operator is wrong on its own inputs; rounding that grew on its way, or a tie")
        return
    if location.first.name != check.first:
        check.details.append(f"the first operator that is wrong on its own inputs makes {location.first.name}")
    if not location.findings:
        check.details.append("cause: no known mistake reproduces it")
        return
    best = location.findings[0]
    check.cause, check.mistake = best.text, best.mistake
    where = "" if best.tensor == location.first.name else f", at {best.tensor}"
    left = f"which leaves {best.error_after:.2g} of an error of {best.error_before:.2g}"
    check.details.append(f"cause: it equals ours {best.text}{where} ({left})")


def _ids(row) -> str:
    return ", ".join(str(expert) for expert in sorted(int(expert) for expert in row))


def _margin(name: str) -> str:
    return name.rsplit(".", 1)[0] + ".margin"


def _which_rank(name, index, expected, captured: Capture, tolerance) -> list[str]:
    """Which rank holds the wrong value, where more than one took part."""
    if len(captured.ranks) < 2:
        return []
    parts = [rank[name] for rank in captured.ranks]
    kind, _, axis = captured.result.joins.get(name, "same").partition(":")
    if kind == "concat":
        return [f"rank {rank_of(index[int(axis)], parts, int(axis))} holds it"]
    if kind == "sum":
        return [f"a sum of {len(parts)} ranks' parts; any of them may be wrong"]
    wrong = [str(rank) for rank, part in enumerate(parts) if of_rms(part, expected) > tolerance]
    return [f"wrong on rank {', '.join(wrong) or 'none'} of {len(parts)}"]


def _check_logprobs(check: Check, captured: Capture, ours, tokens) -> None:
    """The engine's own log-probabilities of the prompt's tokens, against those of our logits."""
    if not captured.result.logprobs:
        return
    logits = ours["final.logits"].astype(np.float64)[:-1]
    top = logits.max(axis=1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    mine = logits[np.arange(len(logits)), tokens[1:]] - log_sum
    worst = float(np.abs(mine - captured.result.logprobs).max())
    check.notes.append(f"log-probabilities of {len(mine)} prompt tokens differ by at most {worst:.1e}")


def _check_generated(check: Check, captured: Capture, model: Model, prompts, new_tokens: int, mtp: bool) -> None:
    """Greedy tokens of every prompt; with the MTP layer drafting, its drafts and how many were accepted."""
    ours, drafts, drafted, accepted = [], [], 0, 0
    for tokens in prompts:
        with record() as tensors:
            generated = model.generate_batch([tokens], new_tokens, speculative=mtp)
        ours.append(generated.tokens[0])
        drafts.append(_drafts(tensors, model.config.num_hidden_layers)[: generated.drafted])
        drafted, accepted = drafted + generated.drafted, accepted + generated.accepted
    theirs = captured.result
    for number, (mine, other) in enumerate(zip(ours, theirs.generated, strict=True)):
        at = next((i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            check.ok = False
            check.details.append(f"prompt {number}: new token {at} is {other[at]}, {mine[at]} is expected")
    check.notes.append(f"{len(prompts)} prompts, {new_tokens} greedy tokens each")
    if not (mtp and theirs.counters):
        return
    counted = {key.rsplit("_num_", 1)[-1]: int(value) for key, value in theirs.counters.items()}
    check.speculation = {
        "drafted": drafted,
        "accepted": accepted,
        "engine_drafted": counted["draft_tokens"],
        "engine_accepted": counted["accepted_tokens"],
        "drafts_equal": all(a == b[: len(a)] for a, b in zip(drafts, theirs.drafts, strict=True)),
    }
    check.notes.append(
        f"drafts: we {drafted}, of which {accepted} accepted; engine {counted['draft_tokens']}, "
        f"{counted['accepted_tokens']} accepted; the drafted tokens are "
        f"{'the same' if check.speculation['drafts_equal'] else 'NOT the same'}"
    )
    if not check.speculation["drafts_equal"] or (drafted, accepted) != (
        counted["draft_tokens"],
        counted["accepted_tokens"],
    ):
        check.ok = False
        check.details.append("speculation differs from the engine's")


def _drafts(tensors: Mapping, layer: int) -> list[int]:
    """The draft of every pass of the MTP layer in one request's generation: the best token of its last row."""
    ending = f"layers.{layer}.final.logits"
    return [int(tensors[name][-1].argmax()) for name in tensors if name.endswith(ending)]

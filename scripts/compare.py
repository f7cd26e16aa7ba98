"""Compare two dumps of tensors and name the first that diverges: refmodel compare golden.safetensors dump.npz

Exit code 0: every tensor holds; 1: one does not; 2: could not compare. Either side is a .safetensors, .npz, .npy or
.pt file, a folder of those, or a folder of SGLang's dumper.
"""

import argparse
import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path

from refmodel.golden.compare import compare
from refmodel.golden.dump import open_dump
from refmodel.golden.names import TABLES
from refmodel.golden.rules import parse_rule

PICTURES = 12
LONG_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel compare`."""
    parser.add_argument("reference", help="golden file or dump that is taken as right")
    parser.add_argument("actual", help="dump to judge")
    tolerance = parser.add_argument_group("tolerance", "default: the golden's own, else what dtype and depth suggest")
    tolerance.add_argument("--rtol", type=float, help="part of |reference| for all floating-point tensors")
    tolerance.add_argument("--atol", type=float, help="absolute error for all floating-point tensors")
    tolerance.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="REGEX=RULE",
        help="rule for the names that match, first match wins: 'router=exact', 'attn=rtol:1e-2,rms:1e-3,ulps:2'",
    )
    tolerance.add_argument(
        "--mode", choices=("suggested", "reproduce", "exact"), help="ignore the golden's rules and use these"
    )
    tolerance.add_argument("--tie-margin", type=float, help="a routing flip at a margin up to this is no fault")
    names = parser.add_argument_group("names")
    names.add_argument("--only", metavar="REGEX", help="compare only names that match")
    names.add_argument("--ignore-missing", action="store_true", help="names only in the reference are no fault")
    names.add_argument("--ignore-extra", action="store_true", help="names only in the actual dump are no fault")
    names.add_argument("--ignore-dtype", action="store_true", help="another dtype with good values is no fault")
    names.add_argument(
        "--valid", action="append", default=[], metavar="REGEX=TENSOR", help="rows that TENSOR says hold something"
    )
    form = parser.add_argument_group("form of the actual dump")
    form.add_argument("--names", choices=tuple(TABLES), help="tensors have the names of this engine")
    form.add_argument(
        "--ranks",
        action="append",
        default=[],
        metavar="REGEX=LAYOUT",
        help="join rank.R.NAME: 'q$=dp2 tp4 : t[dp] h[tp] d'; axes with their groups, +tp for partial sums",
    )
    form.add_argument("--half-split-rope", action="store_true", help="rotated vectors are in half-split order")
    form.add_argument("--by-source", action="store_true", help="match dispatched rows by (rank, token, expert)")
    parser.add_argument("-v", "--verbose", action="store_true", help="all tensors in full")
    parser.add_argument(
        "--replay",
        metavar="DIR",
        help="replay each operator of this checkpoint ('example': the packaged one) on the actual dump's own inputs: "
        "drift and what follows from a fault are no faults, and a known mistake is named; REFERENCE is a golden",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures of the first failing tensors")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _tolerances(args: argparse.Namespace):
    rules = dict(parse_rule(text) for text in args.rule)
    if rules and args.mode:
        raise ValueError("--rule and --mode are both given; --rule refines the default, --mode replaces it: give one")
    if rules and (args.rtol is not None or args.atol is not None):
        raise ValueError("--rule and --rtol/--atol are both given; write --rule '.=rtol:X,atol:Y' last instead")
    return rules or args.mode


def _pairs(option: str, texts: list[str], form: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        pattern, sign, value = text.rpartition("=")
        if not sign or not pattern or not value:
            raise ValueError(f"{option} {text!r}: the form '{form}' is required")
        pairs[pattern] = value
    return pairs


def plain(value):
    """JSON has no NaN and no infinity: they become the strings "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 0 if every tensor holds, else 1."""
    if args.replay:
        return _print(args, _replay(args))
    reference, actual = open_dump(args.reference), open_dump(args.actual)
    with _progress(reference, actual) as progress:
        report = _compare(args, reference, actual, progress)
    if args.html:
        Path(args.html).write_text(report.to_html(), encoding="utf-8")
    return _print(args, report)


def _compare(args: argparse.Namespace, reference, actual, progress):
    return compare(
        reference,
        actual,
        _tolerances(args),
        rtol=args.rtol,
        atol=args.atol,
        tie_margin=args.tie_margin,
        missing="ignore" if args.ignore_missing else "error",
        extra="ignore" if args.ignore_extra else "error",
        dtypes="ignore" if args.ignore_dtype else "error",
        only=args.only,
        valid=_pairs("--valid", args.valid, "REGEX=TENSOR"),
        names=args.names,
        half_split_rope=args.half_split_rope,
        ranks=_pairs("--ranks", args.ranks, "REGEX=LAYOUT"),
        by_source=args.by_source,
        pictures=PICTURES if args.html else 0,
        progress=progress,
    )


@contextmanager
def _progress(reference, actual):
    """A bar over the bytes to read, when there are many and stderr is a terminal; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    total = sum(reference[name].nbytes + actual[name].nbytes for name in reference if name in actual)
    if total < LONG_BYTES:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("comparing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compare", total=total)
        yield lambda count: bar.advance(task, count)


def _replay(args: argparse.Namespace):
    from refmodel.golden.bundle import read_bundle
    from refmodel.golden.compare import our_form
    from refmodel.golden.locate import locate_from_golden
    from refmodel.model import Model
    from refmodel.presets import EXAMPLE

    if args.mode or args.rtol is not None or args.atol is not None or args.html:
        raise ValueError("--replay judges single operators: --mode, --rtol, --atol and --html do not go with it")
    golden, reference = read_bundle(args.reference), open_dump(args.reference)
    model = Model.from_pretrained(EXAMPLE if args.replay == "example" else args.replay, numerics=golden.numerics)
    ranks = _pairs("--ranks", args.ranks, "REGEX=LAYOUT")
    actual, _ = our_form(reference, open_dump(args.actual), ranks, args.names, args.half_split_rope)
    rules = dict(parse_rule(text) for text in args.rule)
    return locate_from_golden(model, golden, actual, tolerances=rules, tie_margin=args.tie_margin)


def _print(args: argparse.Namespace, report) -> int:
    if args.json:
        json.dump(plain(report.to_json()), sys.stdout, indent=1)
        print()
    else:
        print(report.to_text(verbose=args.verbose))
    return report.exit_code

"""Measure speed and memory as ratios in one run, with peers and limits beside them.

Without a group all of them are measured, in a few minutes. Candidates take turns in one process; figures are medians
of CPU time on one BLAS thread, of wall time on several. Exit code 1: a stated limit is missed.

Example: refmodel bench fp8 parallel --repeats 5
"""

import argparse
import importlib
import json
import time
from pathlib import Path

GROUPS = {
    "model": "prefill and decode at the standard size, beside transformers, plain BLAS and unruled products",
    "fp8": "encode, decode and products beside ml_dtypes and plain BLAS; how tight the error bounds are",
    "parallel": "emulated ranks against one rank, recording against a plain run",
    "volumes": "counting the published decode deployment",
    "compare": "two large dumps: speed and peak memory",
    "memory": "peak memory of many ranks against one",
    "scale": "log-log slopes of CPU time: 1 is linear",
    "start": "how long the command takes to begin and to end",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel bench`."""
    listed = "; ".join(f"{name}: {about}" for name, about in GROUPS.items())
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{listed} (default: all)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed rounds after a warm-up (default: 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs; no limits")
    parser.add_argument(
        "--vendor", type=Path, metavar="DIR", help="folder with DeepSeek's inference/model.py: one more peer of model"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: seconds, bytes, fractions")


def run(args: argparse.Namespace) -> int:
    """Measure the groups one after the other, print, and return 1 if a stated limit is missed."""
    unknown = [name for name in args.groups if name not in GROUPS]
    if unknown:
        raise ValueError(f"no group {unknown[0]!r}: there are {', '.join(GROUPS)}")
    names = list(dict.fromkeys(args.groups)) or list(GROUPS)
    if args.vendor is not None and not (args.vendor / "model.py").is_file():
        raise ValueError(f"--vendor {args.vendor}: there is no model.py in it; DeepSeek-V3's inference/ is meant")

    from scripts.benches.environment import environment
    from scripts.benches.report import content, print_report, progress
    from scripts.benches.timing import Session

    where, began, rows = environment(), time.perf_counter(), {}
    with progress(names) as (begin, note):
        session = Session(args.repeats, args.quick, args.vendor, note)
        for name in names:
            begin(name)
            rows[name] = importlib.import_module(f"scripts.benches.{name}").measure(session)
    seconds = time.perf_counter() - began
    if args.json:
        print(json.dumps(content(where, rows, seconds, args.repeats, args.quick)))
    else:
        print_report(where, rows, GROUPS, seconds, args.repeats)
    return int(any(row.holds is False for found in rows.values() for row in found))

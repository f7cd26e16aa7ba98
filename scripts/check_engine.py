"""Run an engine and our model on the same tokens and name the first tensor that diverges.

Exit code 0: everything agrees; 1: something differs, with the first diverging tensor, the rank, both values and, where
a known mistake reproduces it, the cause; 2: could not run.

Example: refmodel check-engine hf path/to/checkpoint --python .venv-hf/bin/python --mtp --new-tokens 16
"""

import argparse
import json
import tempfile
from pathlib import Path

from refmodel.checkpoint import EXAMPLE
from scripts.capture import add_engine_arguments, capture, read_prompts
from scripts.engine_check import Check, check_capture
from scripts.engines import ENGINES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel check-engine`."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X", help="of each tensor's root mean square (1e-4)"
    )
    parser.add_argument("--like", metavar="ENGINE", help="whose side to take where engines differ (the one checked)")


def run(args: argparse.Namespace) -> int:
    """Capture, compute, compare, print; 0 if everything agrees, else 1."""
    if not args.tolerance > 0:
        raise ValueError(f"--tolerance {args.tolerance}: must be above 0")
    folder = Path(args.directory) if args.directory else EXAMPLE
    with tempfile.TemporaryDirectory(prefix="refmodel-copy-") as scratch:
        captured = capture(args, Path(scratch))
        # ours is computed from the original: what the copy holds is part of what is checked
        check = check_capture(
            captured,
            folder,
            prompts=lambda config: read_prompts(args, config),
            engine=args.engine,
            like=args.like or args.engine,
            dtype=args.dtype,
            tolerance=args.tolerance,
            new_tokens=args.new_tokens,
            mtp=args.mtp,
        )
    if args.json:
        print(json.dumps(check.to_json()))
    else:
        _print(check, args)
    return 0 if check.ok else 1


def _print(check: Check, args: argparse.Namespace) -> None:
    print(f"{ENGINES[args.engine].title} ({check.engine}) against this project, {args.dtype}, {check.ranks} rank(s)")
    print(check.headline)
    for line in (*check.details, *(f"note: {note}" for note in check.notes)):
        print(line)
    if check.logits is not None:
        print(f"logits differ by at most {check.logits:.1e} of their root mean square")
    if check.worst:
        print("largest difference, relative to the root mean square of the tensor:")
        for part, (name, value) in check.worst.items():
            print(f"  {part:10} {value:.1e}  {name}")

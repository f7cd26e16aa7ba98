"""What the two halves of `refmodel timeline` share: rank lists, printed programs, files."""

import json
from pathlib import Path

from parallel.timing.render import MILLISECONDS, svg, write_trace


def numbers(text: str, flag: str, limit: int | None = None) -> list[int]:
    """Whole numbers from 0 up, separated by commas. Raises ValueError for anything else."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r}: whole numbers separated by commas") from None
    bad = [number for number in numbers if number < 0 or (limit is not None and number >= limit)]
    if bad:
        raise ValueError(
            f"{flag} {text!r}: {bad[0]} is out of range" + (f", ranks are 0 to {limit - 1}" if limit else "")
        )
    return numbers


def print_programs(args, programs, ranks) -> int:
    """The operations of some ranks, one per line, or as JSON."""
    if args.json:
        print(json.dumps({str(rank): [op._asdict() for op in programs[rank]] for rank in ranks}))
        return 0
    for rank in ranks:
        for number, op in enumerate(programs[rank]):
            print(f"{number:5d}  {op}")
    return 0


def write(args, result, shown, window, title, content, unit=MILLISECONDS) -> None:
    """The drawing and the trace, where they were asked for; their names go into `content`."""
    for path in filter(None, (args.svg, args.trace)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if args.svg:
        Path(args.svg).write_text(svg(result, shown, title, window, unit), encoding="utf-8")
        content["svg"] = args.svg
    if args.trace:
        ranks = {span.rank for span in result.spans}
        content["trace"] = {"file": args.trace, "events": write_trace(result, ranks, title, args.trace)}

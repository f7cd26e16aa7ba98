"""The known divergences of engines as a table, from `refmodel.switches`; docs/engines.md holds it.

`python -m scripts.engine_table` writes it there again.
"""

from dataclasses import fields
from pathlib import Path

from refmodel.switches import ENGINES, Switches

DOCUMENT = Path(__file__).parents[1] / "docs" / "engines.md"
BEGIN, END = "<!-- written by python -m scripts.engine_table -->\n", "<!-- end -->\n"


def table() -> str:
    """A Markdown table: a row per switch, the default, and the side that each engine takes where it is another."""
    rows = [["switch", "what it is", "default", *ENGINES], ["---"] * (3 + len(ENGINES))]
    for switch in fields(Switches):
        sides = [_side(values[switch.name]) if switch.name in values else "" for values in ENGINES.values()]
        rows.append([f"`{switch.name}`", switch.metadata["means"], _side(switch.default), *sides])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _side(value) -> str:
    return f"`{value}`"


def with_table(document: str) -> str:
    """The document with the table between its two marks. Raises ValueError where they are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document lacks a mark: {BEGIN.strip()} ... {END.strip()}")
    return before + begin + table() + end + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")

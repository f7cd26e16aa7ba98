"""How long the command takes: to say what it can do, and to run the example model."""

import tempfile
from pathlib import Path

from scripts.benches.children import time_python
from scripts.benches.timing import Row, Session


def measure(session: Session) -> list[Row]:
    """`refmodel --help`, and `refmodel run` without arguments (in the quick run, with few tokens)."""
    rows = _rows(session, "refmodel --help", time_python(["-m", "scripts.main", "--help"], session.repeats), "<= 0.2")
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "scripts.main", "run", "--out", str(Path(folder, "run.safetensors"))]
        name = "refmodel run, the example model"
        if session.quick:
            arguments += ["--ranks", "1", "--new-tokens", "1", "--drafts", "0"]
            name = "refmodel run, one token"
        session.note(name)
        timing = time_python(arguments, 1 if session.quick else session.repeats)
    return rows + _rows(session, name, timing, "<= 10")


def _rows(session, name, timing, limit) -> list[Row]:
    """CPU time is held to the limit: it says what an otherwise idle machine would need."""
    return [
        Row(f"{name}, CPU time", timing.cpu, "s", None, "", session.limit(limit), timing.spread),
        Row(f"{name}, wall time", timing.wall, "s"),
    ]

"""The walk-through in docs/find_a_fault.md prints what it says.

`python tests/scripts/test_find_a_fault.py` writes what is printed now into it.
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "find_a_fault.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
SHOWN = 8  # lines of an output


def call(command: str) -> str:
    from refmodel.golden import mutants
    from scripts.main import main

    words = shlex.split(command)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if words[0] == "refmodel":
            main(words[1:])
        else:
            mutants.main(words[3:])
    lines = out.getvalue().splitlines()
    return "".join(line + "\n" for line in lines[:SHOWN]) + ("...\n" if len(lines) > SHOWN else "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("walk"))
    try:
        blocks = list(BLOCK.finditer(DOCUMENT.read_text(encoding="utf-8")))
        return [(m["command"], m["output"], call(m["command"])) for m in blocks]
    finally:
        os.chdir(before)


def test_the_walk_through_prints_what_it_says(runs):
    assert len(runs) == 5
    for command, expected, found in runs:
        assert found == expected, command


def test_it_ends_at_the_cause(runs):
    assert "it equals ours with the correction bias left in" in runs[-1][2].splitlines()[0]


if __name__ == "__main__":
    import sys
    import tempfile

    sys.path.insert(0, str(DOCUMENT.parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        text = DOCUMENT.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda m: f"```console\n$ {m['command']}\n{call(m['command'])}```", text)
        DOCUMENT.write_text(new, encoding="utf-8")

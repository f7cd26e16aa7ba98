"""The sessions in docs/stepping.md print what it says, and its Python runs.

`python tests/scripts/test_stepping_doc.py` writes what is printed now into it.
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "stepping.md"
BLOCK = re.compile(r"```console\n(?P<session>.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\((?:step|Pdb)\) (?P<line>.*)$", re.MULTILINE)


def session(text: str) -> str:
    """A block as it is printed now: `$` lines are commands of the shell, those behind a prompt are the session's."""
    from refmodel.golden import mutants
    from scripts.main import main

    out = io.StringIO()
    shell = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    for command in shell:
        out.write(f"$ {command}\n")
        words = shlex.split(command)
        if words[1] == "step":
            Path("commands").write_text("\n".join(COMMAND.findall(text)) + "\n")
            words += ["--script", "commands"]
        with contextlib.redirect_stdout(out):
            main(words[1:]) if words[0] == "refmodel" else mutants.main(words[3:])
    printed = re.sub(r"> \S*/(\w+/\w+\.py)\(\d+\)", r"> \1: ", out.getvalue())  # where the code lies is not the point
    lines = iter(COMMAND.findall(text))
    return re.sub(r"\(step\) [^\n]*|\(Pdb\) ", lambda match: _with_command(match.group(), next(lines)), printed)


def _with_command(printed: str, line: str) -> str:
    """pdb does not echo what it reads from a file."""
    return f"(Pdb) {line}\n" if printed.startswith("(Pdb)") else printed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def blocks():
    return [match["session"] for match in BLOCK.finditer(DOCUMENT.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("number", range(4))
def test_the_sessions_print_what_is_written(folder, number):
    assert len(blocks()) == 4
    assert session(blocks()[number]) == blocks()[number]


def test_the_python_runs():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["stop"].tensor == "layers.1.combine_recv.routed"


if __name__ == "__main__":
    import sys
    import tempfile

    sys.path.insert(0, str(DOCUMENT.parents[1]))
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        written = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(BLOCK.sub(lambda m: f"```console\n{session(m['session'])}```", written), encoding="utf-8")

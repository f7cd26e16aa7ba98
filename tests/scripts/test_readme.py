"""The README's commands print what it shows, and its Python prints what its comments say."""

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest
from test_stepping_doc import session

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("number", range(len(CONSOLE)))
def test_commands_print_what_is_shown(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = re.escape(tidy(CONSOLE[number]))
    pattern = re.sub(r"(^|\\\n)\\\.\\\.\\\.(?=\\\n|$)", r"\1(?s:.*?)", shown)  # a line of dots stands for any lines
    assert re.fullmatch(pattern, tidy(session(CONSOLE[number])))


@pytest.mark.parametrize("code", PYTHON)
def test_python_prints_what_its_comments_say(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    expected = re.findall(r"^# ?(.*)$", code, re.M)
    assert tidy(out.getvalue()) == tidy("\n".join(expected))


def test_links_lead_somewhere():
    root = Path(__file__).parents[2]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target


def test_map_names_every_room():
    root = Path(__file__).parents[2]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in listed.stdout.split() if "/" in name and not name.startswith(".")}
    assert tops == {"fp8", "refmodel", "parallel", "scripts", "tests", "docs"}
    for room in tops - {"docs"}:
        assert f"`{room}/`" in README

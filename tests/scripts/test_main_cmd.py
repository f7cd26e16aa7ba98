"""The command itself: overview, unknown commands, help of each, and where it may be started from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.main import available, main

ROOT = Path(__file__).resolve().parents[2]


def test_overview(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in available():
        assert name in text
    assert main([]) == 2


def test_unknown_command(capsys):
    assert main(["rnu"]) == 2
    assert "no command 'rnu'; there are run" in capsys.readouterr().err


def test_a_wrong_number_of_threads_is_told_at_once(capsys, monkeypatch):
    monkeypatch.setenv("REFMODEL_THREADS", "two")
    assert main(["estimate"]) == 2
    assert capsys.readouterr().err == (
        "refmodel estimate: error: REFMODEL_THREADS = 'two': must be a whole number from 1\n"
    )


@pytest.mark.parametrize("name", available())
def test_help_has_an_example(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"refmodel {name}" in text
    assert "--json" in text


def test_starts_from_a_directory_with_its_own_scripts(tmp_path):
    for name in ("scripts", "tests", "fp8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; sys.path.append({str(ROOT)!r}); "
    code += f"sys.argv = ['refmodel', '--help']; runpy.run_path({str(ROOT / 'refmodel' / '__main__.py')!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "commands:" in done.stdout


def test_help_imports_no_numpy():
    code = "import sys; from scripts.main import main; main(['--help']); sys.exit('numpy' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == 0

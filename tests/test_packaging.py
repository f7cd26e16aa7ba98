"""Pins, and nothing in the tree that ties it to a machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_lock_and_constraints_hold_the_same_pins():
    lock = re.findall(r"^(\S+==\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert lock == project["tool"]["uv"]["constraint-dependencies"]
    assert len(lock) > 10
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert re.fullmatch(r"\S+==\S+( ; .*)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_development_tools_are_the_same_for_uv_and_pip():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["dependency-groups"]["dev"] == project["project"]["optional-dependencies"]["dev"]


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_machine_paths_and_no_package_hosts():
    here = Path(__file__)
    found = []
    for path in tracked_files():
        if path == here or path.suffix in (".safetensors", ".npz") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for pattern in (r"/work/", r"/root/", r"files\.pythonhosted", r"pypi\.org/simple", r"/opt/(pypi|wheels)"):
            if re.search(pattern, text):
                found.append(f"{path.relative_to(ROOT)}: {pattern}")
    assert not found


def test_uv_lock_is_not_tracked():
    assert (ROOT / "uv.lock") not in tracked_files()
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()

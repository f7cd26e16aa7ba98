"""The GPU script says clearly that it has nothing to run on, and leaves with 0."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "peers" / "gpu_fp8.py"


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed: the script would run")
def test_script_skips_without_torch():
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "skipped: torch is not installed\n", "")

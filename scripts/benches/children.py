"""Other processes that are measured: the time they take, and the most memory they held."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from scripts.benches.timing import Timing, summarise

_ROOT = Path(__file__).parents[2]  # where the packages lie


class Child(NamedTuple):
    """Seconds of a process that ended, and what it printed."""

    cpu: float
    wall: float
    output: str


def run_python(arguments: list[str], accept=(0,), folder: Path | None = None) -> Child:
    """Run this Python with `arguments` in `folder`; raises ValueError with its last line if it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=folder)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in accept:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"{' '.join(arguments)} ended with {done.returncode}: {last}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Child(cpu, wall, done.stdout)


def time_python(arguments: list[str], repeats: int, folder: Path | None = None) -> Timing:
    """Medians over runs of a process, after one that fills the file cache."""
    run_python(arguments, folder=folder)
    return summarise([run_python(arguments, folder=folder)[:2] for _ in range(repeats)])


def in_child(module: str, *arguments) -> dict:
    """What `python -m module arguments` prints as JSON."""
    return json.loads(run_python(["-m", module, *map(str, arguments)]).output)


def peak_memory() -> int:
    """Most bytes that this process held at once. Not `ru_maxrss` where that can be avoided: Linux lets a child begin
    with the peak of the process that started it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

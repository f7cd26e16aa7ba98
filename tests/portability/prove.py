"""Make the published goldens under other versions of NumPy, BLAS kernels, CPU features and thread counts.

    python tests/portability/prove.py

makes a virtual environment for each version (a package index is needed), runs `python -m refmodel.golden.published` in
each under each setting, and prints a table: what took effect there, how many sets have other inputs or narrow results
than `refmodel/golden/published.json`, and how far the float32 and float64 results are from those of the first run here.
Exit code 0: narrow types are equal byte for byte everywhere, float32 within 1 ulp in 1e-6 of the elements, float64
within 1e-12; 1: not everywhere. Takes about a quarter of a minute for each line on one core.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
VERSIONS = ("numpy==2.0.0 ml-dtypes==0.5.0", "numpy ml-dtypes")
KERNELS = ("", "Haswell", "SkylakeX", "Zen")  # "": what OpenBLAS chooses for this processor
THREADS = (1, 2)
# what took effect: the version, the kernel that OpenBLAS uses, the AVX-512 groups that NumPy may dispatch to
PROBE = """
import ctypes, glob, json, os, numpy as np
found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
pattern = os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs", "libscipy_openblas*")
kernel = "?"
for path in glob.glob(pattern):
    core = ctypes.CDLL(path).scipy_openblas_get_corename64_
    core.restype = ctypes.c_char_p
    kernel = core().decode()
import ml_dtypes
wide = [name for name in found if "AVX512" in name or name == "X86_V4"]
print(json.dumps([np.__version__, ml_dtypes.__version__, kernel, wide]))
"""


class Setting(NamedTuple):
    """One line of the table."""

    python: Path
    kernel: str
    avx512: bool
    threads: int


class Outcome(NamedTuple):
    """What came out under a setting. off: sets beyond the rules in their float32 and float64 results."""

    numpy: str
    ml_dtypes: str
    asked: str
    kernel: str
    avx512: bool
    threads: int
    sets: int
    changed: list[str]
    off: list[str]
    ulps: int  # the largest distance of a float32 result
    differing: int  # float32 results that differ at all
    elements: int  # float32 results


def make_environment(folder: Path, requirements: str) -> Path:
    """The interpreter of a new virtual environment with these requirements."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements.split(), "einops"]
    subprocess.run(command, check=True)
    return python


def environment(setting: Setting) -> dict[str, str]:
    """The variables of a setting, over those that are set already."""
    threads = str(setting.threads)
    env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    env.pop("OPENBLAS_CORETYPE", None), env.pop("NPY_DISABLE_CPU_FEATURES", None)
    if setting.kernel:
        env["OPENBLAS_CORETYPE"] = setting.kernel
    if not setting.avx512:
        groups = json.loads(call(setting.python, env, "-c", PROBE))[3]  # their names change between versions
        if groups:
            env["NPY_DISABLE_CPU_FEATURES"] = " ".join(groups)
    return env


def call(python: Path, env: dict[str, str], *arguments) -> str:
    """What a Python prints. Raises RuntimeError with its errors if it fails."""
    done = subprocess.run([python, "-W", "ignore", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python} {' '.join(map(str, arguments))[:80]} failed:\n{done.stderr}")
    return done.stdout


def run(setting: Setting, folder: Path, here: Path | None) -> Outcome:
    """Make all sets under a setting into `folder`, and hold them to the list and to the files in `here`."""
    from refmodel.golden.published import LISTED, changed

    env = environment(setting)
    numpy, ml_dtypes, kernel, groups = json.loads(call(setting.python, env, "-c", PROBE))
    numerics = ("bfloat16", "fp8", "float32", "float64")
    printed = call(setting.python, env, "-m", "refmodel.golden.published", "--write", folder, "--numerics", *numerics)
    found, listed = json.loads(printed), json.loads(LISTED.read_text())
    narrow = changed({name: entry for name, entry in found.items() if name in listed}, listed)
    narrow += [f"{name} is missing" for name in listed if name not in found]
    off, ulps, differing, elements = wide_differences(here or folder, folder)
    effect = (numpy, ml_dtypes, setting.kernel or "none", kernel, bool(groups), setting.threads)
    return Outcome(*effect, len(listed), narrow, off, ulps, differing, elements)


def wide_differences(here: Path, there: Path):
    """(sets beyond the rules, largest float32 distance in ulps, float32 elements that differ, float32 elements)."""
    from refmodel.golden import compare

    off, ulps, differing, elements = [], 0, 0, 0
    for path in sorted(here.iterdir()):
        report = compare(path, there / path.name, "reproduce", only=r"^(?!inputs\.)")
        off += [] if report.ok else [f"{path.stem}: {report.headline}"]
        for result in report.results:
            if result.reference_dtype == "float32" and result.difference is not None:
                elements += result.difference.total
                differing += result.difference.differing
                worst = result.difference.worst_ulp
                ulps = max(ulps, int(worst.error) if worst is not None else 0)
    return off, ulps, differing, elements


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| NumPy | ml_dtypes | OPENBLAS_CORETYPE | kernels used | NumPy's AVX-512 | threads | narrow sets changed | "
        "float32 differing | wide sets beyond the rules |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        float32 = f"{o.differing} of {o.elements:,}" + (f", {o.ulps} ulp" if o.differing else "")
        lines.append(
            f"| {o.numpy} | {o.ml_dtypes} | {o.asked} | {o.kernel} | {'on' if o.avx512 else 'off'} | {o.threads} | "
            f"{len(o.changed)} of {o.sets} | {float32} | {len(o.off)} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Make, compare, print; 0 if the rules hold under every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="requirements of each environment")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, help="values of OPENBLAS_CORETYPE; '' for none")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    args = parser.parse_args(argv)
    outcomes, here = [], None
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        # the newest last in the list is made first: it is what the others are compared with
        for number, requirements in enumerate(reversed(args.versions)):
            python = make_environment(work / f"environment{number}", requirements)
            settings = [Setting(python, kernel, True, t) for kernel in args.kernels for t in args.threads]
            settings += [Setting(python, "", False, t) for t in args.threads]
            for setting in settings:
                folder = work / f"sets{len(outcomes)}"
                outcomes.append(run(setting, folder, here))
                print(table(outcomes[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
                if here is None:
                    here = folder
                else:
                    shutil.rmtree(folder)
    print(f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}\n")
    print(table(outcomes))
    wrong = [line for o in outcomes for line in (*o.changed, *o.off)]
    print("".join(f"\n{line}" for line in wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

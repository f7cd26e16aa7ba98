"""What the figures of a run depend on."""

import ctypes
import functools
import os
import platform
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from refmodel.threads import VARIABLE as THREADS_VARIABLE
from refmodel.threads import thread_count

_VARIABLES = (THREADS_VARIABLE, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
              "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES",
              "NPY_DISABLE_CPU_FEATURES")  # fmt: skip
# under these NumPy computes otherwise than it would choose to on this processor
_FORCING = ("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES")
_PACKAGES = ("numpy", "ml_dtypes", "torch", "transformers")


def environment() -> dict[str, str]:
    """Python, packages, BLAS kernel and threads, processors, load, and the variables that matter where they are set."""
    found = {"python": platform.python_version()}
    found |= {name: known for name in _PACKAGES if (known := _version(name))}
    found |= {
        "blas kernel": blas_kernel(),
        "blas threads": str(blas_threads()),
        "processor": _processor(),
        "processors": str(os.cpu_count()),
        "load average": f"{os.getloadavg()[0]:.1f}",
        "malloc": "as set below" if any(name.startswith("MALLOC") for name in os.environ) else "freed memory is kept",
    }
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def notice(found: dict[str, str]) -> str:
    """Why the figures of an `environment` may not be what the machine can do; empty where nothing is forced."""
    forced = [f"{name}={found[name]}" for name in _FORCING if name in found]
    if not forced:
        return ""
    return (
        f"{', '.join(forced)} in the environment: an older kernel can take twice the time, and limits are stated for "
        "a run without; unset to see what this processor can do"
    )


def blas_kernel() -> str:
    """Name of the kernel that NumPy's own OpenBLAS picked, or what BLAS NumPy was built with."""
    call = _openblas("get_corename", ctypes.c_char_p)
    if call is not None:
        return call().decode()
    return str(np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"])


def blas_threads() -> int:
    """Threads that NumPy's BLAS uses."""
    call = _openblas("get_num_threads", ctypes.c_int)
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)) if call is None else call()


def threads_at_work() -> int:
    """Threads that products of the model run on: BLAS's own, or those that REFMODEL_THREADS asks for."""
    return max(blas_threads(), thread_count())


@contextmanager
def blas_on(threads: int):
    """NumPy's BLAS on so many threads for a while; no change where NumPy has another BLAS than OpenBLAS."""
    change, before = _openblas("set_num_threads", None), blas_threads()
    if change is None or threads == before:
        yield
        return
    change(threads)
    try:
        yield
    finally:
        change(before)


@functools.cache
def _openblas(name: str, result):
    """A function of the OpenBLAS inside NumPy's wheel; None where NumPy has another BLAS."""
    for library in Path(np.__file__).parents[1].glob("numpy.libs/*openblas*"):
        for symbol in (f"scipy_openblas_{name}64_", f"openblas_{name}64_", f"openblas_{name}"):
            try:
                function = getattr(ctypes.CDLL(str(library)), symbol)
            except (OSError, AttributeError):
                continue
            function.restype = result
            return function
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

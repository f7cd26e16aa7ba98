"""What the figures of a run depend on."""

import ctypes
import os
import platform
from pathlib import Path

import ml_dtypes
import numpy as np

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "MALLOC_MMAP_THRESHOLD_",
              "MALLOC_TRIM_THRESHOLD_", "NPY_DISABLE_CPU_FEATURES")  # fmt: skip


def environment() -> dict[str, str]:
    """Python, NumPy, BLAS kernel, processors, and the variables that matter."""
    found = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "blas kernel": blas_kernel(),
        "processors": str(os.cpu_count()),
        "load average": f"{os.getloadavg()[0]:.1f}",
    }
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def blas_kernel() -> str:
    """Name of the kernel that NumPy's own OpenBLAS picked, or what BLAS NumPy was built with."""
    for library in Path(np.__file__).parents[1].glob("numpy.libs/*openblas*"):
        try:
            corename = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
        except (OSError, AttributeError):
            continue
        corename.restype = ctypes.c_char_p
        return corename().decode()
    return str(np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"])

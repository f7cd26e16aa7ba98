"""The script that proves portability sees what is not portable."""

import json
import sys
from pathlib import Path

import numpy as np
import prove
import pytest

from refmodel.golden import write_bundle

HERE = Path(sys.executable)


def folder(path, **tensors):
    path.mkdir()
    write_bundle(path / "set.safetensors", tensors, None, "float32")
    return path


def test_differences_beyond_the_rules_are_counted(tmp_path):
    x = np.ones(2_000_000, np.float32)
    here = folder(tmp_path / "here", x=x, y=np.float64([1, 2]))
    assert prove.wide_differences(here, here) == ([], 0, 0, 2_000_000)
    one = x.copy()
    one[7] = np.nextafter(np.float32(1), np.float32(2))
    assert prove.wide_differences(here, folder(tmp_path / "one", x=one, y=np.float64([1, 2]))) == ([], 1, 1, 2_000_000)
    one[7] = 1 + 2 * 2.0**-23
    off, *counts = prove.wide_differences(here, folder(tmp_path / "two", x=one, y=np.float64([1, 2 + 1e-9])))
    assert counts == [2, 1, 2_000_000]
    assert len(off) == 1
    assert off[0].startswith("set: x diverges first")
    off, *_ = prove.wide_differences(here, folder(tmp_path / "double", x=x, y=np.float64([1, 2 + 1e-9])))
    assert off[0].startswith("set: y diverges first")


def test_settings_take_effect():
    probe = (HERE, {}, "-c", prove.PROBE)
    usual = json.loads(prove.call(*probe))
    env = prove.environment(prove.Setting(HERE, "Haswell", False, 2))
    assert (env["OPENBLAS_NUM_THREADS"], env["OMP_NUM_THREADS"]) == ("2", "2")
    found = json.loads(prove.call(HERE, env, "-c", prove.PROBE))
    assert found[0] == usual[0] == np.__version__
    assert found[2] in ("Haswell", "?")  # a NumPy with another BLAS has no such kernels
    assert found[3] == []
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        prove.call(HERE, {}, "-c", "1 / 0")


def test_the_table():
    outcome = prove.Outcome("2.0.0", "0.5.0", "Zen", "Haswell", False, 2, 158, ["a"], ["b: c"], 1, 3, 5_000)
    assert prove.table([outcome]).splitlines()[2] == (
        "| 2.0.0 | 0.5.0 | Zen | Haswell | off | 2 | 1 of 158 | 3 of 5,000, 1 ulp | 1 |"
    )


@pytest.mark.long
def test_this_environment_reproduces_the_set(tmp_path):
    outcome = prove.run(prove.Setting(HERE, "Haswell", True, 1), tmp_path, None)
    assert (outcome.changed, outcome.off, outcome.differing) == ([], [], 0)
    assert outcome.elements > 5_000_000

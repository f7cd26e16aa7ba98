"""The published goldens are reproduced: here, and under other BLAS kernels and CPU features."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refmodel.golden import compare
from refmodel.golden.published import LISTED, hashes, sets

ROOT = Path(__file__).parents[2]
MACHINES = {
    "haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "skylakex": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "zen": {"OPENBLAS_CORETYPE": "Zen"},
    "nehalem": {"OPENBLAS_CORETYPE": "Nehalem"},
    "without_avx512": {
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    },
    "two_threads": {"OPENBLAS_NUM_THREADS": "2"},
}


def test_the_listed_hashes_are_reproduced():
    listed = json.loads(LISTED.read_text())
    found = {name: hashes(tensors) for name, _, tensors in sets()}
    assert sorted(found) == sorted(listed)
    wrong = [name for name in listed if found[name]["narrow"] != listed[name]["narrow"]]
    assert not wrong, f"bits changed in {wrong}: see refmodel/golden/CHANGES.md for what to do"


def published(environment, *arguments):
    command = [sys.executable, "-W", "ignore", "-m", "refmodel.golden.published", *map(str, arguments)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WIDE = ("--numerics", "float32", "float64", "--write")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    published({}, *WIDE, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_other_machines_reproduce_them(machine, here, tmp_path):
    listed = json.loads(LISTED.read_text())
    found = published(MACHINES[machine])
    assert [n for n in listed if found[n]["narrow"] != listed[n]["narrow"]] == []
    published(MACHINES[machine], *WIDE, tmp_path)
    for path in sorted(here.iterdir()):
        report = compare(path, tmp_path / path.name, "reproduce")
        assert report.ok, f"{path.name}: {report.headline}"

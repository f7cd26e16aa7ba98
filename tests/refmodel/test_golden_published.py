"""The published goldens are reproduced: here, and under other BLAS kernels and CPU features."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refmodel.golden import compare
from refmodel.golden.published import LISTED, NARROW, build, changed, entry, names, sets

ROOT = Path(__file__).parents[2]
# groups that NumPy dispatches to; how they are called changes between versions
FOUND = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
AVX512 = " ".join(name for name in FOUND if "AVX512" in name or name == "X86_V4")
MACHINES = {
    "haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "skylakex": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "zen": {"OPENBLAS_CORETYPE": "Zen"},
    "nehalem": {"OPENBLAS_CORETYPE": "Nehalem"},
    "without_avx512": {"NPY_DISABLE_CPU_FEATURES": AVX512},
    "two_threads": {"OPENBLAS_NUM_THREADS": "2"},
}


def found_here(shapes, numerics=NARROW):
    return {name: entry(tensors) for name, _, tensors in sets(numerics, shapes)}


def test_every_set_is_listed():
    assert sorted(names()) == sorted(json.loads(LISTED.read_text()))


def test_the_listed_hashes_are_reproduced():
    wrong = changed(found_here("toy"), json.loads(LISTED.read_text()))
    assert not wrong, f"bits changed in {wrong}: see refmodel/golden/CHANGES.md for what to do"


@pytest.mark.long
def test_the_listed_hashes_are_reproduced_at_v3_shapes():
    listed, found = json.loads(LISTED.read_text()), found_here("v3", ())
    assert not changed(found, listed)
    assert {name: x["bytes"] for name, x in found.items()} == {name: listed[name]["bytes"] for name in found}
    assert len(found) > 50


def test_the_whole_set_stays_small():
    assert sum(x["bytes"] for x in json.loads(LISTED.read_text()).values()) < 300e6


def test_a_changed_bit_is_seen():
    _, tensors = build("rms_norm.rows_2")
    before = {"rms_norm.rows_2": entry(tensors)}
    assert changed(before, before) == []
    assert changed(before, {}) == ["rms_norm.rows_2"]
    for name in ("inputs.weight", "outputs.out"):
        other = {key: x.copy() for key, x in tensors.items()}
        other[name].view(np.uint8)[..., 0] ^= 1
        assert changed({"rms_norm.rows_2": entry(other)}, before) == ["rms_norm.rows_2"]


def test_unknown_sets_are_refused():
    with pytest.raises(ValueError, match=r"no published set 'x\.y'; names begin with example, rms_norm"):
        build("x.y")
    with pytest.raises(ValueError, match="operator rope has no case 'y'"):
        build("rope.y")
    with pytest.raises(ValueError, match="shapes='big': one of toy, v3, all"):
        names(shapes="big")


def published(environment, *arguments):
    command = [sys.executable, "-W", "ignore", "-m", "refmodel.golden.published", *map(str, arguments)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WIDE = ("--shapes", "toy", "--numerics", "float32", "float64", "--write")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    published({}, *WIDE, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_other_machines_reproduce_them(machine, here, tmp_path):
    listed = json.loads(LISTED.read_text())
    assert changed(published(MACHINES[machine]), listed) == []
    published(MACHINES[machine], *WIDE, tmp_path)
    for path in sorted(here.iterdir()):
        report = compare(path, tmp_path / path.name, "reproduce")
        assert report.ok, f"{path.name}: {report.headline}"

"""Goldens at V3's shapes: what they contain, that they are lazy, and that their bytes are the published ones."""

import numpy as np
import pytest

from fp8 import gemm, is_power_of_two
from fp8.goldens import GoldenCase, random_values, v3_cases

SMALL = {
    "dense": GoldenCase("small", "dense", 5, 130, 300, seed=1),
    "contiguous": GoldenCase("small", "contiguous", 100, 130, 300, 3, seed=1),
    "masked": GoldenCase("small", "masked", 100, 130, 300, 2, "ue8m0", seed=1),
}
PUBLISHED = {
    "dense": "c99e727f456f27786d6c832c83e7a62efca7d839664017da2ec2798a3fdcbb1a",
    "contiguous": "eb71f4e22897bb194fef14d5cc675b0305a1805506e7f377a89c230cc215193a",
    "masked": "f1e41e7fd2174cea046ee40a6a1ba67b806d8f6143292a7d1a3253d4b8f148c2",
}
PUBLISHED_V3 = {
    "q_a_kv_a.m64": "842e47a013fa22c0dd8bef79c022f8b3f00a8a02f9a01a6dd9f55fce2ee1f36f",
    "q_b.m128": "26190c13dcc1a8572542ad4443a983d815b18dbc9d9b782b997e073bcb57eb08",
    "kv_b.m1": "d3a3d1593c0f7eb80ec50e7edfa2b8d72d2a213c87bc35c761fd484b232faa6b",
    "down.contiguous.g2": "d64dae2432302f24790f70917e0dc12bbaec30c1412fd69274a2c6bf152f2d36",
    "gate_up.masked.g9": "4b7f996a9887b8e66c428560ac7b5b4311de35fbee5852e75a3720ba0d40982d",
}


def test_cases_are_v3s():
    cases = {case.name: case for case in v3_cases()}
    assert len(cases) == 6 * 4 + 2 * 2 * 2
    case = cases["q_a_kv_a.m4096"]
    assert (case.num_rows, case.n, case.k) == (4096, 2112, 7168)
    specification = case.specification()
    assert specification["q_a_kv_a.m4096.b.scale"] == ("float32", (17, 56))
    assert specification["q_a_kv_a.m4096.d"] == ("bfloat16", (4096, 2112))
    assert {case.k for case in cases.values()} == {7168, 1536, 512, 16384, 2048}
    assert {case.groups for case in cases.values()} == {1, 2, 9}


@pytest.mark.parametrize("kind", SMALL)
def test_tensors_are_as_specified(kind):
    case = SMALL[kind]
    tensors = dict(case.build())
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == case.specification()
    assert list(tensors) == list(case.specification())
    assert np.isfinite(tensors["small.d"].astype(np.float32)).all()
    assert np.isfinite(tensors["small.a.codes"].astype(np.float32)).all()
    if case.scale_format == "ue8m0":
        assert is_power_of_two(tensors["small.b.scale"]).all()


@pytest.mark.parametrize("kind", SMALL)
def test_bytes_are_the_published_ones(kind):
    assert SMALL[kind].digest() == PUBLISHED[kind]


def test_seed_name_and_operand_give_different_values():
    case = SMALL["dense"]
    other = GoldenCase("small", "dense", 5, 130, 300, seed=2)
    assert not np.array_equal(case.operand_a().codes, other.operand_a().codes)
    assert np.array_equal(case.operand_a().codes, GoldenCase("small", "dense", 5, 130, 300, seed=1).operand_a().codes)


def test_result_is_the_product_and_padding_is_zero():
    case = SMALL["contiguous"]
    tensors = dict(case.build())
    layout = tensors["small.grouped_layout"]
    assert case.counts().tolist() == [100, 0, 26]
    assert [np.count_nonzero(layout == group) for group in range(3)] == [100, 0, 26]
    a, b = case.operand_a(), case.operand_b()
    np.testing.assert_array_equal(tensors["small.d"][layout == 2], gemm(a.rows(layout == 2), b[2]))
    assert not a.codes[layout < 0].astype(np.float32).any()


def test_the_rows_that_a_kernel_must_write_are_named():
    assert SMALL["dense"].valid() == {}
    for kind, expected in (
        ("contiguous", [*range(100), *range(128, 154)]),
        ("masked", [*range(100), *range(100, 163)]),
    ):
        tensors = dict(SMALL[kind].build())
        assert SMALL[kind].valid() == {"small.d": "small.defined"}
        assert np.flatnonzero(tensors["small.defined"]).tolist() == expected


def test_metadata_states_the_floor_and_the_rule():
    # the floor under amax differs between implementations and cannot be seen in the tensors
    metadata = SMALL["masked"].metadata()
    assert metadata["amax_floor"] == "0.0001"
    assert (metadata["recipe"], metadata["scale_format"], metadata["accumulator"]) == ("deepseek_v3", "ue8m0", "exact")


def test_values_have_the_stated_shape():
    values = random_values((64, 1024), 0).astype(np.float64)
    blocks = values.reshape(64, 8, 128).std(axis=2)
    assert abs(values.mean()) < 0.05
    assert 0.05 < blocks.min() < 0.09
    assert 3.5 < blocks.max() < 6
    assert random_values((0, 5), 0).shape == (0, 5)


def test_one_real_shape():
    case = next(case for case in v3_cases() if case.name == "q_a_kv_a.m1")
    tensors = dict(case.build())
    assert tensors["q_a_kv_a.m1.d"].shape == (1, 2112)


@pytest.mark.long
def test_v3_shapes_have_the_published_bytes():
    cases = {case.name: case for case in v3_cases()}
    for name, digest in PUBLISHED_V3.items():
        assert cases[name].digest() == digest, name


def test_errors():
    with pytest.raises(ValueError, match="kind 'sparse'"):
        GoldenCase("x", "sparse", 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        GoldenCase("x", "dense", 0, 1, 1)

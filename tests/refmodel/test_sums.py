"""Sums in order: the bits of adding one after the other from +0 on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.sums import add_in_order


def oracle(x):
    total = np.zeros((x.shape[0], *x.shape[2:]), x.dtype)
    for i in range(x.shape[1]):
        total = total + x[:, i]
    return total


@settings(max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
def test_equals_adding_one_after_the_other(seed, shape, dtype, strided):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, shape))).astype(dtype)
    if strided:  # rows that were padded and cut off again
        x = np.concatenate([x, x], axis=2)[:, :, : shape[2]]
    assert add_in_order(x).tobytes() == oracle(x).tobytes()


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_minus_zeros_add_up_to_plus_zero(shape):
    assert not np.signbit(add_in_order(np.full(shape, -0.0))).any()

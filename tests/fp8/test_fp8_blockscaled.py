"""Blocks: partial ones, all-zero ones, odd inputs, stacks, and what an infinity or NaN does to its block."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8 import E4M3, E5M2, BlockScaled, encode, quantize, to_bfloat16

F = np.float32


def codes(values):
    return np.asarray(values, F).astype(E4M3.dtype)


def quantize_slowly(x, block):
    """deepseek_v3 on one matrix, element by element."""
    x = np.asarray(x, F)
    scale = np.zeros((-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])), F)
    out = np.zeros(x.shape, E4M3.dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = max(F(1e-4), max(abs(value) for value in x[here].reshape(-1))) / F(448)
            out[here] = np.clip(x[here] / scale[i, j], F(-448), F(448)).astype(E4M3.dtype)
    return out, scale


@given(
    st.integers(1, 7),
    st.integers(1, 300),
    st.sampled_from([(1, 128), (128, 128), (2, 3), (1, 1)]),
    st.integers(0, 2**32),
)
def test_fast_equals_slow(rows, columns, block, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 20, (rows, 1))
    expected_codes, expected_scale = quantize_slowly(x, block)
    for values in (x, x.astype(F)):
        got = quantize(values, block)
        np.testing.assert_array_equal(got.codes.view(np.uint8), expected_codes.view(np.uint8))
        np.testing.assert_array_equal(got.scale, expected_scale)
    narrow = to_bfloat16(x)
    np.testing.assert_array_equal(quantize(narrow, block).scale, quantize_slowly(narrow, block)[1])


def test_block_size_is_read_not_derived():
    # NVIDIA/TensorRT-Model-Connect#1115, #1117: 576 rows in 5 blocks of 128, not of 116
    w = BlockScaled(codes(np.ones((130, 130))), np.array([[1, 2], [3, 4]], F), (128, 128)).dequantize()
    assert (w[127, 127], w[127, 128], w[128, 0], w[129, 129], w[65, 65]) == (1, 2, 3, 4, 1)
    assert quantize(np.ones((576, 7168), F), (128, 128)).scale.shape == (5, 56)
    assert quantize(np.ones((10944, 1), F), (128, 128)).scale.shape == (86, 1)


def test_tail_block_sees_real_values_only():
    x = np.zeros((3, 130), F)
    x[:, :128], x[:, 128:] = 448, -2
    assert quantize(x).scale.tolist() == [[1, F(2) / F(448)]] * 3
    assert quantize(x, (128, 128)).scale.tolist() == [[1, F(2) / F(448)]]


def test_zero_blocks():
    # huggingface/kernels-community#681, THUDM/slime#2256: 49152 NaN; vllm-project/vllm-xpu-kernels#609: no rows
    w = np.zeros((256, 256), F)
    w[0, 0] = 1
    got = quantize(w, (128, 128))
    assert np.count_nonzero(np.isnan(got.codes.astype(F))) == 0
    np.testing.assert_array_equal(got.dequantize(), w)
    assert (got.scale > 0).all()
    empty = quantize(np.zeros((0, 128), F))
    assert (empty.codes.shape, empty.scale.shape) == ((0, 128), (0, 1))
    assert empty.dequantize().shape == (0, 128)
    assert quantize(np.zeros((2, 0), F)).scale.shape == (2, 0)


def test_dequantize_rounds_once():
    scale = F(1 + 2**-23)
    block = BlockScaled(codes([[1.125, -0.0]]), np.array([[scale]], F))
    exact = 1.125 * float(scale)
    assert block.dequantize(np.float64)[0, 0] == exact
    assert block.dequantize(F)[0, 0] == F(exact)
    assert block.dequantize(ml_dtypes.bfloat16)[0, 0] == 1.125
    assert np.signbit(block.dequantize()[0, 1])
    tie = BlockScaled(codes([[1.0]]), np.array([[np.nextafter(F(1 + 2**-8), F(2))]], F))
    assert float(tie.dequantize(ml_dtypes.bfloat16)[0, 0]) == 1.0078125


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_a_block_with_a_non_finite_value_is_nan_and_others_are_not(bad, scale_format):
    x = np.ones((2, 256), F)
    x[0, 5] = bad
    back = quantize(x, scale_format=scale_format).dequantize()
    assert np.isnan(back[0, :128]).all()
    np.testing.assert_array_equal(back[0, 128:], quantize(x[1:], scale_format=scale_format).dequantize()[0, 128:])
    assert np.isfinite(back[1]).all()


def test_strided_read_only_and_stacked_input():
    x = np.random.default_rng(0).standard_normal((4, 6, 200)).astype(F)
    x.flags.writeable = False
    stack = quantize(x, (128, 128))
    assert (stack.shape, stack.scale.shape) == ((4, 6, 200), (4, 1, 2))
    for index in range(4):
        one = quantize(x[index], (128, 128))
        np.testing.assert_array_equal(stack[index].codes, one.codes)
        np.testing.assert_array_equal(stack.dequantize()[index], one.dequantize())
    turned = quantize(x.T)
    np.testing.assert_array_equal(turned.codes, quantize(np.ascontiguousarray(x.T)).codes)
    assert quantize(x, (1, 128)).dequantize(np.float64).shape == x.shape
    assert quantize(np.zeros((0, 3, 5), F)).dequantize().shape == (0, 3, 5)


def test_many_slabs_equal_one_row_at_a_time():
    x = np.random.default_rng(0).standard_normal((300, 1000)).astype(F)
    whole = quantize(x)
    for row in range(0, 300, 37):
        np.testing.assert_array_equal(whole.codes[row], quantize(x[row : row + 1]).codes[0])
    np.testing.assert_array_equal(whole.rows([5, 2]).codes, whole.codes[[5, 2]])
    np.testing.assert_allclose(whole.dequantize(np.float64), x, atol=np.abs(x).max() * 2**-4)


def test_float64_beyond_float32_poisons_its_block_only():
    back = quantize(np.array([[1e300], [1.0]])).dequantize()
    assert np.isnan(back[0, 0])
    assert back[1, 0] == 1.0


def test_errors():
    good = codes(np.ones((2, 130)))
    for match, arguments in {
        r"\(2, 1\) does not fit codes \(2, 130\) in blocks of \(1, 128\): \(2, 2\) is needed": (
            good,
            np.ones((2, 1), F),
        ),
        "scale is float64": (good, np.ones((2, 2))),
        "float32 belong to no 8-bit format": (np.ones((2, 130), F), np.ones((2, 2), F)),
        "at least two axes": (good[0], np.ones(2, F)),
        r"block = \(0, 128\)": (good, np.ones((2, 2), F), (0, 128)),
    }.items():
        with pytest.raises(ValueError, match=match):
            BlockScaled(*arguments)
    with pytest.raises(ValueError, match="int64"):
        quantize(np.ones((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        quantize(np.ones(3, F))
    with pytest.raises(ValueError, match=r"block = \(128, 0\)"):
        quantize(np.ones((2, 2), F), (128, 0))
    block = quantize(np.ones((2, 2), F))
    with pytest.raises(ValueError, match="dequantize gives"):
        block.dequantize(np.float16)
    with pytest.raises(ValueError, match="rows"):
        block[0]
    with pytest.raises(ValueError, match="blocks of one row"):
        quantize(np.ones((2, 2), F), (128, 128)).rows([0])
    assert BlockScaled(encode(np.ones((1, 1)), E5M2), np.ones((1, 1), F)).dequantize()[0, 0] == 1

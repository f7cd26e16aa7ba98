"""Powers of two, packing, column-major and padded layouts, and the conversion between the two E4M3."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8 import (
    E4M3,
    E4M3FNUZ,
    BlockScaled,
    ceil_power_of_two,
    column_major_aligned,
    decode,
    from_fnuz,
    gemm,
    is_power_of_two,
    pack_ue8m0,
    quantize,
    to_fnuz,
    unpack_ue8m0,
)
from fp8.layouts import inner_padded, scale_per_row, tma_aligned_rows, transposed_padded
from fp8.scales import ceil_power_of_two_by_log2, floor_power_of_two
from fp8.shards import concatenate, split

F = np.float32


def test_ceil_by_hand():
    # inclusionAI/humming#39: 1.5 must become 2
    x = np.array([1.5, 1.0, 0.75, 2.0**-126, 2.0**-149, 0.0, 2.0**127, 1.1 * 2.0**127, np.inf, np.nan], F)
    expected = [2.0, 1.0, 1.0, 2.0**-126, 2.0**-126, 2.0**-126, 2.0**127, 2.0**127, np.nan, np.nan]
    np.testing.assert_array_equal(ceil_power_of_two(x), expected)
    with pytest.raises(ValueError, match="1 scales are negative"):
        ceil_power_of_two(np.array([-1.0], F))
    with pytest.raises(ValueError, match="float64"):
        ceil_power_of_two(np.ones(2))


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_ceil_is_the_smallest_power_of_two_not_below(value):
    got = float(ceil_power_of_two(np.array(value, F)))
    assert is_power_of_two(np.array(got, F))
    assert got / 2 < value <= got


@pytest.mark.parametrize("exponent", [-100, -10, 10, 100])
def test_log2_is_one_too_small_just_above_powers_far_from_one(exponent):
    # sgl-project/sglang#29954
    value = np.nextafter(F(2.0**exponent), F(np.inf))
    assert ceil_power_of_two(value[None])[0] == 2.0 ** (exponent + 1)
    assert ceil_power_of_two_by_log2(value[None])[0] == 2.0**exponent
    near = np.nextafter(F(1), F(2))
    assert ceil_power_of_two_by_log2(near[None])[0] == 2.0  # near 1 the logarithm keeps enough bits


def test_floor_and_membership():
    np.testing.assert_array_equal(floor_power_of_two(np.array([1.5, 1.0, 3.9], F)), [1.0, 1.0, 2.0])
    x = np.array([2.0**-127, 2.0**-128, 2.0**127, 0.0, -1.0, 3.0, np.inf, np.nan], F)
    assert is_power_of_two(x).tolist() == [True, False, True, False, False, False, False, False]


def test_packing_by_hand():
    scale = np.array([[1.0, 2.0, 0.5, 2.0**-127, 2.0**127]], F)
    packed = pack_ue8m0(scale)
    assert packed.dtype == np.int32
    assert packed.tolist() == [[127 | 128 << 8 | 126 << 16 | 0 << 24, 254]]
    np.testing.assert_array_equal(unpack_ue8m0(packed, 5), scale)
    np.testing.assert_array_equal(unpack_ue8m0(packed)[0, 5:], [2.0**-127] * 3)  # padding bytes are 0
    assert np.isnan(unpack_ue8m0(np.array([[255]], np.int32), 1)[0, 0])


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=9), st.integers(1, 3))
def test_packing_round_trip(exponents, rows):
    scale = np.tile(np.ldexp(F(1), np.array(exponents)), (rows, 1)).astype(F)
    np.testing.assert_array_equal(unpack_ue8m0(pack_ue8m0(scale), len(exponents)), scale)


def test_packing_refuses_what_it_would_cut():
    # sgl-project/sglang#39193, vllm-project/vllm#22399: 1.99 became 1.0; deepseek-ai/DeepSeek-V3#961: shared mantissa
    with pytest.raises(ValueError, match="2 of 3 scales are not powers of two"):
        pack_ue8m0(np.array([[1.99, 1.0, 8.074192010099068e-05]], F))
    # vllm-project/vllm#49783: uninitialised padding
    for bad in (0.0, -2.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="1 of 1 scales"):
            pack_ue8m0(np.array([[bad]], F))


def test_scale_with_a_mantissa_is_kept_in_float32():
    # deepseek-ai/DeepSeek-V3#961: cutting 8.07e-5 to 2^-14 is 24.407 % too small
    scale = np.array([[8.074192010099068e-05]], F)
    block = BlockScaled(np.ones((1, 1), E4M3.dtype), scale, (128, 128))
    assert block.dequantize(np.float64)[0, 0] == float(scale[0, 0])
    assert float(1 - F(2.0**-14) / scale[0, 0]) == pytest.approx(0.24407, abs=1e-5)


def test_tiny_scale_does_not_spill_into_its_neighbour():
    # NVIDIA/TransformerEngine#2589: 2^-127 is the subnormal 0x00400000, whose mantissa bit landed in the next byte
    assert pack_ue8m0(np.array([[2.0**-127, 1.0]], F)).view(np.uint32).tolist() == [[127 << 8]]


def test_unpack_errors():
    with pytest.raises(ValueError, match="1 words hold 1 to 4 blocks, not 5"):
        unpack_ue8m0(np.zeros((2, 1), np.int32), 5)
    with pytest.raises(ValueError, match="uint8"):
        unpack_ue8m0(np.zeros((2, 1), np.uint8))


@pytest.mark.parametrize("num_rows", [1, 3, 4, 130])
def test_column_major_layout(num_rows):
    scale = np.random.default_rng(0).standard_normal((num_rows, 5)).astype(F)
    got = column_major_aligned(scale)
    np.testing.assert_array_equal(got, scale)
    aligned = -(-num_rows // 4) * 4
    assert got.strides == (4, 4 * aligned) == (4, 4 * tma_aligned_rows(num_rows))
    padding = got.base[:, num_rows:] if got.base.ndim == 2 else got.base.reshape(5, aligned)[:, num_rows:]
    assert not padding.any()
    stack = column_major_aligned(np.stack([scale, 2 * scale]))
    np.testing.assert_array_equal(stack[1], 2 * scale)
    assert stack.strides[0] == 4 * aligned * 5
    with pytest.raises(ValueError, match="float64"):
        column_major_aligned(np.ones((2, 2)))


def test_transformer_engine_layouts_by_hand():
    scale = np.arange(1, 11, dtype=F).reshape(5, 2)
    assert transposed_padded(scale).tolist() == [[1, 3, 5, 7, 9, 0, 0, 0], [2, 4, 6, 8, 10, 0, 0, 0]]
    assert inner_padded(scale)[4].tolist() == [9, 10, 0, 0]


def test_scales_per_row():
    # kv_a: 576 rows are 5 blocks, the last one 64 rows (modelscope/ms-swift#6851)
    got = scale_per_row(np.arange(5, dtype=F)[:, None], 576)
    assert got.shape == (576, 1)
    assert (got[511, 0], got[512, 0], got[575, 0]) == (3, 4, 4)
    with pytest.raises(ValueError, match="4 rows of scales do not cover 576"):
        scale_per_row(np.ones((4, 1), F), 576)


def test_fused_scale_rows_are_the_sum_of_the_parts():
    # vllm-project/vllm#52997: q_a of 2048 rows and kv_a of 576 are 16 + 5 rows of scales; 2624 // 128 is 20
    parts = [quantize(np.full((rows, 128), value, F), (128, 128)) for rows, value in ((2048, 1.0), (576, 3.0))]
    whole = concatenate(parts, axis=0)
    assert whole.scale.shape == (21, 1)
    np.testing.assert_allclose(whole.dequantize()[[0, 2047, 2048, 2623], 0], [1, 1, 3, 3], rtol=1e-6)
    with pytest.raises(ValueError, match=r"\(20, 1\) does not fit codes \(2624, 128\)"):
        BlockScaled(whole.codes, whole.scale[:20], (128, 128))
    with pytest.raises(ValueError, match="part 0 has 576 rows, no multiple of the block of 128"):
        concatenate(parts[::-1], axis=0)


def test_shards_start_on_a_block_or_are_refused():
    # sgl-project/sglang#3345: 258 columns over two ranks are 2 + 2 blocks where the whole has 3; 2048 / 32 is 64
    w = quantize(np.random.default_rng(0).standard_normal((300, 512)).astype(F), (128, 128))
    shards = split(w, 2, axis=1)
    assert [shard.shape for shard in shards] == [(300, 256), (300, 256)]
    np.testing.assert_array_equal(np.concatenate([s.dequantize() for s in shards], axis=1), w.dequantize())
    np.testing.assert_array_equal(concatenate(shards, axis=1).dequantize(), w.dequantize())
    assert split(w, 1, axis=0)[0].shape == w.shape
    assert [part.shape for part in split(quantize(np.ones((4, 130), F)), 2, axis=0)] == [(2, 130)] * 2
    for shape, parts, axis, size in (((2, 258), 2, 1, 129), ((2048, 2), 32, 0, 64), ((18432, 1), 32, 0, 576)):
        matrix = quantize(np.ones(shape, F), (128, 128))
        with pytest.raises(ValueError, match=f"shards of {size} .* would start inside a block of 128"):
            split(matrix, parts, axis)
    with pytest.raises(ValueError, match="300 rows do not split into 7 equal shards"):
        split(w, 7, axis=0)
    with pytest.raises(ValueError, match="axis = 2"):
        split(w, 2, axis=2)
    with pytest.raises(ValueError, match="do not fit each other"):
        concatenate([w, quantize(np.ones((2, 512), F))], axis=0)
    with pytest.raises(ValueError, match="nothing to concatenate"):
        concatenate([], axis=0)


def test_fnuz_conversion_keeps_values():
    # sgl-project/sglang#2667
    raw = np.array([[code for code in range(256) if code & 0x7F != 0x7F]], np.uint8)
    matrix = BlockScaled(raw.view(E4M3.dtype), np.array([[0.25, 8.0]], F))
    other = to_fnuz(matrix)
    assert other.codes.view(np.uint8)[0, raw[0].tolist().index(0x80)] == 0
    np.testing.assert_array_equal(other.dequantize(), matrix.dequantize())
    np.testing.assert_array_equal(from_fnuz(other).dequantize(), matrix.dequantize())
    values = decode(matrix.codes)
    wrong = decode(raw.view(other.codes.dtype)) / np.where(values == 0, np.nan, values)
    assert set(wrong[np.isfinite(wrong)]) == {0.5}  # bytes taken as they are: half of everything, and NaN for -0
    np.testing.assert_array_equal(gemm(other, other, out_dtype=F), gemm(matrix, matrix, out_dtype=F))


def test_fnuz_refuses_what_has_no_counterpart():
    nan = BlockScaled(np.array([[0x7F, 0x01]], np.uint8).view(E4M3.dtype), np.ones((1, 1), F))
    with pytest.raises(ValueError, match="1 codes are NaN"):
        to_fnuz(nan)
    other = BlockScaled(np.array([[0x7F, 0x80]], np.uint8).view(E4M3FNUZ.dtype), np.ones((1, 1), F))
    with pytest.raises(ValueError, match="2 codes"):
        from_fnuz(other)
    with pytest.raises(ValueError, match="to_fnuz takes"):
        to_fnuz(to_fnuz(_one()))
    with pytest.raises(ValueError, match="from_fnuz takes"):
        from_fnuz(_one())


def _one():
    return quantize(np.ones((1, 1), F))

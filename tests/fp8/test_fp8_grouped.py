"""Grouped products: layouts by hand, undefined rows, and what a kernel makes of a misaligned layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8 import (
    E4M3,
    KERNELS,
    BlockScaled,
    contiguous_as_read,
    contiguous_layout,
    gemm,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    grouped_gemm_prefix_sum,
    judge,
    quantize,
)
from fp8.grouped import misaligned_blocks

F = np.float32


def operands(rng, rows, groups, n=5, k=130):
    a = quantize(rng.standard_normal((*np.atleast_1d(rows), k)).astype(F))
    return a, quantize(rng.standard_normal((groups, n, k)).astype(F), (128, 128))


def constant(values, k=4):
    """Weights [G, 1, K] that are constant per group; E4M3 holds them exactly with scale 1."""
    codes = np.tile(np.array(values, F)[:, None, None], (1, 1, k)).astype(E4M3.dtype)
    return BlockScaled(codes, np.ones((len(values), 1, 1), F), (128, 128))


def ones(rows, k=4):
    return BlockScaled(np.ones((rows, k), F).astype(E4M3.dtype), np.ones((rows, 1), F))


def test_layout_by_hand():
    # InternLM/xtuner#2053; deepseek-ai/DeepGEMM#15, #103: 0 rows align to 0, not to 128
    layout = contiguous_layout([2, 3, 0, 130])
    assert layout.padded.tolist() == [128, 128, 0, 256]
    assert layout.starts.tolist() == [0, 128, 256, 256]
    assert layout.grouped_layout.shape == (512,)
    assert np.count_nonzero(layout.grouped_layout >= 0) == 135
    assert layout.grouped_layout.dtype == np.int32


def test_expert_of_each_block_by_hand():
    # vllm-project/vllm#55896, #4517: counts [2, 3, 0, 6, 8] in blocks of 4; there is no expert 5
    layout = contiguous_layout([2, 3, 0, 6, 8], 4).grouped_layout
    assert layout.size == 24
    assert layout[::4].tolist() == [0, 1, 3, 3, 4, 4]
    # ModelTC/LightLLM#1369: five experts are not four and one that wraps around
    a, b = ones(24), constant([1, 2, 3, 4, 5])
    assert (
        grouped_gemm_contiguous(a, b, layout, 4).out[layout >= 0, 0].astype(F).tolist()
        == [4.0] * 2 + [8.0] * 3 + [16.0] * 6 + [20.0] * 8
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([1, 4, 8]), st.integers(0, 99))
@settings(max_examples=30)
def test_valid_rows_do_not_depend_on_alignment(counts, alignment, seed):
    rng = np.random.default_rng(seed)
    tight, padded = contiguous_layout(counts, 1), contiguous_layout(counts, alignment)
    a, b = operands(rng, sum(counts), len(counts))
    raw = np.full((padded.grouped_layout.size, 130), 0x7F, np.uint8)  # NaN in the padding must not leak
    scale = np.full((raw.shape[0], 2), np.nan, F)
    raw[padded.grouped_layout >= 0], scale[padded.grouped_layout >= 0] = a.codes.view(np.uint8), a.scale
    spread = BlockScaled(raw.view(E4M3.dtype), scale)
    left = grouped_gemm_contiguous(a, b, tight.grouped_layout, 1)
    right = grouped_gemm_contiguous(spread, b, padded.grouped_layout, alignment)
    assert left.defined.all()
    np.testing.assert_array_equal(right.out[right.defined], left.out)
    ends = padded.starts + counts
    by_ends = grouped_gemm_prefix_sum(spread, b, ends, alignment)
    np.testing.assert_array_equal(by_ends.defined, right.defined)
    np.testing.assert_array_equal(by_ends.out[by_ends.defined], left.out)
    start = 0
    for group, count in enumerate(counts):
        np.testing.assert_array_equal(
            left.out[start : start + count], gemm(a.rows(slice(start, start + count)), b[group])
        )
        start += count


def test_misaligned_groups_are_refused_and_read_as_a_kernel_reads_them():
    # deepseek-ai/DeepGEMM#178, #15: two groups of 64 rows, weights 1 and 2
    a, b, layout = ones(128), constant([1, 2]), np.repeat(np.array([0, 1], np.int32), 64)
    assert misaligned_blocks(layout).tolist() == [0]
    with pytest.raises(ValueError, match="1 of the blocks of 128 rows hold rows of more than one expert"):
        grouped_gemm_contiguous(a, b, layout)
    read = contiguous_as_read(a, b, layout)
    assert read.out[:, 0].astype(F).tolist() == [4.0] * 128  # the neighbour's weight
    assert read.defined.tolist() == [True] * 64 + [False] * 64
    assert grouped_gemm_contiguous(a, b, layout, 64).out[64:, 0].astype(F).tolist() == [8.0] * 64


def test_padding_as_a_kernel_writes_it():
    layout = np.full(256, -1, np.int32)
    layout[:10], layout[128:130] = 0, 1
    read = contiguous_as_read(ones(256), constant([1, 2]), layout)
    values = read.out[:, 0].astype(F)
    assert values[:64].tolist() == [4.0] * 64  # padding in a live half is computed
    assert values[64:128].tolist() == [0.0] * 64  # a dead half is written as zero
    assert values[128:192].tolist() == [8.0] * 64
    assert np.flatnonzero(read.defined).tolist() == [*range(10), 128, 129]
    layout[0] = -1  # the first row decides for its half, and for the block's expert
    assert contiguous_as_read(ones(256), constant([1, 2]), layout).out[:64].astype(F).sum() == 0


def test_aligned_layouts_are_read_as_they_are_meant():
    rng = np.random.default_rng(0)
    layout = contiguous_layout([70, 0, 128, 3]).grouped_layout
    a, b = operands(rng, layout.size, 4)
    meant, read = grouped_gemm_contiguous(a, b, layout), contiguous_as_read(a, b, layout)
    np.testing.assert_array_equal(meant.defined, read.defined)
    np.testing.assert_array_equal(meant.out[meant.defined], read.out[read.defined])


def test_masked_rows_beyond_the_count_are_not_read():
    # deepseek-ai/DeepGEMM#20, #34, #38, #268; flashinfer-ai/flashinfer#1856
    rng = np.random.default_rng(0)
    a, b = operands(rng, (3, 4), 3)
    raw, scale = a.codes.view(np.uint8).copy(), b.scale.copy()
    raw[0, 2:], raw[1], scale[1] = 0x7F, 0x7F, np.nan
    dirty = BlockScaled(raw.view(E4M3.dtype), a.scale), BlockScaled(b.codes, scale, b.block)
    got = grouped_gemm_masked(*dirty, np.array([2, 0, 4]))
    assert got.defined.tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    np.testing.assert_array_equal(got.out[0, :2], gemm(a[0].rows(slice(0, 2)), b[0]))
    np.testing.assert_array_equal(got.out[2], gemm(a[2], b[2]))
    kernel = np.where(got.defined[..., None], got.out.astype(F), np.nan)
    assert judge(got.out.astype(F), kernel, defined=got.defined).holds
    assert not judge(got.out.astype(F), kernel).holds


def test_small_groups_keep_apart():
    # deepseek-ai/DeepGEMM#268: fewer rows than a tile, a constant per group
    a = BlockScaled(np.ones((2, 16, 4), F).astype(E4M3.dtype), np.ones((2, 16, 1), F))
    out = grouped_gemm_masked(a, constant([1, 3]), np.array([16, 8])).out.astype(F)
    assert out[0].tolist() == [[4.0]] * 16
    assert out[1, :8].tolist() == [[12.0]] * 8


def test_columns_that_are_no_multiple_of_a_tile():
    # huggingface/kernels-community#1153: N = 33, rows of value 2^i, row i is K 2^i
    a = BlockScaled((np.ones((4, 64)) * 2.0 ** np.arange(4)[:, None]).astype(F).astype(E4M3.dtype), np.ones((4, 1), F))
    b = BlockScaled(np.ones((1, 33, 64), F).astype(E4M3.dtype), np.ones((1, 1, 1), F), (128, 128))
    out = grouped_gemm_contiguous(a, b, np.zeros(4, np.int32)).out.astype(F)
    np.testing.assert_array_equal(out, np.tile([[64.0], [128.0], [256.0], [512.0]], (1, 33)))


def test_no_rows_and_other_rules():
    rng = np.random.default_rng(0)
    a, b = operands(rng, 6, 2)
    none = grouped_gemm_contiguous(a.rows(slice(0, 0)), b, np.zeros(0, np.int32))
    assert none.out.shape == (0, 5)
    rule = KERNELS["deepgemm_sm90"]
    layout = np.array([1, 1, 1, -1, -1, -1])
    got = grouped_gemm_contiguous(a, b, layout, out_dtype=F, rule=rule)
    np.testing.assert_array_equal(got.out[:3], gemm(a.rows(slice(0, 3)), b[1], out_dtype=F, **rule._asdict()))


def test_errors():
    rng = np.random.default_rng(0)
    a, b = operands(rng, 6, 2)
    with pytest.raises(ValueError, match="2 ids outside -1 to 1"):
        grouped_gemm_contiguous(a, b, np.array([0, 0, 0, 2, 5, 1]))
    with pytest.raises(ValueError, match="one integer per row of a"):
        grouped_gemm_contiguous(a, b, np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="one integer per row of a"):
        contiguous_as_read(a, b, np.zeros(6))
    with pytest.raises(ValueError, match="a with 2 axes and b"):
        grouped_gemm_contiguous(a, a, np.zeros(6, np.int32))
    with pytest.raises(ValueError, match=r"ends \[3, 2\] with groups starting at \[0, 4\]"):
        grouped_gemm_prefix_sum(a, b, [3, 2], 4)
    with pytest.raises(ValueError, match="one end per group"):
        grouped_gemm_prefix_sum(a, b, [3])
    batch, _ = operands(rng, (2, 4), 2)
    with pytest.raises(ValueError, match="each must lie between 0 and the 4 rows"):
        grouped_gemm_masked(batch, b, np.array([2, 5]))
    with pytest.raises(ValueError, match="one integer per group"):
        grouped_gemm_masked(batch, b, np.array([2]))
    with pytest.raises(ValueError, match="has 2 groups and b"):
        grouped_gemm_masked(batch, operands(rng, 1, 3)[1], np.array([2, 2]))
    with pytest.raises(ValueError, match="counts"):
        contiguous_layout([1, -1])

"""The blockwise product against fractions, its independence of machine and batch, and E5M2."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fp8_oracle import bfloat16, exact_gemm, float32
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8 import E4M3, E5M2, KERNELS, BlockScaled, GemmRule, block_product, decode, encode, gemm, quantize
from fp8.exact import E4M3_PRODUCTS, Extent, codes_extent, exact_operands, format_extent, is_exact
from fp8.goldens import GoldenCase

F = np.float32
ROOT = Path(__file__).parents[2]


def random_codes(rng, shape, fmt=E4M3):
    """Every finite code alike, so that all exponents and subnormals meet."""
    finite = np.flatnonzero(np.isfinite(fmt.values())).astype(np.uint8)
    return rng.choice(finite, shape).view(fmt.dtype)


def random_operands(rng, m, n, k, b_rows=128, a_format=E4M3, b_format=E4M3, block_k=128):
    kb = -(-k // block_k)
    a_scale = np.exp(rng.uniform(-8, 8, (m, kb))).astype(F)
    b_scale = np.exp(rng.uniform(-8, 8, (-(-n // b_rows), kb))).astype(F)
    a = BlockScaled(random_codes(rng, (m, k), a_format), a_scale, (1, block_k))
    return a, BlockScaled(random_codes(rng, (n, k), b_format), b_scale, (b_rows, block_k))


def as_float32(fractions):
    return np.array([[float(value) for value in row] for row in fractions], F)


def test_by_hand():
    a = BlockScaled(np.array([[1, 2, 3], [0, 0.5, -4]], F).astype(E4M3.dtype), np.array([[2], [1]], F))
    b = BlockScaled(np.array([[1, 1, 1], [2, 0, -1]], F).astype(E4M3.dtype), np.array([[0.5]], F), (128, 128))
    assert gemm(a, b).astype(F).tolist() == [[6, -1], [-1.75, 2]]
    assert gemm(a, b, out_dtype=F).dtype == F
    assert gemm(a, b).dtype == ml_dtypes.bfloat16


def test_blocks_are_scaled_separately_by_hand():
    a = BlockScaled(np.ones((1, 130), F).astype(E4M3.dtype), np.array([[1, 100]], F))
    b = BlockScaled(np.ones((129, 130), F).astype(E4M3.dtype), np.array([[1, 2], [3, 4]], F), (128, 128))
    d = gemm(a, b, out_dtype=F)
    assert d[0, [0, 127, 128]].tolist() == [128 + 400, 128 + 400, 384 + 800]


@pytest.mark.parametrize("order", ["a_then_b", "b_then_a", "scales_first"])
@pytest.mark.parametrize("promotion", ["mul_add", "fma"])
@pytest.mark.parametrize(("k", "b_rows"), [(128, 128), (300, 1), (40, 2), (256, 128)])
def test_exact_equals_fractions(order, promotion, k, b_rows):
    a, b = random_operands(np.random.default_rng(k), 3, 4, k, b_rows)
    expected = as_float32(exact_gemm(a, b, order, promotion == "fma"))
    np.testing.assert_array_equal(gemm(a, b, promotion=promotion, scale_order=order, out_dtype=F), expected)
    stored = [[float(bfloat16(Fraction(float(value)))) for value in row] for row in expected]
    np.testing.assert_array_equal(gemm(a, b, promotion=promotion, scale_order=order).astype(np.float64), stored)


def test_adversarial_block_is_exact():
    # 127 times the largest product beside the smallest: 43 bits; one rounding to float32 of the exact sum
    a = np.full((3, 128), 448.0)
    a[:, 0], a[1, 1:], a[2, 64:] = 2.0**-9, 448.0 * (-1.0) ** np.arange(127), -448.0
    b = np.full((2, 128), 448.0)
    b[:, 0] = 2.0**-9
    one = np.ones((3, 1), F)
    got = gemm(BlockScaled(encode(a, E4M3), one), BlockScaled(encode(b, E4M3), one[:2]), out_dtype=F)
    for i in range(3):
        exact = sum(Fraction(x) * Fraction(y) for x, y in zip(a[i], b[0]))
        assert Fraction(float(got[i, 0])) == float32(exact)


@pytest.mark.long
def test_exact_equals_fractions_on_many_operands():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a, b = random_operands(rng, 2, 3, int(rng.integers(1, 400)), int(rng.choice([1, 128])))
        np.testing.assert_array_equal(gemm(a, b, out_dtype=F), as_float32(exact_gemm(a, b)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 100))
@settings(max_examples=20)
def test_rows_do_not_know_their_neighbours(parts, seed):
    rng = np.random.default_rng(seed)
    a, b = random_operands(rng, sum(parts), 530, 260)
    whole = gemm(a, b, out_dtype=F)
    start = 0
    for size in parts:
        np.testing.assert_array_equal(
            gemm(a.rows(slice(start, start + size)), b, out_dtype=F), whole[start : start + size]
        )
        start += size
    order = rng.permutation(a.shape[0])
    np.testing.assert_array_equal(gemm(a.rows(order), b, out_dtype=F), whole[order])


def test_block_product_is_the_same_product():
    a, b = random_operands(np.random.default_rng(0), 150, 4300, 300)
    weight = decode(b.codes).T
    expected = gemm(a, b, out_dtype=F)
    for layout in (np.ascontiguousarray(weight), weight):
        np.testing.assert_array_equal(block_product(decode(a.codes), a.scale, layout, b.scale), expected)


CASE = GoldenCase("digest", "dense", 150, 600, 1000)


@pytest.mark.parametrize("coretype", ["Haswell", "SkylakeX"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_same_bytes_on_every_blas_kernel_and_thread_count(coretype, threads):
    """OPENBLAS_CORETYPE is for OpenBLAS; other libraries ignore it and must give the same bytes all the more."""
    names = {"OPENBLAS_CORETYPE": coretype, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    program = f"from fp8.goldens import GoldenCase; print({CASE!r}.digest())"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=os.environ | names, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == CASE.digest()


def test_sequential_float32_by_hand_and_by_loop():
    a = BlockScaled(encode(np.array([[256.0, 2**-9, 2**-9]]), E4M3), np.ones((1, 1), F))
    b = BlockScaled(encode(np.array([[448.0, 1.0, 1.0], [1.0, 1.0, 448.0]]), E4M3), np.ones((2, 1), F))
    got = gemm(a, b, "float32_sequential", out_dtype=F)
    assert got.tolist() == [[114688.0, 256 + 2**-9 + 0.875]]  # 2^-9 is a quarter of an ulp of 114688
    assert gemm(a, b, out_dtype=F)[0, 0] == 114688.0
    a, b = random_operands(np.random.default_rng(2), 3, 5, 200)
    x, y = a.codes.astype(F), b.codes.astype(F)
    for i in range(3):
        for j in range(5):
            total = F(0)
            for index, start in enumerate((0, 128)):
                partial = F(0)
                for k in range(start, min(start + 128, 200)):
                    partial = partial + x[i, k] * y[j, k]
                total = total + partial * a.scale[i, index] * b.scale[0, index]
            assert gemm(a, b, "float32_sequential", out_dtype=F)[i, j] == total


def test_certificate_by_hand():
    e4m3, e5m2 = format_extent(E4M3), format_extent(E5M2)
    assert is_exact(E4M3_PRODUCTS, e4m3, e4m3)
    assert not is_exact(E4M3_PRODUCTS + 1, e4m3, e4m3)
    assert is_exact(10, e4m3, e5m2)
    assert not is_exact(11, e4m3, e5m2)
    assert not is_exact(2, e5m2, e5m2)
    one = Extent(1.0, 1.0)
    assert is_exact(2**53, one, one)
    assert not is_exact(2**53 + 2, one, one)
    assert codes_extent(encode(np.array([3.0, -0.5, 0.0, np.nan]), E5M2)) == (3.0, 0.5)


def counterexample():
    """127 x (448 * 57344) + 2^-9 * 2^-16 does not fit 53 bits."""
    a, b = np.full((1, 128), 448.0), np.full((2, 128), 57344.0)
    a[0, 0], b[0, 0] = 2.0**-9, 2.0**-16
    a[0, 2::2] = -448.0
    return a, b


def test_e4m3_by_e5m2_is_split_into_exact_bands():
    a, b = counterexample()
    assert float((a @ b.T)[0, 0]) != sum(Fraction(x) * Fraction(y) for x, y in zip(a[0], b[0]))
    one = np.ones((2, 1), F)
    left, right = BlockScaled(encode(a, E4M3), one[:1]), BlockScaled(encode(b, E5M2), one)
    assert len(exact_operands(left.codes, right.codes, 128).a) == 2
    for got, x, y in ((gemm(left, right, out_dtype=F), a, b), (gemm(right, left, out_dtype=F).T, a, b)):
        for j in range(2):
            exact = sum(Fraction(p) * Fraction(q) for p, q in zip(x[0], y[j]))
            assert Fraction(float(got[0, j])) == float32(exact)


def test_bands_are_added_with_one_rounding():
    """2^29 + 2^5 is a tie of float32, and 2^-25 above it is lost in a float64 sum of both bands."""
    a, b = np.full((1, 66), 2.0**8), np.full((1, 66), 2.0**15)
    a[0, 64:], b[0, 64:] = [2.0**5, 2.0**-9], [1.0, 2.0**-16]
    assert float((a @ b.T)[0, 0]) == 2.0**29 + 2.0**5
    one = np.ones((1, 1), F)
    got = gemm(BlockScaled(encode(a, E4M3), one), BlockScaled(encode(b, E5M2), one), out_dtype=F)
    assert got[0, 0] == 2.0**29 + 2.0**6


@pytest.mark.parametrize("swap", [False, True])
def test_e4m3_by_e5m2_equals_fractions(swap):
    rng = np.random.default_rng(9)
    formats = (E5M2, E4M3) if swap else (E4M3, E5M2)
    a, b = random_operands(rng, 3, 3, 200, 1, *formats)
    np.testing.assert_array_equal(gemm(a, b, out_dtype=F), as_float32(exact_gemm(a, b)))


def test_narrow_e5m2_needs_no_split_and_wide_pairs_are_refused():
    rng = np.random.default_rng(1)
    values = rng.choice([0.5, 1.0, -1.5, 4.0], (2, 128))
    one = np.ones((2, 1), F)
    left, right = BlockScaled(encode(values, E5M2), one), BlockScaled(encode(values, E5M2), one)
    assert len(exact_operands(left.codes, right.codes, 128).a) == 1
    np.testing.assert_array_equal(gemm(left, right, out_dtype=F), values @ values.T)
    a, b = random_operands(rng, 2, 2, 128, 1, E5M2, E5M2)
    with pytest.raises(ValueError, match="E5M2 x E5M2 over 128 products is not exact in float64"):
        gemm(a, b)
    assert np.isfinite(gemm(a, b, "float32_sequential", out_dtype=F)).all()


def test_infinities_of_e5m2():
    one = np.ones((1, 1), F)
    left = BlockScaled(encode(np.array([[1.0, 2.0**-9] * 20]), E4M3), one)
    values = np.array([[57344.0, 2.0**-16] * 20])
    values[0, 0] = np.inf
    right = BlockScaled(encode(values, E5M2, "nan"), one)
    assert gemm(left, right)[0, 0] == np.inf
    assert gemm(right, left)[0, 0] == np.inf


def test_one_block_as_long_as_k_promotes_once():
    rng = np.random.default_rng(4)
    a, b = random_operands(rng, 2, 3, 300, 3, block_k=300)
    np.testing.assert_array_equal(gemm(a, b, out_dtype=F), as_float32(exact_gemm(a, b)))


def test_nan_stays_in_its_row_and_column():
    a, b = random_operands(np.random.default_rng(0), 3, 4, 130)
    raw = a.codes.view(np.uint8).copy()
    raw[1, 129] = 0x7F
    for rule in KERNELS.values():
        if rule.accumulator == "blackwell":
            continue
        got = gemm(BlockScaled(raw.view(E4M3.dtype), a.scale), b, **rule._asdict(), out_dtype=F)
        clean = gemm(a, b, **rule._asdict(), out_dtype=F)
        assert np.isnan(got[1]).all()
        assert (got.view(np.uint32)[1] == 0x7FC00000).all()
        np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


def test_empty_and_read_only_operands():
    a, b = random_operands(np.random.default_rng(0), 3, 4, 130)
    for array in (a.codes, a.scale, b.codes, b.scale):
        array.flags.writeable = False
    for rule in [*KERNELS.values(), GemmRule("float32_sequential")]:
        if rule.accumulator != "blackwell":
            assert np.isfinite(gemm(a, b, **rule._asdict(), out_dtype=F)).all()
        assert gemm(a.rows(slice(0, 0)), b, **rule._asdict()).shape == (0, 4)
    nothing = quantize(np.zeros((2, 0), F))
    assert gemm(nothing, nothing).astype(F).tolist() == [[0, 0], [0, 0]]
    strided = BlockScaled(np.asfortranarray(a.codes), np.asfortranarray(a.scale))
    np.testing.assert_array_equal(gemm(strided, b), gemm(a, b))


def test_errors():
    a, b = random_operands(np.random.default_rng(0), 3, 4, 130)
    for match, arguments in {
        "accumulator = 'fast'": {"accumulator": "fast"},
        "promotion = 'none'": {"promotion": "none"},
        "scale_order = 'both'": {"scale_order": "both"},
        "shift = 'round'": {"shift": "round"},
        "out_dtype = 'float16'": {"out_dtype": np.float16},
    }.items():
        with pytest.raises(ValueError, match=match):
            gemm(a, b, **arguments)
    with pytest.raises(ValueError, match="same K"):
        gemm(a, quantize(np.ones((2, 131), F)))
    with pytest.raises(ValueError, match=r"a in blocks of \(128, 128\)"):
        gemm(b, a)
    with pytest.raises(ValueError, match=r"of \(1, 64\)"):
        gemm(a, quantize(np.ones((2, 130), F), (1, 64)))
    with pytest.raises(ValueError, match="format for scales"):
        gemm(a, BlockScaled(np.ones((2, 130), F).astype(ml_dtypes.float8_e8m0fnu), np.ones((2, 2), F)))

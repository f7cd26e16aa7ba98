"""Tensor-core sums against fractions, and against values worked out by hand."""

from fractions import Fraction

import numpy as np
import pytest
from fp8_oracle import float32, fractions_of, fused_sum

from fp8 import E4M3, E4M3FNUZ, E5M2, KERNELS, BlockScaled, GemmRule, decode, encode, gemm, mma_step, quantize

F = np.float32


def one_step(a, b, c=None, **arguments):
    """mma_step of one row and one column."""
    c = None if c is None else np.array([[c]], F)
    return float(mma_step(encode(np.array([a]), E4M3), encode(np.array([b]), E4M3), c, **arguments)[0, 0])


def test_terms_are_cut_towards_zero_below_the_largest_exponent_by_hand():
    # the largest product is 2^16 (256 * 256), so everything is cut to multiples of 2^3
    assert one_step([256, 2.5], [256, 3.0]) == 2**16  # 7.5 is cut to 0
    assert one_step([256, -2.5], [256, 3.0]) == 2**16
    assert one_step([256, -2.5], [256, 3.0], shift="sign_fill") == 2**16 - 8  # -7.5 is cut to -8
    assert one_step([256, 8.0], [256, 1.0]) == 2**16 + 8
    assert one_step([256, 3.75], [256, 4.0]) == 2**16 + 8  # 15 is cut to 8
    assert one_step([256, 2.5], [256, 3.0], unit="blackwell") == 2**16 + 7.5


def test_accumulator_is_a_term_by_hand():
    assert one_step([1.0], [1.0], 2.0**14) == 2**14  # multiples of 2: 1 is cut to 0
    assert one_step([1.0], [1.0], 2.0**13) == 2**13 + 1
    assert one_step([256.0], [256.0], 7.0) == 2**16
    assert one_step([1.0], [1.0], -(2.0**14)) == -(2**14)
    assert one_step([0.0], [1.0], 2.0**-140) == 0.0  # below 2^-126 - 13
    assert one_step([0.0], [1.0], 2.0**-139) == 2.0**-139


def test_product_exponents_are_not_renormalised_by_hand():
    # 1.75 * 1.75 = 3.0625 counts with exponent 0: each 2^-13 is kept, and two of them survive the output's 13 bits
    tiny = [2.0**-7] * 2
    assert one_step([1.75, *tiny], [1.75, 2.0**-6, 2.0**-6]) == 3.0625 + 2.0**-12
    assert one_step([1.75, tiny[0]], [1.75, 2.0**-6]) == 3.0625
    # a subnormal counts with exponent -6, whatever its leading bit
    assert one_step([2.0**-9, 2.0**-6], [2.0**-6, 2.0**-6]) == 2.0**-15 + 2.0**-12


def test_output_is_cut_by_hand():
    # 32 products of 256 * 256 = 2^21, plus one of 2^3: the sum needs more than 14 bits
    a, b = [256.0] * 31 + [8.0], [256.0] * 31 + [1.0]
    exact = 31 * 2**16 + 8
    assert exact % 2**7 == 8
    assert one_step(a, b) == exact - 8
    assert one_step(a, b, unit="blackwell") == exact


def test_zeros_specials_and_overflow():
    assert one_step([0.0, 0.0], [1.0, 448.0]) == 0.0
    assert np.signbit(one_step([-0.0], [1.0], -0.0)) == np.signbit(0.0)
    nan = mma_step(encode(np.array([[np.nan, 1.0]]), E4M3), encode(np.ones((1, 2)), E4M3))
    assert nan.view(np.uint32)[0, 0] == 0x7FFFFFFF
    infinite = encode(np.array([[np.inf, 1.0]]), E5M2, "nan")
    assert mma_step(infinite, encode(np.ones((1, 2)), E5M2))[0, 0] == np.inf
    assert (
        mma_step(infinite, encode(np.ones((1, 2)), E5M2), np.array([[-np.inf]], F)).view(np.uint32)[0, 0] == 0x7FFFFFFF
    )
    largest = np.array([[np.finfo(F).max]], F)
    assert mma_step(encode(np.ones((1, 1)), E4M3), encode(np.ones((1, 1)), E4M3), largest, "blackwell") == largest
    assert mma_step(encode(np.ones((1, 1)), E4M3), encode(np.ones((1, 1)), E4M3), largest)[0, 0] == 2.0**128 - 2.0**114


def random_dots(rng, count):
    """Rows of every kind: all codes alike, bell-shaped, few exponents, many zeros, subnormals, all negative; with C."""
    values = E4M3.values()
    finite = values[np.isfinite(values)]
    rows = np.empty((count, 2, 32))
    for i in range(count):
        kind = i % 5
        if kind == 0:
            rows[i] = rng.choice(finite, (2, 32))
        elif kind == 1:
            rows[i] = rng.standard_normal((2, 32)) * 2.0 ** rng.integers(-8, 7)
        elif kind == 2:
            rows[i] = rng.choice([1.0, -1.125, 1.875, 2.0], (2, 32)) * 2.0 ** rng.integers(-4, 4, (2, 32))
        elif kind == 3:
            rows[i] = np.where(rng.random((2, 32)) < 0.8, 0.0, rng.standard_normal((2, 32)) * 300)
        else:
            rows[i] = rng.integers(-9, 10, (2, 32)) * 2.0**-9
            rows[i, 0] = -np.abs(rows[i, 0])
    size = np.exp(rng.uniform(np.log(1e-5), np.log(1e5), count))
    c = np.where(rng.random(count) < 0.15, 0.0, size * rng.choice([-1, 1], count)).astype(F)
    c[:: count // 20] = rng.choice([1e30, -3e38, 1e-42, 2.0**-126], c[:: count // 20].size)
    return encode(rows, E4M3), c


def hold_dots(count, unit, shift, fraction_bits, output_bits):
    codes, c = random_dots(np.random.default_rng(11), count)
    for i in range(count):
        got = mma_step(codes[i, :1], codes[i, 1:], c[i].reshape(1, 1), unit, shift=shift)[0, 0]
        a, b = fractions_of(decode(codes[i, 0])), fractions_of(decode(codes[i, 1]))
        expected = fused_sum(a, b, Fraction(float(c[i])), fraction_bits, output_bits, floor=shift == "sign_fill")
        assert Fraction(float(got)) == expected, i


@pytest.mark.parametrize("shift", ["truncate", "sign_fill"])
@pytest.mark.parametrize(("unit", "bits"), [("hopper", (13, 13)), ("blackwell", (25, 23))])
def test_steps_equal_fractions(unit, bits, shift):
    hold_dots(300, unit, shift, *bits)


@pytest.mark.long
@pytest.mark.parametrize("shift", ["truncate", "sign_fill"])
@pytest.mark.parametrize(("unit", "bits"), [("hopper", (13, 13)), ("blackwell", (25, 23))])
def test_ten_thousand_steps_equal_fractions(unit, bits, shift):
    hold_dots(10_000, unit, shift, *bits)


def test_e5m2_and_mixed_steps_equal_fractions():
    rng = np.random.default_rng(3)
    for formats, smallest in (((E5M2, E5M2), (-14, -14)), ((E4M3, E5M2), (-6, -14))):
        for _ in range(40):
            a, b = (rng.standard_normal(32) * 2.0 ** rng.integers(-14, 8, 32) for _ in range(2))
            a, b = encode(a[None], formats[0]), encode(b[None], formats[1])
            c = F(rng.standard_normal())
            for unit, bits in (("hopper", (13, 13)), ("blackwell", (25, 23))):
                got = mma_step(a, b, c.reshape(1, 1), unit)[0, 0]
                x, y = fractions_of(decode(a)), fractions_of(decode(b))
                assert Fraction(float(got)) == fused_sum(x, y, Fraction(float(c)), *bits, smallest=smallest)


def test_block_scales_act_inside_a_blackwell_instruction():
    rng = np.random.default_rng(8)
    for _ in range(60):
        codes = encode(rng.standard_normal((2, 32)) * 2.0 ** rng.integers(-6, 6, (2, 32)), E4M3)
        exponents = rng.integers(-60, 60, 2)
        c = F(rng.standard_normal() * 2.0 ** rng.integers(-120, 120))
        scales = [np.array([2.0**exponent], F) for exponent in exponents]
        got = mma_step(codes[:1], codes[1:], c.reshape(1, 1), "blackwell", *scales)[0, 0]
        a, b = fractions_of(decode(codes[0])), fractions_of(decode(codes[1]))
        expected = fused_sum(a, b, Fraction(float(c)), 25, 23, scale=int(exponents.sum()))
        assert Fraction(float(got)) == expected


def test_subnormal_results_are_cut_not_rounded():
    scale = np.array([2.0**-75], F)
    for value, expected in ((1.5, 0.0), (3.5, 2.0**-149), (-3.5, -(2.0**-149))):  # times 2^-150
        got = mma_step(
            encode(np.array([[value]]), E4M3), encode(np.ones((1, 1)), E4M3), None, "blackwell", scale, scale
        )
        assert got[0, 0] == expected


def chain(a, b, block_k, bits, scales=None):
    """Partial sums of each block as a chain of instructions over it (or one chain with scale exponents)."""
    partials, total = [], Fraction(0)
    for index, start in enumerate(range(0, len(a), block_k)):
        total = Fraction(0) if scales is None else total
        for step in range(start, min(start + block_k, len(a)), 32):
            stop = min(step + 32, start + block_k, len(a))
            scale = 0 if scales is None else scales[index]
            total = fused_sum(a[step:stop], b[step:stop], total, *bits, scale=scale)
        partials.append(total)
    return partials


@pytest.mark.parametrize("k", [32, 128, 200])
def test_hopper_gemm_equals_fractions(k):
    rng = np.random.default_rng(k)
    a = quantize(rng.standard_normal((3, k)).astype(F))
    b = quantize(rng.standard_normal((4, k)).astype(F), (128, 128))
    for name in ("deepseek_v3_triton", "deepgemm_sm90", "cublas_2d1d"):
        rule = KERNELS[name]
        got = gemm(a, b, **rule._asdict(), out_dtype=F)
        for i in range(3):
            for j in range(4):
                total = Fraction(0)
                x, y = fractions_of(a.codes[i]), fractions_of(b.codes[j])
                for index, partial in enumerate(chain(x, y, 128, (13, 13))):
                    sa, sb = Fraction(float(a.scale[i, index])), Fraction(float(b.scale[0, index]))
                    first, last = {
                        "a_then_b": (float32(partial * sa), sb),
                        "b_then_a": (float32(partial * sb), sa),
                        "scales_first": (partial, float32(sa * sb)),
                    }[rule.scale_order]
                    total = float32(total + first * last)
                assert Fraction(float(got[i, j])) == total


def test_blackwell_gemm_equals_fractions():
    rng = np.random.default_rng(0)
    a = quantize((rng.standard_normal((2, 300)) * [[1], [1e-3]]).astype(F), scale_format="ue8m0")
    b = quantize(rng.standard_normal((3, 300)).astype(F), (128, 128), scale_format="ue8m0")
    got = gemm(a, b, **KERNELS["deepgemm_sm100"]._asdict(), out_dtype=F)
    for i in range(2):
        for j in range(3):
            scales = [int(np.log2(x) + np.log2(y)) for x, y in zip(a.scale[i], b.scale[0])]
            total = chain(fractions_of(a.codes[i]), fractions_of(b.codes[j]), 128, (25, 23), scales)[-1]
            assert Fraction(float(got[i, j])) == total


def test_blackwell_zero_blocks_with_large_scales_do_not_win():
    """A block of zeros has no exponent, however large its scale: what came before it stays."""
    codes = encode(np.array([[1.0] * 128 + [0.0] * 128]), E4M3)
    a = BlockScaled(codes, np.array([[2.0**-60, 2.0**60]], F))
    assert gemm(a, a, "blackwell", out_dtype=F)[0, 0] == 128 * 2.0**-120


def test_promotion_is_what_keeps_hopper_accurate():
    """DeepSeek-V3 report section 3.3: without promotion the loss grows with K; all-positive sums show it most."""
    rng = np.random.default_rng(0)
    x, y = (np.abs(rng.standard_normal((16, 4096))) for _ in range(2))
    a, b = (encode(value * 100, E4M3) for value in (x, y))
    exact = decode(a) @ decode(b).T
    errors = []
    for block_k in (128, 4096):
        one = np.ones((16, 4096 // block_k), F)
        got = gemm(BlockScaled(a, one, (1, block_k)), BlockScaled(b, one, (1, block_k)), "hopper", out_dtype=F)
        errors.append(np.abs(got / exact - 1).max())
    assert errors[0] < 1e-3
    assert errors[1] > 2e-2


def test_rows_of_a_hopper_gemm_do_not_depend_on_panels():
    rng = np.random.default_rng(0)
    a = quantize(rng.standard_normal((140, 160)).astype(F))
    b = quantize(rng.standard_normal((530, 160)).astype(F), (128, 128))
    rule = GemmRule("hopper", "fma", "scales_first")
    whole = gemm(a, b, **rule._asdict(), out_dtype=F)
    np.testing.assert_array_equal(gemm(a.rows([139, 3]), b, **rule._asdict(), out_dtype=F), whole[[139, 3]])
    tail = BlockScaled(b.codes[512:], b.scale[4:], b.block)
    np.testing.assert_array_equal(gemm(a, tail, **rule._asdict(), out_dtype=F), whole[:, 512:])


def test_errors():
    a = encode(np.ones((2, 32)), E4M3)
    for match, call in {
        "unit 'ampere'": lambda: mma_step(a, a, unit="ampere"),
        "shift 'up'": lambda: mma_step(a, a, shift="up"),
        "at most 32": lambda: mma_step(encode(np.ones((2, 33)), E4M3), encode(np.ones((2, 33)), E4M3)),
        r"c must be float32 \(2, 2\), not float64 \(2, 2\)": lambda: mma_step(a, a, np.ones((2, 2))),
        "come in pairs": lambda: mma_step(a, a, unit="blackwell", a_scale=np.ones(2, F)),
        "only Blackwell": lambda: mma_step(a, a, a_scale=np.ones(2, F), b_scale=np.ones(2, F)),
        "1 of 2 scales are not powers of two": lambda: mma_step(
            a, a, unit="blackwell", a_scale=np.array([1, 3], F), b_scale=np.ones(2, F)
        ),
        "multiply E4M3 and E5M2, not E4M3FNUZ": lambda: mma_step(encode(np.ones((1, 2)), E4M3FNUZ), a[:1, :2]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    ragged = quantize(np.random.default_rng(0).standard_normal((2, 128)).astype(F))
    with pytest.raises(ValueError, match="2 of 2 scales are not powers of two"):
        gemm(ragged, ragged, "blackwell")

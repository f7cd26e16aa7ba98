"""Bounds are never exceeded, are tight enough to be of use, and cover the steps they are made of."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from fp8_oracle import fractions_of

from fp8 import E4M3, E5M2, KERNELS, BlockScaled, GemmRule, encode, gemm, order_free_bound, ordered_bound, quantize
from fp8.bounds import BoundedProduct

F, BF16 = np.float32, ml_dtypes.bfloat16
HOPPER, SEQUENTIAL = KERNELS["deepgemm_sm90"], GemmRule("float32_sequential")
LIMITS = {HOPPER: 40, GemmRule("hopper"): 40, SEQUENTIAL: 150}  # bound over worst error seen


def random_operands(rng, scale_format=None):
    """Shapes with tails; bell-shaped, positive, sparse, widely spread or nearly cancelling values."""
    m, n, k = int(rng.integers(1, 12)), int(rng.integers(1, 12)), int(rng.integers(1, 700))
    kind = rng.integers(5)
    x, y = (rng.standard_normal((rows, k)) for rows in (m, n))
    if kind == 1:
        x, y = np.abs(x), np.abs(y)
    elif kind == 2:
        x = np.where(rng.random(x.shape) < 0.9, 0, x)
    elif kind == 3:
        x, y = x * 2.0 ** rng.integers(-12, 12, x.shape), y * 2.0 ** rng.integers(-12, 12, (n, 1))
    elif kind == 4:
        x[:, k // 2 :] = -x[:, : k - k // 2]
        y[:, k // 2 :] = y[:, : k - k // 2]
    scale_format = scale_format or ("float32", "ue8m0")[int(rng.integers(2))]
    return tuple(quantize(v.astype(F), b, scale_format=scale_format) for v, b in ((x, (1, 128)), (y, (128, 128))))


def hold(count, rules, scale_format=None):
    for seed in range(count):
        a, b = random_operands(np.random.default_rng(seed), scale_format)
        for rule in rules:
            for dtype in (F, BF16):
                got = gemm(a, b, *rule[:2], dtype, rule.scale_order).astype(np.float64)
                ordered, free = ordered_bound(a, b, rule, dtype), order_free_bound(a, b, rule, dtype)
                np.testing.assert_array_equal(ordered.value, free.value)
                error = np.abs(got - ordered.value)
                assert (error <= ordered.bound).all(), (seed, rule, dtype)
                assert (error <= free.bound).all(), (seed, rule, dtype)


def test_never_exceeded():
    hold(25, [HOPPER, SEQUENTIAL, GemmRule("exact"), GemmRule("hopper", "mul_add", "b_then_a")])
    hold(10, [KERNELS["deepgemm_sm100"]], "ue8m0")


@pytest.mark.long
def test_never_exceeded_on_a_thousand_products():
    hold(1000, [HOPPER, SEQUENTIAL])
    hold(200, [GemmRule("exact"), GemmRule("hopper", "fma", "b_then_a"), GemmRule("hopper")])
    hold(200, [KERNELS["deepgemm_sm100"]], "ue8m0")


def tightness(product: BoundedProduct, got) -> float:
    """The largest bound over the worst error seen; 1 would be perfect."""
    return float(product.bound.max() / np.abs(got.astype(np.float64) - product.value).max())


@pytest.mark.parametrize("rule", LIMITS, ids=lambda rule: f"{rule.accumulator}-{rule.promotion}")
@pytest.mark.parametrize("k", [128, 2048, 7168])
@pytest.mark.parametrize("dtype", [F, BF16], ids=["float32", "bfloat16"])
def test_tight_enough(rule, k, dtype, record_property):
    rng = np.random.default_rng(k)
    a = quantize(rng.standard_normal((48, k)).astype(F))
    b = quantize(rng.standard_normal((48, k)).astype(F), (128, 128))
    got = gemm(a, b, *rule[:2], dtype, rule.scale_order)
    ordered = tightness(ordered_bound(a, b, rule, dtype), got)
    free = tightness(order_free_bound(a, b, rule, dtype), got)
    record_property("ordered", ordered)
    record_property("order_free", free)
    print(f"{rule.accumulator} K={k} {np.dtype(dtype).name}: bound / worst error {ordered:.1f}, order-free {free:.0f}")
    assert 1 <= ordered <= LIMITS[rule]
    assert free >= ordered


def test_exact_value_is_the_rational_product():
    a, b = random_operands(np.random.default_rng(7))
    value = ordered_bound(a, b).value
    x, y = fractions_of(a.dequantize(np.float64)[0]), fractions_of(b.dequantize(np.float64)[-1])
    exact = sum((p * q for p, q in zip(x, y)), Fraction(0))
    scale = sum(abs(p * q) for p, q in zip(x, y))
    assert abs(Fraction(float(value[0, -1])) - exact) <= scale * Fraction(2) ** -48


def one_row(values, other):
    one = np.ones((1, 1), F)
    return BlockScaled(encode(np.array([values], F), E4M3), one), BlockScaled(encode(np.array([other], F), E4M3), one)


def test_each_loss_by_hand():
    """Scales of 1 and one block: only the promotion's addition (half a step of the result) comes on top."""
    # 2^16 and 7.5: one term is cut, at multiples of 2^3; the sum fits
    product = ordered_bound(*one_row([256, 2.5], [256, 3.0]), HOPPER, F)
    assert product.value[0, 0] == 2**16 + 7.5
    assert product.bound[0, 0] == pytest.approx(8 + 2.0 ** (16 - 24), rel=1e-6)
    # a product has 6 fraction bits: seven binades below the largest all of them are kept, eight below one may go
    for other, loss in ((2.0, 0), (1.0, 8)):
        product = ordered_bound(*one_row([256, 256], [256, other]), HOPPER, F)
        assert product.bound[0, 0] == pytest.approx(loss + 2.0 ** (16 - 24), rel=1e-6)
    # 31 x 2^16 + 2^9: nothing is cut on the way in, the output may lose what lies between 2^3 and 2^(20 - 13)
    product = ordered_bound(*one_row([256] * 31 + [64], [256] * 31 + [8.0]), HOPPER, F)
    assert product.bound[0, 0] == pytest.approx(2**7 - 2**3 + 2.0 ** (20 - 24), rel=1e-6)
    # products that all fit lose nothing, and a bfloat16 store adds half a step of 2^-7
    product = ordered_bound(*one_row([1.0, 1.0], [1.0, 2.0]), HOPPER, BF16)
    assert product.bound[0, 0] == pytest.approx(2.0 ** (1 - 8) + 2.0 ** (1 - 24), rel=1e-6)
    # 32 carries beyond the first output's width; then, as an accumulator below the largest product, it is cut
    product = ordered_bound(*one_row([1.0] * 32 + [256], [1.0] * 32 + [256]), HOPPER, F)
    assert product.bound[0, 0] == pytest.approx(2.0**-8 - 2.0**-13 + 8 + 2.0 ** (16 - 24), rel=1e-6)
    # float32: 114688 + 2^-9 rounds by half a step of 2^-7 at most, once; the exact products before it not at all
    product = ordered_bound(*one_row([256, 2.0**-9], [448, 1.0]), SEQUENTIAL, F)
    assert product.bound[0, 0] == pytest.approx(2.0 ** (16 - 24), rel=1e-6)
    # a step of the sum twice as long as the products' common one may still round
    product = ordered_bound(*one_row([256, 2.0**-8], [256, 1.0]), SEQUENTIAL, F)
    assert product.bound[0, 0] == pytest.approx(2.0 ** (16 - 24), rel=1e-6)
    product = ordered_bound(*one_row([256, 2.0**-7], [256, 1.0]), SEQUENTIAL, F)
    assert product.bound[0, 0] < 1e-9


def test_a_wrong_kernel_is_caught():
    a, b = (
        quantize(np.random.default_rng(s).standard_normal((20, 512)).astype(F), scale_format="ue8m0") for s in (0, 1)
    )
    product = ordered_bound(a, b, HOPPER)
    good = gemm(a, b, **HOPPER._asdict()).astype(np.float64)
    for wrong in (good * 1.02, gemm(a, BlockScaled(b.codes, b.scale * F(1.1), b.block)).astype(np.float64)):
        assert (np.abs(wrong - product.value) > product.bound).any()
    dropped = BlockScaled(a.codes, np.where(np.arange(4) == 3, 0, a.scale).astype(F), a.block)
    assert (np.abs(gemm(dropped, b).astype(np.float64) - product.value) > product.bound).any()


def test_sign_fill_mixed_formats_and_long_blocks_are_covered():
    rng = np.random.default_rng(0)
    one = np.ones((6, 2), F)
    a = BlockScaled(encode(rng.standard_normal((6, 256)) * 50, E4M3), one)
    b = BlockScaled(encode(rng.standard_normal((6, 256)) * 50, E5M2), one)
    for shift in ("truncate", "sign_fill"):
        product = ordered_bound(a, b, GemmRule("hopper"), F, shift)
        assert (np.abs(gemm(a, b, "hopper", out_dtype=F, shift=shift) - product.value) <= product.bound).all()
    long_a, long_b = (BlockScaled(x.codes, one[:, :1], (1, 256)) for x in (a, a))
    for bound in (ordered_bound, order_free_bound):
        product = bound(long_a, long_b, GemmRule("hopper"), F)
        assert (np.abs(gemm(long_a, long_b, "hopper", out_dtype=F) - product.value) <= product.bound).all()


def test_order_free_bound_holds_for_any_order():
    rng = np.random.default_rng(0)
    codes = [encode(rng.standard_normal((5, 256)) * 100, E4M3) for _ in range(2)]
    one = np.ones((5, 2), F)
    product = order_free_bound(*(BlockScaled(code, one) for code in codes), GemmRule("hopper"), F)
    for _ in range(10):
        order = np.concatenate([rng.permutation(128), 128 + rng.permutation(128)])
        got = gemm(*(BlockScaled(code[:, order], one) for code in codes), "hopper", out_dtype=F)
        assert (np.abs(got - product.value) <= product.bound).all()


def test_errors_and_empty():
    a, b = random_operands(np.random.default_rng(0))
    with pytest.raises(ValueError, match="accumulator = 'fast'"):
        ordered_bound(a, b, GemmRule("fast"))
    with pytest.raises(ValueError, match="same K"):
        order_free_bound(a, quantize(np.ones((2, 5), F)))
    assert ordered_bound(a.rows(slice(0, 0)), b).bound.shape == (0, b.shape[0])

"""A row's bits do not depend on the rows beside it."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8 import quantize
from refmodel import products, rowcounts
from refmodel.linear import DenseWeight, Fp8Weight, grouped_linear, linear, matmul_rows
from refmodel.memory import LINE
from refmodel.products import multiply_tiles, tiles_of

SHAPES = [(256, 256), (192, 768), (512, 1024), (64, 576), (300, 100)]


def weight(K, N, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return DenseWeight.from_rows(rng.normal(size=(N, K)).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_rows_are_independent(K, N, dtype):
    rng = np.random.default_rng(1)
    w, x = weight(K, N, dtype), (rng.normal(size=(600, K)) * np.exp2(rng.integers(-9, 9, (600, K)))).astype(dtype)
    together = linear(x, w)
    for start, stop in [(0, 1), (7, 8), (3, 20), (5, 140), (599, 600), (1, 600), (40, 73)]:
        assert linear(x[start:stop], w).tobytes() == together[start:stop].tobytes()
    order = rng.permutation(600)
    assert linear(x[order], w).tobytes() == together[order].tobytes()


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_any_cut_of_the_rows_gives_the_same_bits(seed, parts):
    rng = np.random.default_rng(seed)
    w = weight(96, 80, np.float32)
    x = rng.normal(size=(sum(parts), 96)).astype(np.float32)
    edges = np.cumsum([0, *parts])
    cut = np.concatenate([linear(x[a:b], w) for a, b in pairwise(edges)])
    assert cut.tobytes() == linear(x, w).tobytes()


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 45), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_grouped_is_each_weight_times_its_own_rows(seed, sizes, poisoned, panels):
    rng = np.random.default_rng(seed)
    edges = np.cumsum([0, *sizes]).tolist()
    cuts = [slice(start, stop) for start, stop in pairwise(edges)]
    N = 128 if panels else 72
    weights = [weight(96, N, np.float32, seed=i) for i in range(len(sizes))]
    if panels:
        weights = [w.in_panels() for w in weights]
    x = rng.normal(size=(edges[-1], 96)).astype(np.float32)
    if poisoned and len(x):
        x[rng.integers(len(x))] = np.nan  # reaches no other row, though calls take in rows of the next group
    with np.errstate(invalid="ignore"):
        got = grouped_linear(x, weights, cuts)
        apart = [linear(x[cut], w) for w, cut in zip(weights, cuts)]
        room = np.full((edges[-1] + 3, N), 7, np.float32)  # rows behind `out` belong to somebody else
        written = grouped_linear(x, weights, cuts, room[:-3])
    assert got.shape == (edges[-1], N)
    assert np.array_equal(got, np.concatenate(apart), equal_nan=True)
    assert np.shares_memory(written, room) or not written.size
    assert np.array_equal(written, got, equal_nan=True)
    assert (room[-3:] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "N"), [(128, 512), (256, 64), (24, 192), (512, 128)])
def test_panels_are_the_same_columns_and_rows_stay_independent(K, N, dtype):
    rng = np.random.default_rng(7)
    whole = weight(K, N, dtype)
    panels = whole.in_panels()
    columns = 256 // panels.matrix.itemsize
    assert (panels.matrix.shape, panels.in_features) == ((N // columns, K, columns), K)
    for n in (0, 63, N - 1):
        np.testing.assert_array_equal(panels.matrix[n // columns, :, n % columns], whole.matrix[:, n])
    x = rng.normal(size=(300, K)).astype(dtype)
    together = linear(x, panels)
    # two sums of K products in any two orders: each is within K ulps of the sum of their magnitudes
    bound = K * np.finfo(dtype).eps * (np.abs(x) @ np.abs(whole.matrix[:, :N]))
    assert (np.abs(together - linear(x, whole)) <= bound).all()
    for start, stop in [(0, 1), (3, 20), (5, 140), (299, 300), (40, 73)]:
        assert linear(x[start:stop], panels).tobytes() == together[start:stop].tobytes()


def test_a_weight_of_many_inputs_or_of_part_of_a_panel_stays_whole():
    for K, N in [(513, 64), (64, 80)]:
        assert weight(K, N, np.float32).in_panels().matrix.shape == (K, N)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "N"), [(40, 80), (256, 64), (512, 200), (1024, 130)])
def test_tiles_are_the_weight_cut_at_steps_and_panels(K, N, dtype):
    rng = np.random.default_rng(8)
    matrix, x = rng.integers(-4, 5, (K, N)).astype(dtype), rng.integers(-4, 5, (6, K)).astype(dtype)
    tiles = tiles_of(matrix)
    steps, columns = max(1, K // 256), 256 // tiles.itemsize
    assert tiles.shape == (-(-N // columns), steps, K // steps, columns)
    for k, n in [(0, 0), (K - 1, N - 1), (K // 2, N // 2)]:
        assert tiles[n // columns, k // (K // steps), k % (K // steps), n % columns] == matrix[k, n]
    for wanted in (1, 5, 6):
        got = multiply_tiles(x, tiles, wanted)
        np.testing.assert_array_equal(got[:, :N], (x @ matrix)[:wanted])
        assert not got[:, N:].any()


def test_few_rows_go_by_tiles_only_where_no_bit_changes(monkeypatch):
    """Whatever BLAS is at work: the probe lets tiles in, or keeps them out."""
    w = weight(512, 200, np.float32)
    x = np.random.default_rng(9).normal(size=(90, 512)).astype(np.float32)
    expected = linear(x, w)
    for start, stop in [(0, 1), (4, 6), (10, 66), (80, 90)]:
        assert linear(x[start:stop], w).tobytes() == expected[start:stop].tobytes()
    true = products.multiply_tiles
    monkeypatch.setattr(rowcounts, "multiply_tiles", lambda *args: np.nextafter(true(*args), np.inf))
    other = rowcounts.RowCounts(w.matrix)
    assert not any(other.in_tiles(rows) for rows in (1, 2, 8, 56))
    assert not rowcounts.row_counts(weight(320, 64, np.float32).matrix).in_tiles(2)  # a step and a quarter


def test_grouped_fp8_is_each_weight_times_its_own_rows():
    rng = np.random.default_rng(6)
    parts = [Fp8Weight.from_parts([quantize(rng.normal(size=(40, 200)).astype(np.float32), (128, 128))]) for _ in "abc"]
    x = quantize(rng.normal(size=(12, 200)).astype(np.float32), (1, 128))
    cuts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    apart = [linear(x.rows(cut), part) for part, cut in zip(parts, cuts)]
    assert grouped_linear(x, parts, cuts).tobytes() == np.concatenate(apart).tobytes()


def test_a_weight_begins_on_a_cache_line():
    assert weight(300, 100, np.float32).matrix.ctypes.data % LINE == 0
    assert weight(64, 128, np.float64).in_panels().matrix.ctypes.data % LINE == 0


def test_product_is_right():
    rng = np.random.default_rng(2)
    rows, x = rng.integers(-8, 8, (5, 7)).astype(float), rng.integers(-8, 8, (3, 7)).astype(float)
    np.testing.assert_array_equal(linear(x, DenseWeight.from_rows(rows)), x @ rows.T)


def test_plan_covers_the_rows_with_allowed_counts():
    counts = rowcounts.row_counts(weight(128, 64, np.float64).matrix)
    for rows in [*range(200), 513, 1000, 1537]:
        for most in (64, 512):
            plan = counts.plan(rows, most)
            ends = [first + count for first, count in plan]
            assert [first for first, _ in plan] == [0, *ends][:-1] if rows else plan == []
            assert all(count <= most and counts.allowed(count) for _, count in plan)
            assert rows <= max(ends, default=0) < rows + rowcounts.ANCHOR + rows // 2 + 1


def test_a_count_that_changes_bits_is_found_and_not_used(monkeypatch):
    """A BLAS whose 4-row kernel rounds otherwise, and one whose every kernel looks at the position."""
    true = np.matmul

    def four_rows_differ(a, b, **kwargs):
        out = true(a, b, **kwargs)
        return np.nextafter(out, np.inf) if a.shape[-2] == 4 else out

    matrix = np.random.default_rng(0).normal(size=(40, 48))
    monkeypatch.setattr(np, "matmul", four_rows_differ)
    counts = rowcounts.RowCounts(matrix)
    assert counts.anchored
    assert counts.allowed(2)
    assert not counts.allowed(4)
    assert all(count != 4 for rows in range(40) for _, count in counts.plan(rows))

    def position_matters(a, b, **kwargs):
        out = true(a, b, **kwargs)
        return out * (1 + np.arange(a.shape[-2])[:, None] * 2.0**-50)

    monkeypatch.setattr(np, "matmul", position_matters)
    counts = rowcounts.RowCounts(matrix)
    assert not counts.anchored
    assert counts.plan(3) == [(0, 1), (1, 1), (2, 1)]


def test_stacked_products_are_independent_too():
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(4, 77, 64)), rng.normal(size=(4, 64, 48))
    together = matmul_rows(x, w)
    np.testing.assert_allclose(together, x @ w, rtol=1e-12)
    assert matmul_rows(np.ascontiguousarray(x[:, 13:18]), w).tobytes() == together[:, 13:18].tobytes()
    transposed = np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2)
    blocks = matmul_rows(x[:, None], transposed[:, None])  # key blocks: one more axis
    assert blocks.shape == (4, 1, 77, 48)


def test_fp8_equals_fractions():
    rng = np.random.default_rng(4)
    w_q = quantize(rng.normal(size=(40, 200)).astype(np.float32), (128, 128))
    x_q = quantize(rng.normal(size=(3, 200)).astype(np.float32), (1, 128))
    got = linear(x_q, Fp8Weight.from_parts([w_q]))
    for t in range(3):
        for n in range(0, 40, 13):
            total = np.float32(0)
            for b, (start, stop) in enumerate([(0, 128), (128, 200)]):
                exact = sum(
                    Fraction(float(x_q.codes[t, k])) * Fraction(float(w_q.codes[n, k])) for k in range(start, stop)
                )
                total += np.float32(float(exact)) * x_q.scale[t, b] * w_q.scale[n // 128, b]
            assert got[t, n] == total


def test_fp8_parts_with_their_own_grid_stand_side_by_side():
    rng = np.random.default_rng(5)
    parts = [quantize(rng.normal(size=(n, 256)).astype(np.float32), (128, 128)) for n in (32, 200, 64)]
    x = quantize(rng.normal(size=(9, 256)).astype(np.float32), (1, 128))
    joined = linear(x, Fp8Weight.from_parts(parts))
    apart = np.concatenate([linear(x, Fp8Weight.from_parts([part])) for part in parts], axis=1)
    assert joined.tobytes() == apart.tobytes()
    lazy = Fp8Weight.from_parts(parts, decoded=False)  # a weight too large to keep decoded: the same bits
    assert lazy.matrix is None
    assert linear(x, lazy).tobytes() == joined.tobytes()


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="float64 weight of 256 inputs"):
        linear(np.zeros((1, 255)), weight(256, 16, np.float64))
    with pytest.raises(ValueError, match="takes BlockScaled rows"):
        linear(np.zeros((1, 128)), Fp8Weight.from_parts([quantize(np.ones((16, 128), np.float32), (128, 128))]))

import numpy as np
import pytest

from refmodel.cache import LatentCache, PagePool


def filled(pool, tokens, seed):
    cache, rows = LatentCache(pool), np.random.default_rng(seed).normal(size=(tokens, pool.width))
    cache.write(0, 0, rows)
    cache.length = tokens
    return cache, rows


def test_rows_come_back_whatever_the_pages():
    pool = PagePool(1, 4, np.float64)
    a, rows_a = filled(pool, 100, 0)
    b, rows_b = filled(pool, 200, 1)
    a.write(0, 100, rows_b[:70])  # a grows after b took pages: its table is not contiguous
    a.length = 170
    np.testing.assert_array_equal(a.rows(0), np.concatenate([rows_a, rows_b[:70]]))
    np.testing.assert_array_equal(b.rows(0), rows_b)
    assert a.block_table != sorted(range(a.block_table[0], a.block_table[0] + 3))


def test_blocks_are_zero_behind_the_last_token():
    pool = PagePool(1, 4, np.float64)
    cache, rows = filled(pool, 70, 0)
    blocks = np.full((2, 64, 4), np.nan)
    cache.read_blocks(0, 65, blocks)
    np.testing.assert_array_equal(blocks.reshape(128, 4)[:65], rows[:65])
    assert (blocks.reshape(128, 4)[65:] == 0).all()
    np.testing.assert_array_equal(cache.rows(0), rows)  # a copy was zeroed, not the page


def test_rows_behind_a_gap_count_once_it_is_filled():
    cache, row = LatentCache(PagePool(2, 4, np.float64)), np.ones((10, 4))
    cache.write(0, 3, row[:2])
    cache.write(0, 7, row[:1])
    assert cache.written == [0, 0]
    cache.write(0, 0, row[:3])
    assert cache.written == [5, 0]
    cache.write(0, 5, row[:2])
    assert cache.written == [8, 0]
    cache.write(0, 6, row[:1])  # a shorter run of drafts in place of rejected ones
    assert cache.written == [7, 0]
    cache.write(0, 9, row[:1])
    cache.truncate(0)
    cache.write(0, 0, row[:9])
    assert cache.written == [9, 0]  # what was behind the gap is forgotten


def test_truncating_gives_pages_back():
    pool = PagePool(2, 4, np.float64, max_pages=4)
    cache, rows = filled(pool, 250, 0)
    with pytest.raises(ValueError, match="max_pages = 4"):
        LatentCache(pool).reserve(1)
    cache.truncate(64)
    assert len(cache.block_table) == 1
    assert cache.written == [64, 0]
    other, _ = filled(pool, 192, 1)
    np.testing.assert_array_equal(cache.rows(0), rows[:64])
    other.release()
    cache.release()
    assert pool.num_free == pool.num_pages == 4


def test_refuses_to_truncate_forward():
    cache, _ = filled(PagePool(1, 4, np.float64), 10, 0)
    with pytest.raises(ValueError, match="truncate to 11 tokens: the cache holds 10"):
        cache.truncate(11)

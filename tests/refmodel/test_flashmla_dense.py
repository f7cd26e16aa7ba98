"""Dense paged decode: FlashMLA's conventions, by hand and against a loop."""

import ml_dtypes
import numpy as np
import pytest
from flashmla_oracle import DENSE_LSE, DENSE_OUT, close, dense
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.flashmla import flash_decode, gather_rows, merge_splits, split_edges, split_plan

PAST_THE_END = 2147480000  # what FlashMLA's tests put into the unused part of a block table


def make_case(seed, lengths, s_q, h_q, h_kv, d, dtype=np.float64):
    """Pages in random physical places, NaN in every row that no request owns, absurd ids past the end."""
    rng = np.random.default_rng(seed)
    used = [-(-n // 64) for n in lengths]
    places = rng.permutation(sum(used) + 3)
    cache = np.full((len(places), 64, h_kv, d), np.nan)
    table = np.full((len(lengths), max(used, default=0) + 2), PAST_THE_END, np.int64)
    for i, (length, pages) in enumerate(zip(lengths, used)):
        table[i, :pages] = places[sum(used[:i]) : sum(used[: i + 1])]
        for j in range(length):
            cache[table[i, j // 64], j % 64] = rng.standard_normal((h_kv, d))
    q = rng.standard_normal((len(lengths), s_q, h_q, d))
    return q.astype(dtype), cache.astype(dtype), table, np.array(lengths, np.int32)


def test_two_keys_by_hand():
    cache = np.full((2, 64, 1, 2), np.nan)
    cache[1, 0, 0], cache[1, 1, 0] = (np.log(3.0), 8.0), (0.0, 4.0)
    out, lse = flash_decode(np.array([[[[1.0, 0.0]]]]), cache, [[1]], np.array([2]), head_dim_v=2, softmax_scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], [0.75 * np.log(3), 7.0], rtol=1e-15)  # weights 3/4 and 1/4
    np.testing.assert_allclose(lse[0, 0, 0], np.log(4.0), rtol=1e-15)


def test_empty_request_gives_zero_and_plus_infinity():
    q, cache, table, lengths = make_case(0, [0, 3], 2, 2, 1, 4)
    out, lse = flash_decode(q, cache, table, lengths, head_dim_v=3)
    assert (out[0] == 0).all()
    assert np.isposinf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_causal_is_aligned_to_the_bottom_right():
    q, cache, table, lengths = make_case(1, [3], 2, 1, 1, 4)
    out, _ = flash_decode(q, cache, table, lengths, head_dim_v=4, causal=True)
    first, _ = flash_decode(q[:, :1], cache, table, np.array([2]), head_dim_v=4)
    last, _ = flash_decode(q[:, 1:], cache, table, lengths, head_dim_v=4)
    np.testing.assert_allclose(out[:, 0], first[:, 0], rtol=1e-13)
    np.testing.assert_allclose(out[:, 1], last[:, 0], rtol=1e-13)


def test_more_queries_than_keys_leaves_the_first_rows_empty():
    q, cache, table, lengths = make_case(2, [1], 3, 2, 1, 4)
    out, lse = flash_decode(q, cache, table, lengths, head_dim_v=4, causal=True)
    assert (out[0, :2] == 0).all()
    assert np.isposinf(lse[0, :, :2]).all()
    np.testing.assert_allclose(out[0, 2], np.broadcast_to(cache[table[0, 0], 0], (2, 4)), rtol=1e-15)


def test_one_query_row_ignores_causal():
    q, cache, table, lengths = make_case(3, [70, 5], 1, 2, 1, 4)
    masked = flash_decode(q, cache, table, lengths, head_dim_v=4, causal=True)
    plain = flash_decode(q, cache, table, lengths, head_dim_v=4, causal=False)
    np.testing.assert_array_equal(masked.out, plain.out)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0, 1, 2, 20, 63, 64, 65, 127, 128, 129, 140]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    st.booleans(),
    st.sampled_from([1, 2, 7, 132]),
    st.integers(0, 2**32 - 1),
)
def test_equals_the_loop_for_any_split(lengths, s_q, heads, causal, num_sms, seed):
    q, cache, table, lengths = make_case(seed, lengths, s_q, *heads, 6)
    expected_out, expected_lse = dense(q, cache, table, lengths, 4, 6**-0.5, causal)
    plan = split_plan(lengths, s_q * heads[0] // heads[1], heads[1], num_sms)
    for result in (
        flash_decode(q, cache, table, lengths, head_dim_v=4, causal=causal),
        flash_decode(q, cache, table, lengths, head_dim_v=4, causal=causal, plan=plan),
    ):
        np.testing.assert_allclose(result.out, expected_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(result.lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("s_q", "h_q", "lengths"), [(1, 16, [140, 0, 64]), (2, 3, [20, 4096]), (4, 128, [65])])
def test_published_tolerances_in_bfloat16(s_q, h_q, lengths):
    q, cache, table, lengths = make_case(7, lengths, s_q, h_q, 1, 576, ml_dtypes.bfloat16)
    wide = flash_decode(q.astype(np.float64), cache.astype(np.float64), table, lengths, causal=True)
    plan = split_plan(lengths, s_q * h_q)
    narrow = flash_decode(q, cache, table, lengths, causal=True, plan=plan)
    assert narrow.out.dtype == ml_dtypes.bfloat16
    assert narrow.lse.dtype == np.float32
    assert close(narrow.out, wide.out, DENSE_OUT)
    assert close(narrow.lse, wide.lse, DENSE_LSE)
    damaged = narrow.out.copy()
    damaged[0, 0, 0, 0] += ml_dtypes.bfloat16(0.25)
    assert not close(damaged, wide.out, DENSE_OUT)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8), st.sampled_from([1, 64, 128, 256]), st.integers(1, 140))
def test_plan_covers_every_block_once(lengths, num_q_rows, num_sms):
    plan = split_plan(np.array(lengths), num_q_rows, 1, num_sms)
    blocks = [max(-(-n // 64), 1) for n in lengths]
    seen = [[] for _ in lengths]
    for first, start, last, stop, split in plan.parts.tolist():
        for request in range(first, last + 1):
            begin = start if request == first else 0
            end = stop if request == last else blocks[request]
            seen[request] += range(begin, end)
            if request == first and begin == end == 0:
                pytest.fail("a part that begins a request must take a block of it")
        if first <= last:
            assert split == sum(
                1 for p in plan.parts.tolist() if (p[0] == first and p[1] < start) or _ends_in(p, first, start)
            )
    assert seen == [list(range(n)) for n in blocks]
    splits = [len(split_edges(plan, i, max(n, 1))) - 1 for i, n in enumerate(lengths)]
    assert np.diff(plan.num_splits).tolist() == splits
    assert plan.num_splits[-1] <= len(lengths) + len(plan.parts)


def _ends_in(part, request, block):
    """A part that began with an earlier request and took the first blocks of this one."""
    return block > 0 and part[0] < request and part[2] == request


def test_plan_by_hand():
    # 2 parts, blocks 10 and 2: ceil((10 + 2 + 2 * 5) / 2) + 5 = 16 blocks of work each; 10 + 5 fit, 2 + 5 do not
    plan = split_plan(np.array([640, 128]), 64, 1, 2)
    assert plan.parts.tolist() == [[0, 0, 0, 10, 0], [1, 0, 1, 2, 0]]
    assert plan.num_splits.tolist() == [0, 1, 2]
    # one long request on 3 parts: ceil((30 + 5) / 3) + 5 = 17, so 12 + 12 + 6 blocks
    plan = split_plan(np.array([1920]), 64, 1, 3)
    assert plan.parts.tolist() == [[0, 0, 0, 12, 0], [0, 12, 0, 24, 1], [0, 24, 0, 30, 2]]
    assert plan.num_splits.tolist() == [0, 3]


def test_merge_of_empty_splits():
    out, lse = merge_splits(np.array([[7.0], [2.0]]), np.array([-np.inf, 1.5]))
    assert (out, lse) == (2.0, 1.5)
    out, lse = merge_splits(np.zeros((2, 1)), np.full(2, -np.inf))
    assert (out, lse) == (0.0, -np.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": np.zeros((2, 32, 1, 4))}, "must hold 64"),
        ({"k_cache": np.zeros((2, 64, 2, 4))}, "do not divide"),
        ({"k_cache": np.zeros((2, 64, 1, 5))}, "num_blocks"),
        ({"cache_seqlens": np.array([-1])}, "non-negative"),
        ({"cache_seqlens": np.array([200])}, "more than the 1 pages"),
        ({"cache_seqlens": np.array([1, 1])}, "2 lengths"),
        ({"block_table": [[2]]}, "cache has 2 pages"),
        ({"head_dim_v": 5}, "head_dim_v = 5"),
    ],
)
def test_bad_input(change, message):
    good = dict(
        q=np.zeros((1, 1, 3, 4)), k_cache=np.zeros((2, 64, 1, 4)), block_table=[[0]], cache_seqlens=np.array([9])
    )
    with pytest.raises(ValueError, match=message):
        flash_decode(**{**good, "head_dim_v": 4, **change})


def test_rows_are_gathered_in_table_order():
    cache = np.arange(3 * 64).reshape(3, 64, 1, 1)
    rows = gather_rows(cache, np.array([2, 0, PAST_THE_END]), 66)
    assert rows.ravel().tolist() == [*range(128, 192), 0, 1]

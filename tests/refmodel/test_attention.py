"""Core attention: a dense oracle, invariance to chunks, empty key sets, and merging."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel import attend, merge_states
from refmodel.attention import attend_requests


def oracle(q, k, v, scale, causal_offset):
    """One query and head at a time with math.fsum."""
    T, H, _ = q.shape
    out, lse = np.zeros((T, H, v.shape[2])), np.full((T, H), -np.inf)
    for t in range(T):
        seen = len(k) if causal_offset is None else min(len(k), causal_offset + t + 1)
        for h in range(H):
            hk = h if k.shape[1] > 1 else 0
            scores = [scale * math.fsum(q[t, h] * k[s, hk]) for s in range(seen)]
            if not scores:
                continue
            top = max(scores)
            p = [math.exp(score - top) for score in scores]
            lse[t, h] = top + math.log(math.fsum(p))
            out[t, h] = [math.fsum(p[s] * v[s, hk, i] for s in range(seen)) / math.fsum(p) for i in range(v.shape[2])]
    return out, lse


def draw(rng, T, S, H, Hk, d, dv):
    return rng.normal(size=(T, H, d)), rng.normal(size=(S, Hk, d)), rng.normal(size=(S, Hk, dv))


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(0, 140),
    st.sampled_from([(1, 1), (3, 1), (3, 3)]),
    st.one_of(st.none(), st.integers(0, 140)),
)
def test_equals_the_oracle(seed, T, S, heads, offset):
    q, k, v = draw(np.random.default_rng(seed), T, S, *heads, 6, 4)
    got = attend(q, k, v, 0.4, offset)
    out, lse = oracle(q, k, v, 0.4, offset)
    np.testing.assert_allclose(got.out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("values", [1, 10_000, 1 << 30])
def test_how_many_blocks_are_multiplied_at_once_changes_no_bit(values, monkeypatch):
    rng = np.random.default_rng(1)
    q, k, v = (x.astype(np.float32) for x in draw(rng, 80, 300, 2, 2, 24, 16))
    expected = attend(q, k, v, 0.2, 220, dtype=np.float32)
    monkeypatch.setattr("refmodel.attention._VALUES", values)
    got = attend(q, k, v, 0.2, 220, dtype=np.float32)
    assert (got.out.tobytes(), got.lse.tobytes()) == (expected.out.tobytes(), expected.lse.tobytes())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("Hk", [1, 4])
def test_chunks_give_the_bits_of_the_whole(Hk, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (x.astype(dtype) for x in draw(rng, 300, 300, 4, Hk, 48, 32))
    whole = attend(q, k, v, 0.2, 0, dtype=dtype)
    for start, stop in [(0, 1), (63, 65), (64, 128), (0, 17), (120, 131), (299, 300), (5, 260)]:
        part = attend(q[start:stop], k[:stop], v[:stop], 0.2, start, dtype=dtype)
        assert part.out.tobytes() == whole.out[start:stop].tobytes()
        assert part.lse.tobytes() == whole.lse[start:stop].tobytes()


@pytest.mark.parametrize("heads", [(1, 1), (3, 3)])
def test_a_single_row_with_one_value_adds_its_blocks_in_order_too(heads):
    """Numbers that lie side by side in memory NumPy adds in pairs, from eight on."""
    rng = np.random.default_rng(3)
    q, k, v = (x.astype(np.float32) for x in draw(rng, 1200, 1200, *heads, 8, 1))
    whole = attend(q, k, v, 0.2, 0, dtype=np.float32)
    for start in (700, 1023, 1199):
        part = attend(q[start : start + 1], k, v, 0.2, start, dtype=np.float32)
        assert part.out.tobytes() == whole.out[start : start + 1].tobytes()
        assert part.lse.tobytes() == whole.lse[start : start + 1].tobytes()


@pytest.mark.parametrize("T", [1, 3])
def test_requests_together_are_each_alone(T):
    """Of several requests each row sees its own keys; a single token of a single request has a way of its own."""
    rng = np.random.default_rng(4)
    keys = [T, 64, 65, 127, 128]
    q = rng.normal(size=(len(keys), T, 2, 8))
    blocks = rng.normal(size=(len(keys), 2, 64, 8))
    for r, count in enumerate(keys):
        blocks[r].reshape(128, 8)[count:] = 0
    together = attend_requests(q.reshape(-1, 2, 8), blocks, blocks[..., :5], keys, 0.3)
    for r, count in enumerate(keys):
        k = blocks[r].reshape(128, 1, 8)[:count]
        alone = attend(q[r], k, k[..., :5], 0.3, count - T)
        assert together.out[r * T : (r + 1) * T].tobytes() == alone.out.tobytes()
        single = attend_requests(q[r], blocks[r : r + 1], blocks[r : r + 1, ..., :5], [count], 0.3)
        assert (single.out.tobytes(), single.lse.tobytes()) == (alone.out.tobytes(), alone.lse.tobytes())


def test_no_keys_give_zero_and_minus_infinity():
    # flashinfer-ai/flashinfer#4975
    q, k, v = draw(np.random.default_rng(0), 2, 0, 3, 1, 8, 8)
    got = attend(q, k, v, 1.0)
    assert got.out.tolist() == np.zeros((2, 3, 8)).tolist()
    assert (got.lse == -np.inf).all()
    assert attend(q[:0], k, v, 1.0).out.shape == (0, 3, 8)


def test_what_lies_behind_the_last_key_is_never_read():
    # Dao-AILab/flash-attention#2374: 0 * NaN in the value product
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 1, 16, 2, 1, 8, 8)
    expected = attend(q, k[:13], v[:13], 1.0)
    k[13:], v[13:] = np.nan, np.nan
    got = attend(q, k[:13], v[:13], 1.0)
    assert got.out.tobytes() == expected.out.tobytes()


def test_large_scores_do_not_overflow():
    q = np.full((1, 1, 1), 1e4)
    got = attend(q, np.array([[[1.0]], [[2.0]]]), np.array([[[3.0]], [[5.0]]]), 1.0)
    assert got.out[0, 0, 0] == 5.0
    assert got.lse[0, 0] == 2e4


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 90), st.integers(0, 90))
def test_merging_two_key_sets_is_attending_to_both(seed, first, second):
    q, k, v = draw(np.random.default_rng(seed), 3, first + second, 2, 2, 5, 4)
    a = attend(q, k[:first], v[:first], 0.7)
    b = attend(q, k[first:], v[first:], 0.7)
    merged, whole = merge_states(*a, *b), attend(q, k, v, 0.7)
    np.testing.assert_allclose(merged.out, whole.out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-12, atol=1e-14)


def test_merging_with_an_empty_side_returns_the_other_exactly():
    # flashinfer-ai/flashinfer#4452: garbage on the empty side
    rng = np.random.default_rng(2)
    out, lse = rng.normal(size=(4, 2, 8)), rng.normal(size=(4, 2))
    nothing = np.full((4, 2, 8), np.nan), np.full((4, 2), -np.inf)
    for merged in (merge_states(*nothing, out, lse), merge_states(out, lse, *nothing)):
        assert merged.out.tobytes() == out.tobytes()
        assert merged.lse.tobytes() == lse.tobytes()
    both = merge_states(*nothing, *nothing)
    assert (both.out == 0).all()
    assert (both.lse == -np.inf).all()


def test_merging_uses_natural_logarithms():
    # sgl-project/sglang#40903: base 2 in one half
    got = merge_states(np.array([[1.0]]), np.array([0.0]), np.array([[3.0]]), np.array([math.log(3)]))
    assert got.out[0, 0] == pytest.approx(2.5)
    assert got.lse[0] == pytest.approx(math.log(4))


def test_refuses_shapes_that_do_not_fit():
    q, k, v = draw(np.random.default_rng(0), 2, 3, 4, 2, 8, 8)
    with pytest.raises(ValueError, match=r"k \(3, 2, 8\)"):
        attend(q, k, v, 1.0)

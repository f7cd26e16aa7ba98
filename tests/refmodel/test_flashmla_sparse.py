"""FP8 rows and sparse decode: layout to the byte, attention against a loop."""

import math

import ml_dtypes
import numpy as np
import pytest
from flashmla_oracle import SPARSE_OUT, attend_one, close
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.flashmla import flash_decode, sparse_attend, table_indices
from refmodel.fp8_cache import ROW_BYTES, pack_rows, tile_scales, unpack_rows


def test_a_row_to_the_byte():
    row = np.zeros(576, np.float32)
    row[0], row[1], row[128], row[511], row[512], row[575] = 448.0, -1.0, 0.5, 1000.0, 1.0, -2.0
    packed = pack_rows(row)
    assert packed.shape == (656,)
    scales = packed[512:528].view(np.float32)
    # 448/448 = 1; 0.5/448 = 0.00112 -> 2^-9; an empty tile -> ceil(log2(1e-4)) = -13; 1000/448 = 2.23 -> 4
    assert scales.tolist() == [1.0, 2.0**-9, 2.0**-13, 4.0]
    assert packed[[0, 1, 128, 511]].tolist() == [0x7E, 0xB8, 0x78, 0x78]  # 448, -1, 256, and 250 -> 256
    assert packed[528:530].view(ml_dtypes.bfloat16)[0] == 1.0
    assert packed[654:].view(ml_dtypes.bfloat16)[0] == -2.0
    back = unpack_rows(packed)
    assert [float(back[i]) for i in (0, 1, 128, 511, 512, 575)] == [448.0, -1.0, 0.5, 1024.0, 1.0, -2.0]


def test_bytes_per_token_of_the_full_model():
    assert ROW_BYTES * 61 == 40016
    assert 576 * 2 * 61 == 70272
    assert 576 * 2 * 62 == 71424


def test_scale_just_above_a_power_of_two_keeps_the_power():
    # log2 of 2^-10 * (1 + 2^-23) rounds to -10 in float32, so the ceiling is -10 and not -9
    share = np.nextafter(np.float32(2.0**-10), np.float32(1))
    amax = share * np.float32(448)
    assert amax / np.float32(448) == share
    assert tile_scales(np.array([amax]))[0] == 2.0**-10
    assert tile_scales(np.array([np.float32(448 * 2.0**-10 * 1.01)]))[0] == 2.0**-9


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(-12, 12))
def test_unpack_is_within_half_a_step(seed, exponent):
    rows = (np.random.default_rng(seed).standard_normal((3, 576)) * 2.0**exponent).astype(ml_dtypes.bfloat16)
    packed = pack_rows(rows)
    scale = packed[:, 512:528].copy().view(np.float32)
    wide, back = rows.astype(np.float64), unpack_rows(packed).astype(np.float64)
    step = np.repeat(scale.astype(np.float64), 128, axis=1)
    half = np.maximum(np.abs(wide[:, :512]) * 2.0**-4, step * 2.0**-10) * (1 + 2.0**-7)
    assert (np.abs(back[:, :512] - wide[:, :512]) <= half).all()
    np.testing.assert_array_equal(back[:, 512:], wide[:, 512:])
    np.testing.assert_array_equal(
        pack_rows(unpack_rows(packed)), pack_rows(unpack_rows(pack_rows(unpack_rows(packed))))
    )


def sparse_case(seed, b=2, s_q=2, h_q=3, topk=5, blocks=3):
    rng = np.random.default_rng(seed)
    cache = rng.standard_normal((blocks, 64, 1, 576)).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((b, s_q, h_q, 576)).astype(ml_dtypes.bfloat16)
    indices = rng.integers(-1, blocks * 64, (b, s_q, topk))
    return q, cache, indices, rng


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_sparse_equals_the_loop(seed, with_length, with_sink):
    q, cache, indices, rng = sparse_case(seed)
    packed = pack_rows(cache)
    rows = unpack_rows(packed).reshape(-1, 576).astype(np.float64)
    length = rng.integers(0, 6, 2) if with_length else None
    sink = rng.standard_normal(3) * 5 if with_sink else None
    result = sparse_attend(q.astype(np.float64), packed, indices, length, sink)
    for i, j, head in np.ndindex(2, 2, 3):
        chosen = [r for n, r in enumerate(indices[i, j]) if r >= 0 and (length is None or n < length[i])]
        out, lse = attend_one(q[i, j, head], [rows[r] for r in chosen], 512, 576**-0.5)
        shrink = 1.0 if sink is None or lse == math.inf else 1 / (1 + math.exp(sink[head] - lse))
        np.testing.assert_allclose(result.out[i, j, head], np.array(out) * shrink, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(result.lse[i, head, j], lse, rtol=1e-12)
    narrow = sparse_attend(q, packed, indices, length, sink)
    assert close(narrow.out, result.out, SPARSE_OUT)


def test_nan_in_unselected_rows_never_shows_and_in_selected_ones_counts_as_zero():
    q, cache, _, _ = sparse_case(3, b=1, s_q=1)
    packed = pack_rows(cache)
    packed[1] = 0xFF  # E4M3 NaN codes, NaN scales, NaN RoPE
    clean = sparse_attend(q, packed, np.array([[[0, 130, -1, 5]]]))
    assert np.isfinite(clean.out.astype(np.float64)).all()
    cut = sparse_attend(q, packed, np.array([[[0, 130, 5, 70, 64]]]), topk_length=np.array([3]))
    same = sparse_attend(q, packed, np.array([[[0, 130, 5]]]))
    np.testing.assert_array_equal(cut.out, same.out)
    only_nan = sparse_attend(q, packed, np.array([[[70, 71]]]))
    assert (only_nan.out == 0).all()
    np.testing.assert_allclose(only_nan.lse, math.log(2), rtol=1e-6)  # two keys of zeros


def test_no_selected_key_gives_zero_and_plus_infinity_with_and_without_sink():
    q, cache, _, _ = sparse_case(4, b=1, s_q=1)
    for sink in (None, np.array([0.0, np.inf, -np.inf])):
        out, lse = sparse_attend(q, cache, np.full((1, 1, 4), -1), attn_sink=sink)
        assert (out == 0).all()
        assert np.isposinf(lse).all()


def test_sink_halves_the_output_when_it_weighs_as_much_as_the_keys():
    q, cache, indices, _ = sparse_case(5, b=1, s_q=1, h_q=1)
    q, cache = q.astype(np.float64), cache.astype(np.float64)
    plain = sparse_attend(q, cache, indices)
    sunk = sparse_attend(q, cache, indices, attn_sink=plain.lse[0, :, 0])
    np.testing.assert_allclose(sunk.out, plain.out / 2, rtol=1e-14)
    np.testing.assert_array_equal(sunk.lse, plain.lse)


def test_all_indices_equal_dense_over_a_permuted_table():
    q, cache, _, _ = sparse_case(6, b=2, s_q=1)
    q, cache = q.astype(np.float64), cache.astype(np.float64)
    table, lengths = np.array([[2, 0], [1, 0]]), np.array([100, 64])
    positions = np.where(np.arange(100) < lengths[:, None], np.arange(100), -1)[:, None]
    sparse = sparse_attend(q, cache, table_indices(positions, table))
    dense = flash_decode(q, cache, table, lengths)
    np.testing.assert_allclose(sparse.out, dense.out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sparse.lse, dense.lse, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.array([[[192]]])}, "span 192"),
        ({"indices": np.array([[[-2]]])}, "-1 = none"),
        ({"cache": np.zeros((3, 64, 1, 600), np.uint8)}, "rows of 600"),
        ({"cache": np.zeros((3, 16, 1, 656), np.uint8)}, "pages of 64"),
        ({"q": np.zeros((2, 1, 1, 576))}, "do not fit"),
    ],
)
def test_bad_input(change, message):
    good = dict(q=np.zeros((1, 1, 1, 576)), cache=np.zeros((3, 64, 1, 656), np.uint8), indices=np.array([[[0]]]))
    with pytest.raises(ValueError, match=message):
        sparse_attend(**{**good, **change})
    with pytest.raises(ValueError, match="576 numbers"):
        pack_rows(np.zeros(575))
    with pytest.raises(ValueError, match="656"):
        unpack_rows(np.zeros(655, np.uint8))

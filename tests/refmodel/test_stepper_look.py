"""Statistics, histograms and parts of one tensor, by hand."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refmodel.stepper import histogram, parse_selection, select, statistics
from refmodel.stepper.look import spans


def test_statistics_by_hand():
    s = statistics(np.array([[0.0, -3.0, np.nan], [np.inf, 4.0, 0.0]], np.float32))
    assert (s.shape, s.dtype) == ((2, 3), "float32")
    assert (s.min, s.max, s.mean, s.rms) == (-3.0, 4.0, 0.25, 2.5)
    assert (s.zeros, s.nan, s.inf) == (2, 1, 1)
    assert statistics(np.array([3, -1], np.int64))[2:5] == (-1.0, 3.0, 1.0)
    narrow = statistics(np.full(4096, 1, ml_dtypes.bfloat16))  # a mean in bfloat16 would be 0.0625
    assert narrow.mean == 1.0
    assert statistics(np.zeros((0, 3), np.float32))[2:] == (None, None, None, None, 0, 0, 0)
    assert statistics(np.array([np.nan]))[2:] == (None, None, None, None, 0, 1, 0)


def test_histogram_by_hand():
    h = histogram(np.array([0.0, 1.0, 2.0, 4.0, np.nan], ml_dtypes.bfloat16), 2)
    assert h.edges.tolist() == [0.0, 2.0, 4.0]
    assert h.counts.tolist() == [2, 2]  # 2.0 opens the second interval, 4.0 closes it
    with pytest.raises(ValueError, match="0 intervals"):
        histogram(np.zeros(3), 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b", ("a.b", None)),
        ("layers.1.norm[3, :8]", ("layers.1.norm", (3, slice(None, 8)))),
        ("x [-1,::2]", ("x", (-1, slice(None, None, 2)))),
        ("x[..., 0]", ("x", (..., 0))),
        ("x[1:2:3]", ("x", (slice(1, 2, 3),))),
        ("*.topk_idx", ("*.topk_idx", None)),
    ],
)
def test_selections(text, expected):
    assert parse_selection(text) == expected


@pytest.mark.parametrize(
    "text", ["", "x[", "x[]", "x[a]", "x[1:2:3:4]", "x[1.5]", "x]1[", "x[__import__('os')]", "a b"]
)
def test_bad_selections(text):
    with pytest.raises(ValueError, match=r"must be a name|is no index"):
        parse_selection(text)


def test_rows_that_are_there_are_named_by_their_global_numbers():
    array, rows = np.array([[10, 11], [30, 31], [40, 41]]), np.array([1, 3, 4])
    assert select(array, (3,), rows).tolist() == [30, 31]
    assert select(array, (slice(2, 9), 1), rows).tolist() == [31, 41]
    assert select(array, (slice(None),), rows).tolist() == array.tolist()
    assert select(array, (..., 0), rows).tolist() == [10, 30, 40]
    assert select(array, (slice(0, 5, 2), 0), rows).tolist() == [40]
    with pytest.raises(ValueError, match="row 2 is not there yet; rows so far: 1, 3-4"):
        select(array, (2,), rows)
    with pytest.raises(ValueError, match="which count upwards from 0; rows so far: 1, 3-4"):
        select(array, (slice(-1, None),), rows)
    with pytest.raises(ValueError, match="row -1 is not there yet"):
        select(array, (-1,), rows)
    with pytest.raises(ValueError, match=r"shape \(3, 2\): .*out of bounds"):
        select(array, (3, 2), rows)
    assert select(array, (-1, 0)).tolist() == 40  # all rows are there
    with pytest.raises(ValueError, match="too many indices"):
        select(array, (0, 0, 0))
    with pytest.raises(ValueError, match="step cannot be zero"):
        select(array, (slice(None, None, 0),))


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(0, 21), st.integers(0, 22), st.integers(1, 4))
def test_a_slice_of_rows_is_those_rows_of_the_whole(held, start, stop, step):
    rows = np.array(sorted(held))
    whole = np.arange(21) * 10
    got = select(whole[rows], (slice(start, stop, step),), rows)
    assert got.tolist() == [row * 10 for row in range(21)[start:stop:step] if row in held]


def test_spans():
    assert spans(np.array([0, 1, 2, 4, 9, 10])) == "0-2, 4, 9-10"
    assert spans(np.array([], int)) == "none"
    assert spans(np.arange(0, 20, 2), most=2) == "0, 2 and 8 more ranges"

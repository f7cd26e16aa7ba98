import ml_dtypes
import numpy as np
import pytest

from refmodel import rms_norm
from refmodel.numerics import bfloat16, round_to, widen


def test_hand_values():
    np.testing.assert_allclose(rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0), [[0.848528137, 2.26274170]])


@pytest.mark.parametrize(("eps", "value"), [(1e-6, 0.7071068), (1e-5, 0.3015113)])
def test_epsilon_shows_at_small_values(eps, value):
    # huggingface/transformers#44261
    got = rms_norm(np.full((1, 16), 1e-3), np.ones(16), eps)
    np.testing.assert_allclose(got, value, rtol=1e-6)


def test_layout_does_not_matter():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(37, 50)), rng.normal(size=50)
    expected = rms_norm(x, weight, 1e-6)
    assert rms_norm(np.asfortranarray(x), weight, 1e-6).tobytes() == expected.tobytes()
    assert rms_norm(np.repeat(x, 2, axis=0)[::2], weight, 1e-6).tobytes() == expected.tobytes()
    assert rms_norm(x[5:6], weight, 1e-6).tobytes() == expected[5:6].tobytes()


def test_casting_before_the_weight_is_another_rounding():
    rng = np.random.default_rng(0)
    x = round_to(rng.normal(size=(64, 128)), bfloat16)
    weight = round_to(1 + 0.3 * rng.normal(size=128), bfloat16)
    late = round_to(rms_norm(x, weight, 1e-6), bfloat16)
    early = round_to(rms_norm(x, weight, 1e-6, cast_before_weight=bfloat16), bfloat16)
    differ = np.mean(late.view(np.uint16) != early.view(np.uint16))
    assert 0.2 < differ < 0.4  # measured elsewhere: 29 %
    # the early order by hand, for one element
    r = 1 / np.sqrt(np.mean(widen(x[0], np.dtype(float)) ** 2) + 1e-6)
    by_hand = round_to(
        np.array([float(round_to(np.array([float(x[0, 0]) * r]), bfloat16)[0]) * float(weight[0])]), bfloat16
    )
    assert early[0, 0] == by_hand[0]


def test_refuses_other_widths():
    with pytest.raises(ValueError, match=r"x \(2, 3\) and weight \(4,\)"):
        rms_norm(np.zeros((2, 3)), np.ones(4), 1e-6)


def test_bfloat16_mean_is_not_taken_in_bfloat16():
    # the mean of 4,096 bfloat16 ones, taken in bfloat16, is 0.0625
    ones = np.ones((1, 4096), ml_dtypes.bfloat16)
    np.testing.assert_allclose(rms_norm(ones, ones[0], 0.0), 1.0)

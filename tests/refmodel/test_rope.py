"""YaRN and RoPE: published values, and the mistakes of public reports."""

from dataclasses import replace

import numpy as np
import pytest

from refmodel import ModelConfig, apply_rope, softmax_scale, yarn_frequencies
from refmodel.config import RopeScaling


@pytest.fixture(scope="module")
def v3():
    return ModelConfig.preset("v3")


def test_softmax_scale_has_mscale_squared_and_the_head_width(v3):
    # onnxruntime/mobius#548: exact at position 0 without it, wrong after
    assert softmax_scale(v3) == pytest.approx(0.1352337789, rel=1e-9)
    lite = replace(v3, rope_scaling=replace(v3.rope_scaling, mscale=0.707, mscale_all_dim=0.707))
    assert softmax_scale(lite) == pytest.approx(0.1147213868, rel=1e-9)
    assert softmax_scale(replace(v3, rope_scaling=None)) == pytest.approx(192**-0.5, rel=1e-15)


def test_amplitude_is_a_ratio(v3):
    # kekzl/imp#880: one field for both roles
    assert yarn_frequencies(v3)[1] == 1.0
    absent = replace(v3, rope_scaling=replace(v3.rope_scaling, mscale=1.0, mscale_all_dim=0))
    assert yarn_frequencies(absent)[1] == pytest.approx(1.3688879454)
    assert softmax_scale(absent) == pytest.approx(192**-0.5)
    other = replace(v3, rope_scaling=replace(v3.rope_scaling, mscale=0.707, mscale_all_dim=1.0))
    assert yarn_frequencies(other)[1] == pytest.approx(0.921, abs=1e-3)


def test_frequency_table(v3):
    # deepseek-ai/DeepSeek-V3 inference/model.py
    inv_freq, _ = yarn_frequencies(v3)
    expected = {0: 1.0, 10: 0.0562341325, 11: 0.0390069266, 16: 0.0055, 22: 1.778279e-4, 23: 3.333804e-5}
    for index, value in expected.items():
        assert inv_freq[index] == pytest.approx(value, rel=1e-6)
    assert inv_freq[31] == pytest.approx(3.3338036e-6, rel=1e-6)


def test_equal_correction_bounds_do_not_divide_by_zero(v3):
    scaling = RopeScaling(32, 4096, beta_fast=1, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    inv_freq, _ = yarn_frequencies(replace(v3, rope_theta=5e4, rope_scaling=scaling))
    assert inv_freq[19] == pytest.approx(1.62175991e-3, rel=1e-6)
    assert inv_freq[20] == pytest.approx(3.6140468e-5, rel=1e-6)
    assert np.isfinite(inv_freq).all()
    # a range that is empty altogether
    same = replace(v3, qk_rope_head_dim=2, rope_scaling=RopeScaling(40, 4096, beta_fast=1, beta_slow=1))
    assert np.isfinite(yarn_frequencies(same)[0]).all()


def test_yarn_does_not_depend_on_a_runtime_length(v3):
    # the vendor's demo switches YaRN by max_seq_len; a config decides here
    short = replace(v3, max_position_embeddings=4096)
    np.testing.assert_array_equal(yarn_frequencies(short)[0], yarn_frequencies(v3)[0])


def test_interleaved_pairs():
    # vllm-project/vllm#26995, huggingface/transformers#35926
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    inv_freq = 1e4 ** -np.array([0.0, 0.5])
    got = apply_rope(x, np.array([1]), inv_freq)
    np.testing.assert_allclose(got.ravel(), [-1.1426397, 1.9220756, 2.9598507, 4.0297996], rtol=1e-7)
    half = apply_rope(x, np.array([1]), inv_freq, interleaved=False)
    np.testing.assert_allclose(half.ravel(), [-1.9841106, 1.9599007, 2.4623779, 4.0197997], rtol=1e-7)
    # half-split on permuted input is interleaved, permuted
    order = [0, 2, 1, 3]
    permuted = apply_rope(x[..., order], np.array([1]), inv_freq, interleaved=False)
    np.testing.assert_allclose(permuted.ravel(), got.ravel()[order])


def test_equals_complex_rotation_at_far_positions():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(5, 3, 8)), np.array([0, 1, 77, 4096, 163839])
    inv_freq = 1e4 ** -(np.arange(4) / 4)
    for t, position in enumerate(positions):
        for pair in range(4):
            turned = (x[t, :, 2 * pair] + 1j * x[t, :, 2 * pair + 1]) * np.exp(1j * position * inv_freq[pair])
            got = apply_rope(x, positions, inv_freq, amplitude=1.5)[t]
            np.testing.assert_allclose(got[:, 2 * pair], 1.5 * turned.real, atol=1e-11)
            np.testing.assert_allclose(got[:, 2 * pair + 1], 1.5 * turned.imag, atol=1e-11)


def test_refuses_odd_widths_and_wrong_lengths(v3):
    with pytest.raises(ValueError, match="even width"):
        apply_rope(np.zeros((1, 1, 7)), np.zeros(1), np.zeros(3))
    with pytest.raises(ValueError, match="needs 4 frequencies and 1 positions, got 3 and 2"):
        apply_rope(np.zeros((1, 1, 8)), np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="qk_rope_head_dim"):
        replace(v3, qk_rope_head_dim=7)

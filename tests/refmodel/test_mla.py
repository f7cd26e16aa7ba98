"""Layout of kv_b: per head the rows of keys, then those of values."""

import numpy as np
from tiny import VARIANTS, some_ids, tiny_model

from refmodel.weights import LayerWeights


class _Weights:
    keep = True

    def __init__(self, rows):
        self.rows = np.array(rows, np.float64)[:, None]
        self.config = type("Config", (), dict(num_attention_heads=2, qk_nope_head_dim=1, v_head_dim=1))

    def dense(self, name):
        return self.rows


def test_kv_b_alternates_keys_and_values_by_head():
    # NVIDIA/Megatron-LM#3193: all keys, then all values, would give keys [1, 2]
    weights = LayerWeights(_Weights([1, 2, 3, 4]), 0)
    assert weights.w_uk.ravel().tolist() == [1, 3]
    assert weights.w_uv.ravel().tolist() == [2, 4]


def test_forms_agree_with_values_wider_than_keys():
    model, ids = tiny_model("wide_values"), some_ids(70)
    assert VARIANTS["wide_values"].v_head_dim != VARIANTS["wide_values"].qk_nope_head_dim
    naive, absorbed = model.forward(ids), model.forward(ids, phase="decode")
    assert np.abs(naive - absorbed).max() < 1e-12 * np.abs(naive).max()

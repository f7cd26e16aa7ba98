import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refmodel.trace import record
from scripts.engine_join import join_parts, join_ranks, rank_of

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "adapters"))


def test_heads_side_by_side_and_partial_sums():
    ranks = (
        {"q": np.array([[[1.0]]]), "s": np.array([1.5]), "x": np.ones(2)},
        {"q": np.array([[[2.0]]]), "s": np.array([2.0]), "x": np.ones(2)},
    )
    whole, notes = join_ranks(ranks, {"q": "concat:1", "s": "sum"})
    assert whole["q"].tolist() == [[[1.0], [2.0]]]
    assert whole["s"].tolist() == [3.5]
    assert whole["x"].tolist() == [1, 1]
    assert notes == []


def test_a_rank_that_should_hold_the_same_and_does_not_is_noted():
    _, notes = join_ranks(({"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": np.array([0, 0.5])}), {})
    assert notes == ["x: rank 2 differs from rank 0 by up to 0.5; both should hold the same"]


def test_sums_are_rounded_once():
    parts = [np.array([1.0], np.float32), np.array([2**-24], np.float32), np.array([2**-24], np.float32)]
    assert join_parts("x", parts, "sum")[0] == np.float32(1 + 2**-23)


@pytest.mark.parametrize(
    ("ranks", "joins", "message"),
    [
        (({"x": np.ones(1)}, {}), {}, "rank 1 of 2 did not capture it"),
        (({"x": np.ones(1)}, {"x": np.ones(2)}), {}, "one shape is required"),
        (({"x": np.ones(1)},), {"x": "glue"}, "join rule 'glue'"),
        (({"x": np.ones(1)},), {"x": "concat:-1"}, "join rule 'concat:-1'"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, joins, message):
    with pytest.raises(ValueError, match=message):
        join_ranks(ranks, joins)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1))
def test_rank_of_is_where_the_value_came_from(sizes, axis):
    parts = [np.full((n, 2) if axis == 0 else (2, n), rank) for rank, n in enumerate(sizes)]
    whole = join_parts("x", parts, f"concat:{axis}")
    for index in range(whole.shape[axis]):
        assert rank_of(index, parts, axis) == np.take(whole, index, axis).flat[0]


def test_adapters_use_the_names_that_we_record(tmp_path):
    """Every name an adapter can give is one that our model records, with its MTP layer."""
    import names
    from engine_oracle import CONFIG, TOKENS

    from refmodel.model import Model

    model = Model.random(CONFIG, 0)
    with record() as tensors:
        model.forward(TOKENS)
        model.mtp_logits(TOKENS[1:], tensors["final.norm"][:-1])
    dense = {"mlp", "dense_hidden"}
    moe = {"router_logits", "topk_idx", "topk_weights", "routed", "shared", "moe", "hidden"}
    for point in names.LAYER_POINTS:
        for layer in (0, 1, 2):
            absent = point in (moe if layer == 0 else dense)
            assert (names.layer_name(layer, point) in tensors) != absent, (layer, point)
    ends = (names.EMBED, names.FINAL_NORM, names.LOGITS)
    assert all(name in tensors for name in ends)
    assert all(names.mtp_name(2, point) in tensors for point in ("enorm", "hnorm", "eh_proj", "norm", "logits"))

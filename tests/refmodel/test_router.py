"""The gate: hand cases, public bug reports, and a slow oracle written from the rule."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refmodel import route


def oracle(logits, bias, top_k, n_group, topk_group, factor, norm=True, method="noaux_tc", eps=1e-20):
    """One row at a time, in Python floats, by repeated maximum with the lowest index first."""
    ids, weights = [], []
    for row in np.asarray(logits, np.float64):
        scores = [1 / (1 + math.exp(-x)) for x in row.tolist()]
        choice = [s + b for s, b in zip(scores, bias)]
        size = len(row) // n_group
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(n_group)]
        group_score = [sum(group[: 2 if method == "noaux_tc" else 1]) for group in groups]
        kept = sorted(range(n_group), key=lambda g: (-group_score[g], g))[:topk_group]
        allowed = [e for e in range(len(row)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        w = [scores[e] for e in chosen]
        if norm:
            w = [x / (sum(w) + eps) for x in w]
        ids.append(chosen)
        weights.append([x * factor for x in w])
    return np.array(ids), np.array(weights)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(8, 1, 1, 3), (16, 4, 2, 4), (32, 8, 4, 8), (12, 3, 1, 4)]),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_oracle(seed, shape, norm, coarse):
    E, G, M, K = shape
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, E)) * 3
    if coarse:  # many exact ties
        logits = np.round(logits)
    bias = rng.choice([-1.0, 0.0, 0.5], E)
    got = route(logits, bias, top_k=K, n_group=G, topk_group=M, routed_scaling_factor=2.5, norm_topk_prob=norm)
    ids, weights = oracle(logits, bias, K, G, M, 2.5, norm)
    np.testing.assert_array_equal(got.topk_idx, ids)
    np.testing.assert_allclose(got.topk_weights, weights, rtol=1e-14)


def test_masked_groups_lose_even_to_negative_scores():
    # vllm-project/vllm#13474, huggingface/transformers#45441: a mask of 0 beats negative scores
    logits, bias = np.zeros((1, 4), np.float32), np.array([-0.6, -0.7, -1, -2], np.float32)
    got = route(logits, bias, top_k=2, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    assert got.topk_idx.tolist() == [[0, 1]]
    assert got.topk_weights.tolist() == [[1.25, 1.25]]
    # adding a constant to every bias changes nothing
    moved = route(logits, bias + 5, top_k=2, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    assert moved.topk_idx.tolist() == [[0, 1]]


def logits_for(scores):
    scores = np.asarray(scores, np.float64)
    return np.log(scores / (1 - scores))[None]


@pytest.mark.parametrize(("method", "ids"), [("noaux_tc", [2, 3]), ("group_limited_greedy", [0, 1])])
def test_group_score_is_the_sum_of_two_or_the_maximum(method, ids):
    # NVIDIA/Megatron-LM#1381: V2's rule in a V3 gate
    got = route(logits_for([0.9, 0.1, 0.6, 0.55]), None, top_k=2, n_group=2, topk_group=1, topk_method=method)
    assert got.topk_idx.tolist() == [ids]


def test_bias_selects_and_does_not_weigh():
    # flashinfer-ai/flashinfer#3875
    logits, bias = np.array([[2, 1, 0, -1]], np.float32), np.array([0, 0, 0, 1.5], np.float32)
    got = route(logits, bias, top_k=2, routed_scaling_factor=2.5)
    assert got.topk_idx.tolist() == [[3, 0]]
    np.testing.assert_allclose(got.topk_weights, [[0.58479, 1.91521]], atol=1e-5)


def test_scores_that_underflow():
    # flashinfer-ai/flashinfer#3803: 0 / 0
    kwargs = dict(top_k=8, routed_scaling_factor=2.5)
    zero = route(np.full((1, 8), -200, np.float32), None, **kwargs)
    assert zero.topk_weights.tolist() == [[0.0] * 8]
    tiny = route(np.full((1, 8), -48, np.float32), None, **kwargs)
    np.testing.assert_allclose(tiny.topk_weights, 0.16648, atol=1e-5)
    bare = route(np.full((1, 8), -48, np.float32), None, norm_eps=0.0, **kwargs)
    np.testing.assert_allclose(bare.topk_weights, 0.3125)


def test_ties_go_to_the_lowest_index():
    # vllm-project/vllm#54403
    got = route(np.zeros((1, 256), np.float32), np.zeros(256), top_k=8, n_group=8, topk_group=4)
    assert got.topk_idx.tolist() == [list(range(8))]
    assert got.margin.tolist() == [0.0]
    # equal groups: the lower one
    got = route(logits_for([0.2, 0.1, 0.2, 0.1]), None, top_k=2, n_group=2, topk_group=1)
    assert got.topk_idx.tolist() == [[0, 1]]


def test_close_scores_keep_their_order():
    # an index-dependent nudge would reorder them (vllm-project/vllm#52679)
    scores = np.full(256, 0.25)
    scores[220], scores[10] = 0.5 + 1e-7, 0.5
    got = route(logits_for(scores), None, top_k=2)
    assert got.topk_idx.tolist() == [[220, 10]]


def test_ids_are_distinct_with_infinite_bias():
    # vllm-project/vllm-omni#7175
    bias = np.array([-np.inf, -np.inf, 0, -np.inf])
    got = route(np.zeros((1, 4), np.float32), bias, top_k=3)
    assert got.topk_idx.tolist() == [[2, 0, 1]]


def test_a_row_of_nan_selects_nothing_and_touches_no_neighbour():
    # vllm-project/vllm#39593
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 16)).astype(np.float32)
    clean = route(logits[[0, 2]], None, top_k=4, n_group=4, topk_group=2)
    logits[1] = np.nan
    got = route(logits, None, top_k=4, n_group=4, topk_group=2)
    assert got.topk_idx[1].tolist() == [-1] * 4
    assert got.topk_weights[1].tolist() == [0.0] * 4
    np.testing.assert_array_equal(got.topk_idx[[0, 2]], clean.topk_idx)
    assert got.topk_weights[[0, 2]].tobytes() == clean.topk_weights.tobytes()


def test_logits_stored_in_bfloat16_lose_the_choice():
    # deepseek-ai/DeepSeek-V3#696: 1.001953125 is no bfloat16
    logits = np.array([[1.0, 1.001953125]], np.float32)
    assert route(logits, None, top_k=1).topk_idx.tolist() == [[1]]
    assert route(logits.astype(ml_dtypes.bfloat16), None, top_k=1).topk_idx.tolist() == [[0]]


def test_bias_in_bfloat16_would_choose_another_expert():
    # vllm-project/vllm#23640: the bias stays float32
    logits, bias = logits_for([0.500, 0.505]), np.array([4.012, 4.000], np.float32)
    assert route(logits, bias, top_k=1).topk_idx.tolist() == [[0]]
    narrow = bias.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert route(logits, narrow, top_k=1).topk_idx.tolist() == [[1]]


def test_scaling_factor_applies_once_with_and_without_normalising():
    # vllm-project/vllm#24119
    logits = logits_for([0.5, 0.25])
    assert route(logits, None, top_k=2, routed_scaling_factor=2.5).topk_weights.sum() == pytest.approx(2.5)
    plain = route(logits, None, top_k=2, routed_scaling_factor=2.0, norm_topk_prob=False)
    np.testing.assert_allclose(plain.topk_weights, [[1.0, 0.5]])


def test_softmax_scores():
    got = route(np.array([[math.log(2), 0.0]]), None, top_k=2, norm_topk_prob=False, scoring_func="softmax")
    np.testing.assert_allclose(got.topk_weights, [[2 / 3, 1 / 3]])


def test_margin_is_the_nearer_of_group_and_expert():
    # groups (.9 + .1) and (.6 + .55): 0.15 apart; experts .6 and .55: 0.05 apart
    got = route(logits_for([0.9, 0.1, 0.6, 0.55]), None, top_k=1, n_group=2, topk_group=1)
    assert got.margin[0] == pytest.approx(0.05)
    got = route(logits_for([0.9, 0.1, 0.6, 0.2]), None, top_k=1, n_group=2, topk_group=1)
    assert got.margin[0] == pytest.approx(0.2)  # 1.0 against 0.8


@pytest.mark.parametrize("tokens", [1, 700])
def test_without_a_margin_the_selection_is_the_same(tokens):
    logits = np.random.default_rng(5).normal(size=(tokens, 16)).astype(np.float32)
    logits[tokens // 2, 3] = np.nan
    settings = {"top_k": 4, "n_group": 4, "topk_group": 2}
    full, short = route(logits, None, **settings), route(logits, None, **settings, with_margin=False)
    assert short.margin is None
    np.testing.assert_array_equal(short.topk_idx, full.topk_idx)
    np.testing.assert_array_equal(short.topk_weights, full.topk_weights)
    assert np.isnan(full.margin).tolist() == (full.topk_idx[:, 0] < 0).tolist()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (dict(top_k=0), "top_k = 0"),
        (dict(top_k=9), "top_k = 9"),
        (dict(top_k=2, n_group=3), "n_group = 3"),
        (dict(top_k=2, n_group=2, topk_group=3), "topk_group = 3"),
        (dict(top_k=5, n_group=2, topk_group=1), "4 experts of the chosen groups"),
        (dict(top_k=2, scoring_func="relu"), "scoring_func = 'relu'"),
        (dict(top_k=2, topk_method="x"), "topk_method = 'x'"),
    ],
)
def test_refuses(kwargs, words):
    with pytest.raises(ValueError, match=words):
        route(np.zeros((1, 8)), None, **kwargs)


def test_refuses_a_bias_of_another_length():
    with pytest.raises(ValueError, match=r"correction_bias \(7,\)"):
        route(np.zeros((1, 8)), np.zeros(7), top_k=2)

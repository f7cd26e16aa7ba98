"""Reported mistakes that show in members of the family, in requests without tokens, or from the second key on."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from tiny import TINY, some_ids, tiny_model

from refmodel import Model, ModelConfig, route, softmax_scale, yarn_frequencies
from refmodel.generate import Item


def test_one_group_of_384_is_plain_top_8():
    # Kimi-K2-like: kernels and group code that assume 256 experts in 8 groups
    config = ModelConfig.preset("kimi_k2")
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(50, 384)).astype(np.float32), rng.normal(size=384).astype(np.float32)
    got = route(
        logits,
        bias,
        top_k=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    for t, row in enumerate(logits):
        scores = [float(np.float32(1 / (1 + np.exp(-np.float64(x))))) for x in row]
        best = sorted(range(384), key=lambda e: -(scores[e] + float(bias[e])))[:8]
        assert got.topk_idx[t].tolist() == best
        # 2.827 in bfloat16 is 2.828125
        weights = [scores[e] / sum(scores[e] for e in best) * 2.827 for e in best]
        np.testing.assert_allclose(got.topk_weights[t], weights, rtol=2e-7)
    with pytest.raises(ValueError, match=r"n_group = 5.*divide n_routed_experts = 384"):
        replace(config, n_group=5)
    with pytest.raises(ValueError, match="384 experts do not divide into n_group = 5"):
        route(logits, bias, top_k=8, n_group=5, topk_group=1)


def test_glm_widths_of_query_value_and_cache():
    # GLM-4.7-Flash: `head_dim` 64 in its config is the rope width; the query width is 192 + 64, the value width 256
    config = ModelConfig.preset("glm_4.7_flash")
    assert softmax_scale(config) == 256**-0.5 == 0.0625
    assert yarn_frequencies(config)[0].shape == (32,)
    assert Model.random(config, 0).new_pool().width == 576


def test_cache_pages_at_full_size():
    # gpustack/gguf-parser-go#8, jundot/omlx#2626: expanded heads charged, or layers forgotten
    config = ModelConfig.preset("v3")
    pool = Model.random(config, 0, numerics="bfloat16").new_pool()
    row = pool.width * pool.dtype.itemsize
    assert (pool.width, pool.dtype) == (576, ml_dtypes.bfloat16)
    assert row * config.num_hidden_layers == 70_272
    assert row * pool.num_layers == 71_424  # with the MTP layer
    expanded = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * 2 * config.num_hidden_layers
    assert expanded == 4_997_120
    bits_4 = pool.width / 2 * config.num_hidden_layers * 65_536
    assert bits_4 == 1098 * 2**20  # 64K tokens at 4 bits; 17.875 MiB is one layer of 572


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_wrong_softmax_scale_is_invisible_at_one_key(phase):
    # vllm-project/vllm#41569, huggingface/transformers#47435: exact at position 0, wrong after
    right = tiny_model()
    config = replace(TINY, rope_scaling=replace(TINY.rope_scaling, mscale=0.0, mscale_all_dim=0.0))
    wrong = Model.random(config, 0, numerics="float64")
    assert softmax_scale(config) < softmax_scale(TINY)
    assert yarn_frequencies(config)[1] != yarn_frequencies(TINY)[1]
    ids = some_ids(2)
    a, b = right.forward(ids, phase=phase), wrong.forward(ids, phase=phase)
    np.testing.assert_allclose(a[0], b[0], rtol=1e-12)
    assert np.abs(a[1] - b[1]).max() > 1e-6


@pytest.mark.parametrize("numerics", ["float64", "fp8"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_request_without_tokens_changes_nothing_and_gets_no_rows(phase, numerics):
    model, ids = tiny_model(numerics=numerics), some_ids(5)
    assert model.forward(np.zeros(0, int), phase=phase).shape == (0, 100)
    held = model.new_cache()
    model.forward(ids, held)
    before = held.rows(0).tobytes()
    items = [Item(0, ids, model.new_cache(), 0), Item(1, ids[:0], model.new_cache(), 0), Item(2, ids[:0], held, 5)]
    steps = model.step(items, phase)
    assert steps[0].logits.tobytes() == model.forward(ids, phase=phase).tobytes()
    assert [step.logits.shape for step in steps[1:]] == [(0, 100), (0, 100)]
    assert [step.hidden.shape for step in steps[1:]] == [(0, 48), (0, 48)]
    assert (held.length, held.rows(0).tobytes()) == (5, before)

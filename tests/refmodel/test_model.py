"""The whole model: against the slow oracle, and against itself cut in every way."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import model_oracle
import numpy as np
import pytest
from tiny import TINY, VARIANTS, some_ids, tiny_model

from refmodel import Model, record
from refmodel.generate import Item
from refmodel.presets import EXAMPLE
from refmodel.random_weights import RandomTensors

NUMERICS = ("float64", "float32", "bfloat16", "fp8")
ROOT = Path(__file__).resolve().parents[2]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_equals_the_oracle(name, phase):
    ids = some_ids(12)
    expected, _ = model_oracle.forward(RandomTensors(VARIANTS[name], 0), VARIANTS[name], ids)
    got = tiny_model(name).forward(ids, phase=phase)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_model_too_large_to_keep_has_the_same_bits(numerics, monkeypatch):
    config, ids = replace(TINY, hidden_size=64), some_ids(80)  # experts' down projections lie in panels
    kept = Model.random(config, numerics=numerics, compute="float64")
    assert kept.weights.layer(1).experts.kept
    monkeypatch.setattr("refmodel.weights.DECODED_BUDGET", 0)
    made_anew = Model.random(config, numerics=numerics, compute="float64")
    assert not made_anew.weights.layer(1).experts.kept
    for phase in ("prefill", "decode"):
        assert same(kept.forward(ids, phase=phase), made_anew.forward(ids, phase=phase))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_any_cut_gives_the_bits_of_the_whole(numerics, phase):
    # chunked prefill, incremental decode, two tokens at a time (verify); positions across several pages
    model, ids = tiny_model(numerics=numerics), some_ids(150)
    whole = model.forward(ids, phase=phase)
    for cuts in ([64], [1, 63, 65, 130], [149], [70, 71, 72, 74, 76, 78]):
        cache, parts, edges = model.new_cache(), [], [0, *cuts, len(ids)]
        for start, stop in pairwise(edges):
            parts.append(model.forward(ids[start:stop], cache, phase))
        assert same(np.concatenate(parts), whole)
        assert cache.length == 150


def test_naive_and_absorbed_agree_in_float64():
    for name in VARIANTS:
        model, ids = tiny_model(name), some_ids(80)
        naive, absorbed = model.forward(ids), model.forward(ids, phase="decode")
        assert np.abs(naive - absorbed).max() < 1e-12 * np.abs(naive).max()


@pytest.mark.parametrize("numerics", NUMERICS)
def test_requests_do_not_see_each_other(numerics):
    model = tiny_model(numerics=numerics)
    prompts = [some_ids(n, seed=n) for n in (5, 70, 1, 33)]
    items = [Item(i, ids, model.new_cache(), 0) for i, ids in enumerate(prompts)]
    together = model.step(items, "prefill")
    for step, ids in zip(together, prompts):
        assert same(step.logits, model.forward(ids))


def test_a_later_token_changes_nothing_before_it():
    model, ids = tiny_model(), some_ids(40)
    changed = ids.copy()
    changed[30] = (changed[30] + 1) % TINY.vocab_size
    before, after = model.forward(ids), model.forward(changed)
    assert same(before[:30], after[:30])
    assert not np.array_equal(before[30:], after[30:])


def test_unused_cache_slots_are_never_read():
    # flashinfer-ai/flashinfer#941: NaN in slots behind the last token, and in another request's pages
    model = tiny_model()
    pool, ids = model.new_pool(), some_ids(13)
    from refmodel.cache import LatentCache

    clean, poisoned = LatentCache(pool), LatentCache(pool)
    model.step([Item(0, ids[:12], clean, 0), Item(1, ids[:12], poisoned, 0)], "prefill")
    expected = model.step([Item(0, ids[12:], clean, 12)], "decode")[0].logits
    clean.truncate(12)
    for layer in range(TINY.num_layers):
        pool.layer(layer)[clean.block_table[0], 12:] = np.nan
        pool.layer(layer)[poisoned.block_table[0]] = np.nan
    assert same(model.step([Item(0, ids[12:], clean, 12)], "decode")[0].logits, expected)


@pytest.mark.parametrize(
    ("numerics", "activation", "wide"),
    [
        ("float64", np.float64, np.float64),
        ("float32", np.float32, np.float32),
        ("bfloat16", ml_dtypes.bfloat16, np.float32),
        ("fp8", ml_dtypes.bfloat16, np.float32),
    ],
)
def test_dtypes_of_every_tensor(numerics, activation, wide):
    # osaurus-ai/vmlx-swift#379: router weights promoted the residual stream to float32
    model = tiny_model(numerics=numerics)
    with record() as tensors:
        model.forward(some_ids(5))
    wide_names = ("router.logits", "router.topk_weights", "final.logits", "lse")
    for name, array in tensors.items():
        if name.endswith(wide_names):
            assert array.dtype == wide, name
        elif not name.endswith(("topk_idx", "margin", "codes", "scale")):
            assert array.dtype == activation, name
    assert model.new_pool().dtype == activation


def test_cache_bytes_per_token_and_layer():
    model = Model.from_pretrained(EXAMPLE)
    cache = model.new_cache()
    model.forward(np.arange(3), cache)
    assert cache.rows(0).nbytes == 3 * 1152  # 576 numbers of 2 bytes, as in V3 itself


@pytest.mark.parametrize("ids", [[0, 100], [-1], [[1, 2]], [0.5]])
def test_refuses_ids(ids):
    with pytest.raises(ValueError, match=r"outside the vocabulary of 100|flat list of integers"):
        tiny_model().forward(ids)


def test_refuses_unknown_settings():
    for kwargs, words in [
        (dict(numerics="fp16"), "numerics = 'fp16'"),
        (dict(compute="float16"), "compute = float16"),
        (dict(numerics="float64", compute="float32"), "float64 results need float64 arithmetic"),
        (dict(like="tgi"), "like = 'tgi'"),
    ]:
        with pytest.raises(ValueError, match=words):
            Model.from_pretrained(EXAMPLE, **kwargs)
    with pytest.raises(ValueError, match="phase = 'verify'"):
        tiny_model().forward([1], phase="verify")


def test_float32_compute_stays_near_float64():
    ids = some_ids(60)
    exact = tiny_model(numerics="float64").forward(ids)
    fast = tiny_model(numerics="float32", compute="float32").forward(ids)
    assert fast.dtype == np.float32
    assert np.abs(fast - exact).max() < 1e-4 * np.sqrt(np.mean(exact**2))


def test_example_model_reads_python():
    # the model was trained on bytes of Python: it must be far better than the uniform 5.5 nats
    text = b"def __init__(self, name):\n\tself.name = name\n\ndef __repr__(self):\n\treturn self.name\n"
    ids = np.frombuffer(text, np.uint8)
    logits = Model.from_pretrained(EXAMPLE).forward(ids).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert -log_p[np.arange(len(ids) - 1), ids[1:]].mean() < 1.5


_BITS = """
import hashlib, numpy as np
from refmodel import Model
from refmodel.presets import EXAMPLE
ids = np.frombuffer(b"class Stack:\\n\\tdef push(self, item):\\n\\t\\tself.items.append(item)\\n", np.uint8)
for numerics in ("bfloat16", "fp8"):
    model = Model.from_pretrained(EXAMPLE, numerics=numerics)
    cache = model.new_cache()
    logits = [model.forward(ids, cache), model.forward(ids[:2], cache, "decode")]
    print(hashlib.sha256(b"".join(x.tobytes() for x in logits)).hexdigest())
"""


def bits(**variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", _BITS], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_bfloat16_and_fp8_bits_do_not_depend_on_blas_kernels():
    assert bits(OPENBLAS_CORETYPE="Haswell") == bits(OPENBLAS_CORETYPE="SkylakeX")


@pytest.mark.long
@pytest.mark.parametrize(
    "variables",
    [
        dict(OPENBLAS_CORETYPE="Zen"),
        dict(OPENBLAS_CORETYPE="Sandybridge"),
        dict(OPENBLAS_NUM_THREADS="2"),
        dict(NPY_DISABLE_CPU_FEATURES="AVX512F AVX512CD AVX512_SKX"),
    ],
)
def test_bits_do_not_depend_on_the_machine(variables):
    assert bits(**variables) == bits()

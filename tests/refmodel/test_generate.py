"""Decoding: speculative equals plain, the acceptance rule is exact, rejected entries leave the cache."""

import json

import numpy as np
import pytest
from tiny import TINY, some_ids, tiny_model

from refmodel import Model, accept
from refmodel.generate import Step, distribution, draw, generate
from refmodel.presets import EXAMPLE

PROMPTS = [np.frombuffer(p.encode(), np.uint8) for p in json.loads((EXAMPLE / "prompts.json").read_text())["prompts"]]


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("numerics", ["float32", "bfloat16", "fp8"])
def test_speculative_greedy_equals_plain_greedy(numerics, num_drafts):
    # vllm-project/vllm#49938
    model, prompts = tiny_model(numerics=numerics), [some_ids(5), some_ids(70, seed=1)]
    plain = model.generate_batch(prompts, 24)
    fast = model.generate_batch(prompts, 24, speculative=True, num_drafts=num_drafts)
    assert fast.tokens == plain.tokens
    for a, b in zip(plain.caches, fast.caches):
        assert a.length == b.length
        for layer in range(TINY.num_hidden_layers):
            assert a.rows(layer).tobytes() == b.rows(layer).tobytes()


@pytest.mark.parametrize(("new_tokens", "rate"), [(24, 0.6), pytest.param(256, 0.6, marks=pytest.mark.long)])
def test_the_example_drafts_well_and_changes_nothing(new_tokens, rate):
    model = Model.from_pretrained(EXAMPLE)
    plain = model.generate_batch(PROMPTS, new_tokens)
    fast = model.generate_batch(PROMPTS, new_tokens, speculative=True)
    print(f"acceptance {fast.acceptance_rate:.3f}, {fast.tokens_per_step:.3f} tokens per step")
    assert fast.tokens == plain.tokens
    assert fast.acceptance_rate > rate
    assert fast.tokens_per_step == pytest.approx(1 + fast.accepted / fast.steps)


class _Drafter:
    """A model whose drafts are replaced: always wrong, or always the model's own greedy tokens."""

    def __init__(self, model, truth, wrong):
        self.model, self.truth, self.wrong = model, truth, wrong
        self.config, self.seen = model.config, []

    def new_cache(self, request):
        return self.model.new_cache(request)

    def step(self, items, phase, prefix):
        self.seen.append([len(item.token_ids) for item in items])
        return self.model.step(items, phase, prefix)

    def mtp_step(self, items, phase, prefix):
        steps = []
        for item in items:
            logits = np.zeros((len(item.token_ids), self.config.vocab_size))
            index = item.slot + len(item.token_ids) + 1 - self.prompt_length
            token = self.truth[min(index, len(self.truth) - 1)]
            logits[-1, (token + 1) % 100 if self.wrong else token] = 9.0
            steps.append(Step(logits, np.zeros((len(item.token_ids), 1))))
        return steps


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("wrong", [True, False])
def test_bad_drafts_cost_a_step_each_and_good_ones_give_k_more(k, wrong):
    model, prompt = tiny_model(), some_ids(6)
    truth = model.generate(prompt, 40)
    engine = _Drafter(model, truth, wrong)
    engine.prompt_length = len(prompt)
    done = generate(engine, [prompt], 25, speculative=True, num_drafts=k)
    assert done.tokens[0] == truth[:25]
    assert done.caches[0].length == len(prompt) + 25 - 1  # no rejected entry is left
    if wrong:
        assert (done.accepted, done.steps) == (0, 24)
    else:
        assert done.accepted == done.drafted
        assert done.steps == -(-24 // (k + 1))


def test_acceptance_follows_the_target_distribution():
    """The rule is exact: whatever q is, the first token is distributed as p."""
    p, q = np.array([0.5, 0.2, 0.3, 0.0]), np.array([0.1, 0.6, 0.2, 0.1])
    rng, counts, kept = np.random.default_rng(0), np.zeros(4), 0
    for _ in range(40000):
        verdict = accept([draw(q, rng)], q[None], np.stack([p, p]), rng)
        counts[verdict.tokens[0]] += 1
        kept += verdict.num_accepted
    np.testing.assert_allclose(counts / 40000, p, atol=0.01)
    assert kept / 40000 == pytest.approx(np.minimum(p, q).sum(), abs=0.01)
    assert counts[3] == 0


def test_acceptance_by_hand():
    rng = np.random.default_rng(0)
    sure, other = np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])
    assert accept([1], sure[None], np.stack([sure, other]), rng) == ([1, 2], 1)  # kept, then the bonus token
    assert accept([1], sure[None], np.stack([other, sure]), rng) == ([2], 0)  # rejected: drawn from the target
    assert accept([], np.zeros((0, 3)), sure[None], rng) == ([1], 0)
    with pytest.raises(ValueError, match="1 drafts need 1 draft rows and 2 target rows"):
        accept([1], sure[None], sure[None], rng)


def test_distribution():
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1]))
    np.testing.assert_allclose(distribution(logits, 1.0, 1.0), [0.5, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(distribution(logits, 1.0, 0.7), [5 / 7, 2 / 7, 0, 0])  # of a tie the lower id
    np.testing.assert_allclose(distribution(logits, 0.5, 1.0), np.array([25, 4, 4, 1]) / 34)
    assert distribution(np.array([1.0, 3.0, 3.0]), 0, 1.0).tolist() == [0, 1, 0]


def test_sampling_depends_on_seed_and_request_only():
    model, prompts = tiny_model(numerics="bfloat16"), [some_ids(5, seed=i) for i in range(3)]
    settings = dict(temperature=0.9, top_p=0.9, speculative=True)
    together = model.generate_batch(prompts, 12, seed=5, **settings).tokens
    assert model.generate_batch(prompts[:1], 12, seed=5, **settings).tokens[0] == together[0]
    assert model.generate_batch(prompts, 12, seed=6, **settings).tokens != together


def test_stop_tokens_and_budget():
    model, prompt = tiny_model(), some_ids(6)
    tokens = model.generate(prompt, 20)
    stop = tokens[7]
    first = tokens.index(stop)
    assert model.generate(prompt, 20, stop_token_ids=[stop]) == tokens[: first + 1]
    assert model.generate(prompt, 20, stop_token_ids=[stop], speculative=True) == tokens[: first + 1]
    assert model.generate(prompt, 1) == tokens[:1]


@pytest.mark.parametrize(
    ("prompt", "kwargs", "words"),
    [
        ([], dict(max_new_tokens=3), "prompt 0 is empty"),
        ([1], dict(max_new_tokens=0), "max_new_tokens = 0"),
        ([1], dict(max_new_tokens=2, temperature=-1.0), "temperature = -1.0"),
        ([1], dict(max_new_tokens=2, top_p=0.0), "top_p = 0.0"),
        ([1], dict(max_new_tokens=2, speculative=True, num_drafts=0), "num_drafts = 0"),
    ],
)
def test_refuses(prompt, kwargs, words):
    with pytest.raises(ValueError, match=words):
        tiny_model().generate(prompt, **kwargs)

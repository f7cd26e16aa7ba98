"""The serving system with the example model: same tokens as one rank alone, whatever the path they took."""

import dataclasses
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import refmodel
from parallel.deployment import Deployment
from parallel.placement import Placement
from parallel.serving.balance_experts import balance_experts
from parallel.serving.disagg import PrefillDecode
from parallel.serving.engine import ModelEngine
from parallel.serving.kv_store import KVStore
from parallel.serving.requests import Status
from parallel.serving.scheduler import Scheduler, SchedulerConfig
from parallel.topology import Topology
from refmodel.attention import attend
from refmodel.cache import LatentCache
from refmodel.flashmla import flash_decode
from refmodel.generate import Item
from refmodel.model import Model
from refmodel.trace import record

EXAMPLE = Path(refmodel.__file__).parent / "example"
TEXT = b"\tdef close(self):\n\t\traise ValueError('closed')\n\n\tif isinstance(value, str):\n\t\treturn self.name\n" * 4


@cache
def model(numerics: str = "float32") -> Model:
    return Model.from_pretrained(EXAMPLE, numerics)


def make_prompts(seed: int, count: int, roots: int = 3, shared=(0, 66, 70), most: int = 12) -> list[list[int]]:
    """Byte prompts that share their first 66 or 70 tokens, so one page, with others of the same root; or nothing."""
    rng = random.Random(seed)
    starts = [rng.randrange(100) for _ in range(roots)]
    prompts = []
    for _ in range(count):
        start, tail = rng.choice(starts), rng.randrange(200)
        prompts.append(list(TEXT[start : start + rng.choice(shared)] + TEXT[tail : tail + rng.randint(1, most)]))
    return prompts


def plain_tokens(prompts, new: int, numerics: str = "float32") -> list[list[int]]:
    return model(numerics).generate_batch([np.array(prompt) for prompt in prompts], new).tokens


def run_to_the_end(system) -> None:
    for _ in range(2000):
        if not system.busy:
            return
        system.tick() if isinstance(system, PrefillDecode) else system.step()
    raise AssertionError("no end")


def recorded_load() -> np.ndarray:
    """[3, 256]: how often the MoE layers and the MTP layer choose each expert for the text."""
    ids = np.array(list(TEXT[:300]))
    with record() as tensors:
        hidden = model().step([Item(0, ids, model().new_cache(), 0)], "prefill")[0].hidden
        model().mtp_logits(np.append(ids[1:], 10), hidden)
    names = [f"layers.{layer}.attn_core.router.topk_idx" for layer in (1, 2, 3)]
    return np.stack([np.bincount(tensors[name].ravel(), minlength=256) for name in names])


def balanced_placement(ranks: int) -> dict[int, Placement]:
    """32 redundant experts where the balancer puts them, in another way on every layer."""
    plan = balance_experts(recorded_load(), 288, 8, 1, ranks, "balanced").phy2log
    return {layer: Placement(row, ranks) for layer, row in zip((1, 2, 3), plan)}


def apart(ranks, numerics, path=None, prefill_dispatch="normal", drafts=1, placement=None) -> PrefillDecode:
    """Prefill with its dialect and overlap, decode with its own, on as many emulated ranks each."""
    sides = [
        Deployment(model(numerics), Topology(ranks), dispatch=dispatch, schedule=schedule, placement=placement)
        for dispatch, schedule in ((prefill_dispatch, "prefill_overlap"), ("low_latency", "decode_overlap"))
    ]
    engines = ModelEngine(sides[0], 12, mtp=drafts > 0), ModelEngine(sides[1], 12, drafts=drafts)
    store = None if path is None else KVStore(path, engines[0].namespace("example"))
    assert engines[0].namespace("example") == engines[1].namespace("example")
    return PrefillDecode(*engines, SchedulerConfig(max_tokens=96), SchedulerConfig(draft_tokens=drafts), store)


def longest_known_prefix(prompt, known) -> int:
    """Whole pages of 64 that an earlier token row shares with the prompt, at most all but one of its tokens."""
    best = 0
    for tokens in known:
        same = next((i for i, (a, b) in enumerate(zip(prompt, tokens)) if a != b), min(len(prompt), len(tokens)))
        best = max(best, min(same - 1, len(prompt) - 1) // 64 * 64)  # one token more must agree: the MTP row saw it
    return best


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_chunks_pages_and_preemption_change_no_token(drafts):
    prompts = make_prompts(0, 4)
    engine = ModelEngine(model(), num_pages=4, drafts=drafts)
    scheduler = Scheduler(engine, SchedulerConfig(max_tokens=20 + drafts, draft_tokens=drafts))
    requests = [scheduler.submit(i, prompt, 6) for i, prompt in enumerate(prompts)]
    run_to_the_end(scheduler)
    assert [request.generated for request in requests] == plain_tokens(prompts, 6)
    assert scheduler.pools[0].free == 4


def test_growing_beyond_the_pages_preempts_and_still_gives_the_same_tokens():
    prompts = [list(TEXT[:60]), list(TEXT[11:81])]  # one page and two; the first soon needs its second
    scheduler = Scheduler(ModelEngine(model(), num_pages=3, drafts=1), SchedulerConfig(draft_tokens=1))
    requests = [scheduler.submit(i, prompt, 12) for i, prompt in enumerate(prompts)]
    run_to_the_end(scheduler)
    assert scheduler.stats.preemptions == 1
    assert [request.generated for request in requests] == plain_tokens(prompts, 12)


def test_sampled_tokens_are_those_of_generate():
    prompts = make_prompts(1, 3, shared=(0,))
    settings = dict(temperature=0.8, top_p=0.9, seed=5)
    expected = model().generate_batch([np.array(p) for p in prompts], 8, speculative=True, **settings).tokens
    together = Scheduler(ModelEngine(model(), 8, drafts=1, **settings), SchedulerConfig(draft_tokens=1))
    engines = ModelEngine(model(), 8, mtp=True, **settings), ModelEngine(model(), 8, drafts=1, **settings)
    for system in (together, PrefillDecode(*engines, decode=SchedulerConfig(draft_tokens=1))):
        requests = [system.submit(i, prompt, 8) for i, prompt in enumerate(prompts)]
        run_to_the_end(system)
        assert [request.generated for request in requests] == expected


def test_apart_with_everything_on_two_and_two_ranks(tmp_path):
    prompts = make_prompts(2, 6, roots=1, shared=(66, 70))
    system = apart(2, "float32", tmp_path)
    requests = []
    for half in (prompts[:3], prompts[3:]):
        known = [request.tokens for request in requests]
        for prompt in half:
            requests.append(system.submit(len(requests), prompt, 6))
        run_to_the_end(system)
        if known:
            assert [r.hit_tokens for r in requests[3:]] == [longest_known_prefix(p, known) for p in half]
    assert [request.generated for request in requests] == plain_tokens(prompts, 6)
    assert system.decode.stats.hit_tokens == 3 * 64
    assert system.prefill.stats.computed_tokens == sum(map(len, prompts)) - system.prefill.stats.hit_tokens
    colocated = Scheduler(ModelEngine(model(), 40, drafts=1), SchedulerConfig(draft_tokens=1))
    for i, prompt in enumerate(prompts):
        colocated.submit(i, prompt, 6)
    run_to_the_end(colocated)
    assert system.decode.engine.stats == colocated.engine.stats  # acceptance, to the draft
    row = 576 * 4 * 4  # float32, three layers and the MTP layer
    for request in requests:
        assert system.bytes_sent[request.id]["tokens"] == len(request.prompt) * row
        assert system.bytes_sent[request.id]["pages"] == -(-len(request.prompt) // 64) * 64 * row


def test_a_second_turn_finds_what_decode_wrote(tmp_path):
    system = apart(1, "float64", tmp_path, "low_latency")
    first = system.submit(0, list(TEXT[:60]), 8)
    run_to_the_end(system)
    turn = [*first.tokens, *b" # and"]
    second = system.submit(1, turn, 4)
    run_to_the_end(system)
    assert second.hit_tokens == 64  # 60 tokens of the prompt and four generated ones
    assert second.generated == plain_tokens([turn], 4, "float64")[0]


def test_in_fp8_normal_dispatch_rounds_as_its_one_rank_reference():
    prompts = make_prompts(3, 4)
    system = apart(2, "fp8", None, "normal")
    reference = ModelEngine(system.prefill.engine.model.reference(), 12, mtp=True)
    alone = PrefillDecode(reference, ModelEngine(model("fp8"), 12, drafts=1), None, SchedulerConfig(draft_tokens=1))
    for one in (system, alone):
        for i, prompt in enumerate(prompts):
            one.submit(i, prompt, 6)
        run_to_the_end(one)
    for i in range(4):
        assert system.decode.requests[i].generated == alone.decode.requests[i].generated
    assert system.decode.engine.stats == alone.decode.engine.stats


def test_flash_decode_reads_the_pages_that_the_model_wrote():
    """Dense decode over the model's own pages and block table equals `attend` over its rows."""
    pool = model().new_pool()
    caches = [LatentCache(pool) for _ in range(3)]
    for turn in range(2):  # grown in turns, so that the block tables interleave
        for number, length in enumerate((70, 1, 64)):
            model().forward(list(TEXT[:length]), caches[number], "decode" if turn else "prefill")
    lengths = np.array([held.length for held in caches])
    table = np.full((3, 4), 2147480000)
    for row, held in zip(table, caches):
        row[: len(held.block_table)] = held.block_table
    q = np.random.default_rng(0).standard_normal((3, 2, 4, 576))
    for layer in range(3):
        out, lse = flash_decode(q, pool.layer(layer)[:, :, None], table, lengths, softmax_scale=0.1, causal=True)
        for i, held in enumerate(caches):
            keys = held.rows(layer)[:, None]  # [S, 1, 576]
            expected = attend(q[i], keys, keys[..., :512], 0.1, causal_offset=held.length - 2)
            np.testing.assert_allclose(out[i], expected.out, rtol=1e-11, atol=1e-13)
            np.testing.assert_allclose(lse[i].T, expected.lse, rtol=1e-12)


def test_experts_on_loads_recorded_from_the_model():
    load = recorded_load()
    assert (load.sum(axis=1) == 300 * 8).all()
    before, after = (balance_experts(load, 288, 8, 4, 32, policy) for policy in ("contiguous", "balanced"))
    assert (after.max_over_mean < before.max_over_mean / 1.5).all()
    assert (after.over_bound >= 1).all()


def random_trace(seed: int) -> tuple[int, int]:
    """Arrivals, lengths, aborts and small caches; (preemptions, aborted requests)."""
    rng = random.Random(seed)
    drafts = rng.choice([0, 1, 2])
    prompts = make_prompts(seed, rng.randint(2, 4), roots=1, shared=(0, 40, 58))
    new = rng.randint(2, 8)
    scheduler = Scheduler(
        ModelEngine(model(), rng.choice([2, 3, 5]), drafts),
        SchedulerConfig(rng.choice([1, 4]), rng.choice([8, 50, 200]), drafts),
    )
    aborted, submitted = set(), 0
    while submitted < len(prompts) or scheduler.busy:
        while submitted < len(prompts) and rng.random() < 0.6:
            scheduler.submit(submitted, prompts[submitted], new)
            submitted += 1
        batch = scheduler.begin()
        if submitted and rng.random() < 0.05:
            victim = rng.randrange(submitted)
            if scheduler.requests[victim].status in (Status.WAITING, Status.RUNNING):
                aborted.add(victim)
            scheduler.abort(victim)
        scheduler.finish(scheduler.engine.step(batch))
    for i, expected in enumerate(plain_tokens(prompts, new)):
        got = scheduler.requests[i].generated
        assert got == (expected[: len(got)] if i in aborted else expected)
    assert scheduler.pools[0].free == scheduler.pools[0].num_pages
    return scheduler.stats.preemptions, len(aborted)


def test_two_random_traces():
    for seed in range(2):
        random_trace(seed)


@pytest.mark.long
def test_fifty_random_traces():
    seen = [random_trace(seed) for seed in range(100, 150)]
    assert sum(preempted for preempted, _ in seen) > 0
    assert sum(aborted for _, aborted in seen) > 0


@pytest.mark.long
@pytest.mark.parametrize(("numerics", "prefill_dispatch"), [("float32", "normal"), ("fp8", "low_latency")])
def test_64_requests_on_8_and_8_ranks(tmp_path, numerics, prefill_dispatch):
    prompts = make_prompts(4, 64, shared=(66, 70), most=10)
    system = apart(8, numerics, tmp_path, prefill_dispatch, placement=balanced_placement(8))
    assert system.prefill.config.policy == system.decode.config.policy == "balanced"
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(system.submit(i, prompt, 8))
        if i % 16 == 15:
            system.tick()
    run_to_the_end(system)
    assert [request.generated for request in requests] == plain_tokens(prompts, 8, numerics)
    assert all(request.hit_tokens in (0, 64) for request in requests)
    assert system.decode.stats.hit_tokens == sum(request.hit_tokens for request in requests) >= 32 * 64
    assert system.prefill.stats.computed_tokens == sum(map(len, prompts)) - system.prefill.stats.hit_tokens
    colocated = Scheduler(ModelEngine(model(numerics), 40, drafts=1), SchedulerConfig(draft_tokens=1))
    for i, prompt in enumerate(prompts):
        colocated.submit(i, prompt, 8)
    run_to_the_end(colocated)
    assert system.decode.engine.stats == colocated.engine.stats  # acceptance, to the draft
    assert 0 < colocated.engine.stats.accepted_tokens < colocated.engine.stats.draft_tokens


def test_bad_input(tmp_path):
    engine = ModelEngine(model(), 2, drafts=1)
    blind = dataclasses.replace(engine.namespace("example"), lookahead=0)
    with pytest.raises(ValueError, match="looks 0 tokens ahead"):
        Scheduler(engine, store=KVStore(tmp_path, blind))
    assert engine.namespace("a") != ModelEngine(model("fp8"), 2, drafts=1).namespace("a")
    assert engine.namespace("a") != ModelEngine(model(), 2).namespace("a")
    with pytest.raises(ValueError, match="no MTP layer"):
        ModelEngine(type("M", (), {"config": type("C", (), {"num_nextn_predict_layers": 0})})(), 4, drafts=1)

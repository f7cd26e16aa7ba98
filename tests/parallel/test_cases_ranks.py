"""Reported mistakes that show only on several ranks: requests without tokens, and latents that are not divided."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import TINY, some_ids, tiny_model

from parallel import Deployment, Topology
from parallel.schedule import BUILDERS


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("schedule", BUILDERS)
def test_requests_without_tokens_beside_others_and_alone(schedule, phase):
    # vllm-project/vllm#51984, #53578: an idle rank must take part, also one whose requests have nothing to compute
    model, none = tiny_model(numerics="bfloat16"), np.zeros(0, int)
    deployment = Deployment(model, Topology(4, 2), schedule=schedule)
    batch = [[some_ids(9), none], [none], [], [none, some_ids(1, seed=1), none]]
    logits = deployment.run(batch, phase=phase)
    for ids_of_rank, rows_of_rank in zip(batch, logits, strict=True):
        for ids, rows in zip(ids_of_rank, rows_of_rank, strict=True):
            assert rows.tobytes() == model.forward(ids, phase=phase).tobytes()
            assert rows.shape == (len(ids), TINY.vocab_size)
    sent = deployment.ledger.matrix("dispatch", unit="rows", classes="payload").sum(axis=1)
    assert (sent[[1, 2]] == 0).all()
    assert (sent[[0, 3]] > 0).all()


@pytest.mark.parametrize("cut", [1, 79, 80, 81, 159])
def test_the_second_half_of_a_prompt_knows_where_it_begins(cut, monkeypatch):
    # vllm-project/vllm#56031, ggml-org/llama.cpp#26471: positions or history restart at the cut
    from parallel.micro_batches import cut_item
    from parallel.ranked_pass import RankedPass

    def split(mine):
        (item, start), *_ = mine
        return [cut_item(item, start, 0, cut)], [cut_item(item, start, cut, 160)]

    model, ids = tiny_model(), some_ids(160)
    seen = []
    deployment = Deployment(model, Topology(1), schedule="prefill_overlap", split=split)
    distribute = RankedPass._distribute
    monkeypatch.setattr(RankedPass, "_distribute", lambda self: seen.append(distribute(self)) or seen[-1])
    ((logits,),) = deployment.run([[ids]])
    first, second = (seen[0][0, half].state.batch for half in range(2))
    assert first.positions.tolist() == list(range(cut))
    assert second.positions.tolist() == list(range(cut, 160))
    assert second.segments[0].cache_offset == cut
    assert logits.tobytes() == model.forward(ids).tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_latent_is_kept_whole_on_one_rank(ranks):
    # spark-arena/sparkrun#247: the latent is not divided over ranks as heads are
    deployment = Deployment(tiny_model(numerics="bfloat16"), Topology(ranks))
    cache = deployment.new_cache(3)
    assert (cache.pool.width, cache.pool.num_layers) == (32 + 8, 4)


def test_a_placement_of_the_mtp_layer_is_its_own():
    # vllm-project/vllm-ascend#8710: the MTP layer has a row of its own in the table
    from parallel.placement import Placement

    model, ids = tiny_model(numerics="bfloat16"), some_ids(12)
    reverse = Placement(np.arange(16)[::-1], 2)
    layers = {layer: Placement(np.arange(16), 2) for layer in (1, 2)} | {3: reverse}
    deployment = Deployment(model, Topology(2), placement=layers)
    assert deployment.placement(TINY.num_hidden_layers) is reverse
    assert deployment.generate([[ids], []], 8, speculative=True) == [[model.generate(ids, 8)], []]
    for placement, words in [
        ({1: reverse, 2: reverse}, r"placement names no layer 3: each of the MoE layers \[1, 2, 3\] needs one"),
        (Placement(np.arange(16), 4), "layer 1: 16 experts on 4 ranks, but the model has 16 and the topology 2"),
        ({**layers, 2: Placement(np.arange(8), 2)}, "layer 2: 8 experts on 2 ranks"),
    ]:
        with pytest.raises(ValueError, match=words):
            Deployment(model, Topology(2), placement=placement)

"""Hand-over of pages: bytes, chunks, poison, aborts at any point, and nobody's pages overwritten."""

import random

import ml_dtypes
import numpy as np
import pytest

from parallel.serving.handoff import CachePages, HandOver, Metadata
from parallel.serving.pages import PagePool

META = Metadata(first_token=42, position=13)


def cache(num_pages: int, page_size: int, width: int = 3, layers: int = 2, dtype=np.float32) -> CachePages:
    side = CachePages([np.zeros((num_pages, page_size, width), dtype) for _ in range(layers)])
    side.poison(range(num_pages))
    return side


def compute(side: CachePages, pages, first: int, stop: int, mark: float = 0.0) -> None:
    """Write rows that tell layer, token and request."""
    for number, layer in enumerate(side.layers):
        layer[side.places(pages, first, stop)] = mark + number + np.arange(first, stop)[:, None] / 100


def rows_of(side: CachePages, pages, count: int) -> np.ndarray:
    return np.stack([layer[side.places(pages, 0, count)] for layer in side.layers]).astype(np.float64)


def expected(count: int, mark: float = 0.0, layers: int = 2, width: int = 3) -> np.ndarray:
    rows = mark + np.arange(layers)[:, None] + np.arange(count) / 100
    return np.repeat(rows[:, :, None], width, axis=2)


def deliver_all(handover: HandOver, rng=None) -> None:
    while handover.under_way:
        handover.deliver(rng.randrange(len(handover.under_way)) if rng else 0)


def test_thirteen_tokens_in_pages_of_four_in_bytes():  # page bytes and token bytes are two figures
    source, target = (cache(8, 4, 576, 2, ml_dtypes.bfloat16) for _ in range(2))
    lines = []
    handover = HandOver(source, [5, 1, 7, 0], target, [2, 3, 4, 6], 13, record=lambda *line: lines.append(line))
    assert handover.page_bytes == 4 * 4 * 576 * 2 * 2 == 36_864
    assert handover.token_bytes == 13 * 576 * 2 * 2 == 29_952
    compute(source, [5, 1, 7, 0], 0, 13)
    handover.send(13)
    handover.finish(Metadata(42, 13, hidden=np.zeros(7168, ml_dtypes.bfloat16)))
    deliver_all(handover)
    assert handover.payload_bytes == 29_952
    assert handover.metadata_bytes == 8 + 14_336
    assert lines == [("cache", 0, 13, 1152), ("cache", 1, 13, 1152), ("control", 0, 1, 14_344)]
    assert handover.take().first_token == 42


def test_full_size_request_in_bytes():
    per_token = 576 * 2 * 61
    assert per_token == 70_272
    assert 4989 * per_token == pytest.approx(350.6e6, rel=1e-3)
    assert 4096 * per_token == 287_834_112


def test_chunks_arrive_in_any_order_and_sizes_of_pages_may_differ():  # vllm-project/vllm#22663
    for seed in range(20):
        rng = random.Random(seed)
        source, target = cache(6, rng.choice([1, 4, 5])), cache(20, rng.choice([2, 8]))
        count = rng.randint(1, 6)
        ours = rng.sample(range(6), -(-count // source.page_size))
        theirs = rng.sample(range(20), -(-count // target.page_size))
        handover = HandOver(source, ours, target, theirs, count)
        done = 0
        while done < count:
            step = rng.randint(1, count - done)
            compute(source, ours, done, done + step)
            done += step
            handover.send(done)
            if handover.under_way and rng.random() < 0.5:
                handover.deliver(rng.randrange(len(handover.under_way)))
            assert not handover.complete
        handover.finish(META)
        deliver_all(handover, rng)
        assert handover.take() == META
        np.testing.assert_allclose(rows_of(target, theirs, count), expected(count), rtol=1e-6)


def test_rows_that_are_not_computed_cannot_be_sent():  # sgl-project/sglang#33970
    source, target = cache(4, 4), cache(4, 4)
    handover = HandOver(source, [0, 1, 2, 3], target, [0, 1, 2, 3], 13)
    compute(source, [0, 1, 2, 3], 0, 8)
    with pytest.raises(ValueError, match=r"tokens 0 \.\. 8 of layer 0 are sent before they are computed"):
        handover.send(9)
    handover.send(8)
    source.layers[0][source.places([0, 1, 2, 3], 8, 13)] = 1.0  # one layer is ahead of the other
    with pytest.raises(ValueError, match="of layer 1"):
        handover.send(13)
    with pytest.raises(ValueError, match="finish after 8 of 13"):
        handover.finish(META)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.uint8, np.int64])
def test_poison_is_seen_in_every_dtype(dtype):
    side = cache(2, 4, dtype=dtype)
    assert not side.is_written(0, [1], 0, 1)
    side.layers[0][1, 0] = 1
    assert side.is_written(0, [1], 0, 1)
    assert not side.is_written(0, [1], 0, 2)


def test_everything_is_there_on_the_decode_side_already():  # no rows, but metadata all the same
    source, target = cache(2, 4), cache(2, 4)
    compute(target, [0, 1], 0, 8)
    handover = HandOver(source, [0, 1], target, [0, 1], 8, have=8)
    handover.send(8)
    assert not handover.complete
    handover.finish(META)
    deliver_all(handover)
    assert handover.take() == META
    assert (handover.payload_bytes, handover.token_bytes, handover.page_bytes) == (0, 0, 0)
    assert handover.metadata_bytes == 8


def test_half_of_it_is_there():
    source, target = cache(2, 4), cache(2, 4)
    compute(source, [0, 1], 0, 7)
    compute(target, [1, 0], 0, 4)
    handover = HandOver(source, [0, 1], target, [1, 0], 7, have=4)
    handover.send(7)
    handover.finish(META)
    deliver_all(handover)
    assert handover.take() == META
    assert handover.payload_bytes == handover.token_bytes == 3 * 3 * 4 * 2
    assert handover.page_bytes == 4 * 3 * 4 * 2


def test_a_prefill_that_gives_up_never_completes():  # sgl-project/sglang#30233
    source, target = cache(2, 4, layers=3), cache(2, 4, layers=3)
    compute(source, [0, 1], 0, 8)
    handover = HandOver(source, [0, 1], target, [0, 1], 8)
    handover.send(8)
    handover.deliver()  # one layer of three
    handover.abort_source()
    deliver_all(handover)
    assert handover.failed
    assert not handover.complete
    with pytest.raises(ValueError, match="not complete"):
        handover.take()
    assert handover.source_free
    assert not handover.destination_free  # until the decode side has given up too
    handover.abort_destination()
    assert handover.destination_free


def test_late_write_of_an_aborted_request_hits_nobody():  # sgl-project/sglang#24527
    source, target = cache(4, 4), cache(2, 4)
    pool = PagePool(2, 4)
    pages = pool.take(2)
    first = HandOver(source, [0, 1], target, pages, 8)
    compute(source, [0, 1], 0, 8, mark=10)
    first.send(8)
    first.abort_destination()
    assert not first.destination_free  # a new request cannot have these pages yet
    with pytest.raises(ValueError, match="2 pages asked for"):
        pool.take(2)
    first.finish(META)
    deliver_all(first)
    assert first.destination_free
    pool.give_back(pages)
    target.poison(pages)
    second_pages = pool.take(2)
    second = HandOver(source, [2, 3], target, second_pages, 8)
    compute(source, [2, 3], 0, 8, mark=20)
    second.send(8)
    second.finish(META)
    deliver_all(second)
    second.take()
    np.testing.assert_allclose(rows_of(target, second_pages, 8), expected(8, 20), rtol=1e-6)


@pytest.mark.parametrize("abort", ["abort_source", "abort_destination"])
def test_whoever_gives_up_last_gives_up(abort):
    source, target = cache(2, 4), cache(2, 4)
    compute(source, [0, 1], 0, 8)
    handover = HandOver(source, [0, 1], target, [0, 1], 8)
    handover.send(8)
    handover.finish(META)
    deliver_all(handover)
    assert handover.complete
    getattr(handover, abort)()
    assert not handover.complete
    with pytest.raises(ValueError, match="not complete"):
        handover.take()


def test_after_the_decode_side_gave_up_nothing_more_is_sent():
    source, target = cache(2, 4), cache(2, 4)
    compute(source, [0, 1], 0, 8)
    handover = HandOver(source, [0, 1], target, [0, 1], 8)
    handover.send(3)
    handover.abort_destination()
    handover.send(5)  # the prefill side has not heard of it yet
    assert handover.under_way[-1].stop == 5
    deliver_all(handover)
    assert not handover.destination_free  # nothing is under way, but more may come
    handover.send(8)
    handover.finish(META)
    assert handover.under_way == []
    assert handover.source_free
    assert handover.destination_free
    with pytest.raises(ValueError, match="after the prefill side was done"):
        handover.send(8)


def play(seed: int) -> int:
    """Requests over two pools that are far too small, aborts on both sides, writes delivered late and out of order."""
    rng = random.Random(seed)
    sides = cache(6, rng.choice([1, 2, 4])), cache(6, rng.choice([1, 2, 4]))
    pools = [PagePool(6, side.page_size) for side in sides]
    open_, taken = [], 0
    for number in range(60):
        count = rng.randint(1, 6)
        needs = [pool.pages_for(count) for pool in pools]
        if all(pool.free >= need for pool, need in zip(pools, needs)):
            pages = [pool.take(need) for pool, need in zip(pools, needs)]
            for side, mine in zip(sides, pages):
                side.poison(mine)
            open_.append([HandOver(sides[0], pages[0], sides[1], pages[1], count), number + 1.0, [True, True]])
        for entry in rng.sample(open_, min(2, len(open_))):
            handover, mark, _ = entry
            event = rng.random()
            if event < 0.1:
                handover.abort_source()
            elif event < 0.2:
                handover.abort_destination()
            elif not handover._source_done:
                if handover.sent < handover.num_tokens:
                    stop = rng.randint(handover.sent + 1, handover.num_tokens)
                    compute(sides[0], handover.source_pages, handover.sent, stop, mark)
                    handover.send(stop)
                if handover.sent == handover.num_tokens or handover._source_knows:
                    handover.finish(META)
            if handover.under_way and rng.random() < 0.7:
                handover.deliver(rng.randrange(len(handover.under_way)))
            if handover.failed:
                handover.abort_destination()
            if handover.complete:
                handover.take()
                np.testing.assert_allclose(
                    rows_of(sides[1], handover.destination_pages, handover.num_tokens),
                    expected(handover.num_tokens, mark),
                    rtol=1e-5,
                )
                taken += 1
        for handover, _, owned in open_:
            for i, (free, pages) in enumerate(
                ((handover.source_free, handover.source_pages), (handover.destination_free, handover.destination_pages))
            ):
                if owned[i] and free:
                    pools[i].give_back(pages)
                    owned[i] = False
        open_ = [entry for entry in open_ if any(entry[2])]
    for handover, _, owned in open_:
        handover.abort_source()
        handover.abort_destination()
        deliver_all(handover)
        assert handover.source_free
        assert handover.destination_free
        for i, pages in enumerate((handover.source_pages, handover.destination_pages)):
            if owned[i]:
                pools[i].give_back(pages)
    assert all(pool.free == 6 for pool in pools)
    return taken


def test_random_histories():
    assert sum(play(seed) for seed in range(60)) > 200


@pytest.mark.long
def test_many_random_histories():
    for seed in range(1000, 1800):
        play(seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"destination": cache(4, 4, width=5)}, "differ in"),
        ({"destination": cache(4, 4, layers=3)}, "differ in"),
        ({"destination": cache(4, 4, dtype=np.float64)}, "differ in"),
        ({"source_pages": [0]}, "1 source pages of 4 do not hold 5"),
        ({"destination_pages": [0]}, "1 destination pages"),
        ({"have": 6}, "have = 6"),
    ],
)
def test_bad_input(change, message):
    good = dict(
        source=cache(4, 4), source_pages=[0, 1], destination=cache(4, 4), destination_pages=[0, 1], num_tokens=5
    )
    with pytest.raises(ValueError, match=message):
        HandOver(**{**good, **change})
    with pytest.raises(ValueError, match="of one kind"):
        CachePages([np.zeros((1, 2, 3)), np.zeros((1, 2, 4))])

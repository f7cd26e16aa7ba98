"""Chain replication: no acknowledged block is lost while targets come and go."""

import random

import pytest

from parallel.serving.chain import Chain, State, Unavailable


def test_write_all_read_any():
    chain = Chain(3)
    chain.write("k", b"one")
    assert [chain.read("k", t) for t in range(3)] == [b"one"] * 3
    assert chain.read("other", 1) is None


def test_the_tail_decides_while_a_write_is_under_way():
    chain = Chain(3)
    chain.write("k", b"old")
    write = chain.start_write("k", b"new")
    assert not chain.step(write)  # the head holds it
    assert not chain.step(write)  # the middle too
    assert [chain.read("k", t) for t in range(3)] == [b"old"] * 3
    assert not chain.step(write)  # the tail commits: from here on every target answers with it
    assert [chain.read("k", t) for t in range(3)] == [b"new"] * 3
    assert not chain.step(write)
    assert chain.step(write)
    assert all(target.pending == {} for target in chain.targets)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_a_target_lost_at_any_message_of_a_write(lost, after):
    chain = Chain(3)
    chain.write("old", b"kept")
    write = chain.start_write("k", b"data")
    for _ in range(after):
        chain.step(write)
    chain.fail(lost, wipe=True)
    while not chain.step(write):
        pass
    for target in chain.serving:
        assert chain.read("k", target) == b"data"
        assert chain.read("old", target) == b"kept"
    chain.restore(lost)
    while not chain.sync_step(lost):
        pass
    assert chain.serving[-1] == lost
    assert (chain.read("k", lost), chain.read("old", lost)) == (b"data", b"kept")


def test_the_last_to_serve_must_return_first():
    chain = Chain(2)
    chain.fail(0)
    chain.write("k", b"only on 1")
    chain.fail(1)
    with pytest.raises(Unavailable, match=r"last to serve, \[1\]"):
        chain.restore(0)
    with pytest.raises(Unavailable, match="must return first"):
        chain.start_write("k", b"x")
    chain.restore(1)
    assert chain.read("k", 1) == b"only on 1"
    chain.restore(0)
    with pytest.raises(Unavailable, match="syncing"):
        chain.read("k", 0)
    while not chain.sync_step(0):
        pass
    assert chain.read("k", 0) == b"only on 1"


def test_a_newer_write_that_stops_half_way_does_not_hide_an_acknowledged_older_one():
    chain = Chain(3)
    first, second = chain.start_write("k", b"first"), chain.start_write("k", b"second")
    chain.step(second)  # only the head ever hears of the second
    while not chain.step(first):
        pass
    assert [chain.read("k", t) for t in range(3)] == [b"first"] * 3


def play(seed: int, events: int) -> tuple[int, int]:
    """Random events; after each one every serving target must show what was acknowledged, or newer."""
    rng = random.Random(seed)
    chain = Chain(rng.randint(1, 4))
    acknowledged, seen, under_way, counts = {}, {}, [], [0, 0]
    for number in range(events):
        event = rng.choice("wwwssssssssfrcc")
        target = rng.randrange(len(chain.targets))
        try:
            if event == "w":
                under_way.append(chain.start_write(rng.randrange(3), number.to_bytes(4, "big")))
            elif event == "s" and under_way:
                write = rng.choice(under_way)
                if chain.step(write):
                    under_way.remove(write)
                    acknowledged[write.key] = max(acknowledged.get(write.key, 0), int.from_bytes(write.data, "big"))
                    counts[0] += 1
            elif event == "f":
                last = chain.serving == [target] or chain.targets[target].state is State.LAST
                chain.fail(target, wipe=not last and rng.random() < 0.5)
                counts[1] += 1
                if rng.random() < 0.3:
                    under_way = under_way[1:]  # a client dies with its write
            elif event == "r":
                chain.restore(target)
            elif event == "c":
                chain.sync_step(target)
        except Unavailable:
            assert not chain.serving
        for key in range(3):
            shown = [int.from_bytes(chain.read(key, reader) or b"", "big") for reader in chain.serving]
            oldest = max(acknowledged.get(key, 0), seen.get(key, 0))  # what was seen once must not vanish either
            assert all(value >= oldest for value in shown), (seed, number, key)
            seen[key] = max([oldest, *shown])
    return counts[0], counts[1]


def test_random_histories():
    totals = [play(seed, 120) for seed in range(150)]
    assert sum(t[0] for t in totals) > 1000
    assert sum(t[1] for t in totals) > 500


@pytest.mark.long
def test_many_random_histories():
    for seed in range(3000):
        play(10_000 + seed, 200)


def test_an_empty_chain_is_refused():
    with pytest.raises(ValueError, match="num_targets = 0"):
        Chain(0)

"""Work on several threads: all of it is done, faults come out, and no bit of a model depends on the number."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import some_ids, tiny_model

from refmodel import record, threads
from refmodel.threads import each, row_pieces, thread_count


@pytest.fixture
def always(monkeypatch):
    """Threads for any amount of work."""
    monkeypatch.setattr(threads, "_WORTH", 0)

    def use(count):
        monkeypatch.setenv("REFMODEL_THREADS", str(count))

    return use


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_item_is_worked_on_once(always, count):
    always(count)
    done = []
    each(done.append, range(1000), 1.0)
    assert sorted(done) == list(range(1000))
    each(done.append, [], 1.0)
    assert len(done) == 1000


def test_items_run_side_by_side(always):
    always(2)
    meet = threading.Barrier(2, timeout=30)  # passes only if two items are under way at a time
    each(lambda item: meet.wait(), range(2), 1.0)


def test_little_work_and_work_within_work_stay_in_their_thread(always, monkeypatch):
    always(3)
    here = set()
    monkeypatch.setattr(threads, "_WORTH", 1e-3)
    each(lambda item: here.add(threading.get_ident()), range(50), 1e-4)
    assert here == {threading.get_ident()}
    outer = []

    def work(item):
        inner = set()
        each(lambda item: inner.add(threading.get_ident()), range(50), 1.0)
        outer.append(inner == {threading.get_ident()})

    each(work, range(6), 1.0)
    assert outer == [True] * 6


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_fault_ends_the_work_and_is_raised(always, count):
    always(count)
    done, broken = [], threading.Event()

    def work(item):
        if item == 3:
            broken.set()
            raise ValueError("item 3")
        if item > 3:
            broken.wait(30)
        done.append(item)

    with pytest.raises(ValueError, match="item 3"):
        each(work, range(10_000), 1.0)
    assert len(done) < 10_000
    each(done.append, ["again"], 1.0)
    assert done[-1] == "again"


def test_settings_of_the_caller_hold_in_every_thread(always):
    always(2)
    meet, seen = threading.Barrier(2, timeout=30), []

    def work(item):
        meet.wait()
        seen.append(np.geterr()["divide"])

    with np.errstate(divide="raise"):
        each(work, range(2), 1.0)
    assert seen == ["raise", "raise"]


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", "²"])
def test_a_number_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("REFMODEL_THREADS", text)
    with pytest.raises(ValueError, match=r"REFMODEL_THREADS = .*whole number from 1"):
        thread_count()


@settings(max_examples=100)
@given(st.integers(0, 300), st.integers(1, 70))
def test_pieces_hold_every_row_once(rows, size):
    pieces = row_pieces(rows, size)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    assert all(0 < piece.stop - piece.start <= size for piece in pieces)


@pytest.mark.parametrize("numerics", ["float32", "fp8"])
@pytest.mark.parametrize("name", ["v3", "no_q_lora"])
def test_a_model_has_the_same_bits_on_any_number_of_threads(always, name, numerics):
    model = tiny_model(name, numerics, compute="float32")
    prompts = [some_ids(300, seed=1), some_ids(70, seed=2), some_ids(1, seed=3)]

    def results():
        with record() as tensors:
            model.forward(prompts[0])
        recorded = {name: tensors[name].tobytes() for name in tensors}
        logits = [model.forward(prompt, phase=phase).tobytes() for prompt in prompts for phase in ("prefill", "decode")]
        return recorded, logits, model.generate_batch(prompts, 6, speculative=True).tokens

    always(1)
    alone = results()
    always(3)
    assert results() == alone

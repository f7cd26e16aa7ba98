"""Loads of ranks from routing tables and vectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.timing.imbalance import (
    drawn_popularity,
    even_placement,
    loads_of_routing,
    loads_of_vector,
    read_loads,
)


def test_a_replicated_expert_shares_its_rows():
    # expert 0 has 6 rows on two replicas, experts 1 and 2 have 2 and 4
    loads = loads_of_vector(np.array([6.0, 2.0, 4.0]), np.array([0, 1, 0, 2]), num_ranks=2)
    assert loads.rows.tolist() == [5.0, 7.0]
    assert loads.experts.tolist() == [2.0, 2.0]
    assert loads.imbalance == pytest.approx(7 / 6)


def test_a_routing_table_is_counted_without_padding():
    table = np.array([[0, 1], [0, -1], [2, 0]])
    loads = loads_of_routing(table, np.array([0, 1, 2, 3]), num_ranks=4)
    assert loads.rows.tolist() == [3.0, 1.0, 1.0, 0.0]
    assert loads.experts.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_no_rows_at_all_are_even():
    assert loads_of_vector(np.zeros(2), np.array([0, 1]), 2).imbalance == 1.0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 30))
def test_loads_equal_a_count_row_by_row(ranks, per_rank, seed):
    rng = np.random.default_rng(seed)
    experts = ranks * per_rank
    table = rng.integers(-1, experts, size=(9, 2))
    phy2log = rng.permutation(experts)
    rows = [0] * ranks
    for expert in table.ravel():
        if expert >= 0:
            rows[int(np.flatnonzero(phy2log == expert)[0]) // per_rank] += 1
    assert loads_of_routing(table, phy2log, ranks).rows.tolist() == rows


def test_without_a_balancer_the_first_experts_are_copied():
    assert even_placement(3, 5).tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(ValueError, match="2 physical experts cannot hold 3"):
        even_placement(3, 2)


def test_drawn_popularity_is_a_distribution():
    popularity = drawn_popularity(256, 0.5, seed=1)
    assert popularity.sum() == pytest.approx(1.0)
    assert np.log(popularity).std() == pytest.approx(0.5, rel=0.1)
    assert drawn_popularity(4, 0.0).tolist() == [0.25] * 4
    with pytest.raises(ValueError, match="cannot be negative"):
        drawn_popularity(4, -1.0)


@pytest.mark.parametrize(
    ("table", "placement", "ranks", "text"),
    [
        ([[0, 4]], [0, 1, 2, 3], 2, "experts are 0 to 3"),
        ([[0, -2]], [0, 1, 2, 3], 2, "from -2"),
        ([[0, 1]], [0, 1, 2], 2, "do not divide over 2 ranks"),
    ],
)
def test_bad_tables_are_refused(table, placement, ranks, text):
    with pytest.raises(ValueError, match=text):
        loads_of_routing(np.array(table), np.array(placement), ranks)
    with pytest.raises(ValueError, match="names expert 3"):
        loads_of_vector(np.ones(2), np.array([0, 3]), 2)


def test_loads_are_read_from_text_vectors_and_recorded_routing(tmp_path):
    (tmp_path / "loads.csv").write_text("3, 1\n2\n")
    assert read_loads(tmp_path / "loads.csv", 3).tolist() == [[3.0, 1.0, 2.0]]
    np.save(tmp_path / "loads.npy", np.array([0.5, 1.5]))
    assert read_loads(tmp_path / "loads.npy", 2).tolist() == [[0.5, 1.5]]
    ids = np.array([[[0, 2], [1, 0]], [[2, 0], [0, 2]]])  # [tokens, layers, top-k]
    np.save(tmp_path / "ids.npy", ids)
    assert read_loads(tmp_path / "ids.npy", 3).tolist() == [[2.0, 0.0, 2.0], [2.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [("three", "expected numbers"), ("1, -1", "from 0 up"), ("1", "loads of 1 experts"), ("0 0", "not all 0")],
)
def test_bad_load_files_are_refused(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_loads(tmp_path / "bad.csv", 2)

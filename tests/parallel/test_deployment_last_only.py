"""Logits of each request's last token alone, wherever the request's tokens are computed."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "refmodel"))
from tiny import some_ids, tiny_model

from parallel import Deployment, Topology
from refmodel.generate import Item

LENGTHS = (5, 1, 9, 3, 7)  # five requests on eight ranks: three ranks have none


@pytest.mark.parametrize("schedule", ["sequential", "prefill_overlap"])
def test_last_rows_of_all_logits(schedule):
    deployment = Deployment(tiny_model(), Topology(8), schedule=schedule)

    def logits(last_only):
        fresh = deployment.fresh()
        items = [Item(i, some_ids(length, i), fresh.new_cache(i), 0) for i, length in enumerate(LENGTHS)]
        return [step.logits for step in fresh.step(items, "prefill", last_only=last_only)]

    every, last = logits(False), logits(True)
    assert [part.shape[0] for part in every] == list(LENGTHS)
    assert len(last) == len(LENGTHS)
    for all_rows, one_row in zip(every, last):
        np.testing.assert_array_equal(one_row, all_rows[-1:])

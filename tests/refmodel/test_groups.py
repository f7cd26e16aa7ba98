"""Groups of requests for absorbed attention: every row of a request with new tokens once, and none in wrong company."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refmodel.cache import PAGE_SIZE
from refmodel.groups import FEW_TOKENS, alike
from refmodel.state import Segment

ROW_BYTES = 640


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 300)), max_size=30))
def test_each_row_is_in_one_group_of_its_kind(requests):
    segments, start = [], 0
    for new, cached in requests:
        segments.append(Segment(None, cached, start, start + new))
        start += new
    groups = list(alike(segments, ROW_BYTES))
    rows = np.concatenate([np.arange(start)[group.rows] for group in groups] or [np.zeros(0, int)])
    assert sorted(rows.tolist()) == list(range(start))
    for group in groups:
        own = [np.arange(segment.start, segment.stop) for segment in group.segments]
        assert np.arange(start)[group.rows].tolist() == np.concatenate(own).tolist()  # request after request
        assert {len(each) for each in own} == {group.new_tokens}
        assert group.keys == [segment.keys for segment in group.segments]
        assert {-(-keys // PAGE_SIZE) for keys in group.keys} == {group.blocks}
        assert len(own) == 1 or group.new_tokens <= FEW_TOKENS
        assert len(own) == 1 or len(own) * group.blocks * PAGE_SIZE * ROW_BYTES <= 2 << 20

"""Names of blocks: equal only for equal tokens under equal settings."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.serving.keys import Namespace, block_keys, token_bytes, usable_blocks

BASE = Namespace("example@1", "bfloat16", "latent 576 x 3", block_tokens=4)


def test_every_setting_changes_every_key():
    changed = [
        dataclasses.replace(BASE, **change)
        for change in (
            {"model": "example@2"},
            {"numerics": "fp8"},
            {"layout": "latent 576 x 4"},
            {"tenant": "a"},
            {"adapter": "a"},
            {"lookahead": 1},
            {"extra": (("form", "absorbed"),)},
            {"extra": (("adapter", "a"),)},
        )
    ]
    tokens = np.arange(9)
    keys = [set(block_keys(space, tokens)) for space in [BASE, *changed]]
    for one, other in itertools.combinations(keys, 2):
        assert not one & other


def test_adapter_named_like_a_tenant_does_not_match():  # vllm-project/vllm#44701
    tenant, adapter = dataclasses.replace(BASE, tenant="x"), dataclasses.replace(BASE, adapter="x")
    assert tenant.root() != adapter.root()
    assert Namespace("ab", "c", "d").root() != Namespace("a", "bc", "d").root()
    assert Namespace("a", "b", "c", extra=(("n", "1"),)).root() != Namespace("a", "b", "c", extra=(("n", 1),)).root()


def test_tokens_have_a_fixed_width():
    assert token_bytes([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert block_keys(BASE, [1, 2, 3, 4]) != block_keys(BASE, [12, 3, 4, 0])
    with pytest.raises(ValueError, match="integers"):
        token_bytes([1.5])
    with pytest.raises(ValueError, match="integers"):
        token_bytes([-1])


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 2))
def test_keys_agree_exactly_as_far_as_tokens_and_lookahead_do(left, right, ahead):
    space = dataclasses.replace(BASE, lookahead=ahead)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right)))
    shared = [a == b for a, b in zip(block_keys(space, left), block_keys(space, right))]
    assert shared == [(i + 1) * 4 + ahead <= same for i in range(len(shared))]


def test_never_the_whole_prompt():  # vllm-project/vllm#17999, #25267
    assert [usable_blocks(BASE, n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    ahead = dataclasses.replace(BASE, lookahead=1)
    assert [usable_blocks(ahead, n) for n in (4, 5, 8, 9)] == [0, 1, 1, 2]  # costs nothing: the last token was computed


def test_bad_namespace():
    with pytest.raises(ValueError, match="block_tokens = 0"):
        Namespace("m", "n", "l", block_tokens=0)
    with pytest.raises(ValueError, match="lookahead = -1"):
        Namespace("m", "n", "l", lookahead=-1)
    with pytest.raises(ValueError, match="tenant = None"):
        Namespace("m", "n", "l", tenant=None)

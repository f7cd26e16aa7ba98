"""Every variant of a checkpoint loads to the right values with the right notices, or is refused in words."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint_variants import base
from config_cases import CONFIG_CASES
from tensor_cases import TENSOR_CASES

from fp8 import BlockScaled
from refmodel.checkpoint import Checkpoint
from refmodel.checkpoint_writer import write_checkpoint

CASES = CONFIG_CASES + TENSOR_CASES


def as_values(value):
    return value.dequantize(np.float64) if isinstance(value, BlockScaled) else value.astype(np.float64)


def read_values(checkpoint):
    return {
        name: as_values(checkpoint.block_scaled(name) if checkpoint.is_fp8(name) else checkpoint.array(name))
        for name in checkpoint.names()
    }


def write_variant(case, directory):
    variant = base(case.kind, case.config)
    case.change(variant)
    write_checkpoint(directory, variant.config, variant.tensors, max_shard_bytes=40_000)
    for name, content in variant.files.items():
        (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_variant(case, tmp_path):
    write_variant(case, tmp_path)
    if case.refused:
        with pytest.raises(ValueError, match=r".") as error:
            read_values(Checkpoint.open(tmp_path))
        message = str(error.value)
        assert message.startswith(str(tmp_path))
        assert "\n" not in message
        for words in case.refused:
            assert words in message
        return
    checkpoint = Checkpoint.open(tmp_path)
    expected = base(case.kind, case.config).tensors
    if case.config.tie_word_embeddings:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    for name, value in read_values(checkpoint).items():
        np.testing.assert_array_equal(value, as_values(expected[name]), err_msg=name)
    assert len(checkpoint.notices) == len(case.notices), checkpoint.notices
    for notice, words in zip(checkpoint.notices, case.notices, strict=True):
        assert words in notice


def test_there_are_enough_variants():
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_the_values_would_betray_a_wrong_tensor(tmp_path):
    """The comparison above can fail: one scale doubled is seen."""
    variant = base("fp8")
    name = "model.layers.1.self_attn.o_proj.weight"
    stored = variant.tensors[name]
    variant.tensors[name] = BlockScaled(stored.codes, stored.scale * np.float32(2), stored.block)
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    read = read_values(Checkpoint.open(tmp_path))
    different = [key for key, value in read.items() if not np.array_equal(value, as_values(base("fp8").tensors[key]))]
    assert different == [name]
    assert ml_dtypes.bfloat16 == Checkpoint.open(tmp_path).array("lm_head.weight").dtype

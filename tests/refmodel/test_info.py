"""Counts and bytes of a model, by hand for a tiny one and as published for V3; and the command that prints them."""

import argparse
import json
import re
import time
from dataclasses import replace

import pytest
from checkpoint_changes import nvfp4
from checkpoint_variants import base
from fake_checkpoint import write_sparse_checkpoint

from refmodel.checkpoint import EXAMPLE, Checkpoint
from refmodel.checkpoint_writer import write_checkpoint
from refmodel.config import ModelConfig, Quantization
from refmodel.inventory import Amount, expected_inventory, kv_bytes_per_token, take_inventory
from scripts import info

HAND = ModelConfig(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    moe_intermediate_size=2,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=3,
    kv_lora_rank=2,
    qk_nope_head_dim=2,
    qk_rope_head_dim=2,
    v_head_dim=3,
    num_nextn_predict_layers=1,
)


def run(*arguments):
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    return info.run(parser.parse_args([str(argument) for argument in arguments]))


def test_counts_by_hand():
    inventory = expected_inventory(HAND)
    # q_a 12, q_b 24, kv_a 16, kv_b 20, o 24, and norms of 3 and 2
    assert inventory.main["attention"] == Amount(2 * 101, 2 * 2 * 101)
    assert inventory.main["dense_mlp"].parameters == 3 * 6 * 4
    assert inventory.main["router"] == Amount(16 + 4, 2 * 16 + 4 * 4)  # the bias is float32
    assert inventory.main["shared_experts"].parameters == 3 * 2 * 4
    assert inventory.main["routed_experts"].parameters == 4 * 24
    assert inventory.main["norms"].parameters == 2 * 8 + 4
    assert (inventory.main["embedding"].parameters, inventory.main["head"].parameters) == (40, 40)
    assert inventory.total.parameters == 202 + 72 + 20 + 24 + 96 + 20 + 80 == 514
    assert inventory.activated(head=False).parameters == 514 - 80 - 48
    assert inventory.activated().parameters == 514 - 40 - 48
    assert inventory.activated(embedding=True).parameters == 514 - 48
    assert inventory.mtp_unique.parameters == 101 + 8 + 20 + 24 + 96 + 32 + 12 == 293
    assert inventory.mtp_activated().parameters == 293 - 48
    assert kv_bytes_per_token(HAND) == (2 + 2) * 2 * 2
    assert kv_bytes_per_token(HAND, itemsize=4, mtp=True) == (2 + 2) * 4 * 3


def test_bytes_by_hand():
    """FP8 in blocks of 2 x 3: q_a [3, 4] is 12 codes and 2 x 2 scales, and so on; norms stay in bfloat16."""
    inventory = expected_inventory(replace(HAND, quantization_config=Quantization((2, 3))))
    scales = 2 * 2 + 4 * 1 + 2 * 2 + 5 * 1 + 2 * 2
    assert inventory.main["attention"].nbytes == 2 * (96 + 4 * scales + 2 * (3 + 2))
    assert inventory.main["head"].nbytes == 80
    assert inventory.main["shared_experts"].nbytes == 24 + 4 * (2 + 2 + 2)


def test_tied_embedding_is_counted_once():
    inventory = expected_inventory(replace(HAND, tie_word_embeddings=True))
    assert inventory.total.parameters == 514 - 40
    assert inventory.activated().parameters == 514 - 40 - 48


def test_v3_is_as_published():
    """DeepSeek-V3 README_WEIGHTS.md: 671 B, activated 36.6 B with the head, MTP 11.5 B without its copies; and what
    those figures leave out (tenstorrent/tt-metal's copy of it counts MTP's activated parameters otherwise)."""
    inventory = expected_inventory(ModelConfig.preset("v3"))
    assert inventory.total == Amount(671_026_419_200, 673_150_611_808)
    assert inventory.main["attention"].parameters == 61 * 187_107_328
    assert inventory.main["routed_experts"].parameters == 58 * 256 * 44_040_192
    assert inventory.main["embedding"].parameters == inventory.main["head"].parameters == 926_679_040
    assert inventory.activated().parameters == 36_625_618_432
    assert inventory.activated(head=False).parameters == 35_698_939_392
    assert inventory.activated(embedding=True).parameters == 37_552_297_472
    assert inventory.mtp_unique.parameters == 11_610_068_224
    assert inventory.mtp_activated().parameters == 688_100_608
    assert kv_bytes_per_token(ModelConfig.preset("v3")) == 70_272
    assert kv_bytes_per_token(ModelConfig.preset("v3"), mtp=True) == 71_424


@pytest.mark.parametrize(
    ("name", "total", "activated", "kv"),
    [
        ("kimi_k2", 1.026e12, 32.9e9, 70_272),
        ("moonlight", 15.96e9, 2.9e9, 31_104),
        ("v2_lite_like", 15.7e9, 2.7e9, 31_104),
    ],
)
def test_other_members_are_about_as_published(name, total, activated, kv):
    inventory = expected_inventory(ModelConfig.preset(name))
    assert inventory.total.parameters == pytest.approx(total, rel=0.005)
    assert inventory.activated(embedding=True).parameters == pytest.approx(activated, rel=0.05)
    assert kv_bytes_per_token(ModelConfig.preset(name)) == kv


def test_what_is_stored_is_what_is_expected():
    checkpoint = Checkpoint.open(EXAMPLE)
    stored, expected = take_inventory(checkpoint), expected_inventory(checkpoint.config)
    assert stored.main == expected.main
    assert stored.mtp_unique == expected.mtp_unique
    assert stored.mtp["embedding"] == stored.main["embedding"]
    assert stored.stored.parameters == 24_134_144


@pytest.fixture(scope="module")
def v3_headers(tmp_path_factory):
    """The 671 B model's headers, with no data behind them."""
    directory = tmp_path_factory.mktemp("v3")
    write_sparse_checkpoint(directory, ModelConfig.preset("v3"))
    return directory


def test_info_on_the_headers_of_the_671b_model(v3_headers, capsys):
    start = time.process_time()  # of the processor: other work on the machine must not fail this
    assert run(v3_headers) == 0
    assert time.process_time() - start < 3
    text = capsys.readouterr().out
    assert re.search(r"main model +671,026,419,200 +671\.03 B +673,150,611,808 +embedding and head, not MTP", text)
    assert re.search(r"activated per token +36,625,618,432 +36\.63 B .* head, not the embedding", text)
    assert "latent cache: 70,272 bytes per token in bfloat16, 71,424 with the MTP layers'" in text
    assert re.search(r"in the files +684,489,845,504 ", text)
    assert "e4m3 in blocks of 128 x 128, float32 scales, dynamic activations" in text
    assert "note:" not in text


def test_info_as_json(v3_headers, capsys):
    assert run(v3_headers, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["loads"] is True
    assert content["files"] == len(list(v3_headers.glob("*.safetensors")))
    assert content["parameters"]["total"] == 671_026_419_200
    assert content["parameters"]["activated_with_head"] == 36_625_618_432
    assert content["kv_bytes_per_token"] == 70_272
    assert sum(part["parameters"] for part in content["parts"].values()) == content["parameters"]["stored"]
    assert sum(part["bytes"] for part in content["parts"].values()) == content["bytes"]["stored"]


def test_info_describes_the_example_by_default(capsys):
    assert run() == 0
    text = capsys.readouterr().out
    assert "yes: 2 files, weights fp8" in text
    assert "3, 1 of them dense, and 1 MTP" in text
    assert "4 heads of 128 + 64, value 128, q latent 192, kv latent 512 + 64" in text
    assert "epsilon 1e-06; inside attention 1e-06" in text
    assert "8 of 256, 4 of 8 groups, width 32, 1 shared; dense MLP 768" in text
    assert "sigmoid, noaux_tc, weights normalised, times 2.5" in text


def test_info_says_what_was_assumed(tmp_path, capsys):
    variant = base("fp8-128")
    del variant.config["quantization_config"], variant.config["scoring_func"]
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    assert run(tmp_path) == 0
    text = capsys.readouterr().out
    assert "note: scoring_func: absent, 'sigmoid' assumed: the router has an e_score_correction_bias\n" in text
    assert "note: no quantization_config, but weights are FP8: 128 x 128 blocks assumed" in text


def test_info_says_why_a_checkpoint_does_not_load(tmp_path, capsys):
    """ai-dynamo/aiconfigurator: an NVFP4 copy; the summary of its config is printed all the same."""
    variant = base()
    nvfp4(variant)
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(variant.files["hf_quant_config.json"]))
    assert run(tmp_path) == 2
    text = capsys.readouterr().out
    assert re.search(r"loads +no: .*: unsupported: NVFP4 \(modelopt\)\n", text)
    assert "2 heads of 12 + 8" in text
    assert "Complete, and stored as the config says, it would hold:" in text
    assert "in the files" not in text
    assert run(tmp_path, "--json") == 2
    content = json.loads(capsys.readouterr().out)
    assert (content["loads"], content["files"]) == (False, None)
    assert content["reason"].endswith("unsupported: NVFP4 (modelopt)")


def test_info_without_anything_to_describe(tmp_path):
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        run(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        run(tmp_path / "none")


def test_a_config_alone_is_described(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("kimi_k2").to_dict()))
    assert run(tmp_path) == 2
    text = capsys.readouterr().out
    assert "no .safetensors file" in text
    assert "8 of 384, width 2048, 1 shared" in text
    assert "1,026,408,232,448" in text


@pytest.mark.parametrize(("count", "text"), [(36_625_618_432, "36.63 B"), (24_134_144, "24.13 M"), (514, "514")])
def test_billions(count, text):
    assert info.billions(count) == text

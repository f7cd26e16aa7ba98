"""A checkpoint directory: its files and index, what opening it checks, and how its tensors are read."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint_variants import BLOCK, MOE, MTP, TINY, base
from fake_checkpoint import write_sparse_checkpoint

from fp8 import BlockScaled
from refmodel.checkpoint import EXAMPLE, Checkpoint
from refmodel.checkpoint_writer import write_checkpoint
from refmodel.config import ModelConfig
from refmodel.names import canonical_name, layer_of
from refmodel.shards import INDEX
from refmodel.tensor_file import load_tensors, save_tensors

O_PROJ = f"{MOE}self_attn.o_proj.weight"


@pytest.fixture
def fp8_shards(tmp_path):
    """An FP8 model in several shards with an index."""
    variant = base("fp8")
    write_checkpoint(tmp_path, variant.config, variant.tensors, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def edit_index(directory, change):
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_the_packaged_example_opens_without_a_word():
    checkpoint = Checkpoint.open(EXAMPLE)
    assert checkpoint.notices == []
    assert (checkpoint.dtype_of_weights, checkpoint.block_size, checkpoint.has_mtp) == ("fp8", (128, 128), True)
    assert checkpoint.config == ModelConfig.preset("example")
    names = list(checkpoint.names())
    assert len(names) == len(set(names)) == 2367
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.3.shared_head.head.weight" in names
    kv_a = checkpoint.block_scaled("model.layers.1.self_attn.kv_a_proj_with_mqa.weight")
    assert (kv_a.codes.shape, kv_a.scale.shape, kv_a.block) == ((576, 256), (5, 2), (128, 128))
    bias = checkpoint.array("model.layers.1.mlp.gate.e_score_correction_bias")
    assert (bias.dtype, bias.shape) == (np.float32, (256,))
    assert checkpoint.array("model.norm.weight").dtype == ml_dtypes.bfloat16


def test_a_full_size_checkpoint_reads_only_what_is_touched(tmp_path):
    """576 rows are 5 blocks of 128, the last one half full; deriving the block from the shapes would give 116."""
    write_sparse_checkpoint(tmp_path, ModelConfig.preset("v3"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.notices == []
    weight = checkpoint.block_scaled("model.layers.60.self_attn.kv_a_proj_with_mqa.weight")
    assert (weight.codes.shape, weight.scale.shape, weight.block) == ((576, 7168), (5, 56), (128, 128))
    assert not weight.dequantize(np.float32).any()


def test_tensors_are_asked_for_as_what_they_are(fp8_shards):
    checkpoint = Checkpoint.open(fp8_shards)
    assert checkpoint.is_fp8(O_PROJ)
    assert not checkpoint.is_fp8("lm_head.weight")
    assert checkpoint.block_size == BLOCK
    with pytest.raises(ValueError, match=r"o_proj\.weight is FP8: take block_scaled"):
        checkpoint.array(O_PROJ)
    with pytest.raises(ValueError, match=r"lm_head\.weight is BF16, not FP8: take array"):
        checkpoint.block_scaled("lm_head.weight")
    for name in ("model.layers.9.input_layernorm.weight", f"{O_PROJ}_scale_inv"):
        with pytest.raises(ValueError, match="no tensor"):
            checkpoint.array(name)
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.array("lm_head.weight")[0, 0] = 1


def test_weight_and_scale_in_different_shards(tmp_path):
    """deepseek-ai/DeepSeek-V3#2"""
    variant = base("fp8")
    weights = {n: v.codes if isinstance(v, BlockScaled) else v for n, v in variant.tensors.items()}
    scales = {f"{n}_scale_inv": v.scale for n, v in variant.tensors.items() if isinstance(v, BlockScaled)}
    save_tensors(tmp_path / "a.safetensors", weights)
    save_tensors(tmp_path / "b.safetensors", scales)
    weight_map = dict.fromkeys(weights, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(variant.config))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.notices == []
    read, stored = checkpoint.block_scaled(O_PROJ), variant.tensors[O_PROJ]
    assert np.array_equal(read.dequantize(np.float64), stored.dequantize(np.float64))
    (tmp_path / INDEX).unlink()
    assert Checkpoint.open(tmp_path).notices == [f"no {INDEX}: all 2 .safetensors files are read as shards"]
    save_tensors(tmp_path / "b.safetensors", {n: s for n, s in scales.items() if n != f"{O_PROJ}_scale_inv"})
    with pytest.raises(
        ValueError, match=r"o_proj\.weight is F8_E4M3, but its scale .*o_proj\.weight_scale_inv is missing"
    ):
        Checkpoint.open(tmp_path)


def test_the_scale_multiplies(fp8_shards):
    """`_inv` is a name: code 2 with scale 0.5 is 1 (sgl-project/sglang#3075); an E8M0 byte b is 2^(b - 127)."""
    shard = next(path for path in fp8_shards.glob("*.safetensors") if O_PROJ in load_tensors(path))
    tensors = load_tensors(shard)
    tensors[O_PROJ] = np.full((32, 20), 2, ml_dtypes.float8_e4m3fn)
    bytes_ = np.array([[127, 119], [126, 128]], np.uint8)
    tensors[f"{O_PROJ}_scale_inv"] = bytes_.view(ml_dtypes.float8_e8m0fnu)
    save_tensors(shard, tensors)
    value = Checkpoint.open(fp8_shards).block_scaled(O_PROJ).dequantize(np.float64)
    assert [value[0, 0], value[0, 16], value[16, 0], value[31, 19]] == [2, 2**-7, 1, 4]


def test_declared_powers_of_two_that_are_none_are_kept_and_counted(tmp_path):
    """deepseek-ai/DeepSeek-V3#961: dropping the mantissa of such a scale would make it 24.4 % too small."""
    variant = base("fp8")
    variant.config["quantization_config"]["scale_fmt"] = "ue8m0"
    stored, odd = variant.tensors[O_PROJ], np.float32(8.074192010099068e-05)
    scale = stored.scale.copy()
    scale[1, 1] = odd
    variant.tensors[O_PROJ] = BlockScaled(stored.codes, scale, stored.block)
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.block_scaled(f"{MOE}self_attn.kv_b_proj.weight")
    assert checkpoint.notices == []
    assert checkpoint.block_scaled(O_PROJ).scale[1, 1] == odd
    assert checkpoint.notices == [
        "scale_fmt is 'ue8m0', but 1 of 7 scales read so far are not powers of two: used as they are"
    ]


def test_an_mtp_layer_without_copies_reads_the_main_ones(tmp_path):
    variant = base()
    variant.drop(f"{MTP}embed_tokens", f"{MTP}shared_head.head")
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    checkpoint = Checkpoint.open(tmp_path)
    copy = checkpoint.array(f"{MTP}shared_head.head.weight")
    assert copy.tobytes() == checkpoint.array("lm_head.weight").tobytes()
    assert not checkpoint.is_fp8(f"{MTP}embed_tokens.weight")
    assert f"{MTP}embed_tokens.weight" in list(checkpoint.names())


def test_a_missing_mtp_layer_is_not_counted(tmp_path):
    variant = base()
    variant.drop(MTP)
    write_checkpoint(tmp_path, variant.config, variant.tensors)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.has_mtp, checkpoint.config.num_nextn_predict_layers) == (False, 0)
    assert not any(name.startswith(MTP) for name in checkpoint.names())


def truncate(directory):
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def unknown_dtype(directory):
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes().replace(b'"F8_E4M3"', b'"F8_E9M9"', 1))


def remove_shard(directory):
    sorted(directory.glob("*.safetensors"))[1].unlink()


def move_entry(directory):
    edit_index(directory, lambda weight_map: weight_map.update({O_PROJ: sorted(set(weight_map.values()))[-1]}))


def duplicate(directory):
    first, *_, last = sorted(directory.glob("*.safetensors"))
    copy = {"model.embed_tokens.weight": load_tensors(first)["model.embed_tokens.weight"]}
    save_tensors(last, load_tensors(last) | copy)
    (directory / INDEX).unlink()


def write(name, text):
    return lambda directory: (directory / name).write_text(text)


DAMAGE = {
    "truncated shard": (truncate, "model-00002-of-00005.safetensors: tensor .* the file is truncated"),
    "unknown dtype": (
        unknown_dtype,
        "00002-of-00005.safetensors: tensor .* unknown dtype 'F8_E9M9'; known: BOOL",
    ),
    "missing shard": (remove_shard, "lists 1 files that do not exist, first 'model-00002-of-00005.safetensors'"),
    "wrong shard in the index": (move_entry, "places 1 tensors in files .*o_proj.* it is in model-0000[1-4]"),
    "one tensor in two files": (duplicate, "embed_tokens.* which model-00001-of-00005.safetensors holds"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json: cannot be read: No such file"),
    "config is no JSON": (write("config.json", "{"), "config.json: not valid JSON"),
    "index is no JSON": (write(INDEX, "{"), "not a JSON object with a weight_map"),
    "index without weight_map": (write(INDEX, "{}"), "not a JSON object with a weight_map"),
    "weight_map not of strings": (write(INDEX, '{"weight_map": {"a": 1}}'), "must map tensor names to file names"),
    "shard elsewhere": (write(INDEX, '{"weight_map": {"a": "../b.safetensors"}}'), "in the same directory"),
    "empty index": (write(INDEX, '{"weight_map": {}}'), "no .safetensors file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_before_anything_is_computed(damage, fp8_shards):
    change, words = DAMAGE[damage]
    change(fp8_shards)
    with pytest.raises(ValueError, match=words) as error:
        Checkpoint.open(fp8_shards)
    assert str(error.value).startswith(str(fp8_shards))
    assert "\n" not in str(error.value)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        Checkpoint.open(tmp_path)


def test_files_beyond_the_index(fp8_shards):
    save_tensors(fp8_shards / "consolidated.safetensors", {"x": np.zeros(2)})
    edit_index(fp8_shards, lambda weight_map: weight_map.pop(O_PROJ))
    assert Checkpoint.open(fp8_shards).notices == [
        f"{INDEX} does not list consolidated.safetensors: not read",
        f"{INDEX} does not list 1 tensors of its shards, first {O_PROJ}: read all the same",
    ]


def test_the_index_chooses_among_copies(fp8_shards):
    """A stale copy of a tensor in another shard is not what the index names."""
    last = sorted(fp8_shards.glob("*.safetensors"))[-1]
    stale = np.zeros((TINY.vocab_size, TINY.hidden_size), ml_dtypes.bfloat16)
    save_tensors(last, load_tensors(last) | {"model.embed_tokens.weight": stale})
    assert Checkpoint.open(fp8_shards).array("model.embed_tokens.weight").any()


def test_a_written_checkpoint_is_read_back(tmp_path):
    variant = base("fp8")
    one, many, again = tmp_path / "one", tmp_path / "many", tmp_path / "again"
    write_checkpoint(one, ModelConfig.from_pretrained(variant.config), variant.tensors)
    write_checkpoint(many, variant.config, variant.tensors, max_shard_bytes=10_000)
    write_checkpoint(again, variant.config, variant.tensors, max_shard_bytes=10_000)
    assert sorted(path.name for path in one.iterdir()) == ["config.json", "model.safetensors"]
    shards = sorted(many.glob("*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(sum(a.nbytes for a in load_tensors(path).values()) <= 10_000 for path in shards)
    total = sum(a.nbytes for path in shards for a in load_tensors(path).values())
    assert json.loads((many / INDEX).read_text())["metadata"]["total_size"] == total
    for path in many.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    assert Checkpoint.open(one).config == Checkpoint.open(many).config
    with pytest.raises(ValueError, match=r"holds \.safetensors files already"):
        write_checkpoint(one, variant.config, variant.tensors)
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        write_checkpoint(tmp_path / "new", variant.config, variant.tensors, max_shard_bytes=0)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("layers.61.ffn.gate.bias", "model.layers.61.mlp.gate.e_score_correction_bias"),
        ("layers.3.ffn.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("layers.0.ffn.w1.scale", "model.layers.0.mlp.gate_proj.weight_scale_inv"),
        ("layers.3.ffn.experts.12.w2.weight", "model.layers.3.mlp.experts.12.down_proj.weight"),
        ("layers.3.ffn.shared_experts.w3.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.self_attn.kv_a_layernorm.weight"),
        ("layers.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.2.mlp.up_proj.weight_scale", "model.layers.2.mlp.up_proj.weight_scale_inv"),
        ("vision_tower.layers.0.attn.wq.weight", "vision_tower.layers.0.attn.wq.weight"),
        ("model.layersX.0.w", "model.layersX.0.w"),
        ("", ""),
    ],
)
def test_names(stored, canonical):
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.61.eh_proj.weight", 61),
        ("model.layers.x.eh_proj.weight", None),
        ("model.layers.", None),
        ("lm_head.weight", None),
        (f"model.layers.{'9' * 5000}.w", None),
        ("model.layers.٣.w", None),
    ],
)
def test_layer_of(name, layer):
    assert layer_of(name) == layer

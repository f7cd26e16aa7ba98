import json
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from refmodel.golden import Tolerance, compare, content_hash, read_bundle, suggest, write_bundle
from refmodel.golden.tolerance import depth_of, reproduce
from refmodel.tensor_file import TensorFile, load_tensors, save_tensors

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@dataclass
class Config:
    num_hidden_layers: int = 3
    hidden_size: int = 4


def tensors():
    return {
        "final.logits": np.float32([[1, 2], [3, 4]]),
        "embed.hidden": np.ones((2, 4), BF16),
        "layers.1.dispatch_send.codes": np.ones((2, 4), E4M3),
        "layers.1.attn_core.router.topk_idx": np.int64([[1, 0], [2, 3]]),
        "layers.2.groups": np.ones((2, 3, 4), np.float32),
        "layers.2.counts": np.int32([1, 3]),
    }


def write(path, **changes):
    arguments = dict(
        config=Config(),
        numerics="fp8",
        recipe="deepseek_v3",
        seed=7,
        tolerances={"groups": Tolerance(atol=1.0, reason="told")},
        valid={"layers.2.groups": "layers.2.counts"},
        extra={"prompt": "hé"},
    )
    write_bundle(path, tensors(), **(arguments | changes))


def test_round_trip(tmp_path):
    path = tmp_path / "g.safetensors"
    write(path)
    bundle = read_bundle(path)
    assert bundle.order == tuple(tensors())
    assert (bundle.config, bundle.numerics, bundle.recipe, bundle.seed) == (
        {"num_hidden_layers": 3, "hidden_size": 4},
        "fp8",
        "deepseek_v3",
        7,
    )
    assert bundle.versions["numpy"] == np.__version__
    assert bundle.extra == {"prompt": "hé"}
    assert bundle.tolerances["layers.2.groups"] == Tolerance(atol=1.0, reason="told")
    assert bundle.tolerances["layers.1.attn_core.router.topk_idx"].exact
    for name, array in tensors().items():
        assert bundle.tensors[name].dtype == array.dtype
        assert bundle.tensors[name].tobytes() == array.tobytes()
    assert list(load_tensors(path)) == sorted(tensors())  # an ordinary tensor file for any other reader


def test_equal_input_gives_an_equal_file(tmp_path):
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_content_hash_depends_on_bits_names_and_shapes_alone(tmp_path):
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors", seed=8)
    a, b = (content_hash(read_bundle(tmp_path / f"{n}.safetensors").tensors) for n in "ab")
    assert a == b == content_hash(dict(reversed(tensors().items())))
    for change in ({"final.logits": np.float32([[1, 2, 3, 4]])}, {"final.logits": np.float32([[1, 2], [3, 5]])}):
        assert content_hash(tensors() | change) != a


def test_compare_takes_order_rules_and_valid_rows_from_the_golden(tmp_path):
    path = tmp_path / "g.safetensors"
    write(path)
    actual = {k: v.copy() for k, v in tensors().items()}
    actual["layers.2.groups"] += np.float32(0.5)
    actual["layers.2.groups"][0, 1:] = np.nan
    assert compare(path, actual).ok
    actual["final.logits"][0, 0] = 9
    actual["embed.hidden"][0, 0] = 9
    report = compare(path, actual)
    assert report.first.name == "final.logits"  # first by the golden's order
    assert compare(path, tensors(), "exact").ok


def other(path, **metadata):
    file = TensorFile(path)
    save_tensors(path, load_tensors(path), {**file.metadata, **metadata})


# a golden that an older or newer version wrote must not be judged by rules that it does not know
def test_another_schema_is_refused_by_reader_and_by_compare_on_either_side(tmp_path):
    path = tmp_path / "g.safetensors"
    write(path)
    other(path, schema="999")
    for call in (lambda: read_bundle(path), lambda: compare(path, tensors()), lambda: compare(tensors(), path)):
        with pytest.raises(ValueError, match=r"schema '999'.*reads schema 1.*refmodel dump"):
            call()


def test_what_is_no_golden_or_contradicts_itself_is_refused(tmp_path):
    path = tmp_path / "g.safetensors"
    save_tensors(path, tensors())
    with pytest.raises(ValueError, match="no golden"):
        read_bundle(path)
    write(path)
    other(path, order=json.dumps(["x"]))
    with pytest.raises(ValueError, match="other names"):
        read_bundle(path)
    write(path)
    other(path, config="{")
    with pytest.raises(ValueError, match="incomplete or broken"):
        read_bundle(path)
    write(path)
    other(path, tolerances=json.dumps({"final.logits": {"what": 1}}))
    with pytest.raises(ValueError, match="'what' is unknown"):
        read_bundle(path)


def test_bad_input_is_refused(tmp_path):
    path = tmp_path / "g.safetensors"
    with pytest.raises(ValueError, match="no tensors"):
        write_bundle(path, {}, None, "fp8")
    with pytest.raises(ValueError, match="numerics 'int4' is unknown"):
        write(path, numerics="int4")
    with pytest.raises(ValueError, match="matches none"):
        write(path, tolerances={"nothing": Tolerance()})
    with pytest.raises(ValueError, match="names of tensors"):
        write(path, valid={"layers.2.groups": "gone"})
    with pytest.raises(ValueError, match="a dict or a dataclass"):
        write(path, config=3)
    assert not path.exists()


def test_depth_and_suggestions():
    assert [depth_of(n) for n in ("embed.hidden", "layers.0.x", "step.3.layers.12.y", "final.logits")] == [0, 1, 13, 0]
    deep, shallow = suggest(BF16, 61), suggest(BF16, 1)
    assert shallow.rtol == pytest.approx(8 * 2**-9 * 13**0.5)
    assert 0.4 < deep.rtol < 0.5
    assert suggest(np.float32, 0, "bfloat16").rtol == pytest.approx(8 * 2**-9)
    assert suggest(np.float32, 0).rtol == pytest.approx(8 * 2**-24 * 64)
    assert suggest(np.float64, 5).rtol == 1e-12
    assert suggest(np.int32, 5).exact
    assert "61 layers deep" in deep.reason
    assert reproduce(np.float32) == Tolerance(ulps=1, differing=1e-6, reason=reproduce(np.float32).reason)
    assert reproduce(BF16).exact
    with pytest.raises(ValueError, match="numerics 'x'"):
        suggest(BF16, 1, "x")
    for bad in (-1.0, float("nan"), "1", True):
        with pytest.raises(ValueError, match="0 or more"):
            Tolerance(rtol=bad)


def test_the_logits_of_a_golden_are_as_deep_as_its_model(tmp_path):
    path = tmp_path / "g.safetensors"
    ordered = {"embed.hidden": np.ones(3, BF16), "layers.0.x": np.ones(3, BF16), "final.logits": np.ones(3, BF16)}
    write_bundle(path, ordered, Config(), "bfloat16")
    rules = read_bundle(path).tolerances
    assert "0 layers deep" in rules["embed.hidden"].reason
    assert "3 layers deep" in rules["final.logits"].reason

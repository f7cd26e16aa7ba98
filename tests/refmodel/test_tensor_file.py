"""`.safetensors` files: every dtype bit for bit, one file for one content, and a named error for each fault."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from refmodel.tensor_file import TensorFile, load_tensors, save_tensors
from refmodel.tensor_header import DTYPES, MAX_HEADER_BYTES

ALL = [
    ("BOOL", np.bool_),
    ("U8", np.uint8),
    ("I8", np.int8),
    ("U16", np.uint16),
    ("I16", np.int16),
    ("U32", np.uint32),
    ("I32", np.int32),
    ("U64", np.uint64),
    ("I64", np.int64),
    ("F16", np.float16),
    ("F32", np.float32),
    ("F64", np.float64),
    ("C64", np.complex64),
    ("BF16", ml_dtypes.bfloat16),
    ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    ("F8_E5M2", ml_dtypes.float8_e5m2),
    ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
]


def raw_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def random_bits(dtype, shape, seed=0):
    """Every bit pattern, NaNs included, that the dtype can hold."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.integers(0, 256, size, dtype=np.uint8).tobytes(), dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_the_bytes_of_a_small_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"b": np.array([1, 2], np.uint8), "a": np.array([[1.0]], ml_dtypes.bfloat16)}, {"k": "v"})
    header = (
        b'{"__metadata__":{"k":"v"},"a":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]},'
        b'"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    assert path.read_bytes() == struct.pack("<Q", len(padded)) + padded + b"\x80\x3f\x01\x02"


def test_reads_a_file_written_by_hand(tmp_path):
    path = tmp_path / "a.safetensors"
    header = {
        "later": {"dtype": "F32", "shape": [], "data_offsets": [2, 6]},
        "first": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
        "none": {"dtype": "I64", "shape": [0, 7], "data_offsets": [6, 6]},
    }
    path.write_bytes(raw_file(header, struct.pack("<Hf", 0xC040, 0.5)))
    file = TensorFile(path)
    assert list(file) == list(file.keys()) == ["later", "first", "none"]
    assert file.metadata == {}
    assert (len(file), "first" in file, "second" in file) == (3, True, False)
    assert file.info("first") == ("BF16", (1,))
    assert file["first"].tolist() == [-3.0]
    assert file["later"].shape == ()
    assert file["later"] == np.float32(0.5)
    assert file["later"].flags.aligned
    assert file["none"].shape == (0, 7)


@pytest.mark.parametrize(("name", "dtype"), ALL, ids=[name for name, _ in ALL])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (3, 1, 7)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(name, dtype, shape, tmp_path):
    path = tmp_path / "a.safetensors"
    array = random_bits(dtype, shape)
    save_tensors(path, {"x": array, "odd": np.zeros(3, np.int8)})
    assert TensorFile(path).info("x") == (name, shape)
    assert same_bits(load_tensors(path)["x"], array)
    assert same_bits(np.asarray(TensorFile(path)["x"]), array)


def test_all_dtypes_are_tried():
    assert [name for name, _ in ALL] == list(DTYPES)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=str)
def test_memory_order_does_not_matter(dtype, tmp_path):
    """A transposed, strided or reversed array is written as its values stand (huggingface/safetensors#825)."""
    path = tmp_path / "a.safetensors"
    grid = np.arange(24).reshape(2, 3, 4).astype(dtype)
    views = {"t": grid.T, "s": grid[:, ::2, 1::2], "r": grid[::-1], "f": np.asfortranarray(grid), "b": grid[:1]}
    save_tensors(path, views | {"wide": np.broadcast_to(grid[0, 0], (3, 4))})
    for name, array in load_tensors(path).items():
        expected = np.broadcast_to(grid[0, 0], (3, 4)) if name == "wide" else views[name]
        assert array.tolist() == expected.tolist()
        assert array.flags.writeable


def test_byte_order_and_scalars(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"big": np.array([1, 258], ">i4"), "scalar": np.float64(2.5), "list": [1.5, 2.5]})
    read = load_tensors(path)
    assert read["big"].tolist() == [1, 258]
    assert read["big"].dtype == np.dtype("<i4")
    assert read["scalar"].shape == ()
    assert read["scalar"] == 2.5
    assert read["list"].tolist() == [1.5, 2.5]


def test_equal_input_gives_equal_bytes(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = {name: random_bits(dtype, (3, 2), seed) for seed, (name, dtype) in enumerate(ALL)}
    metadata = {f"key {i}": str(i) for i in range(20)}
    save_tensors(a, tensors, metadata)
    save_tensors(b, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert a.read_bytes() == b.read_bytes()
    save_tensors(b, load_tensors(a), TensorFile(a).metadata)
    assert a.read_bytes() == b.read_bytes()
    length = int.from_bytes(a.read_bytes()[:8], "little")
    assert length % 8 == 0
    header = json.loads(a.read_bytes()[8 : 8 + length])
    assert all(header[name]["data_offsets"][0] % np.dtype(dtype).itemsize == 0 for name, dtype in ALL)


def test_only_what_is_touched_is_read(tmp_path):
    """A file of 1 TB that takes no space: opening it and reading one tensor of it must not read the rest."""
    path = tmp_path / "a.safetensors"
    gap = 10**12
    header = {
        "huge": {"dtype": "U8", "shape": [gap], "data_offsets": [0, gap]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [gap, gap + 8]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(gap, 1)
        file.write(struct.pack("<2f", 1, 2))
    file = TensorFile(path)
    assert file["small"].tolist() == [1, 2]
    assert file["huge"].shape == (gap,)
    assert file["huge"][123456789] == 0
    with pytest.raises(ValueError, match="read-only"):
        file["small"][0] = 3


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": np.zeros(2)})
    before = path.read_bytes()
    for tensors, metadata, words in [
        ({"x": np.array(["text"])}, None, "dtype <U4 cannot be stored"),
        ({"x": np.array([object()])}, None, "dtype object cannot be stored"),
        ({"x": np.zeros(2, np.complex128)}, None, "dtype complex128 cannot be stored"),
        ({1: np.zeros(2)}, None, "tensor name 1: must be a string"),
        ({"__metadata__": np.zeros(2)}, None, "must be a string other than"),
        ({"x": np.zeros(2)}, {"k": 1}, "metadata 'k': 1: keys and values must be strings"),
        ({"\ud800": np.zeros(2)}, None, "not valid Unicode"),
    ]:
        with pytest.raises(ValueError, match=words):
            save_tensors(path, tensors, metadata)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    path, plain = tmp_path / "a.safetensors", tmp_path / "plain"
    save_tensors(path, {"x": np.zeros(2)})
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


DATA = bytes(4)
FAULTS = {
    "empty file": (b"", "starts with 8 bytes of header length"),
    "seven bytes": (bytes(7), "7 bytes"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "header beyond the file": (
        raw_file({}, length=100),
        "header of 100 bytes in a file of 10 bytes: the file is trunc",
    ),
    "header absurdly long": (struct.pack("<Q", 2**63), f"above the limit of {MAX_HEADER_BYTES}"),
    "not JSON": (raw_file(b"{nonsense}"), "not valid JSON"),
    "not an object": (raw_file(b"[1, 2]"), r"must start with '{'"),
    "leading space": (raw_file(b" {}"), r"must start with '{'"),
    "text after the object": (raw_file(b"{} {}"), "not valid JSON"),
    "NaN in the header": (raw_file(b'{"a": NaN}'), "NaN is not JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "nested too deeply": (raw_file(b'{"a":' * 100_000), "nested too deeply|not valid JSON"),
    "a number of 5000 digits": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a tensor twice": (raw_file(b'{"a": {"dtype": "U8"}, "a": 2}'), "the key 'a' occurs twice"),
    "a field twice": (raw_file(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "the key 'dtype' occurs twice"),
    "metadata not strings": (raw_file({"__metadata__": {"a": 1}}), "must map strings to strings"),
    "metadata a list": (raw_file({"__metadata__": ["a"]}), "must map strings to strings"),
    "entry not an object": (raw_file({"a": 3}), "tensor 'a': an entry has exactly the keys"),
    "field missing": (raw_file({"a": {"dtype": "U8", "shape": [4]}}, DATA), "has exactly the keys"),
    "field too many": (raw_file({"a": entry(strides=[1])}, DATA), "has exactly the keys"),
    "unknown dtype": (raw_file({"a": entry("F4")}, DATA), "tensor 'a': unknown dtype 'F4'; known: BOOL U8"),
    "dtype a list": (raw_file({"a": entry(["U8"])}, DATA), "unknown dtype"),
    "negative size": (raw_file({"a": entry(shape=(-4,))}, DATA), "shape must be a list"),
    "size a float": (raw_file({"a": entry(shape=(4.0,))}, DATA), "shape must be a list"),
    "size true": (raw_file({"a": entry(shape=(True, 4))}, DATA), "shape must be a list"),
    "33 axes": (raw_file({"a": entry(shape=(1,) * 33)}, DATA), "at most 32 sizes"),
    "absurd size": (raw_file({"a": entry(shape=(2**80,))}, DATA), "shape must be a list"),
    "absurd product": (raw_file({"a": entry(shape=(2**40, 2**40))}, DATA), "cannot be addressed"),
    "absurd product beside a zero": (
        raw_file({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}),
        "cannot be addressed",
    ),
    "shape too large": (raw_file({"a": entry(shape=(5,))}, DATA), r"hold 4 bytes, shape \[5\] of U8 needs 5"),
    "offsets backwards": (raw_file({"a": entry(offsets=(4, 0))}, DATA), "hold -4 bytes"),
    "offsets negative": (raw_file({"a": entry(offsets=(-4, 0))}, DATA), "two byte positions"),
    "three offsets": (raw_file({"a": entry(offsets=(0, 4, 8))}, DATA), "two byte positions"),
    "overlap": (
        raw_file({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)),
        "tensor 'b': starts at byte 2, overlaps tensor 'a', which ends at byte 4",
    ),
    "same place": (raw_file({"a": entry(), "b": entry()}, DATA), "overlaps"),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9)), "leaves a hole after tensor 'a'"),
    "hole at the start": (
        raw_file({"a": entry(offsets=(1, 5))}, bytes(5)),
        "leaves a hole after the start of the data",
    ),
    "truncated data": (
        raw_file({"a": entry()}, bytes(3)),
        "ends at byte 4 of a data section of 3: the file is truncated",
    ),
    "trailing bytes": (raw_file({"a": entry()}, bytes(5)), "1 bytes after the last tensor belong to none"),
    "data without tensors": (raw_file({}, DATA), "4 bytes after the last tensor"),
    "a name that is no text": (raw_file(b'{"\\ud800": 3}'), "the name is not valid Unicode"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault, tmp_path):
    content, words = FAULTS[fault]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        TensorFile(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))


def test_missing_and_changed_files(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"a\.safetensors: cannot be read: No such file"):
        load_tensors(path)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load_tensors(tmp_path)
    save_tensors(path, {"x": np.zeros(4)})
    file = TensorFile(path)
    with pytest.raises(ValueError, match="no tensor 'y' among its 1"):
        file["y"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="when opened, is"):
        file["x"]


def test_agrees_with_the_safetensors_library(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    readable = [(name, dtype) for name, dtype in ALL if not name.startswith("F8")]
    tensors = {name: random_bits(dtype, (3, 5)) for name, dtype in readable} | {"zero": np.zeros((0, 2), np.float32)}
    library.save_file(tensors, theirs, metadata={"a": "1"})
    read = load_tensors(theirs)
    assert read.keys() == tensors.keys()
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    assert TensorFile(theirs).metadata == {"a": "1"}
    save_tensors(ours, tensors, {"a": "1", "b": "2"})
    back = library.load_file(ours)
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def test_the_library_writes_fp8_that_we_read(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "a.safetensors"
    tensors = {"e4m3": random_bits(ml_dtypes.float8_e4m3fn, (4, 3)), "e5m2": random_bits(ml_dtypes.float8_e5m2, (2,))}
    library.save_file(tensors, path)
    assert all(same_bits(load_tensors(path)[name], tensors[name]) for name in tensors)

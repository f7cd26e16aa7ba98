"""Damaged tensor files, at random: each is refused in one line or read right, as a slow reader says."""

import json
import resource
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refmodel.tensor_file import TensorFile
from refmodel.tensor_header import DTYPES, MAX_BYTES, MAX_DIMENSIONS

NAMES = st.text(max_size=3) | st.sampled_from(["a", "b", "model.layers.0.mlp.gate.weight"])
HUGE = st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64, 2**200, -1, -(2**63)])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | HUGE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def good_files(draw):
    """(list of header entries in any order, data): a valid file, names unique, layout without holes."""
    names = draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), unique=True, max_size=4))
    entries, position = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = DTYPES[dtype].itemsize
        for n in shape:
            size *= n
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}))
        position += size
    if draw(st.booleans()):
        entries.append(("__metadata__", draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))))
    return draw(st.permutations(entries)), draw(st.binary(min_size=position, max_size=position))


def spell(entries, data, pad=0):
    """The bytes of a file; written out by hand so that a key may occur twice."""
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}"
    text = text.encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


@st.composite
def files(draw):
    """A valid file, then up to two faults in its header and up to one in its bytes."""
    entries, data = draw(good_files())
    entries = [(name, dict(entry)) for name, entry in entries]
    for _ in range(draw(st.integers(0, 2))):
        if entries:
            _damage(draw, entries)
    raw = spell(entries, data, draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(["none", "none", "cut", "append", "flip", "length", "random"]))
    if kind == "cut":
        raw = raw[: draw(st.integers(0, len(raw)))]
    elif kind == "append":
        raw += draw(st.binary(min_size=1, max_size=20))
    elif kind == "flip":
        place = draw(st.integers(0, len(raw) - 1))
        raw = raw[:place] + bytes([raw[place] ^ draw(st.integers(1, 255))]) + raw[place + 1 :]
    elif kind == "length":
        raw = struct.pack("<Q", draw(st.integers(0, 2**64 - 1) | st.integers(0, len(raw)))) + raw[8:]
    elif kind == "random":
        raw = draw(st.binary(max_size=60))
    return raw


def _damage(draw, entries):
    """One fault in one entry of the header."""
    place = draw(st.integers(0, len(entries) - 1))
    name, entry = entries[place]
    kind = draw(st.sampled_from(["shift", "size", "dtype", "any", "twice", "drop", "rename", "offset"]))
    if kind == "twice":
        entries.append((name, entry))
    elif kind == "drop":
        del entries[place]
    elif kind == "rename":
        entries[place] = (draw(NAMES), entry)
    elif name == "__metadata__" or kind == "any":
        entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(JSON)
    elif kind == "dtype":
        entry["dtype"] = draw(st.sampled_from(sorted(DTYPES)))
    elif kind == "shift" and isinstance(entry.get("data_offsets"), list):
        by = draw(st.integers(-9, 9) | HUGE)
        entry["data_offsets"] = [n + by if type(n) is int else n for n in entry["data_offsets"]]
    elif kind == "offset":
        entry["data_offsets"] = [draw(st.integers(-1, 20) | HUGE), draw(st.integers(-1, 20) | HUGE)]
    elif kind == "size":
        entry["shape"] = draw(st.lists(st.integers(-1, 5) | HUGE, max_size=4))


def slow_read(raw):
    """Name -> (dtype, shape, bytes) of a valid file, else None: each rule by itself, every byte counted."""
    if len(raw) < 8:
        return None
    (length,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + length], raw[8 + length :]
    if length > 100_000_000 or len(text) != length or not text.startswith(b"{"):
        return None
    doubled = []

    def pairs(items):
        doubled.extend(1 for i, (key, _) in enumerate(items) if key in [k for k, _ in items[:i]])
        return dict(items)

    def constant(text):
        raise ValueError(text)

    try:
        header = json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError):
        return None
    if doubled:
        return None
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        return None
    return slow_tensors(header, data)


def slow_tensors(header, data):
    uses, found = [0] * len(data), {}
    for name, entry in header.items():
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            return None
        if type(entry) is not dict or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            return None
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in DTYPES or type(shape) is not list or type(offsets) is not list:
            return None
        if len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
            return None
        if any(type(n) is not int or not 0 <= n < MAX_BYTES for n in shape + offsets):
            return None
        count = reach = DTYPES[dtype].itemsize
        for n in shape:
            count, reach = count * n, reach * max(n, 1)
        begin, end = offsets
        if reach >= MAX_BYTES or end - begin != count or end > len(data):
            return None
        for place in range(begin, end):
            uses[place] += 1
        found[name] = (dtype, tuple(shape), data[begin:end])
    inside = [span for span in (entry["data_offsets"] for entry in header.values()) if span[0] < span[1]]
    empty = [
        entry["data_offsets"][0] for entry in header.values() if entry["data_offsets"][0] == entry["data_offsets"][1]
    ]
    strictly_inside = any(begin < place < end for place in empty for begin, end in inside)
    return found if all(n == 1 for n in uses) and not strictly_inside else None


def check(path, raw):
    path.write_bytes(raw)
    expected = slow_read(raw)
    try:
        file = TensorFile(path)
    except ValueError as error:
        message = str(error)
        assert expected is None, message
        assert message.startswith(f"{path}: ")
        assert message.isascii()
        assert message.isprintable()
        assert len(message) < 700 + len(str(path))
        return False
    assert expected is not None
    assert file.keys() == expected.keys()
    for name, (dtype, shape, content) in expected.items():
        array = file[name]
        assert file.info(name) == (dtype, shape)
        assert (array.dtype, array.shape, array.tobytes()) == (DTYPES[dtype], shape, content)
    return True


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


@given(raw=files())
@settings(max_examples=500)
def test_damaged_files(path, raw):
    check(path, raw)


@pytest.mark.long
def test_damaged_files_in_full(path):
    outcomes = {True: 0, False: 0}

    @given(raw=files())
    @settings(max_examples=20_000)
    def run(raw):
        outcomes[check(path, raw)] += 1

    run()
    assert outcomes[True] + outcomes[False] >= 20_000
    assert min(outcomes.values()) > 2_000  # both the right loads and the refusals were tried


@given(good=good_files(), pad=st.integers(0, 9))
@settings(max_examples=200)
def test_valid_files_load_in_any_order_of_the_header(path, good, pad):
    assert check(path, spell(*good, pad))


@given(
    claim=st.sampled_from([10**9, 10**12, 2**61, 2**62, 2**63, 10**40]),
    dtype=st.sampled_from(["U8", "F64"]),
    axes=st.integers(1, 3),
)
def test_absurd_claims_take_no_memory(path, claim, dtype, axes):
    """Sizes in a header are claims: nothing is allocated for them before the file bears them out."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = [("a", {"dtype": dtype, "shape": [claim] * axes, "data_offsets": [0, claim]})]
    assert not check(path, spell(header, bytes(16)))
    path.write_bytes(struct.pack("<Q", claim % 2**64) + b"{}")
    with pytest.raises(ValueError, match=r"truncated|above the limit"):
        TensorFile(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # KiB

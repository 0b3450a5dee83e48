"""Each part of a run's state is restored bit for bit, or refused with its place in the state."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.errors import CheckpointError
from monarch.frameworks.format import Capture, Shard, Stored, UpdatedOnly, parse, trailer


def file_of(state: object, **facts: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
    capture = Capture(state, facts)
    buffer = np.full(capture.nbytes, 0xAA, np.uint8)
    capture.copy(buffer, deferred=False)
    capture.copy(buffer, deferred=True)
    content = b"".join(capture.pieces(buffer, 100))
    content += trailer(xxhash.xxh3_64_intdigest(content))
    return np.frombuffer(bytearray(content), np.uint8)


def same(one: object, other: object) -> bool:
    """Of the same types all the way down, and of the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        assert isinstance(other, np.ndarray | np.generic)
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return one == other and repr(one) == repr(other)


numbers = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers(allow_nan=False)
)
leaves = numbers | st.text() | st.binary()
keys = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text())


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        leaves,
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
        max_leaves=12,
    )
)
def test_any_nest_of_plain_values_comes_back(state: object) -> None:
    facts, found = parse(file_of(state, step=7))
    assert same(found, state)
    assert facts["step"] == 7


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ">i4", "?", "c16", "u8", "M8[ns]", "U3", "S5"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 7)])
def test_arrays_come_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    size = np.dtype(dtype).itemsize * math.prod(shape)
    # Any bits but for text, which has to be text.
    bits = bytes(size) if dtype[0] == "U" else random.Random(1).randbytes(size)
    array = np.frombuffer(bits, dtype).reshape(shape)
    _, found = parse(file_of({"a": array, "b": [array, UpdatedOnly(array)]}))
    assert same(found["a"], array) and same(found["b"], [array, array])
    # They can be trained on.
    assert found["a"].flags.writeable


def test_arrays_that_do_not_lie_in_order_come_back_in_order() -> None:
    array = np.arange(24).reshape(4, 6)
    _, found = parse(file_of([array.T, array[::2, ::-3], np.asfortranarray(array)]))
    assert [each.tolist() for each in found] == [
        array.T.tolist(),
        array[::2, ::-3].tolist(),
        array.tolist(),
    ]


def test_arrays_copied_at_once_are_separate_from_arrays_that_only_the_update_changes() -> None:
    weights, means = np.ones(3), np.ones(3)
    capture = Capture([UpdatedOnly(weights), means], {})
    buffer = np.zeros(capture.nbytes, np.uint8)
    capture.copy(buffer, deferred=False)
    # The next iteration begins.
    means += 1
    capture.copy(buffer, deferred=True)
    weights += 1
    content = b"".join(capture.pieces(buffer, 100))
    content += trailer(xxhash.xxh3_64_intdigest(content))
    _, found = parse(np.frombuffer(content, np.uint8))
    assert [each.tolist() for each in found] == [[1, 1, 1], [1, 1, 1]]


def test_numpys_and_pythons_random_states_come_back() -> None:
    state = [random.Random(5).getstate(), np.random.RandomState(5).get_state()]
    _, found = parse(file_of(state))
    assert same(found, state)
    assert same(parse(file_of(OrderedDict(a=1)))[1], {"a": 1})


class Foreign:
    """An array of another framework."""

    kind, dtype, shape, nbytes, deferred = "foreign", "f1", (2,), 2, True

    def copy_into(self, target: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        target[...] = 7


def test_an_array_of_a_framework_comes_back_as_its_bytes() -> None:
    _, found = parse(file_of([Foreign()]))
    assert isinstance(found[0], Stored)
    assert (found[0].kind, found[0].dtype, found[0].shape) == ("foreign", "f1", (2,))
    assert found[0].octets.tolist() == [7, 7]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"model": {"w": object()}}, r"state\['model'\]\['w'\]: .*builtins.object"),
        ([1, {2}], r"state\[1\]: .*builtins.set"),
        ({b"k": 1}, r"state\[b'k'\]: .*this key"),
        ([Pair(1, 2)], r"state\[0\]: .*Pair"),
        (np.array([object()]), "state: .*array of object"),
        (np.zeros(1, [("a", "f4")]), "state: .*array of"),
        (np.ma.masked_array([1]), "state: .*MaskedArray"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_place(state: object, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        Capture(state, {})


def test_every_damaged_byte_and_every_cut_is_seen() -> None:
    content = file_of({"w": np.arange(100)})
    for place in random.Random(2).sample(range(len(content)), 300):
        damaged = content.copy()
        damaged[place] ^= 1
        with pytest.raises(CheckpointError, match="damaged"):
            parse(damaged)
    for end in [*range(40), *range(len(content) - 40, len(content))]:
        with pytest.raises(CheckpointError, match="damaged"):
            parse(content[:end].copy())


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b'{"version":2}', "version 2"),
        (b'{"version":1}', "is not valid"),
        (b"[]", "is not valid"),
        (b"\xff", "is not valid"),
        (b'{"version":1,"arrays":[["numpy","<f8",[9],0,72]],"state":{"array":0}}', "beyond"),
        (b'{"version":1,"arrays":[["numpy","O",[1],0,8]],"state":{"array":0}}', "is not valid"),
        (b'{"version":1,"arrays":[],"state":{"array":3}}', "is not valid"),
        (b'{"version":1,"arrays":[],"state":{"code":3}}', "unknown"),
        (b'{"version":1,"arrays":[],"state":{"dict":[[{"dict":[]},1]]}}', "is not valid"),
    ],
)
def test_a_file_that_monarch_did_not_write_is_refused(header: bytes, complaint: str) -> None:
    content = b"MONARCHk" + len(header).to_bytes(8, "little") + header
    content += bytes(-len(content) % 4096) + bytes(8)
    content += trailer(xxhash.xxh3_64_intdigest(content))
    with pytest.raises(CheckpointError, match=complaint):
        parse(np.frombuffer(bytearray(content), np.uint8))


def container(own: object, **tensors: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A file of safetensors that says of itself what it likes."""
    text = json.dumps({"__metadata__": {"monarch": json.dumps(own)}, **tensors}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    content += trailer(xxhash.xxh3_64_intdigest(content))
    return np.frombuffer(bytearray(content), np.uint8)


@pytest.mark.parametrize(
    ("own", "tensors", "complaint"),
    [
        ({"version": 3}, {}, "version 3"),
        ({"version": 2}, {}, "is not valid"),
        ([], {}, "is not valid"),
        ({"version": 2, "arrays": [["w", "numpy", "<f8", [1]]], "state": 1}, {}, "is not valid"),
        (
            {"version": 2, "arrays": [["w", "numpy", "<f8", [9]]], "state": {"array": 0}},
            {"w": {"data_offsets": [0, 72]}},
            "beyond",
        ),
    ],
)
def test_a_file_of_safetensors_that_monarch_did_not_write_is_refused(
    own: object, tensors: dict[str, object], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        parse(container(own, **tensors))


@pytest.mark.promise(164)
def test_a_file_of_an_earlier_version_is_read() -> None:
    header = {
        **{"version": 1, "step": 7, "state": {"dict": [["w", {"array": 0}], ["b", {"array": 1}]]}},
        "arrays": [["numpy", "<f4", [3], 0, 12], ["torch", "bfloat16", [2], 64, 4]],
    }
    text = json.dumps(header).encode()
    content = b"MONARCHk" + len(text).to_bytes(8, "little") + text
    content += bytes(-len(content) % 4096)
    content += np.arange(3, dtype="<f4").tobytes() + bytes(52) + b"abcd" + bytes(60)
    content += trailer(xxhash.xxh3_64_intdigest(content))
    facts, found = parse(np.frombuffer(bytearray(content), np.uint8))
    assert facts == {"version": 1, "step": 7}
    assert found["w"].tolist() == [0, 1, 2] and found["w"].dtype == np.float32
    assert (found["b"].kind, found["b"].dtype, found["b"].shape) == ("torch", "bfloat16", (2,))
    assert found["b"].octets.tobytes() == b"abcd"


class Part(Foreign):
    shard = Shard((5,), (3,))


@pytest.mark.promise(164)
def test_others_read_the_arrays_as_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {
        **{kind: np.arange(6).astype(kind).reshape(2, 3) for kind in ("u1", "i2", "f2", "f8", "?")},
        "scalar": np.float32(2.5),
        "list": [np.ones(3, "f4"), np.zeros(0, "i8")],
        "no type of its own": np.ones(2, "c16"),
        "swapped": np.ones(3, ">i4"),
        "text": np.array(["ab"]),
        "bytes": b"abc",
        # Places whose names would be the same, and names that the format needs itself.
        "a": {"b": np.full(1, 1, "i4"), "": np.ones(1)},
        "a.b": np.full(1, 2, "i4"),
        "__metadata__": np.ones(1),
        "monarch.xxh3": np.ones(1),
        "half of a pair \ud800": np.ones(1),
        "part": Part(),
    }
    content = file_of({**arrays, "number": 5})
    found = safetensors.load(content.tobytes())
    for kind in ("u1", "i2", "f2", "f8", "?"):
        assert same(found[kind], arrays[kind])
    assert found["scalar"].shape == () and found["scalar"] == 2.5
    assert found["list.0"].tolist() == [1, 1, 1] and found["list.1"].shape == (0,)
    assert found["bytes"].tobytes() == b"abc"
    assert found["no type of its own"].tobytes() == np.ones(2, "c16").tobytes()
    assert sorted([found["a.b"].tolist(), found["a.b_"].tolist()]) == [[1], [2]]
    assert found["part"].tolist() == [7, 7]
    # And this is still what Monarch reads.
    _, back = parse(content)
    assert back["part"].shard == Part.shard
    for name in arrays.keys() - {"part"}:
        assert same(back[name], arrays[name])
    assert all(back[name].flags.aligned for name in ("i2", "f8", "swapped", "no type of its own"))

"""The format of the state of a training run in host memory and in a checkpoint file.

A state is a nest of dicts, lists and tuples of numbers, strings, bytes, None, numpy arrays and the
arrays of a framework (``Leaf``). All but the bytes of its arrays goes into a JSON header; the bytes
follow one after another. Reading a file executes no code from it, so it is safe to read the
checkpoint of another user.

A file has the format of safetensors: the length of the header as u64, the header, the arrays
without gaps, all little-endian. Each array is a tensor there, named by its place in the state
(``model.0.weight``); an array whose type the format does not have is one of bytes.
``__metadata__`` has the nest under ``monarch``. Arrays are ordered by alignment, so that each can
be used in place, and begin at a multiple of 4096. The last tensor, ``monarch.xxh3``, has the XXH3
(64 bits) of all bytes before it as u64, and a magic word.

Files of earlier versions are read, too: magic, the length of the header as u64, the header, zeros
to a multiple of 4096, the arrays, each at a multiple of 64, the XXH3 of all that as u64, magic.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import CheckpointError
from monarch.text import KiB

VERSION = 2

Octets = npt.NDArray[np.uint8]

_MAGIC_1 = b"MONARCHk"
_BEGINNING = b'{"__meta'
_END = b"MONARCHe"
_LENGTH = struct.Struct("<Q")
_PAGE_BYTES = 4096
TRAILER_BYTES = _LENGTH.size + len(_END)
_HEAD_BYTES = 16
# A file with a longer header is not a checkpoint.
_MOST_HEADER_BYTES = 1 << 30
# The facts are in this many first bytes of a file.
_MOST_FACTS_BYTES = 64 * KiB
_FACTS_AT = _LENGTH.size + len(b'{"__metadata__":{"monarch":"')
_TRAILER = "monarch.xxh3"

# The types of safetensors, by numpy's names and by PyTorch's.
_SAFETENSORS = {
    **{"?": "BOOL", "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16"},
    **{"<u4": "U32", "<i4": "I32", "<u8": "U64", "<i8": "I64"},
    **{"<f2": "F16", "<f4": "F32", "<f8": "F64"},
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}


@runtime_checkable
class Leaf(Protocol):
    """An array of a framework, as its adapter provides it.

    ``kind`` names the framework, ``dtype`` is the framework's name of the element type.
    ``deferred``: only the update of the weights changes it, so it may be copied during the next
    iteration; others are copied before the training continues. If each rank has a part of the
    array, it has a ``shard``, the Shard that this part is.
    """

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def deferred(self) -> bool: ...

    def copy_into(self, target: Octets) -> None:
        """Copies the elements, in C order, into the ``nbytes`` bytes of ``target``. Thread-safe."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of an array of shape ``whole`` that begins at ``start``; one number a dimension."""

    whole: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """An array of a framework read from a checkpoint; the adapter converts it back."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    octets: Octets
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The saved states of all ranks, by rank, for a run with another number of ranks. ``rank`` of
    ``size``: the current rank. ``TorchState.load`` accepts it."""

    states: tuple[Any, ...]
    rank: int
    size: int


class UpdatedOnly:
    """A numpy array that only the update of the weights changes (see ``Leaf.deferred``)."""

    kind = "numpy"
    deferred = True

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.dtype = array.dtype.str
        self.shape: tuple[int, ...] = array.shape
        self.nbytes = int(array.nbytes)

    def copy_into(self, target: Octets) -> None:
        target.view(self.array.dtype).reshape(self.shape)[...] = self.array


class _Copied(UpdatedOnly):
    deferred = False


class _Scalar(_Copied):
    kind = "scalar"


class _Bytes:
    """A bytes object as a leaf; it is immutable."""

    kind = "bytes"
    dtype = ""
    deferred = True

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.nbytes = len(content)
        self.shape = (self.nbytes,)

    def copy_into(self, target: Octets) -> None:
        target[...] = np.frombuffer(self._content, np.uint8)


class Capture:
    """A state at one moment: its structure and numbers are captured, its arrays not copied yet.
    Raises TypeError, naming the place, for values that a checkpoint cannot hold."""

    def __init__(self, state: object, facts: Mapping[str, object]) -> None:
        """``facts``: further values for the header; JSON."""
        found: list[tuple[str, Leaf]] = []
        tree = self._node(state, "state", "", found)
        self.is_sharded = any(_shard_of(leaf) for _, leaf in found)
        arrays: list[list[object]] = []
        tensors: dict[str, object] = {}
        names: list[str] = []
        taken = {"__metadata__", _TRAILER}
        for path, leaf in found:
            names.append(_name(path, taken))
            taken.add(names[-1])
            arrays.append([names[-1], leaf.kind, leaf.dtype, list(leaf.shape)])
            if shard := _shard_of(leaf):
                arrays[-1] += [list(shard.whole), list(shard.start)]
        # In the order of falling alignment each array is aligned without gaps.
        order = sorted(range(len(found)), key=lambda n: -_alignment(found[n][1]))
        self._leaves: list[tuple[int, Leaf]] = []
        # The bytes that the arrays need in a buffer.
        self.nbytes = 0
        for n in order:
            leaf = found[n][1]
            self._leaves.append((self.nbytes, leaf))
            tensors[names[n]] = _tensor(leaf, self.nbytes)
            self.nbytes += leaf.nbytes
        tensors[_TRAILER] = {
            "dtype": "U8",
            "shape": [TRAILER_BYTES],
            "data_offsets": [self.nbytes, self.nbytes + TRAILER_BYTES],
        }
        own = {"version": VERSION, **facts, "state": tree, "arrays": arrays}
        header = {"__metadata__": {"monarch": json.dumps(own, separators=(",", ":"))}, **tensors}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(_LENGTH.size + len(encoded)) % _PAGE_BYTES)
        self._head = _LENGTH.pack(len(encoded)) + encoded

    def copy(self, buffer: Octets, *, deferred: bool) -> None:
        """Copies arrays to ``nbytes`` of ``buffer``: those that the next iteration may change, or
        the deferred ones; these in any thread, and before the next update of the weights."""
        for offset, leaf in self._leaves:
            if leaf.deferred == deferred and leaf.nbytes:
                leaf.copy_into(buffer[offset : offset + leaf.nbytes])

    def pieces(self, buffer: Octets, piece_bytes: int) -> Iterator[bytes | memoryview]:
        """The bytes of the file without the trailer, in pieces of at most ``piece_bytes``."""
        yield self._head
        for start in range(0, self.nbytes, piece_bytes):
            yield buffer.data[start : min(self.nbytes, start + piece_bytes)]

    def _node(self, value: object, place: str, path: str, found: list[tuple[str, Leaf]]) -> object:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            pairs = []
            for key, inner in value.items():
                where = f"{place}[{key!r}]"
                if not _is_key(key):
                    raise TypeError(f"{where}: a checkpoint cannot hold this key")
                named = self._node(key, where, "", [])
                pairs.append([named, self._node(inner, where, f"{path}.{key}", found)])
            return {"dict": pairs}
        if type(value) in (list, tuple):
            assert isinstance(value, list | tuple)
            inner_nodes = [
                self._node(inner, f"{place}[{i}]", f"{path}.{i}", found)
                for i, inner in enumerate(value)
            ]
            return inner_nodes if isinstance(value, list) else {"tuple": inner_nodes}
        if isinstance(value, complex) and not isinstance(value, np.generic):
            return {"complex": [value.real, value.imag]}
        found.append((path, _leaf_of(value, place)))
        return {"array": len(found) - 1}


def parse(content: Octets) -> tuple[dict[str, Any], Any]:
    """The facts of the header and the state of a file's ``content``; arrays are views of it.

    Raises CheckpointError if it is not a checkpoint, is damaged, or is of a newer Monarch.
    """
    memory = content.data
    inner = memory[: max(0, len(memory) - TRAILER_BYTES)]
    if trailer(xxhash.xxh3_64_intdigest(inner)) != memory[len(inner) :]:
        raise CheckpointError("it is damaged or incomplete")
    start, rest = bytes(inner[:_HEAD_BYTES]), inner[_HEAD_BYTES:]
    head, tensors, first = _header(start, lambda to: bytes(rest[: to - _HEAD_BYTES]))
    body = content[first : len(inner)]
    try:
        arrays = [_array(body, tensors, *entry) for entry in head.pop("arrays")]
        return head, _value(head.pop("state"), arrays)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not valid ({error!s:.100})") from error


def parse_facts(head: bytes, read: Callable[[int], bytes]) -> dict[str, Any]:
    """The facts of the header, which stand before the state. The rest is not parsed: its objects
    need many times as much memory as their text. ``head`` are the first 16 bytes of a file,
    ``read(end)`` returns those from there to ``end``. Raises CheckpointError."""
    is_first, end = _kind_and_end(head)
    begin, mark = (_HEAD_BYTES, b',"state":') if is_first else (_FACTS_AT, rb",\"state\":")
    text = head + read(min(end, _MOST_FACTS_BYTES))
    try:
        text = text[begin : text.index(mark)]
        if not is_first:
            # JSON in a string of JSON.
            text = json.loads(b'"%s"' % text).encode()
        return _of_known_version(json.loads(text + b"}"), is_first)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not valid ({error!s:.100})") from error


def _header(
    head: bytes, read: Callable[[int], bytes]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Monarch's part of the header, that of safetensors for each tensor (empty in version 1), and
    the offset at which the arrays begin."""
    is_first, end = _kind_and_end(head)
    try:
        tensors = {} if is_first else json.loads(head[_LENGTH.size :] + read(end))
        own = read(end) if is_first else tensors["__metadata__"]["monarch"]
        first = -(-end // _PAGE_BYTES) * _PAGE_BYTES if is_first else end
        return _of_known_version(json.loads(own), is_first), tensors, first
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not valid ({error!s:.100})") from error


def _kind_and_end(head: bytes) -> tuple[bool, int]:
    """Whether a file is of version 1, and the offset of the end of its header."""
    is_first = head.startswith(_MAGIC_1)
    length = _LENGTH.unpack_from(head, 8 if is_first else 0)[0] if len(head) == _HEAD_BYTES else 0
    if not length or length > _MOST_HEADER_BYTES or not (is_first or head.endswith(_BEGINNING)):
        raise CheckpointError("it is not a checkpoint")
    return is_first, length + (_HEAD_BYTES if is_first else _LENGTH.size)


def _of_known_version(own: dict[str, Any], is_first: bool) -> dict[str, Any]:
    version = own["version"]
    if version != (1 if is_first else VERSION):
        raise CheckpointError(f"it has version {version!s:.100}, this Monarch knows {VERSION}")
    return own


def trailer(digest: int) -> bytes:
    """The last bytes of a file whose other bytes have the XXH3 ``digest``."""
    return _LENGTH.pack(digest) + _END


def _leaf_of(value: object, place: str) -> Leaf:
    if type(value) in (np.ndarray, np.memmap):
        assert isinstance(value, np.ndarray)
        if value.dtype.hasobject or value.dtype.fields or not value.dtype.itemsize:
            raise TypeError(f"{place}: a checkpoint cannot hold an array of {value.dtype}")
        return _Copied(value)
    if isinstance(value, np.generic):
        return _Scalar(np.asarray(value))
    if isinstance(value, bytes | bytearray):
        return _Bytes(bytes(value))
    if isinstance(value, Leaf):
        return value
    kind = type(value)
    what = f"{place}: a checkpoint cannot hold a {kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] == "torch":
        what += "; monarch.frameworks.torch.leaves() prepares tensors"
    raise TypeError(what)


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str)


def _shard_of(leaf: Leaf) -> Shard | None:
    shard: Shard | None = getattr(leaf, "shard", None)
    return shard


def _name(path: str, taken: Container[str]) -> str:
    """A unique name for the array at ``path``."""
    # A lone surrogate cannot be encoded in UTF-8.
    name = path.removeprefix(".").encode("utf-8", "replace").decode() or "state"
    while name in taken:
        name += "_"
    return name


def _alignment(leaf: Leaf) -> int:
    itemsize = leaf.nbytes // max(1, math.prod(leaf.shape)) or 1
    return itemsize & -itemsize


def _tensor(leaf: Leaf, begin: int) -> dict[str, object]:
    """The entry of an array in the header of safetensors."""
    known = _SAFETENSORS.get(leaf.dtype) if leaf.kind != "bytes" else "U8"
    return {
        "dtype": known or "U8",
        "shape": list(leaf.shape) if known else [leaf.nbytes],
        "data_offsets": [begin, begin + leaf.nbytes],
    }


def _array(body: Octets, tensors: dict[str, Any], *entry: Any) -> object:
    """The array in ``body`` that an entry of the header describes."""
    shard: list[list[int]] = []
    if tensors:
        name, kind, dtype, shape, *shard = entry
        begin, end = tensors[name]["data_offsets"]
    else:
        kind, dtype, shape, begin, nbytes = entry
        end = begin + nbytes
    octets = body[begin:end]
    if begin < 0 or len(octets) != end - begin:
        raise ValueError("an array beyond the end")
    if kind == "bytes":
        return octets.tobytes()
    if kind == "numpy":
        return octets.view(np.dtype(dtype)).reshape(shape)
    if kind == "scalar":
        return octets.view(np.dtype(dtype))[0]
    return Stored(kind, dtype, tuple(shape), octets, Shard(*map(tuple, shard)) if shard else None)


def _value(node: Any, arrays: list[object]) -> Any:
    if isinstance(node, list):
        return [_value(inner, arrays) for inner in node]
    if not isinstance(node, dict):
        return node
    ((kind, inner),) = node.items()
    if kind == "dict":
        return {_value(key, arrays): _value(value, arrays) for key, value in inner}
    if kind == "tuple":
        return tuple(_value(each, arrays) for each in inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "array":
        return arrays[inner]
    raise ValueError(f"an unknown {kind!r}")

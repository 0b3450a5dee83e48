"""How the state of a training run lies in host memory, and in a checkpoint file.

A state is a nest of dicts, lists and tuples of numbers, strings, bytes, None, numpy arrays and the
arrays of a framework (``Leaf``). Everything but the bytes of its arrays goes into a header, JSON;
the bytes lie one after another, each array at a multiple of 64. Nothing in a file is ever run as
code, so a checkpoint of somebody else can be looked at.

A file: magic, the header's length as u64, the header, zeros up to a multiple of 4096, the arrays,
the XXH3 (64 bits) of all that as u64, magic. All little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import CheckpointError

VERSION = 1

Octets = npt.NDArray[np.uint8]

_MAGIC = b"MONARCHk"
_END = b"MONARCHe"
_LENGTH = struct.Struct("<Q")
_PAGE_BYTES = 4096
_ALIGNMENT = 64
TRAILER_BYTES = _LENGTH.size + len(_END)
_HEAD_BYTES = len(_MAGIC) + _LENGTH.size


@runtime_checkable
class Leaf(Protocol):
    """An array of a framework, as its adapter hands it over.

    ``kind`` names the framework, ``dtype`` is its own name of the type of the elements.
    ``deferred``: only the update of the weights changes it, so it may be copied behind the next
    iteration; any other is copied before the training goes on.
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
        """Copy the elements, in C order, into the ``nbytes`` bytes of ``target``. Any thread."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A framework's array as it comes out of a checkpoint; its adapter makes it one again."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    octets: Octets


class UpdatedOnly:
    """A numpy array that only the update of the weights changes (see ``Leaf.deferred``)."""

    kind = "numpy"
    deferred = True

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.dtype = _dtype_name(array)
        self.shape: tuple[int, ...] = array.shape
        self.nbytes = int(array.nbytes)

    def copy_into(self, target: Octets) -> None:
        target.view(self.array.dtype).reshape(self.shape)[...] = self.array


class _Copied(UpdatedOnly):
    deferred = False


class _Scalar(_Copied):
    kind = "scalar"


class _Bytes:
    """Bytes, which nobody changes."""

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
    """A state at one moment: its structure and numbers are taken, its arrays yet to be copied.

    Raises TypeError, naming the place, for what a checkpoint cannot hold.
    """

    def __init__(self, state: object, facts: Mapping[str, object]) -> None:
        """``facts``: what else the header says; JSON."""
        self._leaves: list[tuple[int, Leaf]] = []
        self._end = 0
        tree = self._node(state, "state")
        arrays = [
            [leaf.kind, leaf.dtype, list(leaf.shape), offset, leaf.nbytes]
            for offset, leaf in self._leaves
        ]
        header = {"version": VERSION, **facts, "state": tree, "arrays": arrays}
        told = json.dumps(header, separators=(",", ":")).encode()
        self._head = _MAGIC + _LENGTH.pack(len(told)) + told
        self._head += bytes(-len(self._head) % _PAGE_BYTES)

    @property
    def nbytes(self) -> int:
        """The room that the arrays take in a buffer."""
        return self._end

    def copy_now(self, buffer: Octets) -> None:
        """Copy what the next iteration may change. ``buffer``: at least ``nbytes``."""
        self._copy(buffer, deferred=False)

    def copy_deferred(self, buffer: Octets) -> None:
        """Copy what only the next update changes: in any thread, and over before that."""
        self._copy(buffer, deferred=True)

    def pieces(self, buffer: Octets, piece_bytes: int) -> Iterator[bytes | memoryview]:
        """The file's bytes but for its end, the arrays in pieces of at most ``piece_bytes``."""
        yield self._head
        arrays = buffer.data[: self._end]
        for start in range(0, self._end, piece_bytes):
            yield arrays[start : start + piece_bytes]

    def _copy(self, buffer: Octets, *, deferred: bool) -> None:
        for offset, leaf in self._leaves:
            if leaf.deferred == deferred and leaf.nbytes:
                leaf.copy_into(buffer[offset : offset + leaf.nbytes])

    def _node(self, value: object, place: str) -> object:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            pairs = []
            for key, inner in value.items():
                where = f"{place}[{key!r}]"
                if not _is_key(key):
                    raise TypeError(f"{where}: a checkpoint cannot hold this key")
                pairs.append([self._node(key, where), self._node(inner, where)])
            return {"dict": pairs}
        if type(value) is list:
            return [self._node(inner, f"{place}[{i}]") for i, inner in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self._node(inner, f"{place}[{i}]") for i, inner in enumerate(value)]}
        if isinstance(value, complex) and not isinstance(value, np.generic):
            return {"complex": [value.real, value.imag]}
        leaf = _leaf_of(value, place)
        offset = self._end
        self._end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._leaves.append((offset, leaf))
        return {"array": len(self._leaves) - 1}


def parse(content: Octets) -> tuple[dict[str, Any], Any]:
    """The header's facts and the state of a file's ``content``; arrays are views of it.

    Raises CheckpointError if it is not a checkpoint, is damaged, or is a newer Monarch's.
    """
    memory = content.data
    inner = memory[: max(0, len(memory) - TRAILER_BYTES)]
    if trailer(xxhash.xxh3_64_intdigest(inner)) != memory[len(inner) :]:
        raise CheckpointError("it is damaged, or not whole")
    header = parse_header(bytes(inner[:_HEAD_BYTES]), lambda end: bytes(inner[_HEAD_BYTES:end]))
    head_bytes = _HEAD_BYTES + _LENGTH.unpack_from(inner, len(_MAGIC))[0]
    first = -(-head_bytes // _PAGE_BYTES) * _PAGE_BYTES
    body = content[first : len(inner)]
    try:
        arrays = [_array(body, *told) for told in header.pop("arrays")]
        return header, _value(header.pop("state"), arrays)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header makes no sense ({error})") from error


def parse_header(head: bytes, read: Callable[[int], bytes]) -> dict[str, Any]:
    """The header, from the first 16 bytes of a file. ``read(end)``: those from there to ``end``."""
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
        raise CheckpointError("it is not a checkpoint")
    told = read(_HEAD_BYTES + _LENGTH.unpack_from(head, len(_MAGIC))[0])
    try:
        header = json.loads(told)
        version = header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header makes no sense ({error})") from error
    if version != VERSION:
        raise CheckpointError(f"it has version {version}, this Monarch knows {VERSION}")
    assert isinstance(header, dict)
    return header


def trailer(digest: int) -> bytes:
    """The end of a file whose other bytes have the XXH3 ``digest``."""
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


def _dtype_name(array: npt.NDArray[Any]) -> str:
    return array.dtype.str


def _array(
    body: Octets, kind: str, dtype: str, shape: list[int], offset: int, nbytes: int
) -> object:
    octets = body[offset : offset + nbytes]
    if offset < 0 or len(octets) != nbytes:
        raise ValueError("an array beyond the end")
    if kind == "bytes":
        return octets.tobytes()
    if kind == "numpy":
        return octets.view(np.dtype(dtype)).reshape(shape)
    if kind == "scalar":
        return octets.view(np.dtype(dtype))[0]
    return Stored(kind, dtype, tuple(shape), octets)


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

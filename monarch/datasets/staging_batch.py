"""A prepared batch in sealed memory: arrays by name, or bytes. Nothing in it is executed.

The memory begins with a header: a magic number, the length of the header, and for each array its
name, type, shape and place. The header of memory from another process is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from monarch.datasets.staging_messages import seal, sealed_size
from monarch.errors import MonarchError
from monarch.text import MiB

# What ``produce`` returns, and what the user of a batch gets: read-only.
Batch = Mapping[str, Any] | Buffer
Views = dict[str, npt.NDArray[Any]] | memoryview

_MAGIC = b"MSB1"
# Magic, whether it is bytes without a name, number of arrays, length of the header.
_START = struct.Struct("<4sB3xII")
# Lengths of name and type, number of dimensions, offset. The shape, name and type follow.
_ENTRY = struct.Struct("<HBBxxxxQ")
_MOST_ARRAYS = 4096
_MOST_DIMENSIONS = 32
_MOST_HEADER_BYTES = MiB
_ALIGNED = 64

# Types without Python objects, fields or own classes, whose text gives the type again.
_TYPE = re.compile(r"[<>|](?:[biufcSU][1-9][0-9]{0,8}|[mM]8(?:\[[0-9]{0,4}[A-Za-z]{1,2}\])?)")


class _Array(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def store(batch: Batch) -> int:
    """A descriptor of sealed memory with the batch. Raises TypeError for values that are neither
    arrays of numbers or text nor bytes, ValueError for too many of them, and OSError."""
    named: Mapping[Any, Any]
    if is_bytes := not isinstance(batch, Mapping):
        named = {"": memoryview(batch).cast("B")}
    else:
        named = batch
    arrays = {name: _array(name, value) for name, value in named.items()}
    header, places = _header(arrays, is_bytes=is_bytes)
    fd = os.memfd_create("monarch-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(fd, memoryview(header), 0)
        end = len(header)
        for place, array in zip(places, arrays.values(), strict=True):
            content = array.reshape(-1).view(np.uint8)
            _write(fd, content.data, place.offset)
            end = place.offset + len(content)
        os.ftruncate(fd, end)
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def load(fd: int) -> Views:
    """The batch in memory that ``store`` made: views, which keep the memory. ``fd`` may be closed.

    Raises MonarchError if the memory is not sealed or its header is not valid.
    """
    size = sealed_size(fd)
    if size < _START.size:
        raise _invalid("its memory is not sealed")
    # Kernels before 6.7 refuse shared mappings of sealed memory, also read-only ones. Through a
    # tensor, which knows no read-only memory, this process can change its own copies of pages.
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    magic, is_bytes, arrays, length = _START.unpack_from(memory)
    most = min(size, _MOST_HEADER_BYTES)
    if magic != _MAGIC or arrays > _MOST_ARRAYS or not _START.size <= length <= most:
        raise _invalid("its header is damaged")
    try:
        views = {
            place.name: np.ndarray(place.shape, place.dtype, memory, place.offset)
            for place in _places(memory[:length], arrays, size)
        }
    except (ValueError, TypeError, struct.error) as error:
        raise _invalid("its header is damaged") from error
    for view in views.values():
        view.flags.writeable = False
    if len(views) != arrays:
        raise _invalid("two of its arrays have one name")
    if not is_bytes:
        return views
    content = views.get("")
    if content is None or content.dtype != np.uint8 or content.ndim != 1:
        raise _invalid("its header is damaged")
    return content.data


def _array(name: object, value: Any) -> npt.NDArray[Any]:
    if not isinstance(name, str):
        raise TypeError(f"the names of arrays are text, not {type(name).__name__}")
    if not isinstance(value, np.ndarray | np.generic):
        # Raises TypeError for a value without a buffer.
        return np.asarray(memoryview(value).cast("B"))
    array = np.asarray(value, order="C")
    if not _TYPE.fullmatch(array.dtype.str) or array.ndim > _MOST_DIMENSIONS:
        raise TypeError(
            f"{name!r}: an array of {array.dtype} with {array.ndim} dimensions cannot be shared"
        )
    return array


def _header(
    arrays: Mapping[str, npt.NDArray[Any]], *, is_bytes: bool
) -> tuple[bytes, list[_Array]]:
    """The header, and where each array begins."""
    names = [name.encode("utf-8", "surrogatepass") for name in arrays]
    length = _START.size + sum(
        _ENTRY.size + 8 * array.ndim + len(name) + len(array.dtype.str)
        for name, array in zip(names, arrays.values(), strict=True)
    )
    if (
        len(arrays) > _MOST_ARRAYS
        or length > _MOST_HEADER_BYTES
        or any(len(n) >> 16 for n in names)
    ):
        raise ValueError(f"a batch of {len(arrays)} arrays has too many or too long names")
    parts, places, end = [_START.pack(_MAGIC, is_bytes, len(arrays), length)], [], length
    for name, array in zip(names, arrays.values(), strict=True):
        offset = -(-end // _ALIGNED) * _ALIGNED
        end = offset + array.nbytes
        text = array.dtype.str.encode()
        parts += [
            _ENTRY.pack(len(name), len(text), array.ndim, offset),
            struct.pack(f"<{array.ndim}Q", *array.shape),
            *(name, text),
        ]
        places.append(_Array("", "", (), offset))
    return b"".join(parts), places


def _places(header: bytes, arrays: int, size: int) -> Iterator[_Array]:
    """The arrays of memory of ``size`` bytes. Raises ValueError, TypeError or struct.error."""
    at = _START.size
    for _ in range(arrays):
        name_bytes, type_bytes, dimensions, offset = _ENTRY.unpack_from(header, at)
        at += _ENTRY.size
        shape = struct.unpack_from(f"<{dimensions}Q", header, at)
        at += 8 * dimensions
        end = at + name_bytes + type_bytes
        dtype = header[at + name_bytes : end].decode("ascii")
        if dimensions > _MOST_DIMENSIONS or end > len(header) or not _TYPE.fullmatch(dtype):
            raise ValueError
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        if offset + nbytes > size or max(shape, default=0) >> 48:
            raise ValueError
        name = header[at : at + name_bytes].decode("utf-8", "surrogatepass")
        at = end
        yield _Array(name, dtype, shape, offset)


def _write(fd: int, content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def _invalid(why: str) -> MonarchError:
    return MonarchError(
        f"a batch of the staging area cannot be used: {why}",
        hint="use the same version of monarch in all jobs",
    )

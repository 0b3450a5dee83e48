"""Writes many small copies into a tier in one call: without the interpreter where the C extension
is installed."""

from __future__ import annotations

import errno
import importlib
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import xxhash

from monarch.errors import SourceChanged
from monarch.posix import failpoints
from monarch.text import MiB
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino

# The most bytes of a file of a lot. Larger ones may have holes, which stay holes.
_MOST_BYTES = 1 * MiB - 1
# The inode number, and the version, as _lots.c reads them.
_ROW = struct.Struct("=QQqqQ")

_WriteCopies: TypeAlias = Callable[
    [int, int, bool, bytes, tuple[bytes | memoryview, ...], "array[int]", int], bytes
]


def _extension() -> _WriteCopies | None:
    try:
        write_copies: _WriteCopies = importlib.import_module("monarch.fuse._datapath").write_copies
    except ImportError:
        return None
    return write_copies


# None without the C extension.
_write_copies = _extension()


class Content(NamedTuple):
    """The bytes of a small file, for a copy as the version ``identity``."""

    ino: Ino
    identity: Identity
    data: bytes | memoryview


def write(
    tier: Tier, contents: Sequence[Content], term: int
) -> list[bytes | OSError | SourceChanged]:
    """Commits copies; returns for each its xxh3-128, or why there is none. Those that are not begun
    before ``give_up`` get ECANCELED; ``term`` is ``tier.terms[0]``, the calls of it so far."""
    if _write_copies is None or failpoints.is_armed():
        return [_written(tier, content, term) for content in contents]
    lot = [content for content in contents if _is_plain(content)]
    rows = b"".join(_ROW.pack(content.ino, *_version(content.identity)) for content in lot)
    data = tuple(content.data for content in lot)
    raw = _write_copies(tier.root, tier.directory, tier.seals, rows, data, tier.terms, term)
    errors = iter(array("i", raw))
    return [
        _result(content, next(errors)) if _is_plain(content) else _written(tier, content, term)
        for content in contents
    ]


def give_up(tier: Tier) -> None:
    """The copies that are being written take too long: each lot ends with its present copy."""
    tier.terms[0] += 1


def _is_plain(content: Content) -> bool:
    return len(content.data) == content.identity.size <= _MOST_BYTES


def _version(identity: Identity) -> tuple[int, int, int, int]:
    return identity.size, identity.mtime_ns, identity.ctime_ns, identity.source_ino


def _result(content: Content, number: int) -> bytes | OSError:
    if number:
        return OSError(number, os.strerror(number))
    return xxhash.xxh3_128_digest(content.data)


def _written(tier: Tier, content: Content, term: int) -> bytes | OSError | SourceChanged:
    """As ``write``, for one file, in the interpreter."""
    ino, identity, data = content
    if len(data) != identity.size:
        return SourceChanged(f"read {len(data)} bytes of {identity.size}")
    try:
        if tier.terms[0] != term:
            raise OSError(errno.ECANCELED, "the copy was given up")
        with tier.stage(ino) as staged:
            staged.append(data)
            return staged.commit(identity)
    except OSError as error:
        return error

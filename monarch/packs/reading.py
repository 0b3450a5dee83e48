"""Reads files of the source into the files of a pack, and finds those that change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import xxhash

from monarch.packs.plan import Placed
from monarch.packs.tree import Failure, Identity
from monarch.posix.files import closing_fd, data_at
from monarch.posix.openat2 import open_beneath
from monarch.text import MiB

# Bytes of one read, and of the files that one write takes.
PIECE = 1 * MiB
_ZEROS = bytes(PIECE)
_READ = os.O_RDONLY | os.O_NONBLOCK


class Unread(Exception):
    """A source file could not be read, or differs from the entry that was listed."""

    def __init__(self, path: bytes, what: str) -> None:
        super().__init__(what)
        self.failure = Failure(path, what)


def copy_files(
    root: int, files: Sequence[Placed], to_fd: int, on_unread: Callable[[Failure], None]
) -> list[int]:
    """Copies files that lie one behind the other in a chunk. Returns their digests.

    ``on_unread`` gets each file that cannot be read: the chunk is then of no use. Raises OSError if
    the chunk cannot be written.
    """
    digests = []
    waiting: list[bytes] = []
    at = files[0].entry.offset
    for each in files:
        digest = xxhash.xxh3_64()
        try:
            for piece in _pieces(root, each):
                digest.update(piece)
                waiting.append(piece)
                if sum(map(len, waiting)) >= PIECE:
                    at = _write(to_fd, at, waiting)
        except Unread as error:
            on_unread(error.failure)
        digests.append(digest.intdigest())
    _write(to_fd, at, waiting)
    return digests


def copy_large(root: int, placed: Placed, to_fd: int, on_bytes: Callable[[int], None]) -> int:
    """Copies one file to an empty one, with its holes. Returns the digest of its bytes.

    ``on_bytes`` gets the size of each step. Raises Unread if the file cannot be read, or
    differs from the listed one, and OSError if the other cannot be written.
    """
    with closing_fd(_opened(root, placed)) as fd:
        digest = copy_with_holes(fd, partial(_read, fd, placed), to_fd, placed.entry.size, on_bytes)
        _require_unchanged(fd, placed)
    return digest


def copy_with_holes(
    fd: int,
    read: Callable[[int, int], bytes],
    to_fd: int,
    size: int,
    on_bytes: Callable[[int], None],
) -> int:
    """Copies ``size`` bytes of ``fd`` to an empty file, with the holes. Returns their digest.

    ``read`` returns at least one byte of ``fd``, from a count and a position; ``on_bytes`` gets the
    size of each step. Raises their errors, and OSError if the other file cannot be written.
    """
    digest = xxhash.xxh3_64()
    position = 0
    while position < size:
        begin, end = data_at(fd, position, size)
        while position < begin:
            count = min(PIECE, begin - position)
            digest.update(memoryview(_ZEROS)[:count])
            position += count
            on_bytes(count)
        while position < end:
            piece = read(min(PIECE, end - position), position)
            digest.update(piece)
            position = _write(to_fd, position, [piece])
            on_bytes(len(piece))
    os.ftruncate(to_fd, size)
    return digest.intdigest()


def _pieces(root: int, placed: Placed) -> Iterator[bytes]:
    """The bytes of a source file. Raises Unread."""
    size = placed.entry.size
    with closing_fd(_opened(root, placed)) as fd:
        position = 0
        while position < size:
            piece = _read(fd, placed, min(PIECE, size - position), position)
            position += len(piece)
            yield piece
        _require_unchanged(fd, placed)


def _opened(root: int, placed: Placed) -> int:
    try:
        fd = open_beneath(root, placed.entry.path, _READ)
    except OSError as error:
        raise Unread(placed.entry.path, f"it cannot be opened: {error.strerror}") from error
    try:
        _require_unchanged(fd, placed)
    except Unread:
        os.close(fd)
        raise
    return fd


def _require_unchanged(fd: int, placed: Placed) -> None:
    status = os.fstat(fd)
    if Identity.of(status) != placed.identity:
        raise Unread(placed.entry.path, "it changed after it was listed")


def _read(fd: int, placed: Placed, count: int, position: int) -> bytes:
    """At least one byte of a source file. Raises Unread."""
    try:
        piece = os.pread(fd, count, position)
    except OSError as error:
        raise Unread(placed.entry.path, f"it cannot be read: {error.strerror}") from error
    if not piece:
        raise Unread(placed.entry.path, "it became shorter while it was read")
    return piece


def _write(to_fd: int, at: int, pieces: list[bytes]) -> int:
    """Writes the pieces at the position ``at`` and forgets them. Returns the position behind."""
    raw = memoryview(b"".join(pieces))
    pieces.clear()
    while raw:
        count = os.pwrite(to_fd, raw, at)
        raw, at = raw[count:], at + count
    return at

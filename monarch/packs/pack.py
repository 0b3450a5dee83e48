"""Reads a pack: its description, its records, and the files with its bytes (docs/packs.md).

A pack never changes once it is written, so nothing here is cached, locked or read twice. Every
file of a pack is opened beneath its directory, and never through a symbolic link.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import PackError
from monarch.packs.directory import INDEX, REBUILD, naming, read_description
from monarch.packs.format import (
    FORMAT,
    LARGE,
    MOST,
    MOST_CHUNK,
    MOST_SIZE,
    NONE,
    ORDERS,
    VERSION,
    decode_xattrs,
    require_version,
)
from monarch.packs.index import Index
from monarch.packs.tables import require_few_holes
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.private_directory import read_private, replace_private
from monarch.text import KiB, MiB, escape_text

_READ = os.O_RDONLY | os.O_NONBLOCK


def chunk_name(chunk: int) -> bytes:
    """The path of a chunk in its pack."""
    return b"chunks/%06d.chunk" % chunk


def large_name(large: int) -> bytes:
    """The path of a large file in its pack."""
    return b"large/%06d.data" % large


@dataclass(frozen=True, slots=True)
class PackSummary:
    """The description of a pack. ``bytes``: of all files, hard links once. ``chunks`` and ``large``
    are numbers of files. ``identity``: the digest of the index, and so of all contents."""

    files: int
    entries: int
    bytes: int
    chunks: int
    large: int
    chunk_bytes: int
    seed: int
    order: str
    identity: str


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the tree.

    ``name`` is the last component of its path, empty for the root. ``mode`` has the type, ``size``
    is in bytes. ``chunk`` is -1 if the entry has no bytes in a chunk, and -2 for a large file;
    ``offset`` is then the number of the large file, or the number of a device. ``link`` is the
    number of the first name of the file, ``nlink`` counts its names.
    """

    number: int
    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    link: int
    target: bytes
    chunk: int
    offset: int
    digest: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    _path_of: Callable[[int], bytes] = field(repr=False, compare=False)

    @property
    def path(self) -> bytes:
        """Relative to the root, whose path is empty. It is put together from all names above.
        Raises PackError."""
        return self._path_of(self.number)


class Pack:
    """An open pack. Safe to use in several threads; immutable.

    Raises PackError for anything damaged or hostile. ``open`` reads the description and the index,
    which is not mapped: the process survives that another program cuts its file off.
    ``require_sound`` checks all of it. Use as a context manager.
    """

    def __init__(self, path: bytes, root: int, info: PackSummary, raw: bytes, index: Index) -> None:
        """``raw`` are the bytes of ``index``."""
        self.path = path
        self.info = info
        self._root = root
        self._raw = raw
        self._index = index
        # Whether ``keep`` has left the bytes: then they are sound.
        self._is_kept = False

    @classmethod
    def open(cls, path: bytes, kept: Path | None = None) -> Pack:
        """The pack in the directory ``path``. ``kept``: a file of this node, in which ``keep`` may
        have left the index. Raises PackError."""
        try:
            with naming(path), ExitStack() as on_failure:
                root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                on_failure.callback(os.close, root)
                raw = read_description(root)
                info = _summary(raw)
                found = _kept(kept, info)
                raw_index = found or _read(root, INDEX)
                index = Index(raw_index)
                _require_fits(info, index)
                on_failure.pop_all()
                opened = cls(path, root, info, raw_index, index)
                opened._is_kept = bool(found)
                return opened
        except OSError as error:
            is_denied = isinstance(error, PermissionError)
            which = "a pack that you may read" if is_denied else "the directory of a complete pack"
            raise PackError(
                f"{escape_text(os.fsdecode(path))}: {error.strerror}", hint=f"name {which}"
            ) from error

    def close(self) -> None:
        """May be called twice. Arrays of the pack remain valid."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def keep(self, path: Path) -> None:
        """Keeps the index, which is sound, in a private file for ``open``. Raises OSError."""
        if not self._is_kept:
            replace_private(path, self._raw)

    def require_sound(self) -> None:
        """Compares the whole index with its digest and with itself. Raises PackError."""
        if self._is_kept:
            return
        if xxhash.xxh3_128_hexdigest(self._raw) != self.info.identity:
            raise self._error("the index is damaged", REBUILD)
        try:
            self._index.require_sound()
        except PackError as error:
            raise self._error(str(error.args[0]), REBUILD) from error

    def number(self, path: bytes) -> int:
        """The number of the entry ``path``, relative to the root ``b""``; 0 if there is none."""
        try:
            return self._index.number(path)
        except IndexError as error:
            raise self._error("the index is damaged", REBUILD) from error

    def record(self, number: int) -> Record:
        """The record ``number``, from 1. Raises PackError if there is none."""
        if not 0 < number <= self.info.entries:
            raise self._error(f"there is no record {number}")
        raw = dict(
            zip(
                self._index.records.dtype.names or (),
                self._index.records[number].tolist(),
                strict=True,
            )
        )
        try:
            name = self._index.name(number)
            texts = self._index.text(
                raw["extra_offset"], raw["target_length"] + raw["xattr_length"]
            )
            xattrs = decode_xattrs(texts[raw["target_length"] :])
        except (PackError, IndexError) as error:
            raise self._error("the index is damaged", REBUILD) from error
        return Record(
            number=number,
            parent=raw["parent"],
            name=name,
            mode=raw["mode"],
            uid=raw["uid"],
            gid=raw["gid"],
            size=raw["size"],
            mtime_ns=raw["mtime_ns"],
            nlink=raw["nlink"],
            link=raw["link"],
            target=texts[: raw["target_length"]],
            chunk={NONE: -1, LARGE: -2}.get(raw["chunk"], raw["chunk"]),
            offset=raw["offset"],
            digest=raw["digest"],
            xattrs=xattrs,
            _path_of=self._path,
        )

    def _path(self, number: int) -> bytes:
        try:
            return self._index.path(number)
        except (PackError, IndexError) as error:
            raise self._error("the index is damaged", REBUILD) from error

    def name(self, number: int) -> bytes:
        """The last component of the path of a record."""
        try:
            return self._index.name(number)
        except IndexError as error:
            raise self._error(f"there is no record {number}") from error

    def names_of(self, numbers: npt.NDArray[np.uint32]) -> list[bytes]:
        """``name`` of each record; all must exist."""
        return self._index.names_of(numbers)

    def names(self, directory: int) -> npt.NDArray[np.uint32]:
        """The numbers of the entries of a directory, in the order of their names."""
        if not 0 < directory <= self.info.entries:
            raise self._error(f"there is no record {directory}")
        return self._index.names(directory)

    @property
    def records(self) -> npt.NDArray[Any]:
        """The array of all records (index.RECORD_DTYPE); element 0 belongs to no entry."""
        return self._index.records

    @property
    def chunk_of(self) -> npt.NDArray[np.uint32]:
        """The chunk of each record by its number; format.NONE without bytes, format.LARGE."""
        chunks: npt.NDArray[np.uint32] = self.records["chunk"]
        return chunks

    @property
    def offset_of(self) -> npt.NDArray[np.uint64]:
        """The position of the first byte of each record in the file of its chunk."""
        offsets: npt.NDArray[np.uint64] = self.records["offset"]
        return offsets

    @property
    def size_of(self) -> npt.NDArray[np.uint64]:
        """The size of each record by its number, in bytes."""
        sizes: npt.NDArray[np.uint64] = self.records["size"]
        return sizes

    @property
    def digest_of(self) -> npt.NDArray[np.uint64]:
        """The XXH3 (64 bits) of the bytes of each record."""
        digests: npt.NDArray[np.uint64] = self.records["digest"]
        return digests

    def chunk_file_bytes(self, chunk: int) -> int:
        """The size of the file of a chunk, in bytes; 0 if the chunk is lost."""
        self._require_chunk(chunk)
        return int(self._index.chunks["file_bytes"][chunk])

    def table_digest(self, chunk: int) -> int:
        """The digest of the table of a chunk, which its header must have."""
        self._require_chunk(chunk)
        return int(self._index.chunks["table_digest"][chunk])

    def chunk_numbers(self, chunk: int) -> npt.NDArray[np.uint32]:
        """The records whose bytes are in a chunk, in the order of their offsets. Of a file with
        several names, the first name only."""
        self._require_chunk(chunk)
        first, count = self._index.chunks[["first", "count"]][chunk].tolist()
        return self._index.placed[first : first + count]

    def open_chunk(self, chunk: int) -> int:
        """A descriptor of the file of a chunk, to read. Raises PackError."""
        self._require_chunk(chunk)
        return self._open(chunk_name(chunk), self.chunk_file_bytes(chunk))

    def open_large(self, number: int) -> int:
        """A descriptor of the file with the bytes of a large record, to read. Raises PackError."""
        record = self.record(number)
        if record.chunk != -2:
            raise self._error(f"record {number} is not a large file")
        return self._open(large_name(record.offset), record.size)

    def _require_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.info.chunks:
            raise self._error(f"there is no chunk {chunk}")

    def _open(self, name: bytes, size: int) -> int:
        """A descriptor of a file of the pack, a regular one of ``size`` bytes."""
        try:
            fd = open_beneath(self._root, name, _READ)
        except OSError as error:
            raise self._error(f"{name.decode()}: {error.strerror}", _VERIFY) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            os.close(fd)
            raise self._error(f"{name.decode()} is cut off or damaged", _VERIFY)
        return fd

    def _error(self, what: str, hint: str = "") -> PackError:
        path = escape_text(os.fsdecode(self.path))
        return PackError(f"{path}: {what}", hint=hint.format(path) if hint else "")


# The bytes that most file systems read ahead at most, and those of an index read at once.
_AHEAD_BYTES, _MOST_AHEAD = 128 * KiB, 64 * MiB
_VERIFY = "`monarch pack verify {}` lists all damage"


def _read(root: int, name: bytes) -> bytes:
    """The bytes of a file of a pack. Raises OSError, PackError."""
    with closing_fd(open_beneath(root, name, _READ)) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PackError(f"{name.decode()} is not a regular file")
        if not status.st_size:
            return b""
        require_few_holes(fd, status.st_size)
        # Many reads at once: each would wait for the one before.
        for begin in range(0, min(status.st_size, _MOST_AHEAD), _AHEAD_BYTES):
            with suppress(OSError):
                os.posix_fadvise(fd, begin, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(status.st_size)


def _kept(path: Path | None, info: PackSummary) -> bytes:
    """The index of this pack in a file of this node; empty if it is not there."""
    if path is not None:
        with suppress(OSError):
            raw = read_private(path)
            if xxhash.xxh3_128_hexdigest(raw) == info.identity:
                return raw
    return b""


def summary_of(index: bytes, *, large: int, chunk_bytes: int, seed: int, order: str) -> PackSummary:
    """The description of the pack with this index."""
    found = Index(index)
    return PackSummary(
        files=found.files,
        entries=found.entries,
        bytes=found.file_bytes,
        chunks=len(found.chunks),
        large=large,
        chunk_bytes=chunk_bytes,
        seed=seed,
        order=order,
        identity=xxhash.xxh3_128_hexdigest(index),
    )


def encode_description(info: PackSummary) -> bytes:
    """The bytes of pack.json."""
    fields = {name: getattr(info, name) for name in PackSummary.__slots__}
    return (json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1) + "\n").encode()


def _summary(raw: dict[str, Any]) -> PackSummary:
    """Raises PackError."""
    require_version(raw.get("version"), "it has")
    limits = {
        **{"files": MOST, "entries": MOST, "bytes": MOST_SIZE, "chunks": MOST, "large": MOST},
        **{"chunk_bytes": MOST_CHUNK, "seed": (1 << 64) - 1},
    }
    for name, limit in limits.items():
        value = raw.get(name)
        if type(value) is not int or not 0 <= value <= limit:
            raise PackError(f"pack.json has no usable {name!r}")
    if raw.get("order") not in ORDERS or not isinstance(raw.get("identity"), str):
        raise PackError("pack.json has no usable order or identity")
    return PackSummary(**{name: raw[name] for name in PackSummary.__slots__})


def _require_fits(info: PackSummary, index: Index) -> None:
    """Raises PackError if the description and the index are not of one pack."""
    if (info.entries, info.files, info.bytes, info.chunks) != (
        *(index.entries, index.files, index.file_bytes, len(index.chunks)),
    ):
        raise PackError("pack.json and the index are of two packs")

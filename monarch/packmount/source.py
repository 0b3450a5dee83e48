"""The source of a mount that shows a pack: its files are extents of chunks, or large files.

The number of a record of the pack is the inode number at the source. So a version leads to the
bytes of a file without its path. What the mount needs of the index, some 50 bytes a file, is in
memory: another program that cuts the index off does not disturb the process.

All bytes of a small file are compared with the digest of the index each time they are read. A file
of a damaged chunk cannot be read (EIO); the other files of the chunk can.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import SourceChanged
from monarch.packmount.damage import Damage
from monarch.packmount.files import PackFiles
from monarch.packmount.open_chunks import OpenChunks
from monarch.packs.directory import is_pack
from monarch.packs.format import LARGE
from monarch.packs.pack import (
    Pack,
    PackSummary,
    chunk_name,
    large_name,
)
from monarch.posix.acl import NAMES as ACL_NAMES
from monarch.posix.acl import Acls
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.text import MiB
from monarch.tiers.extents import Extents
from monarch.tiers.source import LEFT_BEHIND, Fetched, Source, SourceFile
from monarch.types import Identity

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
# Bytes in memory of files that are open and too large to be fetched whole. Further ones are on a
# disk of this node.
_MOST_HELD = 64 * MiB
# An error of the pack itself, which the rest of the daemon would take for a removed file.
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO})
_LOST = frozenset({errno.ESTALE})
# The modes of the entries say who may read them, and not those of the files of the pack.
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class FetchedRun:
    """Files of a chunk that were read at once, in the order of the request; None is a file that
    cannot be read. ``raw`` are the bytes that were read, and ``begins`` the positions of the files
    in them. ``reads`` and ``opens`` are the calls at the source."""

    contents: list[memoryview | None]
    raw: bytes | bytearray
    begins: npt.NDArray[np.int64]
    reads: int
    opens: int

    @property
    def nbytes(self) -> int:
        return len(self.raw)


def open_source(
    path: bytes, close: Callable[[int], None] = os.close, kept: Path | None = None
) -> Source:
    """The source of a mount: a pack, with ``kept`` as in ``PackSource``, or the directory itself.
    Raises SourceError, PackError."""
    return PackSource(path, close, kept) if is_pack(path) else Source(path, close)


class PackSource(Source):
    """``kept`` is a file of this node that has, or gets, the index of the pack. Raises PackError
    for a pack that is incomplete, damaged in its index, or hostile."""

    def __init__(
        self, path: bytes, close: Callable[[int], None] = os.close, kept: Path | None = None
    ) -> None:
        super().__init__(path, close)
        self.damage, self.kept = Damage(), kept
        try:
            with Pack.open(path, kept) as pack:
                pack.require_sound()
                if kept is not None:
                    # Without it the index is read at the source each time.
                    with suppress(OSError):
                        pack.keep(kept)
                self.info: PackSummary = pack.info
                self.files = PackFiles(pack)
                # Kept only for a pack whose entries have such attributes.
                self._described = pack if bool(pack.records["xattr_length"].any()) else None
        except BaseException:
            super().close()
            raise
        self._open_chunks = OpenChunks()
        self.extents = Extents(
            self.files.chunk,
            self.files.offset,
            self.files.digest,
            self.info.chunks,
            self._open_chunks,
        )
        self._held = 0
        self._holding = threading.Lock()

    def close(self) -> None:
        self._open_chunks.close()
        super().close()

    @property
    def directory(self) -> int:
        return -1

    def user_xattrs(self, number: int) -> dict[bytes, bytes]:
        """The extended attributes of an entry, without access control lists. Raises PackError."""
        if self._described is None:
            return {}
        xattrs = self._described.record(number).xattrs
        return {name: value for name, value in xattrs if name not in ACL_NAMES}

    @property
    def has_xattrs(self) -> bool:
        """Whether an entry has extended attributes."""
        return self._described is not None

    # -- what a mount of a directory asks by path -------------------------------------------------

    def status(self, path: bytes) -> os.stat_result:
        _refuse(path)

    def acls(self, path: bytes) -> Acls:
        _refuse(path)

    def xattrs(self, path: bytes, source_ino: int = 0) -> dict[bytes, bytes]:
        _refuse(path)

    def open(self, path: bytes) -> SourceFile:
        _refuse(path)

    # -- bytes -----------------------------------------------------------------------------------

    def fetch(self, path: bytes, identity: Identity) -> Fetched:
        """The verified bytes of a file. Raises OSError: EIO if they are damaged or missing."""
        number = self._number(identity, path)
        if not identity.size:
            return Fetched(b"", 0, 0)
        if self.files.chunk[number] == LARGE:
            return self._fetch_large(number, path)
        run = self.fetch_run(np.array([number], np.uint32))
        (content,) = run.contents
        if content is None:
            raise OSError(errno.EIO, "its bytes in the pack are damaged")
        return Fetched(bytes(content), run.reads, run.opens)

    def fetch_run(self, numbers: npt.NDArray[np.uint32]) -> FetchedRun:
        """Reads files of one chunk, in the order of their bytes, in one piece. Raises OSError."""
        run = self._fetch_run(numbers)
        if None in run.contents:
            chunk = int(self.files.chunk[numbers[0]])
            self._open_chunks.forget(chunk)
            if not run.opens:
                # An intact chunk may have been put in the place of the one that was open.
                run = self._fetch_run(numbers)
                self._open_chunks.forget(chunk)
        if self.damage:
            for number, content in zip(numbers.tolist(), run.contents, strict=True):
                if content is not None:
                    self.damage.is_read(number)
        if None in run.contents:
            self._note_damage(numbers, run)
        return run

    def _fetch_run(self, numbers: npt.NDArray[np.uint32]) -> FetchedRun:
        chunk = int(self.files.chunk[numbers[0]])
        offsets, sizes = self.files.extents(numbers)
        first, end = int(offsets[0]), int(offsets[-1] + sizes[-1])
        raw, reads, opens = self._read(chunk, first, end - first)
        whole, contents = memoryview(raw), list[memoryview | None]()
        digest_of = xxhash.xxh3_64_intdigest
        for begin, size, digest in zip(
            (offsets - first).tolist(),
            sizes.tolist(),
            self.files.digest[numbers].tolist(),
            strict=True,
        ):
            content = whole[begin : begin + size]
            is_right = len(content) == size and digest_of(content) == digest
            contents.append(content if is_right else None)
        return FetchedRun(contents, raw, offsets - first, reads, opens)

    def _note_damage(self, numbers: npt.NDArray[np.uint32], run: FetchedRun) -> None:
        name = chunk_name(int(self.files.chunk[numbers[0]]))
        offsets, sizes = self.files.extents(numbers)
        ends = offsets + sizes - offsets[0]
        for number, end, content in zip(numbers.tolist(), ends.tolist(), run.contents, strict=True):
            if content is None:
                what = "is cut off" if end > run.nbytes else "is damaged"
                self.damage.found(number, name, what)

    def _read(self, chunk: int, offset: int, size: int) -> tuple[bytes | bytearray, int, int]:
        """Up to ``size`` bytes of a chunk, the reads and the opens. Raises OSError."""
        is_retried = False
        while True:
            try:
                with self._open_chunks.using(chunk, self._opened_chunk) as opened:
                    return *_read_range(opened.fd, offset, size), opened.opens
            except OSError as error:
                # The descriptor may be of a file system that was unmounted and is back.
                if error.errno not in LEFT_BEHIND or is_retried:
                    raise
                is_retried = True

    def open_version(self, path: bytes, identity: Identity) -> SourceFile:
        """A large file itself; of any other a descriptor with its verified bytes. Raises as
        ``fetch``."""
        number = self._number(identity, path)
        if self.files.chunk[number] == LARGE:
            fd, status = self._opened_large(number), self._status_of(number)
            is_right = partial(self._is_right, number)
            return SourceFile(fd, status, self._close, is_fixed=True, is_right=is_right)
        content = self.fetch(path, identity).data
        fd, close = self._filled(content)
        return SourceFile(fd, self._status_of(number), close, is_fixed=True)

    def _number(self, identity: Identity, path: bytes) -> int:
        number = identity.source_ino
        if not 0 < number < len(self.files.chunk) or (
            (int(self.files.size[number]), int(self.files.mtime_ns[number]))
            != (identity.size, identity.mtime_ns)
        ):
            raise SourceChanged(f"{os.fsdecode(path)!r} is not in this pack")
        return number

    def _status_of(self, number: int) -> os.stat_result:
        size, mtime_ns = int(self.files.size[number]), int(self.files.mtime_ns[number])
        seconds = mtime_ns // 10**9
        return os.stat_result(
            (stat.S_IFREG, number, 0, 1, 0, 0, size, seconds, seconds, seconds),
            {
                "st_mtime_ns": mtime_ns,
                "st_ctime_ns": mtime_ns,
                "st_atime_ns": mtime_ns,
                "st_blocks": (size + 511) // 512,
            },
        )

    def _fetch_large(self, number: int, path: bytes) -> Fetched:
        size = int(self.files.size[number])
        with closing_fd(self._opened_large(number)) as fd:
            raw, reads = _read_range(fd, 0, size)
        if len(raw) != size or not self._is_right(number, xxhash.xxh3_64_intdigest(raw)):
            raise OSError(errno.EIO, "its bytes in the pack are damaged")
        return Fetched(bytes(raw), reads)

    def _is_right(self, number: int, digest: int) -> bool:
        """Whether a large file has the digest of its bytes that were read; notes the damage."""
        is_right = digest == int(self.files.digest[number])
        if not is_right:
            self.damage.found(number, large_name(int(self.files.offset[number])), "is damaged")
        elif self.damage:
            self.damage.is_read(number)
        return is_right

    def _opened_large(self, number: int) -> int:
        name = large_name(int(self.files.offset[number]))
        fd = self._opened_file(number, name)
        if os.fstat(fd).st_size != int(self.files.size[number]):
            os.close(fd)
            self.damage.found(number, name, "has another size")
            raise OSError(errno.EIO, "its bytes in the pack are damaged")
        return fd

    def _opened_chunk(self, chunk: int) -> int:
        # The number of no file: the damage ends when the chunk is opened for any of its files.
        number = -1 - chunk
        fd = self._opened_file(number, chunk_name(chunk), len(self.files.members(chunk)))
        if self.damage:
            self.damage.is_read(number)
        # An extent is read alone: the kernel must not read on behind it.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def _opened_file(self, number: int, name: bytes, entries: int = 1) -> int:
        """Opens a file of the pack, for the file ``number`` of the tree and ``entries`` in all."""
        found = partial(self.damage.found, number, name, entries=entries)
        try:
            fd = self.at_root(open_beneath, name, _FLAGS)
        except OSError as error:
            if error.errno not in _MISSING | _LOST | _DENIED:
                raise
            if error.errno in _MISSING:
                found("is missing")
            elif error.errno in _DENIED:
                found("may not be read by the user of the daemon")
            raise OSError(errno.EIO, f"{name.decode()}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            found("is not a file")
            raise OSError(errno.EIO, f"{name.decode()} is not a file")
        return fd

    def _filled(self, content: bytes) -> tuple[int, Callable[[int], None]]:
        """A descriptor of a file without a name that has these bytes, and what closes it."""
        with self._holding:
            in_memory = self._held + len(content) <= _MOST_HELD
            self._held += len(content) * in_memory
        if not in_memory:
            fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            close = os.close
        else:
            fd = os.memfd_create("monarch-pack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

            def close(fd: int) -> None:
                with self._holding:
                    self._held -= len(content)
                os.close(fd)

        try:
            view, offset = memoryview(content), 0
            while offset < len(view):
                offset += os.pwrite(fd, view[offset:], offset)
            if in_memory:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            close(fd)
            raise
        return fd, close


def _read_range(fd: int, offset: int, size: int) -> tuple[bytes | bytearray, int]:
    """Up to ``size`` bytes, fewer only at the end, and the number of reads. Raises OSError."""
    first = os.pread(fd, size, offset)
    if len(first) == size or not first:
        return first, 1
    parts, reads = bytearray(first), 1
    while len(parts) < size:
        part = os.pread(fd, size - len(parts), offset + len(parts))
        reads += 1
        if not part:
            break
        parts += part
    return parts, reads


def _refuse(path: bytes) -> NoReturn:
    """The entries of a pack do not change, so no part of the daemon compares them by path."""
    raise OSError(errno.EOPNOTSUPP, "a pack has no files by path", path)

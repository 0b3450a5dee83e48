"""Partial copies: sparse files of a tier with the granules of a large file that were read.

A granule has 128 KiB. The file of a partial copy consists of

    data      the granules at their own offsets; one that was not fetched is a hole
    map       at the next multiple of a granule: one byte for each granule, see below
    digests   at the next page: 16 bytes for each granule, its xxh3-128
    header    the last page: the version of the file at the source, and the term (records.py)

A granule is written first, then its digest, then its byte of the map. The datapath reads the map
from the same file (fuse/native/_reading.c), and serves granules that are marked as present.

    0x00 absent   it was not fetched
    0x55 present  its bytes are those of the version
    0xaa doubted  it was present in an earlier term: it must be compared with its digest first

Any other byte is damage, and its granule absent. The three differ in at least four bits: so a disk
that flips up to three bits of a byte makes no granule present, which would be read as zeros.

Present granules become doubted if the file is opened in a later term, or if its seal (contents.py)
is broken. It is set at the last close: each write breaks it. Calls here wait for the local disk.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from monarch.posix.files import closing_fd
from monarch.text import KiB
from monarch.tiers.contents import DIRECTORY, PARTS, Contents, part_name, part_of, put_seal, seal
from monarch.tiers.tier import Tier
from monarch.tiers.verify import (
    DIGEST,
    GOOD,
    MISSING,
    UNKNOWN,
    UNREADABLE,
    VERSION,
    Step,
    Suspect,
    Verdict,
)
from monarch.types import Identity, Ino

# As in fuse/native/_reading.c.
GRANULE = 128 * KiB
ABSENT, PRESENT, DOUBTED = 0x00, 0x55, 0xAA
# For ``bytes.translate``: what the bytes of a map mean.
_STATES = bytes(byte if byte in (PRESENT, DOUBTED) else ABSENT for byte in range(256))
_DOUBTING = _STATES.replace(bytes([PRESENT]), bytes([DOUBTED]))

_PAGE = 4096
_DIGEST_BYTES = 16
_MAGIC = b"monarch parts 2\n"
# magic, term, size, mtime_ns, ctime_ns, source_ino
_HEADER = struct.Struct("<16sIQqqQ")
_CHECK = struct.Struct("<Q")
_HEADER_BYTES = _HEADER.size + _CHECK.size
_ZEROS = bytes(GRANULE)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places in the file of a partial copy of a file of ``size`` bytes."""

    size: int

    @property
    def granules(self) -> int:
        return -(-self.size // GRANULE)

    @property
    def map_at(self) -> int:
        return self.granules * GRANULE

    @property
    def digests_at(self) -> int:
        return self.map_at + _padded(self.granules)

    @property
    def header_at(self) -> int:
        return self.digests_at + _padded(_DIGEST_BYTES * self.granules)

    @property
    def total(self) -> int:
        return self.header_at + _PAGE

    @property
    def overhead(self) -> int:
        """The bytes of map, digests and header."""
        return self.total - self.map_at

    def length(self, start: int, stop: int) -> int:
        """The bytes of the granules from ``start`` to before ``stop``."""
        return min(stop * GRANULE, self.size) - start * GRANULE


def _padded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class Header:
    """The version of a partial copy, and the term in which its granules were last trusted."""

    identity: Identity
    term: int

    def packed(self) -> bytes:
        i = self.identity
        body = _HEADER.pack(_MAGIC, self.term, i.size, i.mtime_ns, i.ctime_ns, i.source_ino)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _read_header(fd: int) -> Header:
    """Raises OSError, ESTALE if the file is not a complete partial copy."""
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size >= _PAGE:
        raw = os.pread(fd, _HEADER_BYTES, status.st_size - _PAGE)
        body = raw[: _HEADER.size]
        if len(raw) == _HEADER_BYTES and raw[_HEADER.size :] == _CHECK.pack(
            xxhash.xxh3_64_intdigest(body)
        ):
            magic, term, size, mtime_ns, ctime_ns, source_ino = _HEADER.unpack(body)
            if magic == _MAGIC and Layout(size).total == status.st_size:
                return Header(Identity(size, mtime_ns, ctime_ns, source_ino), term)
    raise OSError(errno.ESTALE, "the header of the partial copy is damaged")


class PartialFile:
    """An open partial copy. ``map`` has the state of each granule as the file has it. It belongs to
    the event loop: calls in a thread return what the caller must enter into it."""

    def __init__(self, fd: int, ino: Ino, header: Header, states: bytearray, *, seals: bool):
        self.fd = fd
        self.identity = header.identity
        self.layout = Layout(header.identity.size)
        self.map = states
        self._ino = ino
        self._seals = seals

    @classmethod
    def not_created(cls, ino: Ino, identity: Identity) -> PartialFile:
        """In the place of a partial copy until its file is created: it has no granules."""
        states = bytearray(Layout(identity.size).granules)
        return cls(-1, ino, Header(identity, 0), states, seals=False)

    @classmethod
    def create(cls, tier: Tier, ino: Ino, identity: Identity, term: int) -> PartialFile:
        """A new partial copy without granules; an earlier one is removed. Raises OSError."""
        header, layout = Header(identity, term), Layout(identity.size)
        with suppress(FileExistsError):
            os.mkdir(PARTS, 0o700, dir_fd=tier.directory)
        remove(tier, ino)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(part_name(ino), flags, 0o600, dir_fd=tier.directory)
        try:
            os.ftruncate(fd, layout.total)
            os.pwrite(fd, header.packed(), layout.header_at)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, ino, header, bytearray(layout.granules), seals=tier.seals)

    @classmethod
    def open(
        cls, tier: Tier, ino: Ino, identity: Identity, term: int, *, doubts: str
    ) -> PartialFile:
        """Opens a partial copy of the version ``identity``. ``doubts`` is the setting ``verify``:
        when granules are compared before use. Raises OSError, ESTALE for another version."""
        fd = _opened(tier, ino, os.O_RDWR)
        try:
            header = _read_header(fd)
            if header.identity != identity:
                raise OSError(errno.ESTALE, "the partial copy is of another version")
            layout = Layout(identity.size)
            raw = os.pread(fd, layout.granules, layout.map_at)
            sealed = not tier.seals or os.fstat(fd).st_mtime_ns == seal(ino, identity)
            trusted = sealed and (header.term == term or doubts == "never")
            is_doubted = not trusted or doubts == "open"
            states = bytearray(raw.translate(_DOUBTING if is_doubted else _STATES))
            if states != raw:
                os.pwrite(fd, states, layout.map_at)
            if header.term != term:
                os.pwrite(fd, Header(identity, term).packed(), layout.header_at)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, ino, header, states, seals=tier.seals)

    def close(self, *, sealed: bool = True) -> None:
        """Closes the file. Without its seal all granules are doubted at the next open."""
        # At once: another file may get the number while a call that was given up continues.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if self._seals and sealed:
                with suppress(OSError):
                    put_seal(fd, self._ino, self.identity)
            os.close(fd)

    # -- granules ----------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        return ABSENT not in self.map

    def run(self, start: int, stop: int) -> int:
        """The end of the granules from ``start`` on, before ``stop``, that have the same state."""
        state, end = self.map[start], start + 1
        while end < stop and self.map[end] == state:
            end += 1
        return end

    def store(self, start: int, data: bytes) -> None:
        """In a thread: writes the granules from ``start`` on, the last one up to the end of the
        file. They are then present. Raises OSError."""
        view = memoryview(data)
        digests = []
        for offset in range(0, len(data), GRANULE):
            granule = view[offset : offset + GRANULE]
            digests.append(xxhash.xxh3_128_digest(granule))
            # A granule of zeros stays a hole. A damaged granule that was removed is none.
            if granule != _ZEROS[: len(granule)] or granule != self._granule(
                start + offset // GRANULE
            ):
                _write(self.fd, granule, start * GRANULE + offset)
        _write(self.fd, b"".join(digests), self.layout.digests_at + _DIGEST_BYTES * start)
        _write(self.fd, bytes([PRESENT]) * len(digests), self.layout.map_at + start)

    def verify(self, start: int, stop: int) -> bytes:
        """In a thread: compares granules with their digests, and marks them as present or absent in
        the file. Returns their states. Raises OSError."""
        states = bytes(PRESENT if self.is_right(index) else ABSENT for index in range(start, stop))
        _write(self.fd, states, self.layout.map_at + start)
        return states

    def is_right(self, index: int) -> bool:
        """Whether the bytes of a granule are those of its digest. Raises OSError."""
        return self._digest_of(index) == xxhash.xxh3_128_digest(self._granule(index))

    def digests(self, start: int, stop: int) -> bytes:
        """In a thread: the digests of granules, one after the other. Raises OSError."""
        place = self.layout.digests_at + _DIGEST_BYTES * start
        return os.pread(self.fd, _DIGEST_BYTES * (stop - start), place)

    def _digest_of(self, index: int) -> bytes:
        return self.digests(index, index + 1)

    def _granule(self, index: int) -> bytes:
        return os.pread(self.fd, self.layout.length(index, index + 1), index * GRANULE)

    # -- completion --------------------------------------------------------------------------------

    def whole_digest(self) -> bytes:
        """In a thread: the xxh3-128 of the complete file, whose granules are compared with their
        digests. Raises OSError, ESTALE if one differs."""
        digest = xxhash.xxh3_128()
        for index in range(self.layout.granules):
            granule = self._granule(index)
            if xxhash.xxh3_128_digest(granule) != self._digest_of(index):
                raise OSError(errno.ESTALE, "a granule differs from its digest")
            digest.update(granule)
        return digest.digest()

    def become_copy(self, tier: Tier) -> None:
        """In a thread: makes a complete file the whole copy of its inode, which is to be recorded
        then. Raises OSError."""
        os.ftruncate(self.fd, self.layout.size)
        if self._seals:
            put_seal(self.fd, self._ino, self.identity)
        tier.complete_part(self._ino)
        self._seals = False


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def _opened(tier: Tier, ino: Ino, access: int) -> int:
    # O_NONBLOCK: another program may have put a fifo in the place of the file.
    flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(part_name(ino), flags, dir_fd=tier.directory)


# -- partial copies that no process has open -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A partial copy on the disk. ``granules`` are not absent, and have ``nbytes`` bytes, with
    those of map, digests and header."""

    ino: Ino
    header: Header
    granules: int
    nbytes: int


def look_at(directory: int, ino: Ino) -> Found:
    """Raises OSError, ESTALE if the file is not a complete partial copy. ``directory`` is that of a
    generation."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with closing_fd(os.open(part_name(ino), flags, dir_fd=directory)) as fd:
        header = _read_header(fd)
        layout = Layout(header.identity.size)
        states = os.pread(fd, layout.granules, layout.map_at).translate(_STATES)
        held = layout.granules - states.count(ABSENT)
        nbytes = layout.overhead + held * GRANULE
        if states and states[-1] != ABSENT:
            nbytes -= layout.map_at - layout.size
        return Found(ino, header, held, nbytes)


def look_at_in(root: int, generation: str, ino: Ino) -> Found:
    """As ``look_at``, in a generation beneath ``root``, the directory of the tier. Raises
    OSError."""
    with closing_fd(os.open(Contents.PREFIX + generation, DIRECTORY, dir_fd=root)) as directory:
        return look_at(directory, ino)


def remove(tier: Tier, ino: Ino) -> None:
    """Removes a partial copy, or what another program has put in its place. Raises OSError."""
    tier.remove_stranger(part_name(ino), before_ns=1 << 63)


def doubt(tier: Tier, ino: Ino) -> None:
    """Marks a closed partial copy as one of an earlier term. Raises OSError."""
    with closing_fd(_opened(tier, ino, os.O_RDWR)) as fd:
        header = _read_header(fd)
        fresh = Header(header.identity, 0)
        os.pwrite(fd, fresh.packed(), Layout(header.identity.size).header_at)


def verify_part(
    directory: int, ino: Ino, version: Identity | None, *, whole: bool
) -> Generator[Step, None, Verdict]:
    """Checks the partial copy of ``ino`` beneath ``directory``, that of a generation. Yields a step
    for each piece that was read, and returns the verdict. Its version is compared with ``version``,
    if given, and with ``whole`` all its granules with their digests. Waits for the disk.

    The file may be written meanwhile: what the map has as present is complete.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with closing_fd(os.open(part_name(ino), flags, dir_fd=directory)) as fd:
            header = _read_header(fd)
            if version not in (None, header.identity):
                return Verdict(VERSION, "the snapshot has another version")
            part = PartialFile(fd, ino, header, bytearray(), seals=False)
            layout = part.layout
            states = os.pread(fd, layout.granules, layout.map_at) if whole else b""
            for index in _present(states):
                if not part.is_right(index):
                    return Verdict(DIGEST, f"granule {index} differs from its digest")
                yield Step(nbytes=layout.length(index, index + 1))
    except FileNotFoundError:
        return Verdict(MISSING, "the partial copy is missing", errno.ENOENT)
    except OSError as error:
        kind = DIGEST if error.errno == errno.ESTALE else UNREADABLE
        return Verdict(kind, error.strerror or "", error.errno or errno.EIO)
    return GOOD


def _present(states: bytes) -> Iterator[int]:
    index = states.find(PRESENT)
    while index >= 0:
        yield index
        index = states.find(PRESENT, index + 1)


def compare_parts(
    root: int,
    generation: str,
    *,
    whole: bool,
    version_of: Callable[[Ino], Identity | None],
) -> Iterator[Step]:
    """Checks all partial copies of a generation beneath ``root``, the tier's own directory.
    ``version_of`` as for ``verify.compare``; ``whole``: reads all granules."""
    names = Contents(root).parts(generation)
    if not names:
        return
    with closing_fd(os.open(Contents.PREFIX + generation, DIRECTORY, dir_fd=root)) as directory:
        for name in names:
            ino, path = part_of(name), f"{PARTS}/{name}"
            if ino is None:
                yield Step(suspect=Suspect(UNKNOWN, path, "it has no record"))
                continue
            verdict = yield from verify_part(directory, ino, version_of(ino), whole=whole)
            suspect = Suspect(verdict.kind, path, verdict.what, ino, None, verdict.error)
            yield Step(1, 0, suspect if verdict.kind else None)

"""The file of a snapshot: mapped by LMDB or read into memory, once its trailer was checked.

The trailer has a checksum of the pages by which LMDB finds the blocks.

The blocks have their own checksums, but LMDB follows the page numbers in its tree without a
check: one flipped bit there ends the program with SIGBUS. The tree is small, some thirty bytes a
block, so it is checked as a whole when a snapshot is opened, before LMDB sees it. The same
comparison finds a truncated file.

A snapshot may be of another user, with any numbers in its tree and the right checksum. So the
numbers are checked, too: no page, offset or size may lead out of the file.

The trailer follows the last page of LMDB, which does not read beyond it: the numbers of the tree's
pages (u32 each), then the footer: page size u32, pages in the file u32, pages in the tree u32,
zero u32, xxh3 of all that and of those pages u64, magic. The layout of the pages is that of
``mdb.c`` of LMDB 0.9, data version 1.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import lmdb
import xxhash

from monarch.errors import SnapshotError
from monarch.namespace.schema import damaged
from monarch.posix.files import closing_fd
from monarch.text import MiB

_MAGIC = b"MONARCHs"
_FOOTER = struct.Struct("<4IQ8s")

_LMDB_MAGIC = 0xBEEFC0DE
_LMDB_VERSION = 1
# Of a meta page: magic, version; the size of a page; the flags and the root of the main tree; the
# last page; the transaction.
_META = struct.Struct("<16xII 16x I 48x H 34x QQQ")
_NO_PAGE = (1 << 64) - 1
# Of any page: its number, flags, and where its free space begins.
_PAGE = struct.Struct("<QHHH")
_PAGE_HEADER_BYTES = 16
_BRANCH = 0x01
_LEAF = 0x02
# Of an entry of a branch page: the number of a page below in three parts, the size of the key. Of
# one of a leaf page: the size of the value in two parts, flags, the size of the key. The key
# follows, and the value.
_BRANCH_NODE = struct.Struct("<HHHH")
_LEAF_NODE = struct.Struct("<HHHH")
# The value is not in the leaf page, but in separate pages, from the page number there on.
_ELSEWHERE = 0x01
_PAGE_NUMBER = struct.Struct("<Q")

_MOST_TREE_PAGES = 1 << 20
# The sizes of pages that LMDB has: powers of two.
_PAGE_BYTES = frozenset(1 << bits for bits in range(8, 17))
# No valid value is larger, in bytes.
_MOST_VALUE_BYTES = 256 * MiB
_READ_BYTES = 4 * MiB


def append_trailer(path: Path, *, page_bytes: int) -> None:
    """Complete a database that LMDB has closed. The caller syncs the file."""
    with open(path, "r+b") as file:
        metas = [_META.unpack(file.read(page_bytes)[: _META.size]) for _ in range(2)]
        # LMDB writes the two meta pages in turn; the newer one counts.
        magic, version, _, _, root, last_page, _ = max(metas, key=lambda meta: meta[-1])
        if (magic, version) != (_LMDB_MAGIC, _LMDB_VERSION):
            raise SnapshotError(f"this version of LMDB writes format {version}, not 1")
        pages = last_page + 1
        numbers = [0, 1]
        pending = [] if root == _NO_PAGE else [root]
        while pending:
            number = pending.pop()
            numbers.append(number)
            pending += _pages_below(_read_page(file.fileno(), number, page_bytes))
        numbers.sort()
        content = struct.pack(f"<{len(numbers)}I", *numbers)
        head = (page_bytes, pages, len(numbers), 0)
        digest = _digest(file.fileno(), numbers, page_bytes, content, head)
        # The count includes pages that LMDB allocated and released before they were ever written.
        file.truncate(pages * page_bytes)
        file.seek(pages * page_bytes)
        file.write(content + _FOOTER.pack(*head, digest, _MAGIC))


def check_trailer(path: Path) -> tuple[int, int]:
    """The device and inode number of the snapshot ``path``. Raises SnapshotError if it is no
    snapshot, is cut short, or its tree is damaged."""
    with opened(path) as fd:
        check_opened(fd, path)
        status = os.fstat(fd)
        return status.st_dev, status.st_ino


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the snapshot ``path``; a failure to open or to read is a SnapshotError."""
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            yield fd
    except FileNotFoundError as error:
        raise SnapshotError(
            f"there is no snapshot {path}", hint="build it with `monarch snapshot build`"
        ) from error
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {path}: {error.strerror}") from error


def may_replace(path: Path) -> bool:
    """Whether ``path`` is free for a new snapshot: nothing, an empty file, or a snapshot, also a
    damaged one by its first or last bytes. Raises SnapshotError if it cannot be read."""
    if not os.path.lexists(path):
        return True
    with opened(path) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return False
        ends = os.pread(fd, len(_MAGIC), max(0, status.st_size - len(_MAGIC)))
        begins = os.pread(fd, 4, _PAGE_HEADER_BYTES)
        return not status.st_size or ends == _MAGIC or begins == struct.pack("<I", _LMDB_MAGIC)


def read_value(fd: int, name: bytes, path: Path) -> bytes:
    """The value of the key ``name`` by reads alone: no page of the file is mapped. Raises
    SnapshotError, also if the file is damaged, and OSError."""
    page_bytes, numbers = check_opened(fd, path)
    for number in numbers:
        page = _read_page(fd, number, page_bytes)
        if number < 2 or not _flags(page) & _LEAF:
            continue
        for offset in _offsets(page):
            found, start, size, kind = _leaf_node(page, offset)
            if found != name:
                continue
            if not kind & _ELSEWHERE:
                return page[start : start + size]
            (first,) = _PAGE_NUMBER.unpack_from(page, start)
            return os.pread(fd, size, first * page_bytes + _PAGE_HEADER_BYTES)
    raise damaged(str(path))


def check_opened(fd: int, path: Path) -> tuple[int, tuple[int, ...]]:
    """The size of a page and the numbers of the tree's pages of the open snapshot ``path``. Raises
    SnapshotError as ``check_trailer``, and OSError."""
    head = os.pread(fd, _META.size, 0)
    if len(head) < _META.size or _META.unpack(head)[0] != _LMDB_MAGIC:
        raise SnapshotError(
            f"{path} is not a snapshot of Monarch",
            hint="give a file that `monarch snapshot build` wrote",
        )
    size = os.fstat(fd).st_size
    footer = os.pread(fd, _FOOTER.size, max(0, size - _FOOTER.size))
    page_bytes, pages, count, zero, digest, magic = _FOOTER.unpack(footer)
    if (
        magic != _MAGIC
        or page_bytes not in _PAGE_BYTES
        or count > _MOST_TREE_PAGES
        or size != pages * page_bytes + count * 4 + _FOOTER.size
    ):
        raise SnapshotError(
            f"snapshot {path} is truncated, or its end is damaged",
            hint="copy it again, or build it again with `monarch snapshot build`",
        )
    content = os.pread(fd, count * 4, pages * page_bytes)
    numbers = struct.unpack(f"<{count}I", content)
    tree = frozenset(numbers)
    if len(tree) != count or max(tree, default=0) >= pages:
        raise damaged(str(path))
    if digest != _digest(fd, numbers, page_bytes, content, (page_bytes, pages, count, zero)):
        raise damaged(str(path))
    try:
        metas = [_META.unpack_from(_read_page(fd, number, page_bytes)) for number in (0, 1)]
        root = max(metas, key=lambda meta: meta[-1])[-3]
        known = (_LMDB_MAGIC, _LMDB_VERSION, page_bytes, 0)
        sound = all(meta[:4] == known for meta in metas) and (root == _NO_PAGE or root in tree)
        sound = sound and all(
            _is_sound(_read_page(fd, number, page_bytes), page_bytes, pages, tree)
            for number in numbers
            if number >= 2
        )
    except struct.error:
        # An offset is outside its page.
        sound = False
    if not sound:
        raise damaged(str(path))
    return page_bytes, numbers


def _is_sound(page: bytes, page_bytes: int, pages: int, tree: Set[int]) -> bool:
    """Whether this page of the tree leads LMDB only to bytes within the file."""
    flags = _flags(page)
    if flags == _BRANCH:
        return all(
            below in tree and offset + _BRANCH_NODE.size + key_bytes <= page_bytes
            for offset, below, key_bytes in _branch_nodes(page)
        )
    if flags != _LEAF:
        return False
    for offset in _offsets(page):
        name, start, size, kind = _leaf_node(page, offset)
        if len(name) != start - offset - _LEAF_NODE.size or kind not in (0, _ELSEWHERE):
            return False
        end, most = start + size, page_bytes
        if kind == _ELSEWHERE:
            (first,) = _PAGE_NUMBER.unpack_from(page, start)
            end, most = first * page_bytes + _PAGE_HEADER_BYTES + size, pages * page_bytes
        if end > most or size > _MOST_VALUE_BYTES:
            return False
    return True


def _digest(
    fd: int,
    numbers: list[int] | tuple[int, ...],
    page_bytes: int,
    content: bytes,
    head: tuple[int, int, int, int],
) -> int:
    state = xxhash.xxh3_64(struct.pack("<4I", *head) + content)
    for number in numbers:
        state.update(_read_page(fd, number, page_bytes))
    return state.intdigest()


def _read_page(fd: int, number: int, page_bytes: int) -> bytes:
    return os.pread(fd, page_bytes, number * page_bytes)


def _pages_below(page: bytes) -> list[int]:
    if _flags(page) & _LEAF:
        return []
    if not _flags(page) & _BRANCH:
        raise SnapshotError("LMDB wrote a tree with a page that is neither branch nor leaf")
    return [below for _, below, _ in _branch_nodes(page)]


def _flags(page: bytes) -> int:
    flags: int = _PAGE.unpack_from(page)[2]
    return flags


def _offsets(page: bytes) -> tuple[int, ...]:
    """The offsets of the entries of a page. Raises struct.error if they are not valid."""
    _, _, _, lower = _PAGE.unpack_from(page)
    return struct.unpack_from(f"<{(lower - _PAGE_HEADER_BYTES) // 2}H", page, _PAGE_HEADER_BYTES)


def _branch_nodes(page: bytes) -> Iterator[tuple[int, int, int]]:
    """The entries of a branch page: the offset, the number of the page below, the key's size."""
    for offset in _offsets(page):
        low, middle, high, key_bytes = _BRANCH_NODE.unpack_from(page, offset)
        yield offset, low | middle << 16 | high << 32, key_bytes


def _leaf_node(page: bytes, offset: int) -> tuple[bytes, int, int, int]:
    """An entry of a leaf page: its key, where its value is, the value's size, and its flags."""
    low, high, kind, key_bytes = _LEAF_NODE.unpack_from(page, offset)
    start = offset + _LEAF_NODE.size + key_bytes
    return page[offset + _LEAF_NODE.size : start], start, low | high << 16, kind


# -- the mapped file -------------------------------------------------------------------------------


@dataclass(eq=False)
class Mapping:
    """A snapshot file mapped by LMDB, which refuses to map one twice in a process: all users of a
    file share its mapping, as a daemon that refreshes the snapshot that it serves."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[dict[tuple[int, int], Mapping]] = {}

    _identity: tuple[int, int]
    environment: lmdb.Environment
    _memory: int = -1
    _users: int = 0

    @classmethod
    def acquire(cls, path: Path, *, memory_max: int) -> Mapping:
        """The mapping of a snapshot; a file of up to ``memory_max`` bytes is read into memory."""
        with cls._lock:
            memory = _read_into_memory(path, memory_max)
            if memory is not None:
                try:
                    check_opened(memory, path)
                    environment = _map(Path(f"/proc/self/fd/{memory}"))
                except BaseException:
                    os.close(memory)
                    raise
                status = os.fstat(memory)
                identity = status.st_dev, status.st_ino
                made = cls._open[identity] = cls(identity, environment, memory, _users=1)
                return made
            while True:
                identity = check_trailer(path)
                mapping = cls._open.get(identity)
                if mapping is None:
                    environment = _map(path)
                    status = path.stat()
                    if (status.st_dev, status.st_ino) != identity:
                        # Replaced by a newer one between the check and the mapping.
                        environment.close()
                        continue
                    mapping = cls._open[identity] = cls(identity, environment)
                mapping._users += 1
                return mapping

    def size(self) -> int:
        """The size of the database, in bytes."""
        pages: int = self.environment.info()["last_pgno"] + 1
        return pages * int(self.environment.stat()["psize"])

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._open[self._identity]
                self.environment.close()
                if self._memory >= 0:
                    os.close(self._memory)


def _read_into_memory(path: Path, most: int) -> int | None:
    """A descriptor of the content of a file in memory; None if the file is larger than ``most``
    bytes, or if there is no memory for it. Raises SnapshotError if the file cannot be read."""
    if most <= 0:
        return None
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > most:
            return None
        memory = -1
        try:
            memory = os.memfd_create("monarch-snapshot", os.MFD_CLOEXEC)
            os.posix_fallocate(memory, 0, max(1, size))
            os.ftruncate(memory, size)
        except OSError:
            if memory >= 0:
                os.close(memory)
            return None
        try:
            while data := os.read(file, _READ_BYTES):
                os.write(memory, data)
            # The content is in memory now, so its pages are dropped from the page cache.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            os.close(memory)
            raise
        return memory


def _map(path: Path) -> lmdb.Environment:
    try:
        return lmdb.open(
            os.fsencode(path),
            subdir=False,
            readonly=True,
            create=False,
            lock=False,
            readahead=False,
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise SnapshotError(f"cannot map snapshot {path}: {error}") from error

"""The tables of a snapshot: opened, checked, and read as a whole.

A table is a list of views of its blocks in the mapped file, filled at their first use, after the
checksum was compared.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from monarch.errors import SnapshotError
from monarch.namespace import schema
from monarch.namespace.schema import RECORD, RECORD_BYTES, SHIFT, SnapshotSummary, damaged
from monarch.namespace.trailer import Mapping
from monarch.posix.buckets import BUCKETS
from monarch.types import ROOT_INO, Ino

KIND = 0o170000

# Called with the table, the number and the content of a block.
OnLoad = Callable[[bytes, int, memoryview], None]


class _Table:
    """The blocks of one table, each mapped and checked when first used."""

    __slots__ = ("_lock", "_name", "_on_load", "_transaction", "_where", "views")

    def __init__(
        self,
        transaction: lmdb.Transaction,
        lock: threading.Lock,
        *,
        name: bytes,
        count: int,
        where: str,
    ) -> None:
        self._transaction = transaction
        self._lock = lock
        self._name = name
        self._where = where
        self._on_load: OnLoad | None = None
        self.views: list[memoryview | None] = [None] * (-(-count // schema.BLOCK))

    def on_load(self, call: OnLoad) -> None:
        """Calls ``call`` with each checked block, at once with those checked so far."""
        with self._lock:
            self._on_load = call
            for number, view in enumerate(self.views):
                if view is not None:
                    call(self._name, number, view)

    def block(self, number: int) -> memoryview:
        view = self.views[number]
        return self._load(number) if view is None else view

    def check(self, number: int) -> None:
        """Raises SnapshotError if a block is damaged now."""
        with self._lock:
            _value(self._transaction, schema.key(self._name, number), where=self._where)

    def checksum(self, number: int) -> bytes:
        """The checksum of a block, as it is stored. Raises SnapshotError if there is none."""
        with self._lock:
            value = self._transaction.get(schema.key(self._name, number))
        if value is None or len(value) < schema.HEADER_BYTES:
            raise damaged(self._where)
        return bytes(value[: schema.HEADER_BYTES])

    def _load(self, number: int) -> memoryview:
        with self._lock:
            view = self.views[number]
            if view is None:
                view = _value(self._transaction, schema.key(self._name, number), where=self._where)
                self.views[number] = view
                if self._on_load is not None:
                    self._on_load(self._name, number, view)
            return view


class Tables:
    """The tables of an open snapshot. Made by ``open``; ``close`` invalidates all iterators.

    ``file`` is its path, ``entries`` the number of names, which is the highest inode number.
    ``has_acls``: an entry is known to have access control lists.
    """

    def __init__(
        self,
        path: Path,
        info: SnapshotSummary,
        mapping: Mapping,
        transaction: lmdb.Transaction,
        *,
        memory_max: int = 0,
    ) -> None:
        self.file = path
        self._memory_max = memory_max
        self._info = info
        self.id = info.id
        self.source = info.source
        self.created_ns = info.created_ns
        self.entries = info.entries
        self.files = info.files
        self.bytes_total = info.bytes_total
        self.has_acls = bool(info.acls)
        self._mapping = mapping
        self._transaction = transaction
        lock = threading.Lock()
        where = str(path)

        def table(name: bytes, count: int) -> _Table:
            return _Table(transaction, lock, name=name, count=count, where=where)

        self._inodes = table(schema.INODES, info.entries)
        self._names = table(schema.NAMES, info.entries)
        self._links = table(schema.LINKS, info.symlinks)
        self._firsts = table(schema.CHILDREN, info.directories)
        self._acls = table(schema.ACLS, 2 * info.acl_values)
        self._tables = (self._inodes, self._names, self._links, self._firsts, self._acls)

    @classmethod
    def open(cls, path: Path, *, memory_max: int = 0) -> Self:
        """Maps the snapshot ``path``. Raises SnapshotError, with the reason, if it cannot be used.

        A file of up to ``memory_max`` bytes is read into memory: later damage of the file, its disk
        or its file system then has no effect. If a page of a mapped file cannot be read, the
        process ends (SIGBUS).
        """
        mapping = Mapping.acquire(path, memory_max=memory_max)
        try:
            transaction = mapping.environment.begin(buffers=True)
            meta = _value(transaction, schema.META, where=str(path))
            info = schema.decode_meta(bytes(meta), where=str(path))
            if info.entries * RECORD_BYTES > mapping.size():
                raise damaged(str(path))
            return cls(path, info, mapping, transaction, memory_max=memory_max)
        except BaseException:
            mapping.release()
            raise

    @classmethod
    def open_checked(cls, path: Path, *, memory_max: int = 0) -> Self:
        """``open`` and ``check``: for a snapshot that another user may have made."""
        snapshot = cls.open(path, memory_max=memory_max)
        try:
            snapshot.check()
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def close(self) -> None:
        for table in self._tables:
            table.views = []
        self._transaction.abort()
        self._mapping.release()

    def opened_again(self) -> Self:
        """Opens the current file, mapped or in memory as this one. Raises SnapshotError."""
        return self.open(self.file, memory_max=self._memory_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self) -> SnapshotSummary:
        return self._info

    def on_load(self, call: OnLoad) -> None:
        """Calls ``call`` with each block of the tables, in any thread, when it has been checked.
        The blocks stay until ``close``."""
        for table in self._tables:
            table.on_load(call)

    def damages(self) -> Iterator[str]:
        """Compares every block with its checksum, also those in use; yields each damage as text,
        and an empty text for each block that is right, so that the caller may pause."""
        for table in self._tables:
            for number in range(len(table.views)):
                try:
                    table.check(number)
                except SnapshotError as error:
                    yield str(error)
                else:
                    yield ""
        try:
            self.curve()
        except SnapshotError as error:
            yield str(error)

    def check(self) -> None:
        """Read every block once. Raises SnapshotError if one is damaged."""
        for table in self._tables:
            for number in range(len(table.views)):
                table.block(number)
        if not self._is_consistent():
            raise damaged(str(self.file))
        self.curve()

    def _is_consistent(self) -> bool:
        """Whether every number in the tables leads to a place in them, and the parents of all
        entries to the root: a snapshot of another user may have any numbers."""
        info = self._info
        texts = [(self._names, info.entries), (self._links, info.symlinks)]
        texts.append((self._acls, 2 * info.acl_values))
        inodes = self._inodes
        return (
            all(len(inodes.block(n)) % RECORD.itemsize == 0 for n in range(len(inodes.views)))
            and all(_are_possible(records, first, info) for first, records in self.records())
            and sum(len(rows) for _, rows in self.records()) == info.entries
            and all(
                _are_strings(table.block(number), min(schema.BLOCK, count - number * schema.BLOCK))
                for table, count in texts
                for number in range(len(table.views))
            )
            and all(
                _are_names(self._names.block(number), is_first=number == 0)
                for number in range(len(self._names.views))
            )
            and _are_spans(self._firsts, info)
        )

    def content_digest(self) -> str:
        """The XXH3 (128 bits) of all names, attributes and inode numbers, as 32 hexadecimal digits.
        The room that entries take at the source does not count: it may change while they do not,
        as when the client of the source writes them later."""
        digest = xxhash.xxh3_128(b"%d" % self.entries)
        for _, records in self.records():
            digest.update(_without_room(records).tobytes())
        for table in (self._names, self._links, self._firsts, self._acls):
            for number in range(len(table.views)):
                digest.update(table.checksum(number))
        return digest.hexdigest()

    def curve(self) -> npt.NDArray[np.uint64]:
        """Bytes of regular files in each of the BUCKETS buckets."""
        content = _value(self._transaction, schema.CURVE, where=str(self.file))
        if len(content) != BUCKETS * 8:
            raise damaged(str(self.file))
        return np.frombuffer(content, dtype="<u8").copy()

    def records(self) -> Iterator[tuple[Ino, npt.NDArray[np.void]]]:
        """The whole table in pieces: the first inode number and an array of RECORD, a view of the
        mapped file that is valid until ``close``."""
        for number in range(len(self._inodes.views)):
            yield Ino((number << SHIFT) + 1), self.block_of_records(number)

    def block_of_records(self, number: int) -> npt.NDArray[np.void]:
        """The records of one block, a view as of ``records``."""
        return np.frombuffer(self._inodes.block(number), dtype=RECORD)

    def newest_ns(self) -> int:
        """The newest change time of all entries: a lower bound of the source's clock."""
        if self._info.newest_ns is not None:
            return self._info.newest_ns
        return max(int(rows["ctime_ns"].max()) for _, rows in self.records())

    def directories(self) -> Iterator[Ino]:
        """Every directory, in the order of inode numbers."""
        for first, rows in self.records():
            for row in np.flatnonzero((rows["mode"] & KIND) == stat.S_IFDIR).tolist():
                yield Ino(first + row)

    def directories_of_files(self) -> list[Ino]:
        """Every directory that has an entry which is no directory, in the order of the numbers."""
        found: set[int] = set()
        for _, rows in self.records():
            is_file = (rows["mode"] & KIND) != stat.S_IFDIR
            found.update(np.unique(rows["parent"][is_file]).tolist())
        return [Ino(number) for number in sorted(found)]

    def columns(self, slots: range) -> npt.NDArray[np.void]:
        """The records of consecutive places as one array of RECORD."""
        pieces = [
            self._inodes.block(number)[low * RECORD_BYTES : high * RECORD_BYTES]
            for number, low, high in spans(slots.start, slots.stop)
        ]
        return np.frombuffer(b"".join(pieces), dtype=RECORD)


def _without_room(records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Records without the blocks of files and the sizes of directories."""
    kinds, kept = records["mode"] & KIND, records.copy()
    kept["extra"][(kinds == stat.S_IFREG) & (records["flags"] & schema.ALIAS == 0)] = 0
    kept["size"][kinds == stat.S_IFDIR] = 0
    return kept


def _are_possible(records: npt.NDArray[np.void], first: int, info: SnapshotSummary) -> bool:
    """Whether the numbers in some records lead to existing places; ``first`` is the number of the
    first record."""
    flags, kinds, extra = records["flags"], records["mode"] & KIND, records["extra"]
    # A directory has a lower number than its entries; the root is its own parent.
    above = np.arange(first - 1, first - 1 + len(records))
    above[:1] = max(first - 1, ROOT_INO)
    alias = flags & schema.ALIAS != 0
    directory, link = ~alias & (kinds == stat.S_IFDIR), ~alias & (kinds == stat.S_IFLNK)
    return bool(
        np.all(records["parent"] >= ROOT_INO)
        and np.all(records["parent"] <= above)
        and np.all(flags >> schema.ACL_SHIFT <= info.acl_values)
        and np.all(extra[alias] >= ROOT_INO)
        and np.all(extra[alias] <= info.entries)
        and np.all(extra[directory] < info.directories)
        and np.all(extra[link] < info.symlinks)
    )


def _are_strings(block: memoryview, count: int) -> bool:
    """Whether a block has ``count`` strings, each of them within the block."""
    if len(block) < 4 * (count + 1):
        return False
    offsets = np.frombuffer(block[: 4 * (count + 1)], dtype="<u4").astype(np.int64)
    return bool(
        offsets[0] == offsets.nbytes // 2
        and np.all(np.diff(offsets) >= 0)
        and offsets[-1] == len(block)
    )


def _are_names(block: memoryview, *, is_first: bool) -> bool:
    """Whether the strings of a block can be names in a directory: a path from others would lead to
    another file of the source. That of the root, the first one of all, is empty."""
    start = int.from_bytes(block[:4], "little")
    offsets = np.frombuffer(block[:start], dtype="<u4").astype(np.int64)
    text = np.frombuffer(block, dtype=np.uint8)
    sizes, firsts = np.diff(offsets), offsets[:-1]
    if is_first:
        sizes, firsts = sizes[1:], firsts[1:]
    letters = text[start:]
    if np.any(letters == 0) or np.any(letters == ord("/")) or np.any(sizes == 0):
        return False
    short = firsts[sizes <= 2]
    dots = text == ord(".")
    are_dots = dots[short] & dots[short + sizes[sizes <= 2] - 1]
    return not np.any(are_dots)


def _are_spans(table: _Table, info: SnapshotSummary) -> bool:
    """Whether the first children of all directories are entries of the table."""
    low, directories = 1, info.directories
    for number in range(len(table.views)):
        block = table.block(number)
        count = min(schema.BLOCK, directories - number * schema.BLOCK) + 1
        if len(block) != 4 * count:
            return False
        firsts = np.frombuffer(block, dtype="<u4").astype(np.int64)
        if firsts[0] < low or np.any(np.diff(firsts) < 0):
            return False
        low = int(firsts[-1])
    return low <= info.entries + 1


def _value(transaction: lmdb.Transaction, name: bytes, *, where: str) -> memoryview:
    """The content of a value, checked. Raises SnapshotError."""
    try:
        value = transaction.get(name)
    except lmdb.Error as error:
        raise damaged(where) from error
    if value is None:
        raise damaged(where)
    return schema.unseal(name, value, where=where)


def spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that hold the places from ``start`` to ``stop``: (number, from, to) in each."""
    index, end = start - 1, stop - 1
    while index < end:
        number = index >> SHIFT
        following = min(end, (number + 1) << SHIFT)
        yield number, index & schema.MASK, following - (number << SHIFT)
        index = following

"""Asking a snapshot: names, attributes and targets of links, without a call to the source.

No object is kept for a file. A table is a list of views of its blocks in the mapped file, filled
at their first use, after the checksum was compared; so an answer is arithmetic and one unpacking.
Nothing here waits for anything but a page of the local file, and not even for that if the file
was read into memory. Threads may share a snapshot.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import lmdb
import numpy as np
import numpy.typing as npt

from monarch.acl import NO_ACLS, Acls
from monarch.buckets import BUCKETS
from monarch.errors import SnapshotError
from monarch.namespace.schema import (
    ACL_SHIFT,
    ACLS,
    ALIAS,
    BLOCK,
    CHILDREN,
    CURVE,
    INODES,
    LINKS,
    MASK,
    META,
    NAMES,
    RECORD,
    RECORD_BYTES,
    RECORD_STRUCT,
    SHIFT,
    U32_PAIR,
    UNREADABLE,
    SnapshotSummary,
    damaged,
    decode_meta,
    key,
    unpack_strings,
    unseal,
)
from monarch.namespace.trailer import check_opened, check_trailer, opened
from monarch.types import ROOT_INO, Attributes, Ino
from monarch.units import MiB

_KINDS = 0o170000
_READ_BYTES = 4 * MiB

# Told the table, the number and the content of a block.
OnLoad = Callable[[bytes, int, memoryview], None]


class _Mapping:
    """A snapshot file mapped by LMDB, which refuses to map one twice in a process.

    A daemon may refresh the snapshot that it serves, so those who open a file share its mapping.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[dict[tuple[int, int], _Mapping]] = {}

    def __init__(
        self, identity: tuple[int, int], environment: lmdb.Environment, memory: int = -1
    ) -> None:
        self._identity = identity
        self.environment = environment
        self._memory = memory
        self._users = 0

    @classmethod
    def acquire(cls, path: Path, *, memory_max: int) -> _Mapping:
        """The mapping of a snapshot; of its content in memory up to ``memory_max`` bytes."""
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
                made = cls._open[identity] = cls(identity, environment, memory)
                made._users = 1
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
        """Of its pages, in bytes."""
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
        self.views: list[memoryview | None] = [None] * (-(-count // BLOCK))

    def on_load(self, call: OnLoad) -> None:
        """``call`` is told of each block that was checked, of those so far at once."""
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
            _value(self._transaction, key(self._name, number), where=self._where)

    def _load(self, number: int) -> memoryview:
        with self._lock:
            view = self.views[number]
            if view is None:
                view = _value(self._transaction, key(self._name, number), where=self._where)
                self.views[number] = view
                if self._on_load is not None:
                    self._on_load(self._name, number, view)
            return view


class Snapshot:
    """An open snapshot. Made by ``open``; ``close`` invalidates every iterator it gave out.

    Methods that take an inode number raise IndexError for one that the snapshot does not have.
    """

    def __init__(
        self,
        path: Path,
        info: SnapshotSummary,
        mapping: _Mapping,
        transaction: lmdb.Transaction,
        *,
        memory_max: int = 0,
    ) -> None:
        self._path = path
        self._memory_max = memory_max
        self._info = info
        self._mapping = mapping
        self._transaction = transaction
        lock = threading.Lock()
        where = str(path)

        def table(name: bytes, count: int) -> _Table:
            return _Table(transaction, lock, name=name, count=count, where=where)

        self._inodes = table(INODES, info.entries)
        self._names = table(NAMES, info.entries)
        self._links = table(LINKS, info.symlinks)
        self._firsts = table(CHILDREN, info.directories)
        self._acls = table(ACLS, 2 * info.acl_values)
        self._tables = (self._inodes, self._names, self._links, self._firsts, self._acls)
        self._aliases: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None

    @classmethod
    def open(cls, path: Path, *, memory_max: int = 0) -> Snapshot:
        """Map the snapshot ``path``. Raises SnapshotError if it cannot be used, with the reason.

        One of up to ``memory_max`` bytes is read into memory: whatever becomes of the file, of its
        disk or of its file system is then not felt. Of a mapped file a page that cannot be read
        ends the process (SIGBUS).
        """
        mapping = _Mapping.acquire(path, memory_max=memory_max)
        try:
            transaction = mapping.environment.begin(buffers=True)
            meta = _value(transaction, META, where=str(path))
            info = decode_meta(bytes(meta), where=str(path))
            if info.entries * RECORD_BYTES > mapping.size():
                raise damaged(str(path))
            return cls(path, info, mapping, transaction, memory_max=memory_max)
        except BaseException:
            mapping.release()
            raise

    def close(self) -> None:
        for table in self._tables:
            table.views = []
        self._transaction.abort()
        self._mapping.release()

    def opened_again(self) -> Snapshot:
        """What the file is now, mapped or in memory as this one. Raises SnapshotError."""
        return Snapshot.open(self._path, memory_max=self._memory_max)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file(self) -> Path:
        """Where the snapshot itself lies."""
        return self._path

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def source(self) -> bytes:
        return self._info.source

    @property
    def entries(self) -> int:
        """How many names there are, which is the highest inode number."""
        return self._info.entries

    @property
    def files(self) -> int:
        return self._info.files

    @property
    def bytes_total(self) -> int:
        return self._info.bytes_total

    @property
    def created_ns(self) -> int:
        return self._info.created_ns

    def info(self) -> SnapshotSummary:
        return self._info

    def on_load(self, call: OnLoad) -> None:
        """``call`` is told of each block of the tables, in any thread, once it has been checked.

        The blocks stay until ``close``.
        """
        for table in self._tables:
            table.on_load(call)

    def damages(self) -> Iterator[str]:
        """Compare every block with its checksum now, those in use, too; yields what is damaged.

        An empty text comes for each that is right, so that the caller may pause.
        """
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
            raise damaged(str(self._path))
        self.curve()

    def _is_consistent(self) -> bool:
        """Whether every number in the tables leads to a place in them, and all parents to the root.

        A snapshot from somebody else may hold any numbers, with the right checksums.
        """
        info = self._info
        texts = [(self._names, info.entries), (self._links, info.symlinks)]
        texts.append((self._acls, 2 * info.acl_values))
        inodes = self._inodes
        return (
            all(len(inodes.block(n)) % RECORD.itemsize == 0 for n in range(len(inodes.views)))
            and all(_are_possible(records, first, info) for first, records in self.records())
            and sum(len(rows) for _, rows in self.records()) == info.entries
            and all(
                _are_strings(table.block(number), min(BLOCK, count - number * BLOCK))
                for table, count in texts
                for number in range(len(table.views))
            )
            and self._are_spans()
        )

    def _are_spans(self) -> bool:
        """Whether the entries of each directory are entries."""
        low, left = 1, self._info.directories
        for number in range(len(self._firsts.views)):
            block = self._firsts.block(number)
            count = min(BLOCK, left - number * BLOCK) + 1
            if len(block) != 4 * count:
                return False
            firsts = np.frombuffer(block, dtype="<u4").astype(np.int64)
            if firsts[0] < low or np.any(np.diff(firsts) < 0):
                return False
            low = int(firsts[-1])
        return low <= self._info.entries + 1

    def curve(self) -> npt.NDArray[np.uint64]:
        """Bytes of regular files in each of the BUCKETS buckets."""
        content = _value(self._transaction, CURVE, where=str(self._path))
        if len(content) != BUCKETS * 8:
            raise damaged(str(self._path))
        return np.frombuffer(content, dtype="<u8").copy()

    def attributes(self, ino: Ino) -> Attributes:
        """What ``lstat`` told of an entry; of an alias, what it told of the file's first name."""
        return self._attributes(ino, self._record(ino))

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode number of a child; a hard link has that of the file's first name."""
        slot = self.slot(parent, name)
        if slot is None:
            return None
        record = self._record(slot)
        return Ino(record[10]) if record[5] & ALIAS else slot

    def slot(self, parent: Ino, name: bytes) -> Ino | None:
        """The place of a child in the table, which is not its inode number if it is an alias."""
        children = self.children(parent)
        low, high = children.start, children.stop
        block = self._names.block
        unpack = U32_PAIR.unpack_from
        while low < high:
            middle = (low + high) // 2
            view = block((middle - 1) >> SHIFT)
            start, stop = unpack(view, ((middle - 1) & MASK) * 4)
            found = bytes(view[start:stop])
            if found < name:
                low = middle + 1
            elif found == name:
                return Ino(middle)
            else:
                high = middle
        return None

    def children(self, ino: Ino) -> range:
        """The places of a directory's entries, in the order of their names; empty for a file."""
        record = self._record(ino)
        if record[1] & _KINDS != stat.S_IFDIR:
            return range(0)
        rank = record[10]
        return range(*U32_PAIR.unpack_from(self._firsts.block(rank >> SHIFT), (rank & MASK) * 4))

    def names(self, ino: Ino) -> list[bytes]:
        """The names in a directory, sorted."""
        children = self.children(ino)
        return list(
            itertools.chain.from_iterable(
                unpack_strings(self._names.block(number), start, stop)
                for number, start, stop in _spans(children.start, children.stop)
            )
        )

    def list_from(self, ino: Ino, start: int) -> Iterator[tuple[bytes, Attributes]]:
        """The entries of a directory from the index ``start`` on, in the order of their names."""
        children = self.children(ino)
        for number, low, high in _spans(children.start + start, children.stop):
            names = self._names.block(number)
            inodes = self._inodes.block(number)
            slot = (number << SHIFT) + 1
            # In pieces, since a reader of a wide directory often wants no more than a page of it.
            for begin in range(low, high, 128):
                end = min(begin + 128, high)
                records = RECORD_STRUCT.iter_unpack(
                    inodes[begin * RECORD_BYTES : end * RECORD_BYTES]
                )
                for index, name, record in zip(
                    range(begin, end), unpack_strings(names, begin, end), records, strict=True
                ):
                    if record[5] & ALIAS or record[1] & _KINDS != stat.S_IFREG:
                        yield name, self._attributes(Ino(slot + index), record)
                    else:
                        yield (
                            name,
                            Attributes(
                                Ino(slot + index),
                                Ino(record[0]),
                                record[1],
                                record[4],
                                record[2],
                                record[3],
                                record[6],
                                record[7],
                                record[8],
                                record[9],
                                record[10],
                                0,
                            ),
                        )

    def name(self, slot: int) -> bytes:
        index = _index(slot)
        view = self._names.block(index >> SHIFT)
        start, stop = U32_PAIR.unpack_from(view, (index & MASK) * 4)
        return bytes(view[start:stop])

    def path(self, ino: Ino) -> bytes:
        """Where the entry is in the source, relative to its root, which is ``b""``."""
        parts = []
        while ino != ROOT_INO:
            parts.append(self.name(ino))
            ino = Ino(self._record(ino)[0])
        return b"/".join(reversed(parts))

    def readlink(self, ino: Ino) -> bytes:
        """The target of a symbolic link. Raises ValueError for anything else."""
        record = self._record(ino)
        if record[5] & ALIAS:
            record = self._record(record[10])
        if record[1] & _KINDS != stat.S_IFLNK:
            raise ValueError(f"inode {ino} is not a symbolic link")
        rank = record[10]
        index = rank & MASK
        return unpack_strings(self._links.block(rank >> SHIFT), index, index + 1)[0]

    @property
    def has_acls(self) -> bool:
        """Whether any entry has access control lists, as far as was looked."""
        return bool(self._info.acls)

    def acls(self, ino: Ino) -> Acls:
        """The access control lists of an entry, as they are stored."""
        return self.acls_of(self._record(ino)[5])

    def acls_of(self, flags: int) -> Acls:
        """Those that the ``flags`` of a record tell of."""
        return self.acl_value(flags >> ACL_SHIFT) if flags >> ACL_SHIFT else NO_ACLS

    def acl_value(self, number: int) -> Acls:
        """The pair of that number, from 1 to ``info().acl_values``."""
        index = 2 * (number - 1)
        block = self._acls.block(index >> SHIFT)
        return Acls(*unpack_strings(block, index & MASK, (index & MASK) + 2))

    def resolve(self, path: bytes) -> Ino | None:
        """The inode number of a path relative to the root. Symbolic links are not followed."""
        ino = ROOT_INO
        for part in path.split(b"/"):
            if part not in (b"", b"."):
                found = self.lookup(ino, part)
                if found is None:
                    return None
                ino = found
        return ino

    def parent(self, slot: Ino) -> Ino:
        """The directory that an entry is in; the root is in itself."""
        return Ino(self._record(slot)[0])

    def unreadable(self, slot: Ino) -> bool:
        """Whether the entry could not be looked at, or listed, when the snapshot was built."""
        return bool(self._record(slot)[5] & UNREADABLE)

    def records(self) -> Iterator[tuple[Ino, npt.NDArray[np.void]]]:
        """The whole table in pieces: the first inode number and an array of RECORD.

        The arrays are views of the mapped file: take what you need before ``close``.
        """
        for number in range(len(self._inodes.views)):
            yield (
                Ino((number << SHIFT) + 1),
                np.frombuffer(self._inodes.block(number), dtype=RECORD),
            )

    def newest_ns(self) -> int:
        """The newest time of change of all entries: the source's clock was there at least."""
        if self._info.newest_ns is not None:
            return self._info.newest_ns
        return max(int(rows["ctime_ns"].max()) for _, rows in self.records())

    def aliases(self, ino: Ino) -> Iterator[Ino]:
        """The places of a file's names but the first; the first call passes over the table."""
        if self._aliases is None:
            self._aliases = self._sorted_aliases()
        files, places = self._aliases
        low, high = np.searchsorted(files, np.array((ino, ino + 1), np.uint64)).tolist()
        yield from map(Ino, places[low:high].tolist())

    def _sorted_aliases(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The file and the place of every further name, sorted: 16 bytes for each in all."""
        files, places = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        if self._info.aliases:
            for first, rows in self.records():
                found = np.flatnonzero(rows["flags"] & ALIAS)
                files.append(rows["extra"][found])
                places.append((found + first).astype(np.uint64))
        file, place = np.concatenate(files), np.concatenate(places)
        order = np.argsort(file, kind="stable")
        return file[order], place[order]

    def directories(self) -> Iterator[Ino]:
        """Every directory, in the order of inode numbers."""
        for first, rows in self.records():
            for row in np.flatnonzero((rows["mode"] & _KINDS) == stat.S_IFDIR).tolist():
                yield Ino(first + row)

    def columns(self, slots: range) -> npt.NDArray[np.void]:
        """The records of consecutive places as one array of RECORD."""
        pieces = [
            self._inodes.block(number)[low * RECORD_BYTES : high * RECORD_BYTES]
            for number, low, high in _spans(slots.start, slots.stop)
        ]
        return np.frombuffer(b"".join(pieces), dtype=RECORD)

    def walk(self, ino: Ino = ROOT_INO) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino``, depth first.

        A hard link is given as the file's first name, so a file may come more than once.
        """
        attributes = self.attributes(ino)
        if attributes.is_file:
            yield attributes.ino, attributes
        if not attributes.is_dir:
            return
        pending = [self.list_from(ino, 0)]
        while pending:
            for _, attributes in pending[-1]:
                if attributes.is_file:
                    yield attributes.ino, attributes
                elif attributes.is_dir:
                    pending.append(self.list_from(attributes.ino, 0))
                    break
            else:
                pending.pop()

    def reusable(self, slot: Ino) -> tuple[bytes | None, bytes | None]:
        """The record of an entry and, for a symbolic link, its target, if an unchanged directory
        vouches for them; (None, None) for what can change without it."""
        record = self._record(slot)
        if record[5] or record[4] > 1 or record[1] & _KINDS == stat.S_IFDIR:
            return None, None
        index = slot - 1
        at = (index & MASK) * RECORD_BYTES
        raw = bytes(self._inodes.block(index >> SHIFT)[at : at + RECORD_BYTES])
        target = self.readlink(slot) if record[1] & _KINDS == stat.S_IFLNK else None
        return raw, target

    def is_listed_directory(self, slot: Ino) -> bool:
        """Whether it is a directory and its names are known."""
        record = self._record(slot)
        return record[1] & _KINDS == stat.S_IFDIR and not record[5] & UNREADABLE

    def _record(self, slot: int) -> tuple[int, ...]:
        index = _index(slot)
        return RECORD_STRUCT.unpack_from(
            self._inodes.block(index >> SHIFT), (index & MASK) * RECORD_BYTES
        )

    def _attributes(self, slot: Ino, record: tuple[int, ...]) -> Attributes:
        if record[5] & ALIAS:
            slot = Ino(record[10])
            record = self._record(slot)
        parent, mode, uid, gid, nlink, _, size, mtime_ns, ctime_ns, source_ino, extra = record
        kind = mode & _KINDS
        blocks = rdev = 0
        if kind == stat.S_IFREG:
            blocks = extra
        elif kind == stat.S_IFDIR:
            blocks = (size + 511) // 512
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            rdev = extra
        return Attributes(
            slot,
            Ino(parent),
            mode,
            nlink,
            uid,
            gid,
            size,
            mtime_ns,
            ctime_ns,
            source_ino,
            blocks,
            rdev,
        )


def _are_possible(records: npt.NDArray[np.void], first: int, info: SnapshotSummary) -> bool:
    """Whether some records, of which the first has that number, lead to places that there are."""
    flags, kinds, extra = records["flags"], records["mode"] & _KINDS, records["extra"]
    # A directory has a lower number than what is in it; the root is in itself.
    above = np.arange(first - 1, first - 1 + len(records))
    above[:1] = max(first - 1, ROOT_INO)
    alias = flags & ALIAS != 0
    directory, link = ~alias & (kinds == stat.S_IFDIR), ~alias & (kinds == stat.S_IFLNK)
    return bool(
        np.all(records["parent"] >= ROOT_INO)
        and np.all(records["parent"] <= above)
        and np.all(flags >> ACL_SHIFT <= info.acl_values)
        and np.all(extra[alias] >= ROOT_INO)
        and np.all(extra[alias] <= info.entries)
        and np.all(extra[directory] < info.directories)
        and np.all(extra[link] < info.symlinks)
    )


def _are_strings(block: memoryview, count: int) -> bool:
    """Whether a block has as many strings, each of them in the block."""
    if len(block) < 4 * (count + 1):
        return False
    offsets = np.frombuffer(block[: 4 * (count + 1)], dtype="<u4").astype(np.int64)
    return bool(
        offsets[0] == offsets.nbytes // 2
        and np.all(np.diff(offsets) >= 0)
        and offsets[-1] == len(block)
    )


def _read_into_memory(path: Path, most: int) -> int | None:
    """A descriptor of the content of a file in memory; None if it is larger than ``most`` bytes.

    Raises SnapshotError if it cannot be read. Where there is no memory for it, that is None, too.
    """
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
            # It is in memory now, and need not be there twice.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            os.close(memory)
            raise
        return memory


def _map(path: Path) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(path),
            subdir=False,
            readonly=True,
            create=False,
            lock=False,
            readahead=False,
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise SnapshotError(f"cannot map snapshot {path}: {error}") from error


def _value(transaction: lmdb.Transaction, name: bytes, *, where: str) -> memoryview:
    """The content of a value, checked. Raises SnapshotError."""
    try:
        value = transaction.get(name)
    except lmdb.Error as error:
        raise damaged(where) from error
    if value is None:
        raise damaged(where)
    return unseal(name, value, where=where)


def _index(slot: int) -> int:
    if slot < 1:
        raise IndexError(f"no inode {slot}")
    return slot - 1


def _spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that hold the places from ``start`` to ``stop``: (number, from, to) in each."""
    index, end = start - 1, stop - 1
    while index < end:
        number = index >> SHIFT
        following = min(end, (number + 1) << SHIFT)
        yield number, index & MASK, following - (number << SHIFT)
        index = following

"""Queries of a snapshot: names, attributes and targets of links, without a call to the source.

There is no object for a file: an answer is computed from a table (tables.py). A query waits at most
for a page of the local file, and not at all if the file was read into memory. Thread-safe.
"""

from __future__ import annotations

import itertools
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from monarch.namespace.schema import (
    ACL_SHIFT,
    ALIAS,
    MASK,
    RECORD_BYTES,
    RECORD_STRUCT,
    SHIFT,
    U32_PAIR,
    UNREADABLE,
    unpack_strings,
)
from monarch.namespace.tables import KIND, Tables, spans
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import ROOT_INO, Attributes, Ino


class Snapshot(Tables):
    """Queries of an open snapshot. They raise IndexError for an inode number that it does not
    have."""

    def attributes(self, ino: Ino) -> Attributes:
        """The attributes of an entry; of an alias, those of the file's first name."""
        return self._attributes(ino, self._record(ino))

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode number of a child, or None; a hard link has that of the file's first name."""
        slot = self.slot(parent, name)
        if slot is None:
            return None
        record = self._record(slot)
        return Ino(record[10]) if record[5] & ALIAS else slot

    def slot(self, parent: Ino, name: bytes) -> Ino | None:
        """The index of a child in the table; not its inode number if it is an alias."""
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
        if record[1] & KIND != stat.S_IFDIR:
            return range(0)
        rank = record[10]
        return range(*U32_PAIR.unpack_from(self._firsts.block(rank >> SHIFT), (rank & MASK) * 4))

    def names(self, ino: Ino) -> list[bytes]:
        """The names in a directory, sorted."""
        children = self.children(ino)
        return list(
            itertools.chain.from_iterable(
                unpack_strings(self._names.block(number), start, stop)
                for number, start, stop in spans(children.start, children.stop)
            )
        )

    def list_from(self, ino: Ino, start: int) -> Iterator[tuple[bytes, Attributes]]:
        """The entries of a directory from the index ``start`` on, in the order of their names."""
        children = self.children(ino)
        for number, low, high in spans(children.start + start, children.stop):
            names = self._names.block(number)
            inodes = self._inodes.block(number)
            slot = (number << SHIFT) + 1
            # In pieces, since a reader of a wide directory often needs only a page of it.
            for begin in range(low, high, 128):
                end = min(begin + 128, high)
                records = RECORD_STRUCT.iter_unpack(
                    inodes[begin * RECORD_BYTES : end * RECORD_BYTES]
                )
                for index, name, record in zip(
                    range(begin, end), unpack_strings(names, begin, end), records, strict=True
                ):
                    if record[5] & ALIAS or record[1] & KIND != stat.S_IFREG:
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
        """The path of an entry in the source, relative to its root, which is ``b""``."""
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
        if record[1] & KIND != stat.S_IFLNK:
            raise ValueError(f"inode {ino} is not a symbolic link")
        rank = record[10]
        index = rank & MASK
        return unpack_strings(self._links.block(rank >> SHIFT), index, index + 1)[0]

    def acls(self, ino: Ino) -> Acls:
        """The access control lists of an entry, as they are stored."""
        return self.acls_of(self._record(ino)[5])

    def acls_of(self, flags: int) -> Acls:
        """The access control lists that the ``flags`` of a record refer to."""
        return self.acl_value(flags >> ACL_SHIFT) if flags >> ACL_SHIFT else NO_ACLS

    def acl_value(self, number: int) -> Acls:
        """The pair of lists with this number, from 1 to ``info().acl_values``."""
        index = 2 * (number - 1)
        block = self._acls.block(index >> SHIFT)
        return Acls(*unpack_strings(block, index & MASK, (index & MASK) + 2))

    def resolve(self, path: bytes) -> Ino | None:
        """The inode number of a path relative to the root. Symbolic links are not followed."""
        return resolve(path, self.lookup)

    def parent(self, slot: Ino) -> Ino:
        """The directory that an entry is in; the root is in itself."""
        return Ino(self._record(slot)[0])

    def level(self, directory: Ino, depth: int) -> range:
        """The entries that are ``depth`` levels beneath a directory. Their numbers are consecutive,
        since entries are numbered breadth first."""
        level = range(directory, directory + 1)
        # All entries except the root: their parents ascend.
        places = range(ROOT_INO + 1, self.entries + 1)
        for _ in range(depth):
            start = bisect_left(places, level.start, key=self._parent)
            level = places[start : bisect_left(places, level.stop, start, key=self._parent)]
        return level

    def files_in(
        self, slots: range
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The regular files among consecutive entries, each at its first name only: their inode
        numbers, sizes, and inode numbers at the source."""
        records = self.columns(slots)
        found = np.flatnonzero(_are_files(records))
        chosen = records[found]
        return found + slots.start, chosen["size"], chosen["source_ino"]

    def count_files(self, slots: range) -> int:
        """The number of regular files among consecutive entries, each at its first name only."""
        return int(np.count_nonzero(_are_files(self.columns(slots))))

    def directories_in(self, slots: range) -> list[Ino]:
        """The directories among consecutive entries."""
        found = np.flatnonzero(self.columns(slots)["mode"] & KIND == stat.S_IFDIR)
        return [Ino(slot) for slot in (found + slots.start).tolist()]

    def _parent(self, slot: int) -> int:
        return self._record(slot)[0]

    def unreadable(self, slot: Ino) -> bool:
        """Whether the entry could not be read, or listed, when the snapshot was built."""
        return bool(self._record(slot)[5] & UNREADABLE)

    def aliases(self, ino: Ino) -> Iterator[Ino]:
        """The indices of a file's names except the first; the first call reads the whole table."""
        files, places = self._aliases
        low, high = np.searchsorted(files, np.array((ino, ino + 1), np.uint64)).tolist()
        yield from map(Ino, places[low:high].tolist())

    @cached_property
    def _aliases(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The file and the index of every further name, sorted: 16 bytes for each."""
        files, places = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        if self._info.aliases:
            for first, rows in self.records():
                found = np.flatnonzero(rows["flags"] & ALIAS)
                files.append(rows["extra"][found])
                places.append((found + first).astype(np.uint64))
        file, place = np.concatenate(files), np.concatenate(places)
        order = np.argsort(file, kind="stable")
        return file[order], place[order]

    def walk(self, ino: Ino = ROOT_INO) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino``, depth first; one with several names may come
        more than once."""
        return walk(self.attributes(ino), lambda directory: self.list_from(directory, 0))

    def reusable(self, slot: Ino) -> tuple[bytes | None, bytes | None]:
        """The record of an entry and, for a symbolic link, its target, as they were in the
        snapshot. (None, None) for an entry that may have changed although its directory has not."""
        record = self._record(slot)
        if record[5] or record[4] > 1 or record[1] & KIND == stat.S_IFDIR:
            return None, None
        index = slot - 1
        at = (index & MASK) * RECORD_BYTES
        raw = bytes(self._inodes.block(index >> SHIFT)[at : at + RECORD_BYTES])
        target = self.readlink(slot) if record[1] & KIND == stat.S_IFLNK else None
        return raw, target

    def is_listed_directory(self, slot: Ino) -> bool:
        """Whether it is a directory and its names are known."""
        record = self._record(slot)
        return record[1] & KIND == stat.S_IFDIR and not record[5] & UNREADABLE

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
        kind = mode & KIND
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


def resolve(path: bytes, lookup: Callable[[Ino, bytes], Ino | None]) -> Ino | None:
    """The inode at a path relative to the root, None if there is none."""
    ino: Ino | None = ROOT_INO
    for part in path.split(b"/"):
        if ino is not None and part not in (b"", b"."):
            ino = lookup(ino, part)
    return ino


def walk(
    top: Attributes, entries: Callable[[Ino], Iterator[tuple[bytes, Attributes]]]
) -> Iterator[tuple[Ino, Attributes]]:
    """The regular files at and beneath ``top``, depth first; ``entries`` lists a directory."""
    if top.is_file:
        yield top.ino, top
    pending = [entries(top.ino)] if top.is_dir else []
    while pending:
        for _, attributes in pending[-1]:
            if attributes.is_file:
                yield attributes.ino, attributes
            elif attributes.is_dir:
                pending.append(entries(attributes.ino))
                break
        else:
            pending.pop()


def _are_files(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of some records are of regular files, each at its first name only."""
    is_first = records["flags"] & ALIAS == 0
    are_files: npt.NDArray[np.bool_] = is_first & (records["mode"] & KIND == stat.S_IFREG)
    return are_files


def _index(slot: int) -> int:
    if slot < 1:
        raise IndexError(f"no inode {slot}")
    return slot - 1

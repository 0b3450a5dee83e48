"""The names in directories that differ from those of the snapshot, and the limits of names.

A directory has a ``Listing`` once a name in it was made, changed or removed through the mount. Used
from one thread, that of the event loop; nothing here waits. Names that are not in memory are read
from the file of ``spill.py``, which raises Unanswered while its disk hangs.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge

from monarch.errors import Refused
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.spill import Spill
from monarch.types import WRITTEN_INO, Ino

# Names that were added to a directory have indices from here on; those of the snapshot are below.
ADDED_INDEX = 1 << 32
# The value of a name that was removed, in the snapshot's part or where the file still has it.
REMOVED = Ino(0)
# Memory of a name in a directory, in bytes.
ENTRY_BYTES = 256
# Names of a directory that are read from the file at once.
_READ = 256

# As renameat2(2) has it.
RENAME_NOREPLACE = 1

NAME_MAX = 255
# As ext4 has it: a link that the source would refuse later is refused now.
LINK_MAX = 65000
# Bytes of a symbolic link's target: a path without its NUL.
TARGET_MAX = 4095
# Bytes of the names and values of one inode's extended attributes, which are kept in memory: twice
# the largest value that Linux allows.
XATTRS_MAX = 128 << 10

DOTS = (b".", b"..")

Named = tuple[Ino, bytes]
# A name: its directory, itself, its index there and its inode.
Spilled = tuple[Ino, bytes, int, Ino]


def require_name(name: bytes, of_dot: int, of_dot_dot: int) -> None:
    """Raises Refused if an entry cannot have the name; for ``.`` and ``..`` with the errors that
    the operation gives for these."""
    if not name:
        raise Refused(errno.ENOENT)
    if name in DOTS:
        raise Refused(of_dot if name == b"." else of_dot_dot)
    if b"/" in name or b"\0" in name:
        raise Refused(errno.EINVAL)
    if len(name) > NAME_MAX:
        raise Refused(errno.ENAMETOOLONG)


def require_target(target: bytes) -> None:
    """Raises Refused if a symbolic link cannot have the target."""
    if not target:
        raise Refused(errno.ENOENT)
    if b"\0" in target:
        raise Refused(errno.EINVAL)
    if len(target) > TARGET_MAX:
        raise Refused(errno.ENAMETOOLONG)


class Listing:
    """How the names of one directory differ from those that the snapshot has there.

    A name of the snapshot keeps its index there, whichever inode has it. Any other name gets the
    next index when it is added, so a process that is reading the directory continues behind the
    names that it has. Some added names may be in ``spill``; those in memory are newer.
    """

    __slots__ = ("_added", "_ino", "_most", "_moves", "_order", "changed", "end", "spill")

    def __init__(self, ino: Ino) -> None:
        self._ino = ino
        self.spill: Spill | None = None
        # Names that the snapshot has, and their inodes now.
        self.changed: dict[bytes, Ino] = {}
        self._added: dict[bytes, tuple[int, Ino]] = {}
        # How many names the table of the added ones has had at once.
        self._most = 0
        # Every name that was added, by index, and with them some that were removed again.
        self._order: list[tuple[int, bytes]] = []
        # How often a name was moved to the file or removed from it.
        self._moves = 0
        self.end = ADDED_INDEX

    def __len__(self) -> int:
        """The number of names that differ, of those in memory."""
        return len(self.changed) + len(self._added)

    def find(self, name: bytes, snapshot: Snapshot) -> Ino | None:
        """The inode of a name, REMOVED if it was removed, None if it is that of the snapshot."""
        found = self.changed.get(name)
        if found is not None:
            return found
        if name not in self._added and _is_in(snapshot, self._ino, name):
            # The file has no names of the snapshot.
            return None
        added = self._now(name)
        return None if added is None else added[1]

    def _now(self, name: bytes) -> tuple[int, Ino] | None:
        """The index and the inode of an added name, REMOVED if it was removed."""
        added = self._added.get(name)
        if added is None and self.spill is not None:
            return self.spill.find(self._ino, name)
        return added

    def put(self, name: bytes, ino: Ino, *, in_snapshot: bool) -> None:
        if in_snapshot:
            self.changed[name] = ino
            return
        now = self._now(name)
        index = self.end if now is None or now[1] == REMOVED else now[0]
        if index == self.end:
            self._order.append((index, name))
            self.end += 1
        elif name not in self._added:
            insort(self._order, (index, name))
        self._added[name] = (index, ino)
        self._most = max(self._most, len(self._added))

    def remove(self, name: bytes, *, in_snapshot: bool) -> bool:
        """Returns whether the file still has the name (``forgotten``)."""
        if in_snapshot:
            self.changed[name] = REMOVED
            return False
        if self.spill is not None and self.spill.find(self._ino, name) is not None:
            self._added[name] = (0, REMOVED)
            self._most = max(self._most, len(self._added))
            return True
        del self._added[name]
        self._tidy()
        return False

    def in_memory(self, name: bytes, ino: Ino) -> int | None:
        """The index of an added name if it is that inode's and is in memory."""
        index, found = self._added.get(name, (0, REMOVED))
        return index if found == ino else None

    def put_away(self, name: bytes) -> None:
        """The file has the name now."""
        self._moves += 1
        del self._added[name]
        self._tidy()

    def forgotten(self, name: bytes) -> None:
        """The file does not have a removed name any more."""
        self._moves += 1
        if self._added.get(name, (0, Ino(1)))[1] == REMOVED:
            del self._added[name]
            self._tidy()

    def _tidy(self) -> None:
        if self._most > 2 * len(self._added) + 8:
            # Python's table keeps the memory of names that have left it.
            self._added = dict(self._added)
            self._most = len(self._added)
        if len(self._order) > 2 * len(self._added) + 64:
            # A new list: a caller that reads the old one continues in it.
            added = self._added
            self._order = [it for it in self._order if added.get(it[1], (-1,))[0] == it[0]]

    def added(self, start: int, end: int) -> Iterator[tuple[int, bytes, Ino]]:
        """The added names, from index ``start`` to before ``end``."""
        while start < end:
            away = self.spill.names(self._ino, start, end, _READ) if self.spill is not None else []
            upto, moves = away[-1][0] + 1 if len(away) == _READ else end, self._moves
            order = self._order
            here = order[bisect_left(order, (start,)) : bisect_left(order, (upto,))]
            before = -1
            for index, name, ino in merge(((*it, REMOVED) for it in here), away):
                if index == before:
                    # It is in both; the one in memory was yielded.
                    continue
                if ino != REMOVED and moves == self._moves and name not in self._added:
                    now: tuple[int, Ino] | None = (index, ino)
                else:
                    now = self._now(name)
                if now is not None and now[0] == index and now[1] != REMOVED:
                    before = index
                    yield index, name, now[1]
            start = upto


class Listings:
    """The listings of all directories."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._listings: dict[Ino, Listing] = {}
        self.get = self._listings.get
        # The names in all listings.
        self._count = 0
        # Names that were removed, and that the file still has.
        self.unnamed: dict[Named, None] = {}

    @property
    def held_bytes(self) -> int:
        """About how much memory the names take."""
        return self._count * ENTRY_BYTES

    def in_snapshot(self, parent: Ino, name: bytes) -> bool:
        return _is_in(self._snapshot, parent, name)

    def find(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode of a name, REMOVED if it was removed, None if it is that of the snapshot."""
        listing = self._listings.get(parent)
        return None if listing is None else listing.find(name, self._snapshot)

    def put(self, parent: Ino, name: bytes, ino: Ino, *, in_snapshot: bool) -> None:
        """Gives a name to an inode; ``in_snapshot`` is whether the snapshot has it."""
        listing = self._get(parent)
        self._count -= len(listing)
        listing.put(name, ino, in_snapshot=in_snapshot)
        self._count += len(listing)

    def remove(self, parent: Ino, name: bytes) -> bool:
        """Removes a name; returns whether the snapshot has it."""
        in_snapshot, listing = self.in_snapshot(parent, name), self._get(parent)
        self._count -= len(listing)
        if listing.remove(name, in_snapshot=in_snapshot):
            self.unnamed[parent, name] = None
        self._count += len(listing)
        return in_snapshot

    def _get(self, directory: Ino) -> Listing:
        listing = self._listings.get(directory)
        if listing is None:
            listing = self._listings[directory] = Listing(directory)
        return listing

    def drop(self, directory: Ino) -> None:
        """A directory was removed. No other gets its number, so names that are left in it need not
        be removed."""
        self._count -= len(self._listings.pop(directory, ()))

    # -- the file --------------------------------------------------------------------------------

    def in_memory(self, nodes: Iterable[tuple[Ino, Iterable[Named]]]) -> Iterator[Spilled]:
        """The names of ``nodes`` that are in memory, for the file."""
        for ino, names in nodes:
            for parent, name in names:
                listing = self._listings.get(parent)
                index = None if listing is None else listing.in_memory(name, ino)
                if index is not None:
                    yield parent, name, index, ino

    def spill_to(self, spill: Spill, names: Iterable[Spilled]) -> None:
        """``spill`` may have these names from now on."""
        for parent, _, _, _ in names:
            self._listings[parent].spill = spill

    def spilled(self, names: Iterable[Spilled]) -> None:
        """The file has these names now, and none that was removed."""
        for parent, name in self.unnamed:
            if (listing := self._listings.get(parent)) is not None:
                self._count -= len(listing)
                listing.forgotten(name)
                self._count += len(listing)
        self.unnamed.clear()
        for parent, name, _, _ in names:
            self._listings[parent].put_away(name)
            self._count -= 1


def _is_in(snapshot: Snapshot, parent: Ino, name: bytes) -> bool:
    return parent < WRITTEN_INO and snapshot.slot(parent, name) is not None

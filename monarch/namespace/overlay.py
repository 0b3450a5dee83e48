"""The tree that the mount shows where names were made, changed and removed through the mount.

What was written is kept beside the snapshot: a ``Node`` for each inode that was made or changed, a
``Listing`` for each directory whose names differ. All else is answered by what is known of the
source, so memory grows with what is written and not with the files. What was not used lately is
moved out of memory (``put_away``, spill.py) and comes back when it is asked for. Each operation
checks everything that may refuse it before it changes anything, and refuses as a local file
system does. Used from one thread, the event loop's; nothing here waits, and what needs the file of
what was put away raises Unanswered while its disk hangs.
"""

from __future__ import annotations

import errno
import marshal
import stat
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from heapq import merge
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from monarch.errors import Refused
from monarch.namespace.source_view import SourceView
from monarch.namespace.spill import Spill
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino

# As renameat2(2) has it.
RENAME_NOREPLACE = 1

# Names that a directory got have indices from here on; those of the snapshot are below.
ADDED_INDEX = 1 << 32

NAME_MAX = 255
# As ext4 has it: what the source would refuse later is refused now.
LINK_MAX = 65000
# Bytes of a symbolic link's target: what a path may have without its NUL.
TARGET_MAX = 4095
# Bytes of names and values that one inode's extended attributes may have: twice the largest value
# that Linux lets through. They are kept in memory.
XATTRS_MAX = 128 << 10

# Memory, in bytes: of an inode with what the daemon keeps of it elsewhere, of a name in a
# directory, of an extended attribute beside its own bytes, of an inode of the snapshot that was
# removed, and of an inode that was put away. A new file is the first two.
_NODE_BYTES = 2816
_ENTRY_BYTES = 256
_XATTR_BYTES = 256
_REMOVED_BYTES = 64
_SPILLED_BYTES = 64
NAME_BYTES = _NODE_BYTES + _ENTRY_BYTES

_KINDS = frozenset(
    (
        stat.S_IFREG,
        stat.S_IFDIR,
        stat.S_IFLNK,
        stat.S_IFIFO,
        stat.S_IFSOCK,
        stat.S_IFCHR,
        stat.S_IFBLK,
    )
)
_DOTS = (b".", b"..")
_DIRECTORY_BYTES = 4096
# What stands in a listing for a name that was removed, of the snapshot or one that was put away.
_NONE = Ino(0)

# Unused inodes that stay in memory; inodes put away at once, which takes the event loop some
# milliseconds; names of a directory read back at once.
_KEPT = 8192
_BATCH = 256
_READ = 256


@dataclass(slots=True)
class Node:
    """An inode that was made or changed through the mount; its holder may change plain fields.

    ``names`` are all names it has, each the directory's number and the name there, the first one
    first; without any it is *nameless*, and ``nlink`` is 0. The root has none either. ``parent`` is
    the directory of the first name, or of the last that there was. ``size`` in bytes, ``blocks`` in
    512-byte units, times in ns since the epoch. ``object`` is the number of the absorbed file that
    has its bytes; 0: the source has them, or there are none. ``source_ino`` is the source's number
    of it, 0 if it was made here.

    What ``keeps_*`` names was set through the mount; the rest of a node without an object follows
    the source when that changes.
    """

    ino: Ino
    parent: Ino
    mode: int
    uid: int
    gid: int
    nlink: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    rdev: int = 0
    size: int = 0
    blocks: int = 0
    source_ino: int = 0
    target: bytes = b""
    object: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    # Whether those that the source had are among them.
    has_source_xattrs: bool = False
    names: dict[tuple[Ino, bytes], None] = field(default_factory=dict)
    keeps_mode: bool = False
    keeps_owner: bool = False
    keeps_times: bool = False

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def attributes(self) -> Attributes:
        return Attributes(
            self.ino,
            self.parent,
            self.mode,
            self.nlink,
            self.uid,
            self.gid,
            self.size,
            self.mtime_ns,
            self.ctime_ns,
            self.source_ino,
            self.blocks,
            self.rdev,
            self.atime_ns,
        )

    def touch(self, now_ns: int) -> None:
        """Its content, or its names if it is a directory, changed at ``now_ns``."""
        self.mtime_ns = self.ctime_ns = now_ns
        self.keeps_times = True

    def follow(self, attributes: Attributes) -> None:
        """The source has other attributes: take over what was not set through the mount."""
        if self.object or stat.S_IFMT(attributes.mode) != stat.S_IFMT(self.mode):
            return
        if not self.keeps_mode:
            self.mode = attributes.mode
        if not self.keeps_owner:
            self.uid, self.gid = attributes.uid, attributes.gid
        if not self.keeps_times:
            self.mtime_ns = self.atime_ns = attributes.mtime_ns
        self.ctime_ns = max(self.ctime_ns, attributes.ctime_ns)
        self.source_ino = attributes.source_ino
        if self.is_file:
            self.size, self.blocks = attributes.size, attributes.blocks


class Directory(Node):
    """A node that tells ``changed`` of its inode whenever a field is set."""

    __slots__ = ("_changed",)
    _changed: Callable[[Ino], None] | None

    def __init__(self, changed: Callable[[Ino], None], *given: Any, **fields: Any) -> None:
        object.__setattr__(self, "_changed", None)
        Node.__init__(self, *given, **fields)
        object.__setattr__(self, "_changed", changed)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if self._changed is not None:
            self._changed(self.ino)


@dataclass(frozen=True, slots=True)
class Renamed:
    """What a rename did: the inode that has the new name, and the one that lost it, if any."""

    node: Node
    replaced: Node | None


class Listing:
    """How the names of one directory differ from those that the snapshot has there.

    A name of the snapshot keeps its place there, whichever inode has it. Any other gets the next
    index when it comes, so that a listing that is being read continues behind what it has seen.
    Some of these may be in ``spill``; what is here is newer.
    """

    __slots__ = ("_added", "_ino", "_moves", "_order", "changed", "end", "spill")

    def __init__(self, ino: Ino) -> None:
        self._ino = ino
        self.spill: Spill | None = None
        # Names that the snapshot has, and whose they are now.
        self.changed: dict[bytes, Ino] = {}
        self._added: dict[bytes, tuple[int, Ino]] = {}
        # Every name that was added, by index, and with them some that went again.
        self._order: list[tuple[int, bytes]] = []
        # How often something of it was moved to the file or forgotten there.
        self._moves = 0
        self.end = ADDED_INDEX

    def __len__(self) -> int:
        """How many names differ, of those that are in memory."""
        return len(self.changed) + len(self._added)

    def find(self, name: bytes, in_snapshot: Callable[[Ino, bytes], bool]) -> Ino | None:
        """Whose the name is, 0 if it was removed; None if that is as in the snapshot."""
        found = self.changed.get(name)
        if found is not None:
            return found
        if name not in self._added and in_snapshot(self._ino, name):
            # The file has none of those.
            return None
        added = self._now(name)
        return None if added is None else added[1]

    def _now(self, name: bytes) -> tuple[int, Ino] | None:
        """The index of a name that was added and whose it is, 0 if it was removed."""
        added = self._added.get(name)
        if added is None and self.spill is not None:
            return self.spill.find(self._ino, name)
        return added

    def put(self, name: bytes, ino: Ino, *, in_snapshot: bool) -> None:
        if in_snapshot:
            self.changed[name] = ino
            return
        now = self._now(name)
        index = self.end if now is None or now[1] == _NONE else now[0]
        if index == self.end:
            self._order.append((index, name))
            self.end += 1
        elif name not in self._added:
            insort(self._order, (index, name))
        self._added[name] = (index, ino)

    def remove(self, name: bytes, *, in_snapshot: bool) -> bool:
        """Whether the name is still in the file of those that were put away (``forgotten``)."""
        if in_snapshot:
            self.changed[name] = _NONE
            return False
        if self.spill is not None and self.spill.find(self._ino, name) is not None:
            self._added[name] = (0, _NONE)
            return True
        del self._added[name]
        self._tidy()
        return False

    def in_memory(self, name: bytes, ino: Ino) -> int | None:
        """The index of a name that was added if it is that inode's and is in memory."""
        index, found = self._added.get(name, (0, _NONE))
        return index if found == ino else None

    def put_away(self, name: bytes) -> None:
        """The name is in the file now, as it is here."""
        self._moves += 1
        del self._added[name]
        self._tidy()

    def forgotten(self, name: bytes) -> None:
        """A name that was removed is in the file no more."""
        self._moves += 1
        if self._added.get(name, (0, Ino(1)))[1] == _NONE:
            del self._added[name]

    def _tidy(self) -> None:
        if len(self._order) > 2 * len(self._added) + 64:
            # A new list: a caller that reads the old one continues in it.
            self._order = [(index, name) for index, name in self._order if self._has(index, name)]

    def added(self, start: int, end: int) -> Iterator[tuple[int, bytes, Ino]]:
        """The names that were added, from index ``start`` to before ``end``."""
        while start < end:
            away = self.spill.names(self._ino, start, end, _READ) if self.spill is not None else []
            upto, moves = away[-1][0] + 1 if len(away) == _READ else end, self._moves
            order = self._order
            here = order[bisect_left(order, (start,)) : bisect_left(order, (upto,))]
            before = -1
            for index, name, ino in merge(((*it, _NONE) for it in here), away):
                if index == before:
                    # It is in both; the one in memory was yielded.
                    continue
                if ino != _NONE and moves == self._moves and name not in self._added:
                    now: tuple[int, Ino] | None = (index, ino)
                else:
                    now = self._now(name)
                if now is not None and now[0] == index and now[1] != _NONE:
                    before = index
                    yield index, name, now[1]
            start = upto

    def _has(self, index: int, name: bytes) -> bool:
        added = self._added.get(name)
        return added is not None and added[0] == index


class Overlay:
    """One tree of what is known of the source and what was written over it.

    Methods that take an inode number raise IndexError for one that the snapshot does not have, and
    Refused, ESTALE, for one that was made through the mount and is forgotten. Those that take a
    name raise SourceError, EACCES, if the directory could not be listed when the snapshot was made.
    Those that change something raise Refused with the errno that Linux gives on a local file
    system, and have then changed nothing.

    Inodes that are made are numbered from ``first_ino`` on, and no number comes again. What is put
    away goes into a file beside ``spill``, the path of another; without, all stays in memory.
    """

    def __init__(
        self, known: SourceView, *, first_ino: Ino = WRITTEN_INO, spill: Path | None = None
    ) -> None:
        self._known = known
        # Those in memory: what came or was asked for last is at the end.
        self._nodes: dict[Ino, Node] = {}
        self._spill_at = spill
        self._spill: Spill | None = None
        # How many are there only; those of the snapshot among them, a bit for each inode.
        self._spilled = 0
        self._spilled_old = bytearray()
        # Inodes of which the file has what they were; of these, those that are forgotten since, and
        # names that were removed since.
        self._outdated: set[Ino] = set()
        self._dropped: list[Ino] = []
        self._unnamed: dict[tuple[Ino, bytes], None] = {}
        self._listings: dict[Ino, Listing] = {}
        # Inodes of the snapshot that lost all names through the mount.
        self._removed: set[Ino] = set()
        # Directories that others have made at the source since the snapshot.
        self._adopted: set[Ino] = set()
        # Entries of all listings, and the bytes of extended attributes and symbolic links' targets.
        self._entry_count = 0
        self._value_bytes = 0
        self._next_ino = Ino(max(first_ino, WRITTEN_INO))
        self._given: Callable[[Ino, bytes], None] = _untold
        self._lapsed: Callable[[Ino, bytes], None] = _untold
        self._changed: Callable[[Ino], None] = _untold

    def tell_names(
        self,
        given: Callable[[Ino, bytes], None],
        taken: Callable[[Ino, bytes], None],
        changed: Callable[[Ino], None],
    ) -> None:
        """Tell of each name that is given from now on and that the snapshot does not have, before
        a process can see it, of each of these that is taken, and of each directory that was made or
        changed through the mount and has other attributes from now on. Before all else."""
        self._given, self._lapsed, self._changed = given, taken, changed

    # -- asking --------------------------------------------------------------------------------

    @property
    def next_ino(self) -> Ino:
        """The number that the next inode gets."""
        return self._next_ino

    def node(self, ino: Ino) -> Node | None:
        """What was written of an inode; None if nothing was, or nothing is known any more."""
        return self._node(ino)

    def nodes(self) -> Iterator[Node]:
        """All that was written and is not forgotten; read-only, where it was put away."""
        here = list(self._nodes)
        for ino in here:
            if (node := self._nodes.get(ino) or self._seen(ino)) is not None:
                yield node
        seen, after = set(here), Ino(0)
        while self._spill is not None and (inos := self._spill.inos(after, _READ)):
            after = inos[-1]
            for ino in inos:
                if ino not in seen and (node := self._seen(ino)) is not None:
                    yield node

    async def answers(self) -> None:
        """Until what is not in memory can be read."""
        if self._spill is not None:
            await self._spill.answers()

    @property
    def put_away_count(self) -> int:
        """How many inodes are not in memory."""
        return self._spilled

    @property
    def held_bytes(self) -> int:
        """About how much memory all that takes which differs from the snapshot."""
        return (
            len(self._nodes) * _NODE_BYTES
            + self._entry_count * _ENTRY_BYTES
            + len(self._removed) * _REMOVED_BYTES
            + self._spilled * _SPILLED_BYTES
            + self._value_bytes
        )

    def is_written(self, ino: Ino) -> bool:
        """Whether it was made through the mount, or is of the snapshot and was changed."""
        return self._has(ino)

    def is_forgotten(self, ino: Ino) -> bool:
        """Whether it was removed through the mount, and nothing is known of it any more."""
        return (ino >= WRITTEN_INO or ino in self._removed) and not self._has(ino)

    def is_gone(self, ino: Ino) -> bool:
        """Whether it has no name any more, through the mount or at the source."""
        if ino in self._known.gone or ino in self._removed:
            return True
        node = self._seen(ino)
        if node is None:
            return ino >= WRITTEN_INO
        return not node.names and ino != ROOT_INO

    def attributes(self, ino: Ino) -> Attributes:
        """The newest that is known; of an entry that is gone, what it was."""
        node = self._seen(ino)
        if node is not None:
            return node.attributes
        self._require_known(ino)
        return self._known.attributes(ino)

    def at_source(self, ino: Ino) -> Attributes | None:
        """What the source has, as far as is known, whatever was written since.

        None for what was made through the mount, until ``refresh`` tells of it.
        """
        if ino not in self._nodes and (away := self._away(ino)) is not None and away[1] is not None:
            return away[1]
        if ino >= WRITTEN_INO:
            return self._known.refreshed.get(ino)
        return self._known.attributes(ino)

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """Whose a name is; None for a free name, in a directory that is gone, or in no directory.

        Raises SourceError, EACCES, if the directory could not be listed.
        """
        if self._is_untouched:
            return self._known.lookup(parent, name) if parent < WRITTEN_INO else None
        listing = self._listings.get(parent)
        if listing is not None:
            found = listing.find(name, self._in_snapshot)
            if found is not None:
                return found if found != _NONE and found not in self._known.gone else None
        if parent >= WRITTEN_INO or parent in self._removed:
            return None
        return self._known.lookup(parent, name)

    def resolve(self, path: bytes) -> Ino | None:
        """The number at a path relative to the root. Symbolic links are not followed."""
        ino = ROOT_INO
        for part in path.split(b"/"):
            if part not in (b"", b"."):
                found = self.lookup(ino, part)
                if found is None:
                    return None
                ino = found
        return ino

    def list_from(
        self, ino: Ino, start: int, *, end: int | None = None
    ) -> Iterator[tuple[int, bytes, Attributes]]:
        """The entries of a directory from the index ``start`` on, each with its index.

        The index is an entry's place in the snapshot, and above all of those if it came since, so
        that a listing can be continued behind an entry whatever went or came in between. It ends at
        what came since its first entry was taken; with ``end``, at what came since ``list_end``
        gave that. Raises SourceError, EACCES, if it could not be listed.
        """
        if ino < WRITTEN_INO:
            self._known.require_listed(ino)
        return self._entries(ino, start, end)

    def list_end(self, ino: Ino) -> int:
        """The index before which all entries are that a directory has now.

        A listing that is begun now and continued to there ends, though names are added to the
        directory as fast as they are read, as by a process that renames each file that it finds.
        """
        listing = self._listings.get(ino)
        return ADDED_INDEX if listing is None else listing.end

    def walk(self, ino: Ino = ROOT_INO) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino`` that are not gone, depth first.

        A file with several names comes once for each.
        """
        if self._is_untouched:
            yield from self._known.walk(ino)
            return
        attributes = self.attributes(ino)
        if attributes.is_file and not self.is_gone(ino):
            yield ino, attributes
        if not attributes.is_dir:
            return
        pending = [self._entries(ino, 0, None)]
        while pending:
            for _, _, attributes in pending[-1]:
                if attributes.is_file:
                    yield attributes.ino, attributes
                elif attributes.is_dir:
                    pending.append(self._entries(attributes.ino, 0, None))
                    break
            else:
                pending.pop()

    def path(self, ino: Ino) -> bytes:
        """Where the source has the entry, relative to its root.

        What was made through the mount is where the mount shows it, unless ``move`` says otherwise;
        raises Refused, ENOENT, if it is nameless.
        """
        if ino < WRITTEN_INO:
            return self._known.moved(ino) or self._known.snapshot.path(ino)
        return self._known.moved(ino) or self.visible_path(ino)

    def visible_path(self, ino: Ino) -> bytes:
        """Where the mount shows the inode, by its first name, relative to the root.

        Raises Refused, ENOENT, if it has no name.
        """
        parts: list[bytes] = []
        while ino != ROOT_INO:
            node = self._seen(ino)
            if node is None:
                if ino >= WRITTEN_INO or ino in self._removed:
                    raise Refused(errno.ENOENT)
                # A directory of the snapshot stays where it is, so all above are there, too.
                parts.append(self._known.snapshot.path(ino))
                break
            ino, name = self._first_name(node)
            parts.append(name)
        return b"/".join(reversed(parts))

    def path_of(self, parent: Ino, name: bytes) -> bytes:
        """The path of a name in a directory, whether it is there or not. Raises as visible_path."""
        above = self.visible_path(parent)
        return above + b"/" + name if above else name

    def visible_paths(self, ino: Ino) -> Iterator[bytes]:
        """All paths at which the mount shows an inode, the first one first; none if nameless."""
        node = self._seen(ino)
        names = iter(node.names) if node is not None else self._names_below(ino)
        for parent, name in names:
            yield self.path_of(parent, name)

    def readlink(self, ino: Ino) -> bytes:
        """The target of a symbolic link. Raises ValueError for anything else."""
        node = self._seen(ino)
        if node is None:
            self._require_known(ino)
            return self._known.snapshot.readlink(ino)
        if not stat.S_ISLNK(node.mode):
            raise ValueError(f"inode {ino} is not a symbolic link")
        return node.target

    def xattr(self, ino: Ino, name: bytes) -> bytes:
        """The value that was set through the mount. Raises Refused, ENODATA, if none was."""
        node = self._seen(ino)
        value = None if node is None else node.xattrs.get(name)
        if value is None:
            raise Refused(errno.ENODATA)
        return value

    def more_for_xattr(self, ino: Ino, name: bytes, value: bytes) -> int:
        """How many bytes more ``held_bytes`` is once an inode has that value."""
        node = self._seen(ino)
        before = {} if node is None else {key: v for key, v in node.xattrs.items() if key == name}
        return _size_of({name: value}) - _size_of(before)

    def xattrs(self, ino: Ino) -> tuple[bytes, ...]:
        """The names of what was set through the mount."""
        node = self._seen(ino)
        return () if node is None else tuple(node.xattrs)

    # -- changing ------------------------------------------------------------------------------

    def copy_up(self, ino: Ino) -> Node:
        """The node of an inode; one of the snapshot gets it, with all its names.

        An inode that the source has lost is nameless. Raises Refused, ESTALE, if it is forgotten.
        """
        node = self._node(ino)
        if node is not None:
            return node
        self._require_known(ino)
        if ino in self._removed:
            raise Refused(errno.ESTALE)
        return self._noted(ino, self._names_below(ino))

    def make(
        self,
        parent: Ino,
        name: bytes,
        *,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        rdev: int = 0,
        target: bytes = b"",
        object: int = 0,
        ino: Ino | None = None,
    ) -> Node:
        """A new inode of the kind that ``mode`` says: ``target`` of a symbolic link, ``rdev`` of a
        device, ``object`` of a file. In a directory with the set-group-ID bit it has that group.

        Its number is the next one, or ``ino``, as when what was done before is done again. Raises
        Refused; ValueError if ``ino`` is another's.
        """
        kind = stat.S_IFMT(mode)
        if kind not in _KINDS:
            raise Refused(errno.EINVAL)
        if kind == stat.S_IFLNK:
            _require_target(target)
        self._require_place(parent, name)
        if self.lookup(parent, name) is not None:
            raise Refused(errno.EEXIST)
        if ino is not None and (ino < WRITTEN_INO or self._has(ino)):
            raise ValueError(f"inode {ino} is another's")
        directory = self.copy_up(parent)
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if kind == stat.S_IFDIR:
                mode |= stat.S_ISGID
        number = self._next_ino if ino is None else ino
        self._next_ino = Ino(max(self._next_ino, number + 1))
        is_dir = kind == stat.S_IFDIR
        size = _DIRECTORY_BYTES if is_dir else len(target)
        node = self._new(
            ino=number,
            parent=parent,
            mode=mode,
            uid=uid,
            gid=gid,
            nlink=2 if is_dir else 1,
            mtime_ns=now_ns,
            ctime_ns=now_ns,
            atime_ns=now_ns,
            rdev=rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            size=size,
            blocks=size // 512 if is_dir else 0,
            target=target,
            object=object,
            keeps_mode=True,
            keeps_owner=True,
            keeps_times=True,
        )
        self._nodes[number] = node
        self._value_bytes += len(target)
        self._put(parent, name, node)
        _count(directory, is_dir)
        directory.touch(now_ns)
        return node

    def adopt(self, parent: Ino, name: bytes, now: Attributes, *, target: bytes = b"") -> Node:
        """Show what others have made at the source: an inode with the next number, which has what
        ``now`` tells but its number. The name must be free. Raises Refused."""
        self._require_directory(parent)
        directory, number = self.copy_up(parent), self._next_ino
        self._next_ino = Ino(number + 1)
        is_dir = now.is_dir
        node = self._nodes[number] = self._new(
            ino=number,
            parent=parent,
            mode=now.mode,
            uid=now.uid,
            gid=now.gid,
            nlink=max(2, now.nlink) if is_dir else 1,
            mtime_ns=now.mtime_ns,
            ctime_ns=now.ctime_ns,
            atime_ns=now.mtime_ns,
            rdev=now.rdev,
            size=now.size,
            blocks=now.blocks,
            source_ino=now.source_ino,
            target=target,
        )
        self._value_bytes += len(target)
        self._put(parent, name, node)
        _count(directory, is_dir)
        if is_dir:
            self._adopted.add(number)
        return node

    def link(self, ino: Ino, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """One more name of a file, or of anything else but a directory. Raises Refused."""
        self._require_place(parent, name)
        if self.lookup(parent, name) is not None:
            raise Refused(errno.EEXIST)
        attributes = self.attributes(ino)
        if attributes.is_dir:
            raise Refused(errno.EPERM)
        if self.is_gone(ino):
            raise Refused(errno.ENOENT)
        if attributes.nlink >= LINK_MAX:
            raise Refused(errno.EMLINK)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._put(parent, name, node)
        node.nlink += 1
        node.ctime_ns = now_ns
        directory.touch(now_ns)
        return node

    def unlink(self, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """Remove a name of anything but a directory. Raises Refused.

        Without another name the inode is nameless; ``forget_node`` when no process has it open.
        """
        self._require_directory(parent)
        _require_name(name, errno.EISDIR, errno.EISDIR)
        ino = self._require(parent, name)
        if self.attributes(ino).is_dir:
            raise Refused(errno.EISDIR)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._remove(parent, name)
        self._lose(node, parent, name, now_ns)
        directory.touch(now_ns)
        return node

    def rmdir(self, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """Remove an empty directory, which is nameless then. Raises Refused."""
        self._require_directory(parent)
        _require_name(name, errno.EINVAL, errno.ENOTEMPTY)
        ino = self._require(parent, name)
        if not self.attributes(ino).is_dir:
            raise Refused(errno.ENOTDIR)
        self._require_empty(ino)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._remove(parent, name)
        self._lose(node, parent, name, now_ns)
        _discount(directory)
        directory.touch(now_ns)
        return node

    def hide(self, parent: Ino, name: bytes, *, now_ns: int) -> None:
        """Take a name from whatever has it, a directory with what is in it too. Raises Refused.

        For what was done before and is done again where others have put something since.
        """
        node, directory = self.copy_up(self._require(parent, name)), self.copy_up(parent)
        self._remove(parent, name)
        self._lose(node, parent, name, now_ns)
        if node.is_dir:
            _discount(directory)

    def copy_up_all(self, ino: Ino) -> None:
        """Take a directory and all that is beneath it, which then is where that is."""
        self.copy_up(ino)
        for _, _, attributes in list(self._entries(ino, 0, None)):
            if attributes.is_dir:
                self.copy_up_all(attributes.ino)
            else:
                self.copy_up(attributes.ino)

    def rename(
        self,
        parent: Ino,
        name: bytes,
        to_parent: Ino,
        to_name: bytes,
        *,
        flags: int = 0,
        now_ns: int,
        is_again: bool = False,
    ) -> Renamed | None:
        """Give an inode another name, in place of the inode that has that.

        None if both are names of one inode: nothing happens then. Raises Refused; EXDEV for a
        directory of the snapshot, or of others: what is in it is found at the source by the path
        that it has, so the caller must copy it, as between file systems. Not if it
        ``is_again``: it was made on the mount, and the snapshot knows it since; all beneath it is
        taken (``copy_up_all``).
        """
        if flags & ~RENAME_NOREPLACE:
            raise Refused(errno.EINVAL)
        self._require_directory(parent)
        self._require_directory(to_parent)
        _require_name(name, errno.EBUSY, errno.EBUSY)
        if to_name in _DOTS:
            raise Refused(errno.EEXIST if flags & RENAME_NOREPLACE else errno.EBUSY)
        ino = self._require(parent, name)
        _require_name(to_name, errno.EBUSY, errno.EBUSY)
        existing = self.lookup(to_parent, to_name)
        self._require_order(ino, existing, parent=parent, to_parent=to_parent, flags=flags)
        if existing == ino:
            return None
        is_dir = self.attributes(ino).is_dir
        if existing is not None:
            if is_dir != self.attributes(existing).is_dir:
                raise Refused(errno.ENOTDIR if is_dir else errno.EISDIR)
            if is_dir:
                self._require_empty(existing)
        if is_dir and (ino < WRITTEN_INO or ino in self._adopted) and not is_again:
            raise Refused(errno.EXDEV)

        node, directory, to_directory = (
            self.copy_up(ino),
            self.copy_up(parent),
            self.copy_up(to_parent),
        )
        replaced = None if existing is None else self.copy_up(existing)
        if replaced is not None:
            self._lose(replaced, to_parent, to_name, now_ns)
            if is_dir:
                _discount(to_directory)
        self._remove(parent, name)
        del node.names[parent, name]
        self._put(to_parent, to_name, node)
        node.parent = self._first_name(node)[0]
        node.ctime_ns = now_ns
        if is_dir:
            _discount(directory)
            _count(to_directory, True)
        directory.touch(now_ns)
        to_directory.touch(now_ns)
        return Renamed(node, replaced)

    def change(
        self,
        ino: Ino,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        size: int | None = None,
        now_ns: int,
    ) -> Node:
        """Set what is given, and the change time. Of ``mode`` the permission bits count.

        Another owner takes the set-user-ID and set-group-ID bits from what is no directory. Another
        size changes the modification time and nothing but the number: bytes are the caller's.
        Raises Refused: EISDIR or EINVAL for the size of what has none.
        """
        if size is not None:
            attributes = self.attributes(ino)
            if size < 0 or not (attributes.is_file or attributes.is_dir):
                raise Refused(errno.EINVAL)
            if attributes.is_dir:
                raise Refused(errno.EISDIR)
        node = self.copy_up(ino)
        if mode is not None:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            node.keeps_mode = True
        if uid is not None or gid is not None:
            node.uid = node.uid if uid is None else uid
            node.gid = node.gid if gid is None else gid
            node.keeps_owner = True
            if mode is None and not node.is_dir:
                self.drop_privileges(node)
        if size is not None:
            node.size = size
            node.touch(now_ns)
        if atime_ns is not None or mtime_ns is not None:
            node.atime_ns = node.atime_ns if atime_ns is None else atime_ns
            node.mtime_ns = node.mtime_ns if mtime_ns is None else mtime_ns
            node.keeps_times = True
        node.ctime_ns = now_ns
        return node

    def set_xattr(self, ino: Ino, name: bytes, value: bytes, *, now_ns: int) -> Node:
        """Raises Refused, ENOSPC, if an inode's attributes get too many bytes."""
        node = self.copy_up(ino)
        others = sum(len(key) + len(kept) for key, kept in node.xattrs.items() if key != name)
        if others + len(name) + len(value) > XATTRS_MAX:
            raise Refused(errno.ENOSPC)
        self._replace_xattrs(node, node.xattrs | {name: value})
        node.ctime_ns = now_ns
        return node

    def remove_xattr(self, ino: Ino, name: bytes, *, now_ns: int) -> Node:
        """Raises Refused, ENODATA, if there is none of that name."""
        self.xattr(ino, name)
        node = self.copy_up(ino)
        self._replace_xattrs(node, {key: kept for key, kept in node.xattrs.items() if key != name})
        node.ctime_ns = now_ns
        return node

    def have_xattrs(self, node: Node, xattrs: Mapping[bytes, bytes]) -> None:
        """The file has these, as the source or the journal tells."""
        self._replace_xattrs(node, dict(xattrs))

    def _replace_xattrs(self, node: Node, xattrs: dict[bytes, bytes]) -> None:
        self._value_bytes += _size_of(xattrs) - _size_of(node.xattrs)
        node.xattrs = xattrs

    def forget_node(self, ino: Ino) -> None:
        """No process has a nameless inode open any more. Raises ValueError if it has a name."""
        node = self._node(ino)
        if node is None:
            return
        if node.names or ino == ROOT_INO:
            raise ValueError(f"inode {ino} has a name")
        self._value_bytes -= _size_of(node.xattrs) + len(node.target)
        del self._nodes[ino]
        self._changed(ino)
        self._adopted.discard(ino)
        if ino in self._outdated:
            self._dropped.append(ino)
        self._known.drop(ino)

    # -- what is not in memory ------------------------------------------------------------------

    def put_away(self) -> bool:
        """Move some of the inodes that were not used lately out of memory, with their names;
        whether there may be more of them.

        Not those whose ``Node`` a caller holds, which may be about to change it. Raises OSError or
        Unanswered if the file does not take them: they stay in memory then.
        """
        over = min(len(self._nodes) - _KEPT, _BATCH)
        if self._spill_at is None or (over <= 0 and not self._dropped and not self._unnamed):
            return False
        if self._spill is None:
            self._spill = Spill(self._spill_at)
        chosen: list[Node] = []
        for ino in list(islice(self._nodes, max(0, over))):
            if _references(self._nodes, ino) > _ALONE or self._known.has_more(ino):
                self._nodes[ino] = self._nodes.pop(ino)
            else:
                chosen.append(self._nodes[ino])
        names: list[tuple[Ino, bytes, int, Ino]] = []
        for node in chosen:
            for parent, name in node.names:
                listing = self._listings.get(parent)
                index = None if listing is None else listing.in_memory(name, node.ino)
                if index is not None:
                    names.append((parent, name, index, node.ino))
        refreshed = self._known.refreshed
        # A move that is not answered may be made all the same, after changes of what is here.
        for parent, _, _, _ in names:
            self._listings[parent].spill = self._spill
        self._outdated.update(node.ino for node in chosen)
        self._spill.move(
            nodes=[(node.ino, _packed(node, refreshed.get(node.ino))) for node in chosen],
            names=names,
            gone=self._dropped,
            unnamed=self._unnamed,
        )
        self._forget_dropped()
        for parent, name, _, _ in names:
            listing = self._listings[parent]
            listing.put_away(name)
            self._entry_count -= 1
        for node in chosen:
            del self._nodes[node.ino]
            self._known.put_away(node.ino)
            self._value_bytes -= _values_of(node)
            self._outdated.discard(node.ino)
            self._mark_spilled(node.ino, True)
            self._spilled += 1
        return over == _BATCH and bool(chosen)

    def _forget_dropped(self) -> None:
        """The file has forgotten what it was to forget."""
        for ino in self._dropped:
            self._outdated.discard(ino)
            self._mark_spilled(ino, False)
        self._dropped.clear()
        for parent, name in self._unnamed:
            if (listing := self._listings.get(parent)) is not None:
                self._entry_count -= len(listing)
                listing.forgotten(name)
                self._entry_count += len(listing)
        self._unnamed.clear()

    def _mark_spilled(self, ino: Ino, is_spilled: bool) -> None:
        """Whether the file has an inode of the snapshot: of others it is asked."""
        if ino >= WRITTEN_INO:
            return
        at, bit, bits = ino >> 3, 1 << (ino & 7), self._spilled_old
        if at >= len(bits):
            bits.extend(bytes(at + 1 - len(bits)))
        bits[at] = bits[at] | bit if is_spilled else bits[at] & ~bit

    def _away(self, ino: Ino) -> tuple[Node, Attributes | None] | None:
        """An inode that is not in memory, and what the source has of it.

        Raises Refused, EIO, if the file cannot be read.
        """
        if self._spill is None or ino in self._outdated:
            return None
        if ino < WRITTEN_INO:
            at = ino >> 3
            if at >= len(self._spilled_old) or not self._spilled_old[at] & 1 << (ino & 7):
                return None
        packed = self._spill.node(ino)
        if packed is None:
            return None
        given, refreshed = _unpacked(packed)
        return self._new(**dict(zip(_FIELDS, given, strict=True))), refreshed

    def _seen(self, ino: Ino) -> Node | None:
        """The node of an inode, to be read at once and not kept."""
        node = self._nodes.get(ino)
        if node is None and (away := self._away(ino)) is not None:
            return away[0]
        return node

    def _node(self, ino: Ino) -> Node | None:
        """The node of an inode, in memory from now on."""
        node = self._nodes.get(ino)
        if node is None and (away := self._away(ino)) is not None:
            node, refreshed = away
            self._nodes[ino] = node
            self._outdated.add(ino)
            self._spilled -= 1
            self._value_bytes += _values_of(node)
            if refreshed is not None:
                self._known.refreshed[ino] = refreshed
        return node

    def _has(self, ino: Ino) -> bool:
        return ino in self._nodes or self._away(ino) is not None

    @property
    def _is_untouched(self) -> bool:
        return not self._nodes and not self._spilled

    # -- how ---------------------------------------------------------------------------------

    def _new(self, *, mode: int, **fields: Any) -> Node:
        if stat.S_ISDIR(mode):
            return Directory(lambda ino: self._changed(ino), mode=mode, **fields)
        return Node(mode=mode, **fields)

    def _entries(
        self, ino: Ino, start: int, end: int | None
    ) -> Iterator[tuple[int, bytes, Attributes]]:
        """As list_from; of a directory that could not be listed, none but those that came."""
        listing = self._listings.get(ino)
        if end is None:
            end = self.list_end(ino)
        refreshed, gone = self._known.refreshed, self._known.gone
        if ino < WRITTEN_INO and start < ADDED_INDEX and ino not in self._removed:
            entries = enumerate(self._known.snapshot.list_from(ino, start), start)
            if self._is_untouched and not refreshed and not gone:
                for index, (name, attributes) in entries:
                    yield index, name, attributes
                return
            changed = {} if listing is None else listing.changed
            for index, (name, attributes) in entries:
                found = changed.get(name, attributes.ino)
                if found == _NONE or found in gone:
                    continue
                node = self._seen(found)
                if node is not None:
                    yield index, name, node.attributes
                elif found == attributes.ino:
                    yield index, name, refreshed.get(found, attributes)
                else:
                    yield index, name, self._known.attributes(found)
        if listing is not None:
            for index, name, found in listing.added(start, end):
                if found not in gone:
                    yield index, name, self.attributes(found)

    def _noted(self, ino: Ino, named: Iterable[tuple[Ino, bytes]]) -> Node:
        """The node of an inode of the snapshot, which it has from now on."""
        now = self._known.attributes(ino)
        names = dict.fromkeys(named)
        is_link = stat.S_ISLNK(now.mode)
        node = self._new(
            ino=ino,
            parent=now.parent,
            mode=now.mode,
            uid=now.uid,
            gid=now.gid,
            nlink=now.nlink if names or ino == ROOT_INO else 0,
            mtime_ns=now.mtime_ns,
            ctime_ns=now.ctime_ns,
            atime_ns=now.mtime_ns,
            rdev=now.rdev,
            size=now.size,
            blocks=now.blocks,
            source_ino=now.source_ino,
            target=self._known.snapshot.readlink(ino) if is_link else b"",
            names=names,
        )
        self._known.differs(ino)
        self._nodes[ino] = node
        self._value_bytes += len(node.target)
        return node

    def _require_known(self, ino: Ino) -> None:
        """Of what was made through the mount, all is in its node."""
        if ino >= WRITTEN_INO:
            raise Refused(errno.ESTALE)

    def _require_directory(self, ino: Ino) -> None:
        is_forgotten = ino >= WRITTEN_INO and not self._has(ino)
        if not is_forgotten and not self.attributes(ino).is_dir:
            raise Refused(errno.ENOTDIR)
        if self.is_gone(ino):
            raise Refused(errno.ENOENT)

    def _require_place(self, parent: Ino, name: bytes) -> None:
        """Whether something may be made there."""
        self._require_directory(parent)
        _require_name(name, errno.EEXIST, errno.EEXIST)

    def _require_empty(self, ino: Ino) -> None:
        if ino < WRITTEN_INO and not self._known.is_listed(ino):
            raise Refused(errno.ENOTEMPTY)
        for _ in self._entries(ino, 0, None):
            raise Refused(errno.ENOTEMPTY)

    def _require_order(
        self, ino: Ino, existing: Ino | None, *, parent: Ino, to_parent: Ino, flags: int
    ) -> None:
        """A rename must not put a directory beneath itself, nor replace what it is in."""
        if existing is not None and flags & RENAME_NOREPLACE:
            raise Refused(errno.EEXIST)
        if self._is_at_or_above(ino, to_parent):
            raise Refused(errno.EINVAL)
        if existing is not None and self._is_at_or_above(existing, parent):
            raise Refused(errno.ENOTEMPTY)

    def _is_at_or_above(self, ino: Ino, directory: Ino) -> bool:
        while directory not in (ino, ROOT_INO):
            node = self._seen(directory)
            directory = self._known.snapshot.parent(directory) if node is None else node.parent
        return directory == ino

    def _require(self, parent: Ino, name: bytes) -> Ino:
        ino = self.lookup(parent, name)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def _first_name(self, node: Node) -> tuple[Ino, bytes]:
        for named in node.names:
            return named
        raise Refused(errno.ENOENT)

    def _names_below(self, ino: Ino) -> Iterator[tuple[Ino, bytes]]:
        """The names of an inode that nothing was written of."""
        if ino < WRITTEN_INO and not self.is_gone(ino):
            yield from self._known.names(ino)

    def _in_snapshot(self, parent: Ino, name: bytes) -> bool:
        return parent < WRITTEN_INO and self._known.snapshot.slot(parent, name) is not None

    def _put(self, parent: Ino, name: bytes, node: Node) -> None:
        """Give an inode a name that no inode is seen to have."""
        listing = self._listing(parent)
        in_snapshot = self._in_snapshot(parent, name)
        before = listing.find(name, self._in_snapshot)
        is_new = not before and not in_snapshot
        if before is None and in_snapshot:
            before = self._known.snapshot.lookup(parent, name)
        if before:
            self._displace(before, parent, name)
        self._entry_count -= len(listing)
        listing.put(name, node.ino, in_snapshot=in_snapshot)
        self._entry_count += len(listing)
        if is_new:
            self._given(parent, name)
        node.names[parent, name] = None

    def _displace(self, ino: Ino, parent: Ino, name: bytes) -> None:
        """The source has lost who had a name, which does not come back when the source has that."""
        lost = self._node(ino) or self._noted(ino, self._known.names(ino))
        if (parent, name) in lost.names:
            self._unname(lost, parent, name)

    def _displace_all(self, directory: Ino) -> None:
        """A directory goes in which all that is left is what the source has lost."""
        if not self._known.gone:
            return
        listing = self._listings.get(directory, Listing(directory))
        if directory < WRITTEN_INO:
            for name, attributes in self._known.snapshot.list_from(directory, 0):
                if ino := listing.changed.get(name, attributes.ino):
                    self._displace(ino, directory, name)
        for _, name, ino in list(listing.added(ADDED_INDEX, listing.end)):
            self._displace(ino, directory, name)

    def _remove(self, parent: Ino, name: bytes) -> None:
        listing, in_snapshot = self._listing(parent), self._in_snapshot(parent, name)
        self._entry_count -= len(listing)
        if listing.remove(name, in_snapshot=in_snapshot):
            self._unnamed[parent, name] = None
        self._entry_count += len(listing)
        if not in_snapshot:
            self._lapsed(parent, name)

    def _listing(self, ino: Ino) -> Listing:
        """That of a directory in which a name is about to differ."""
        listing = self._listings.get(ino)
        if listing is None:
            listing = self._listings[ino] = Listing(ino)
        return listing

    def _lose(self, node: Node, parent: Ino, name: bytes, now_ns: int) -> None:
        """Take a name from an inode."""
        node.ctime_ns = now_ns
        self._unname(node, parent, name)

    def _unname(self, node: Node, parent: Ino, name: bytes) -> None:
        del node.names[parent, name]
        if node.names:
            node.nlink -= 1
            node.parent = self._first_name(node)[0]
            return
        # Names outside the mount do not count: no process reaches it by them.
        node.nlink = 0
        if node.is_dir:
            self._displace_all(node.ino)
            # Names that are left in it stay given: no other directory gets its number.
            self._entry_count -= len(self._listings.pop(node.ino, ()))
        if node.ino < WRITTEN_INO:
            self._removed.add(node.ino)

    @staticmethod
    def drop_privileges(node: Node) -> None:
        drop = stat.S_ISUID
        if node.mode & stat.S_IXGRP:
            drop |= stat.S_ISGID
        if node.mode & drop:
            node.mode &= ~drop
            node.keeps_mode = True


def _untold(ino: Ino, name: bytes = b"") -> None:
    """Ignore the change."""


_FIELDS = tuple(each.name for each in fields(Node))
_NODE_FIELDS = attrgetter(*_FIELDS)
_ATTRIBUTES_FIELDS = attrgetter(*(each.name for each in fields(Attributes)))


def _packed(node: Node, refreshed: Attributes | None) -> bytes:
    there = None if refreshed is None else _ATTRIBUTES_FIELDS(refreshed)
    return marshal.dumps((_NODE_FIELDS(node), there))


def _unpacked(packed: bytes) -> tuple[tuple[Any, ...], Attributes | None]:
    """The inverse of ``_packed``."""
    node, refreshed = marshal.loads(packed)
    return node, None if refreshed is None else Attributes(*refreshed)


def _references(nodes: Mapping[Ino, object], ino: Ino) -> int:
    """How many references to a node there are, with those that this takes."""
    node = nodes[ino]
    return sys.getrefcount(node)


# Of a node without a holder.
_ALONE = _references({ROOT_INO: object()}, ROOT_INO)


def _values_of(node: Node) -> int:
    """The memory that the values take which an inode has, in bytes."""
    return _size_of(node.xattrs) + len(node.target)


def _size_of(xattrs: Mapping[bytes, bytes]) -> int:
    """The memory that extended attributes take, in bytes."""
    return sum(_XATTR_BYTES + len(name) + len(value) for name, value in xattrs.items())


def _require_name(name: bytes, of_dot: int, of_dot_dot: int) -> None:
    """``of_dot`` and ``of_dot_dot`` are what the operation gives for these."""
    if not name:
        raise Refused(errno.ENOENT)
    if name in _DOTS:
        raise Refused(of_dot if name == b"." else of_dot_dot)
    if b"/" in name or b"\0" in name:
        raise Refused(errno.EINVAL)
    if len(name) > NAME_MAX:
        raise Refused(errno.ENAMETOOLONG)


def _require_target(target: bytes) -> None:
    if not target:
        raise Refused(errno.ENOENT)
    if b"\0" in target:
        raise Refused(errno.EINVAL)
    if len(target) > TARGET_MAX:
        raise Refused(errno.ENAMETOOLONG)


def _count(directory: Node, is_dir: bool) -> None:
    """A directory got an entry. Some file systems do not count directories: theirs have 1 link."""
    if is_dir and directory.nlink > 1:
        directory.nlink += 1


def _discount(directory: Node) -> None:
    """A directory lost a directory."""
    if directory.nlink > 2:
        directory.nlink -= 1
